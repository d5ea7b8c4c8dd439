"""A hook of mkdocs: pages from other folders of the repository, and pages generated from the program.

README, CHANGELOG and the READMEs of the folders become pages, with their links rewritten; the reference is generated
from the data of `--help` and from docstrings. The site loads nothing from other places, which the build checks.
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

import typer.main

import ckpt_tools
from ckpt_tools.cli import manual
from ckpt_tools.cli.app import app
from ckpt_tools.cli.commands import by_section, parameters

REPO = Path(__file__).resolve().parent.parent
DOCS = ".github/docs"
ELSEWHERE = {  # page -> its path in the repository
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
NEED_TORCH = {"StorageReader"}  # derived from a class of torch, which the site is built without
PICTURES = {".svg", ".png"}
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
_LOADS = re.compile(  # what a browser fetches by itself
    r"""<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//|url\(["']?(?:https?:)?//|@import"""
)


def pages() -> dict[str, str]:
    """Every page that is a file: its address in the site -> its path in the repository."""
    own = sorted((REPO / DOCS).rglob("*.md"))
    return {str(path.relative_to(REPO / DOCS)): str(path.relative_to(REPO)) for path in own} | ELSEWHERE


def generated() -> dict[str, str]:
    """Every generated page: its address -> its text."""
    texts = {f"commands/{name}.md": command_page(name) for name in manual.PAGES}
    return texts | {"reference/library.md": library_page(), "reference/json.md": schemas_page()}


def navigation() -> list[dict[str, Any]]:
    """The commands, by the sections of `--help`."""
    sections: dict[str, list[Any]] = {}
    for name, page in manual.PAGES.items():
        sections.setdefault(page.section, []).append({name: f"commands/{name}.md"})
    return [{section: entries} for section, entries in sections.items()]


def with_links(text: str, source: str, page: str) -> tuple[str, dict[str, str]]:
    """The text of `source` with links for its place `page`, and the files that it links to: address -> path."""
    known = {path: address for address, path in pages().items()}
    files: dict[str, str] = {}

    def rewrite(match: re.Match[str]) -> str:
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

    return _LINK.sub(rewrite, text), files


def _address(path: str) -> str:
    """The address of a file: with `.txt`, so that a browser shows it."""
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
    usage = " ".join(
        [manual.PROGRAM, name, *(part.strip("{}") for part in command.collect_usage_pieces(context))]
    )
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
        "`import ckpt_tools` is free; each name is imported when it is first used. Only `load_dtensors` and",
        "`StorageReader` need torch. Examples: [example-scripts](../examples.md).",
        "",
    ]
    for name in ckpt_tools.__all__:
        if name in NEED_TORCH:
            lines += _entry_by_source(name)
        elif name != "__version__":
            lines += _entry(name, getattr(ckpt_tools, name))
    return "\n".join(lines)


def _entry(name: str, value: Any) -> list[str]:
    lines = [f"## {name}", "", "```python", _signature(name, value), "```", ""]
    lines += [_docstring(inspect.getdoc(value) or ""), ""]
    for result in _results(value):
        lines += [
            f"**{result.__name__}**: {_docstring(inspect.getdoc(result) or '')}",
            "",
            *_members(result),
            "",
        ]
    if isinstance(value, type):
        lines += [*_members(value), ""]
    return lines


def _entry_by_source(name: str) -> list[str]:
    """A class that cannot be imported here: its arguments, docstring and methods, from its source."""
    path = REPO / "ckpt_tools" / f"{ckpt_tools._PUBLIC[name].replace('.', '/')}.py"
    node = next(n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef) and n.name == name)
    methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
    initial = next(n for n in methods if n.name == "__init__")
    arguments, defaults = initial.args.args[1:], initial.args.defaults
    parts = [ast.unparse(argument) for argument in arguments]
    for i, default in enumerate(defaults, len(arguments) - len(defaults)):
        parts[i] += f" = {ast.unparse(default)}"
    call = _folded(name, parts, "")
    lines = [f"## {name}", "", "```python", call, "```", "", _docstring(ast.get_docstring(node) or ""), ""]
    for method in methods:
        text = " ".join((ast.get_docstring(method) or "").split())
        if text and not method.name.startswith("_"):
            lines.append(f"* `{method.name}`: {_safe(text)}")
    return [*lines, ""]


def _results(value: Any) -> Iterator[type]:
    """The class of this package that a function returns."""
    if inspect.isfunction(value):
        name = str(inspect.signature(value).return_annotation)
        result = getattr(importlib.import_module(value.__module__), name, None)
        if isinstance(result, type) and result.__module__.startswith("ckpt_tools."):
            yield result


def _members(owner: type) -> list[str]:
    """Public fields, properties and methods of a class."""
    fields = [f.name for f in dataclasses.fields(owner)] if dataclasses.is_dataclass(owner) else []
    lines = [f"* fields: {', '.join(f'`{field}`' for field in fields)}"] if fields else []
    for name, member in vars(owner).items():
        if name.startswith("_") or not (isinstance(member, property) or inspect.isfunction(member)):
            continue
        text = inspect.getdoc(member.fget if isinstance(member, property) else member) or ""
        call = name if isinstance(member, property) else _signature(name, member)
        lines.append(f"* `{' '.join(call.split())}`: {_safe(' '.join(text.split()))}")
    return lines


def _signature(name: str, value: Any) -> str:
    """A signature, in several lines if it is long."""
    signature = inspect.signature(value)
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
    """A docstring as Markdown: the entries of `Args:` and `Raises:` become a list."""
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
        "With `--json` a command prints one document that follows its schema. `schema_version` is raised",
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
    """An option or an argument in a cell: `|` must not end the cell, and no line breaks at hyphens."""
    names, space, kind = html.escape(text).replace("|", "&#124;<wbr>").partition(" &lt;")
    return f'<code class="name">{names}</code>' + (f" <code>&lt;{kind}</code>" if space else "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _safe(text: str) -> str:
    """Text escaped for Markdown, except code: no tags, no emphasis in names and globs."""
    parts = re.split(r"(``[^`]+``|`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([<*_\[\]])", r"\\\1", part) for part in parts)


# Called by mkdocs.


def on_config(config: Any) -> Any:
    """Put every command into the navigation."""
    for entry in config.nav:
        for title in entry if isinstance(entry, dict) else ():
            if title == "Commands":
                entry[title] = navigation()
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add pages from other folders, generated pages, and the files that pages link to."""
    from mkdocs.structure.files import File, InclusionLevel

    linked: dict[str, str] = {}
    for address, source in pages().items():
        text, targets = with_links((REPO / source).read_text(), source, address)
        linked |= targets
        present = files.get_file_from_path(address)
        if present is not None:
            files.remove(present)
        files.append(File.generated(config, address, content=text))
    for address, text in generated().items():
        files.append(File.generated(config, address, content=text))
    for path in sorted((REPO / "ckpt_tools/schemas").glob("*.json")):
        source = str(path.relative_to(REPO))
        linked[_address(source)] = source
    for address, source in linked.items():
        if files.get_file_from_path(address) is None:
            files.append(
                File.generated(
                    config, address, abs_src_path=str(REPO / source), inclusion=InclusionLevel.NOT_IN_NAV
                )
            )
    return files


def on_post_build(config: Any) -> None:
    """Fail if a page would load something from another place. (mkdocs --strict checks the links.)"""
    from mkdocs.exceptions import PluginError

    if pages := foreign(Path(config.site_dir)):
        raise PluginError(f"these would load something from elsewhere: {', '.join(map(str, pages))}")


def foreign(folder: Path) -> list[Path]:
    """Pages and styles that would make a browser fetch something from another place."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".html", ".css")]
    return [path for path in files if _LOADS.search(path.read_text(errors="replace"))]
