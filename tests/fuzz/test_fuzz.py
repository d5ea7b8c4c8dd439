"""Bytes from strangers, damaged at random but alike in every run: our own errors only, in bounded time and memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.hostile.make import archive
from tests.fuzz.corpus import kept
from tests.fuzz.mutate import mutate
from tests.fuzz.parsers import parse, seeds
from tests.fuzz.settings import PARSERS as SETTINGS

EXAMPLES = {"metadata": 400, "object": 800, "frame": 1500, "map": 300, "safetensors": 1500} | dict.fromkeys(
    SETTINGS, 300
)
dice = st.integers(0, (1 << 64) - 1).map(random.Random)


@pytest.mark.parametrize("parser", EXAMPLES)
def test_damaged_input_is_taken_or_refused(parser: str) -> None:
    given_inputs = seeds(parser)
    taken = []

    @settings(max_examples=EXAMPLES[parser], suppress_health_check=list(HealthCheck), database=None)
    @given(rng=dice)
    def check(rng: random.Random) -> None:
        taken.append(parse(parser, mutate(rng, parser, rng.choice(given_inputs), given_inputs)))

    check()
    assert 0 < sum(taken) < len(taken)  # damage that only ever ends in the first check would prove nothing


@pytest.mark.parametrize("parser", sorted(EXAMPLES.keys() - SETTINGS.keys()))
def test_the_kept_corpus(parser: str) -> None:
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
def test_what_was_slow_or_deep(parser: str, data: bytes) -> None:
    parse(parser, data)
