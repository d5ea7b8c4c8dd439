"""The site's code: generated pages say what the program says, and every link leads to a page or a file.

`.ci/run` builds the site strictly; these tests need no mkdocs.
"""

import importlib.util
import inspect
import posixpath
import re
import subprocess
import sys
from types import ModuleType

import pytest
import yaml

import ckpt_tools
from ckpt_tools.cli import manual
from tests.cli.options import OPTIONS
from tests.conftest import REPO

HIDDEN = {"--oom-traceback", "--trust-pickle"}


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", REPO / ".github" / "site_pages.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", manual.PAGES)
def test_the_page_of_a_command_has_its_options_and_examples(name, site):
    text = site.command_page(name)
    for option in set(OPTIONS[name].split()) - HIDDEN:
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", text), option
    for what, words in manual.PAGES[name].examples:
        assert f"{what}:\n\n```bash\n{manual.command_line(words)}\n```" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {row.replace("\\|", "").count("|") for row in rows} == {3}  # no cell ends another


def test_the_library_page_has_every_public_name(site):
    text = site.library_page()
    names = re.findall(r"^## (\w+)$", text, re.M)
    assert names == [name for name in ckpt_tools.__all__ if name != "__version__"]
    assert "convert_to_fsdp_dtensor(\n    source: AnyPath,\n    output: AnyPath," in text
    assert "* `UsageError`: options that contradict each other" in text
    assert "0x" not in text  # of what has no name of its own


def test_the_site_is_made_without_torch(site):
    """`pip install '.[docs]'` does not install it."""
    code = (
        "import runpy, sys; sys.modules['torch'] = None\n"
        "sys.stdout.write(runpy.run_path('.github/site_pages.py')['library_page']())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout == site.library_page()


def test_a_class_of_torchs_is_described_from_its_source(site):
    text = site.library_page()
    found = inspect.signature(ckpt_tools.StorageReader)
    said = text.partition("## StorageReader\n")[2].partition("```python\n")[2].partition("```")[0]
    for parameter in found.parameters.values():
        assert (
            f"    {parameter},\n".replace("'Literal", "Literal")
            .replace('"', "")
            .replace(f"'{parameter.annotation}'", str(parameter.annotation))
            in said
        )


def test_every_schema_is_listed(site):
    page = site.schemas_page()
    assert not [p.name for p in (REPO / "ckpt_tools/schemas").glob("*.json") if f"`{p.name}`" not in page]


def test_every_link_of_the_site_leads_somewhere(site):
    addresses = {*site.pages(), *site.generated()}
    for address, source in site.pages().items():
        text, files = site.with_links((REPO / source).read_text(), source, address)
        assert not [path for path in files.values() if not (REPO / path).is_file()]
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path = target.partition("#")[0]
            place = posixpath.normpath(posixpath.join(posixpath.dirname(address), path))
            assert not path or ":" in path or place in addresses or place in files, (source, target)


def test_the_navigation_has_every_page_once(site):
    text = (REPO / ".github" / "mkdocs.yml").read_text()
    config = yaml.safe_load(text)
    listed = re.findall(r"[\w./-]+\.md", text)
    assert len(listed) == len(set(listed))
    names = {name.lstrip("/") for name in listed}
    assert names | {f"commands/{name}.md" for name in manual.PAGES} == {*site.pages(), *site.generated()}
    entry = next(e["Commands"] for e in _configured(site, config) if "Commands" in e)
    assert [page for part in entry for pages in part.values() for page in pages] == [
        {name: f"commands/{name}.md"}
        for section in dict.fromkeys(page.section for page in manual.PAGES.values())
        for name, page in manual.PAGES.items()
        if page.section == section
    ]


def _configured(
    site: ModuleType, config: dict[str, object]
) -> list[dict[str, list[dict[str, list[object]]]]]:
    class Config:
        nav = config["nav"]

    return site.on_config(Config()).nav


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<script src="https://example.org/x.js"></script>'),
        ("a.html", "<link rel=stylesheet href=//example.org/x.css>"),
        ("a.css", "@font-face{src:url(https://example.org/x.woff)}"),
    ],
)
def test_a_site_that_would_load_from_elsewhere_is_found(name, text, site, tmp_path):
    (tmp_path / name).write_text(text)
    (tmp_path / "b.html").write_text(
        '<a href="https://example.org">a link is not loaded</a><img src="x.png">'
    )
    assert site.foreign(tmp_path) == [tmp_path / name]
