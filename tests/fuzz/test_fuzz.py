"""Bytes from strangers, damaged at random but alike in every run: our own errors only, in bounded time and memory."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.hostile.make import archive
from tests.fuzz.corpus import kept
from tests.fuzz.mutate import mutate
from tests.fuzz.options import EXIT_CODES, LLAMA, MAX_SECONDS, Lines, outcome
from tests.fuzz.parsers import parse, seeds
from tests.fuzz.settings import PARSERS as SETTINGS

EXAMPLES = {"metadata": 400, "object": 800, "frame": 1500, "map": 300, "safetensors": 1500} | dict.fromkeys(
    SETTINGS, 300
)
dice = st.integers(0, (1 << 64) - 1).map(random.Random)


@pytest.mark.parametrize("parser", EXAMPLES)
def test_damaged_input_is_taken_or_refused(parser):
    given_inputs = seeds(parser)
    taken = []

    @settings(max_examples=EXAMPLES[parser], suppress_health_check=list(HealthCheck), database=None)
    @given(rng=dice)
    def check(rng: random.Random) -> None:
        taken.append(parse(parser, mutate(rng, parser, rng.choice(given_inputs), given_inputs)))

    check()
    assert 0 < sum(taken) < len(taken)  # damage that only ever ends in the first check would prove nothing


@pytest.mark.parametrize("parser", sorted(EXAMPLES.keys() - SETTINGS.keys()))
def test_the_kept_corpus(parser):
    taken = [parse(parser, data) for data in kept(parser)]
    assert 0 < sum(taken) < len(taken)


SLOW_ONCE = {
    "safetensors": [
        b"[" * 100_000,
        b'{"a":{"dtype":"F32","shape":[%b],"data_offsets":[0,4]}}' % b",".join([b"9" * 4000] * 500),
    ],
    "map": [
        b"[" * 100_000,
        b'{"weight_map":' * 50_000,
        b"{%b}" % b",".join(b'"n%d":0' % (i // 2) for i in range(100_000)),
        b'{"%b":0}' % (b"module." * 100_000),
    ],
    "metadata": [b"\x80\x02" + b"\x8f" * 200_000 + b"."],
    "object": [archive([("a/data.pkl", b"\x80\x04" + b"\x8f" * 200_000 + b".")])],
}


@pytest.mark.parametrize(("parser", "data"), [(p, d) for p, inputs in SLOW_ONCE.items() for d in inputs])
def test_what_was_slow_or_deep(parser, data):
    parse(parser, data)


def test_any_value_of_any_option(tmp_path, monkeypatch):
    """By hand: `python -m tests.fuzz.options --minutes 10`."""
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")  # names like "x" and "../x" are files here
    lines, rng, codes = Lines(tmp_path), random.Random(5), set()
    for _ in range(40):
        words = lines.draw(rng)
        code, said, seconds = outcome(words)
        assert code in EXIT_CODES, (words, said)
        assert seconds < MAX_SECONDS, words
        codes.add(code)
    assert codes >= {0, 2}


PATHS = [
    "",
    "/proc/self/mem",
    "/dev/zero",
    "/dev/null",
    "\udcff",
    "x" * 5000,
    "a/" * 3000,
    "://",
    "file://",
    "~",
]
NUMBERS = ["9" * 5000, "\u0664", "\u00b2"]
SIZES = ["--max-memory", "--threads", "--tp"]
DRAWN_ONCE = [
    *(
        ["modify-state-dict", "IN", "OUT", "-q", "--op", op]
        for op in ("", " ", "rename ( x", "rename a \\2", "rename a \ud800")
    ),
    *(
        ["convert", "IN", "OUT", "-q", "--dry-run", "--iteration", number]
        for number in ("9" * 5000, "\u0664", "\u00b2")
    ),
    *(
        ["convert", "IN", "OUT", "-q", "--dry-run", option, "9" * 500]
        for option in ("--max-memory", "--threads", "--tp")
    ),
    ["convert", "IN", "OUT", "-q", "--dry-run", "--vocab-size-padded", "9223372036854775807"],
    ["convert", "IN", "OUT", "-q", "--output-model-weight-prefix", "\udcff"],
    ["convert-torch-dist-to-fsdp-dtensor", "IN", "OUT", "-q", "--dry-run", "--iteration", "9" * 5000],
    ["plan", "IN", "--dp-shard", "2147483647"],
    ["plan", "IN", "--world-size", "99999999999"],
    ["plan", "IN", "--dp-shard", "1000", "--dp-outer", "100000"],
    ["verify", "IN", "--threads", "1000000"],
    ["export-hf", "IN", "OUT", "-q", "--dry-run", "--rules", "/dev/zero"],
    ["convert", "IN", "OUT", "-q", "--dry-run", "--param-to-param-group-map-json", "/dev/zero"],
    ["preflight", "IN", "--yaml", "/dev/zero"],
    ["preflight", "IN", "--", "--tensor-model-parallel-size", "x"],
    *(["inspect", path] for path in PATHS),
]


@pytest.mark.parametrize("words", DRAWN_ONCE, ids=range(len(DRAWN_ONCE)))
def test_what_ended_as_a_defect_or_too_late(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said, seconds = outcome(
        [{"IN": str(LLAMA), "OUT": str(tmp_path / "out")}.get(word, word) for word in words]
    )
    assert code in EXIT_CODES, said
    assert seconds < 5
    assert "Traceback" not in said
