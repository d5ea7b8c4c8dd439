"""A hook of mkdocs: pages that stand elsewhere in the repository, and pages that are made from the program itself.

Nothing is stored twice. README, CHANGELOG and the houses' own READMEs become pages as they are, with links that lead
within the site; the reference is made from the same commands as `--help` and from docstrings. The site loads nothing
from elsewhere, which is checked when it is built.
"""

from __future__ import annotations

import ast
import dataclasses
import html
import importlib
import inspect
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import typer.main

import ckpt_tools
from ckpt_tools.cli import manual
from ckpt_tools.cli.app import app
from ckpt_tools.cli.help import by_section, parameters

REPO = Path(__file__).resolve().parent.parent
DOCS = ".github/docs"
ELSEWHERE = {  # page -> where it stands in the repository
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": ".github/CONTRIBUTING.md",
    "for-agents.md": "ckpt_tools/for-agents.md",
    "how-it-is-built.md": "ckpt_tools/README.md",
    "how-it-is-proven.md": "tests/README.md",
    "examples.md": "example-scripts/README.md",
    "reference/data.md": "tests/data/README.md",
    "reference/results.md": "tests/benchmarks/RESULTS.md",
    "reference/notes.md": "tests/benchmarks/NOTES.md",
}
NEED_TORCH = {"StorageReader"}  # a class of torch's class: described without it, as the site is built without
PICTURES = {".svg", ".png"}
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
_WORD_END = re.compile(r"(?<=[^\W_])([._/|]+)(?=\w)|(?<=[a-z])(?=[A-Z])")
_LOADS = re.compile(  # what a browser would fetch by itself
    r"""<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//|url\(["']?(?:https?:)?//|@import"""
)


def pages() -> dict[str, str]:
    """Every page that is a file: its address in the site -> its path in the repository."""
    own = sorted((REPO / DOCS).rglob("*.md"))
    return {str(path.relative_to(REPO / DOCS)): str(path.relative_to(REPO)) for path in own} | ELSEWHERE


def made() -> dict[str, str]:
    """Every page that is made here: its address -> its text."""
    texts = {f"commands/{name}.md": command_page(name) for name in manual.PAGES}
    return texts | {"reference/library.md": library_page(), "reference/json.md": schemas_page()}


def navigation() -> list[dict[str, Any]]:
    """The commands, by the sections of `--help`."""
    sections: dict[str, list[Any]] = {}
    for name, page in manual.PAGES.items():
        sections.setdefault(page.section, []).append({name: f"commands/{name}.md"})
    return [{section: entries} for section, entries in sections.items()]


def moved(text: str, source: str, page: str) -> tuple[str, dict[str, str]]:
    """A text that stood at `source` as page `page`, and the files it leads to: address in the site -> path."""
    known = {path: address for address, path in pages().items()}
    files: dict[str, str] = {}

    def lead(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        path, sharp, anchor = target.partition("#")
        if not path or ":" in path:
            return match[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        address = known.get(place) or known.get(f"{place}/README.md")
        if place == "ckpt_tools/schemas":
            address = "reference/json.md"
        if address is None:
            address = _address(place)
            files[address] = place
        return before + posixpath.relpath(address, posixpath.dirname(page)) + sharp + anchor + after

    return _LINK.sub(lead, text), files


def _address(path: str) -> str:
    """Where a file of the repository stands in the site: a text, so that a browser shows it."""
    within = path.removeprefix(f"{DOCS}/")
    if within != path:
        return within
    visible = "/".join(part.lstrip(".") for part in path.split("/"))
    return f"files/{visible}" + ("" if Path(path).suffix in PICTURES else ".txt")


def command_page(name: str) -> str:
    """The page of a command: what `--help` says."""
    group: Any = typer.main.get_command(app)
    command = group.get_command(None, name)
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join([manual.PROGRAM, name, *command.collect_usage_pieces(context)])
    lines = [f"# {name}", "", inspect.cleandoc(command.help), "", "```text", usage, "```", ""]
    for section, rows in by_section(parameters(command, context)).items():
        lines += [f"## {section}", "", "| name | what it is |", "|---|---|"]
        lines += [f"| {_code(term)} | {_cell(_safe(text))} |" for term, text in rows]
        lines.append("")
    lines += ["## Examples", ""]
    for what, words in manual.PAGES[name].examples:
        lines += [f"{what}:", "", "```bash", manual.command_line(words), "```", ""]
    used = " ".join(words for _, words in manual.PAGES[name].examples)
    named = [
        f"`{word}` is {what}" for word, what in manual.PLACEHOLDERS.items() if re.search(rf"\b{word}\b", used)
    ]
    return "\n".join([*lines, f"{'; '.join(named)}." if named else "", ""])


def library_page() -> str:
    """Every public name with its signature and its docstring, as the code has them."""
    lines = [
        "# The library",
        "",
        "`import ckpt_tools` costs nothing; each name is imported when it is first used, and none needs torch but",
        "`load_dtensors` and `StorageReader`. Examples that tests run: [example-scripts](../examples.md).",
        "",
    ]
    for name in ckpt_tools.__all__:
        if name in NEED_TORCH:
            lines += _entry_by_source(name)
        elif name != "__version__":
            lines += _entry(name, getattr(ckpt_tools, name))
    return "\n".join(lines)


def _entry(name: str, found: Any) -> list[str]:
    lines = [f"## {name}", "", "```python", _signature(name, found), "```", ""]
    lines += [_docstring(inspect.getdoc(found) or ""), ""]
    for result in _results(found):
        lines += [
            f"**{result.__name__}**: {_docstring(inspect.getdoc(result) or '')}",
            "",
            *_members(result),
            "",
        ]
    if isinstance(found, type):
        lines += [*_members(found), ""]
    return lines


def _entry_by_source(name: str) -> list[str]:
    """A class that cannot be imported here: its arguments, its docstring and its methods, as they are written."""
    path = REPO / "ckpt_tools" / f"{ckpt_tools._PUBLIC[name].replace('.', '/')}.py"
    made = next(n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef) and n.name == name)
    methods = [n for n in made.body if isinstance(n, ast.FunctionDef)]
    initial = next(n for n in methods if n.name == "__init__")
    arguments, defaults = initial.args.args[1:], initial.args.defaults
    parts = [ast.unparse(argument) for argument in arguments]
    for i, default in enumerate(defaults, len(arguments) - len(defaults)):
        parts[i] += f" = {ast.unparse(default)}"
    call = _folded(name, parts, "")
    lines = [f"## {name}", "", "```python", call, "```", "", _docstring(ast.get_docstring(made) or ""), ""]
    for method in methods:
        text = " ".join((ast.get_docstring(method) or "").split())
        if text and not method.name.startswith("_"):
            lines.append(f"* `{method.name}`: {_safe(text)}")
    return [*lines, ""]


def _results(found: Any) -> Iterator[type]:
    """The class of this package that a function gives back."""
    if inspect.isfunction(found):
        name = str(inspect.signature(found).return_annotation)
        result = getattr(importlib.import_module(found.__module__), name, None)
        if isinstance(result, type) and result.__module__.startswith("ckpt_tools."):
            yield result


def _members(owner: type) -> list[str]:
    """Fields, properties and methods that a class shows."""
    fields = [f.name for f in dataclasses.fields(owner)] if dataclasses.is_dataclass(owner) else []
    lines = [f"* fields: {', '.join(f'`{field}`' for field in fields)}"] if fields else []
    for name, member in vars(owner).items():
        if name.startswith("_") or not (isinstance(member, property) or inspect.isfunction(member)):
            continue
        text = inspect.getdoc(member.fget if isinstance(member, property) else member) or ""
        call = name if isinstance(member, property) else _signature(name, member)
        lines.append(f"* `{' '.join(call.split())}`: {_safe(' '.join(text.split()))}")
    return lines


def _signature(name: str, found: Any) -> str:
    """A signature as one writes it, folded where it is long."""
    signature = inspect.signature(found)
    parts, keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parts.append("*")
        parts.append(_parameter(parameter))
    given = signature.return_annotation
    returns = f" -> {given}" if isinstance(given, str) and given != "None" else ""
    return _folded(name, parts, returns)


def _folded(name: str, parts: list[str], returns: str) -> str:
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){returns}"])


def _parameter(parameter: inspect.Parameter) -> str:
    text = parameter.name
    if parameter.annotation is not inspect.Parameter.empty:
        text += f": {parameter.annotation}"
    if parameter.default is not inspect.Parameter.empty:
        default = repr(parameter.default)
        text += f" = {'...' if default.startswith('<') else default}"
    return text


def _docstring(text: str) -> str:
    """A docstring as Markdown: what is indented under `Args:` and `Raises:` becomes a list."""
    lines, in_list = [], False
    for line in text.splitlines():
        entry = re.match(r"^ {4}(\w[\w, ]*): (.*)", line)
        if re.match(r"^(Args|Raises|Returns|Yields):$", line):
            lines += ["", f"**{line[:-1]}**", ""]
            in_list = True
        elif in_list and entry:
            lines.append(f"* `{entry[1]}`: {_safe(entry[2])}")
        else:
            lines.append(f"    {_safe(line.strip())}" if in_list and line.strip() else _safe(line))
    return "\n".join(lines)


def schemas_page() -> str:
    """The JSON reports, each with its schema."""
    lines = [
        "# JSON reports",
        "",
        "With `--json` a command prints one document, which keeps to its schema. `schema_version` in it is raised",
        "when a field changes its meaning or goes; new fields may come at any time.",
        "",
        "| schema | title |",
        "|---|---|",
    ]
    for path in sorted((REPO / "ckpt_tools/schemas").glob("*.json")):
        title = json.loads(path.read_text()).get("title", "")
        lines.append(f"| [`{path.name}`](../{_address(str(path.relative_to(REPO)))}) | {_cell(title)} |")
    return "\n".join([*lines, ""])


def _code(text: str) -> str:
    """An option or an argument in a cell: a bar in it ends no cell, and no name is folded at its hyphens."""
    names, space, kind = html.escape(text).replace("|", "&#124;<wbr>").partition(" &lt;")
    return f'<code class="name">{names}</code>' + (f" <code>&lt;{kind}</code>" if space else "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _safe(text: str) -> str:
    """Plain text in which Markdown sees neither tags, nor emphasis in names and globs; code stays as it is."""
    parts = re.split(r"(``[^`]+``|`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([<*_\[\]])", r"\\\1", part) for part in parts)


# What mkdocs calls.


def on_config(config: Any) -> Any:
    """The navigation's entry for commands gets one for each."""
    for entry in config.nav:
        for title in entry if isinstance(entry, dict) else ():
            if title == "Commands":
                entry[title] = navigation()
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add what stands elsewhere, what is made, and the files that pages lead to."""
    from mkdocs.structure.files import File, InclusionLevel

    led_to: dict[str, str] = {}
    for address, source in pages().items():
        text, found = moved((REPO / source).read_text(), source, address)
        led_to |= found
        present = files.get_file_from_path(address)
        if present is not None:
            files.remove(present)
        files.append(File.generated(config, address, content=text))
    for address, text in made().items():
        files.append(File.generated(config, address, content=text))
    for path in sorted((REPO / "ckpt_tools/schemas").glob("*.json")):
        source = str(path.relative_to(REPO))
        led_to[_address(source)] = source
    for address, source in led_to.items():
        if files.get_file_from_path(address) is None:
            files.append(
                File.generated(
                    config, address, abs_src_path=str(REPO / source), inclusion=InclusionLevel.NOT_IN_NAV
                )
            )
    return files


def on_page_content(text: str, **_: Any) -> str:
    return foldable(text)


def foldable(text: str) -> str:
    """A page in which code in a line may be folded between the words of a name, never within an option."""

    def fold(match: re.Match[str]) -> str:
        parts = re.split(r"((?<![\w-])--?[a-z][\w-]*)", match[1])
        parts[::2] = [_WORD_END.sub(r"\1<wbr>", part) for part in parts[::2]]
        parts[1::2] = [f'<span class="option">{part}</span>' for part in parts[1::2]]
        return f"<code>{''.join(parts)}</code>"

    return re.sub(r"(?<!<pre>)<code>([^<]*)</code>", fold, text)


def on_post_build(config: Any) -> None:
    """Refuse a site that would load something from elsewhere, or in which a link leads nowhere."""
    from mkdocs.exceptions import PluginError

    if found := foreign(Path(config.site_dir)):
        raise PluginError(f"these would load something from elsewhere: {', '.join(map(str, found))}")
    if dead := dead_links(Path(config.site_dir)):
        raise PluginError(f"these links lead nowhere: {', '.join(dead)}")


def foreign(folder: Path) -> list[Path]:
    """Pages and styles with something that a browser would fetch from another place."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".html", ".css")]
    return [path for path in files if _LOADS.search(path.read_text(errors="replace"))]


def dead_links(folder: Path) -> list[str]:
    """Links of pages, each after its page, to a file or to a place in a page that is not there."""
    texts = {path: path.read_text() for path in sorted(folder.rglob("*.html")) if path.name != "404.html"}
    places = {path: set(re.findall(r'<[a-z][^>]*\sid="([^"]+)"', text)) for path, text in texts.items()}
    found = []
    for path, text in texts.items():
        for link in dict.fromkeys(re.findall(r'<[a-z][^>]*\s(?:href|src)="([^"]+)"', text)):
            name, _, place = html.unescape(unquote(link)).partition("#")
            to = Path(posixpath.normpath(path.parent / name)) if name else path
            there = to.exists() and (not place or place in places.get(to, (place,)))
            if ":" not in link and not there:
                found.append(f"{path.relative_to(folder)}: {link}")
    return found
