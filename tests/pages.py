"""Every page and drawing must be well formed and one file that loads nothing."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree as Xml

_VOID = {"meta", "input", "br", "hr", "img"}
_LEADS_OUT = re.compile(r"""(?:https?:)?//(?!www\.w3\.org/2000/svg["'])[\w.]|@import|url\((?!#)""")


class _Tags(HTMLParser):
    """Checks that elements are closed in order, and keeps the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text.append(data)


def parse_page(page: str) -> _Tags:
    """Elements and text of a page, which must be well formed, fit for narrow screens, and load nothing."""
    assert page.startswith("<!doctype html>")
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    tags = _Tags()
    tags.feed(page)
    tags.close()
    assert not tags.open
    assert not _LEADS_OUT.search(re.sub(r">[^<]*<", "><", page)), _LEADS_OUT.search(page)
    for _, attributes in tags.seen:
        assert not {"src", "href"} & attributes.keys() or (attributes.get("href") or "#").startswith("#")
        assert not any(name.startswith("on") for name in attributes)
    return tags


def parse_svg(drawing: str) -> Xml.Element:
    """The root of a drawing, which must be well formed and load nothing."""
    root = Xml.fromstring(drawing)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not _LEADS_OUT.search(re.sub(r">[^<]*<", "><", drawing))
    return root
