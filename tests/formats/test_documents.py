"""Settings from strangers: read as JSON and YAML say, bounded in what they may cost."""

import time
from pathlib import Path

import pytest
import yaml

from ckpt_tools.formats.untrusted_documents import (
    MAX_YAML_BYTES,
    DocumentError,
    parse_json,
    parse_yaml,
    read_named_file,
)

ALIASES = b"a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\nd: [*a, *a]\n"


@pytest.mark.parametrize(
    "text", [b"", b"a: 1", b"- 1\n- [x, {y: null}]", ALIASES, b"x: 2026-01-01", b"---\n"]
)
def test_yaml_means_what_pyyaml_says(text):
    assert parse_yaml(text) == yaml.safe_load(text)


def bomb(line: str) -> bytes:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {line.replace('@', f'*a{i - 1}')}" for i in range(1, 30)]
    return "\n".join(lines).encode()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (bomb("[@, @, @, @, @, @, @, @, @]"), "its aliases make more than"),
        (bomb("{k: @, l: @}"), "its aliases make more than"),
        (bomb("{<<: [@, @, @, @, @, @, @, @, @]}"), "its aliases make more than"),
        (b"a: &a [*a]", "an alias names what it is a part of"),
        (b"&a {b: {c: *a}}", "an alias names what it is a part of"),
        (b"[" * 80 + b"]" * 80, "nested deeper than 64"),
        (b"[" * 5_000, "nested too deep"),
        (b"a" * (MAX_YAML_BYTES + 1), "at most 1,048,576"),
        (b"!!python/object/apply:os.system [true]", "not YAML"),
        (b"a: 1\n--- \nb: 2", "not YAML"),
        (b"\xff\xfe\x00", "not YAML"),
        (b"\x1b[31m", "not YAML"),
        (b"!!int x", "not YAML"),
        (b"!!timestamp 2026-99-99", "not YAML"),
        (b"? [a]\n: 1", "not YAML"),
    ],
    ids=range(15),
)
def test_yaml_bombs_and_rubbish_are_refused(text, why):
    began = time.process_time()
    with pytest.raises(DocumentError, match=why):
        parse_yaml(text)
    assert time.process_time() - began < 2


def test_json():
    assert parse_json(b'{"a": [1, null]}') == {"a": [1, None]}
    for text, why in ((b"[" * 5_000, "nested too deep"), (b"{", "not JSON"), (b"\xff", "not JSON")):
        with pytest.raises(DocumentError, match=why):
            parse_json(text)


def test_files_that_users_name_are_bounded(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 10)
    assert read_named_file(tmp_path / "a", 10) == b"x" * 10
    with pytest.raises(DocumentError, match="more than 9 bytes"):
        read_named_file(tmp_path / "a", 9)
    with pytest.raises(DocumentError, match="more than 9 bytes"):
        read_named_file(Path("/dev/zero"), 9)
