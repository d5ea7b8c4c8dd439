"""The pictures of the site: small, and those that `python -m tests.pictures.pages` takes."""

from tests.conftest import REPO
from tests.pictures.pages import PICTURES, SHOWN


def test_the_pictures_are_those_that_are_taken_and_small():
    files = list(PICTURES.iterdir())
    assert {path.name for path in files} == {f"{name}.png" for name in SHOWN}
    assert max(path.stat().st_size for path in files) <= 150_000
    assert sum(path.stat().st_size for path in files) <= 1_000_000
    for name, shot in SHOWN.items():
        head = (PICTURES / f"{name}.png").read_bytes()[:24]
        assert head.startswith(b"\x89PNG\r\n")
        assert (int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")) == (
            shot.width,
            shot.height,
        )


def test_the_wide_pictures_are_shown():
    text = "".join(path.read_text() for path in (REPO / ".github" / "docs").rglob("*.md"))
    assert not [
        name for name, shot in SHOWN.items() if shot.width == 1600 and f"pictures/{name}.png" not in text
    ]
