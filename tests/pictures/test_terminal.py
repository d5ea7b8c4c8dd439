"""The README's picture shows what the program prints today."""

import html
import re

from tests.pictures.terminal import PICTURE, draw, record

MEASURED = re.compile(r" in \d+\.\d\d s$")  # lines with times


def texts(svg: str) -> list[str]:
    """The lines of text, without those that hold measurements."""
    rows: dict[str, str] = {}
    for y, text in re.findall(r'<text [^>]*\by="([\d.]+)"[^>]*>([^<]*)</text>', svg):
        rows[y] = rows.get(y, "") + html.unescape(text).replace("\xa0", " ")
    return [row for row in rows.values() if not MEASURED.search(row)]


def test_the_picture_is_up_to_date():
    """Otherwise: python -m tests.pictures.terminal, and look at it."""
    recorded = PICTURE.read_text()
    assert texts(recorded) == texts(draw(record()))
    assert not re.search(
        r"""(url\(|href=|src[=:])\s*["']?http""", recorded
    )  # nothing is loaded from elsewhere
