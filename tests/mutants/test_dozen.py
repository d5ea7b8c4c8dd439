"""A dozen wrong lines of pure functions, drawn by a fixed seed: their unit tests notice, so the tool that tries wrong
lines works. All rooms, by hand: `python -m tests.mutants`."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.conftest import REPO
from tests.mutants.__main__ import ROOMS, read_equivalent
from tests.mutants.named import named_mutants
from tests.mutants.sites import Mutant, mutants
from tests.mutants.trial import Trials

UNIT_TESTS = {  # quick ones, which import no torch
    "ckpt_tools/model/box.py": "tests/model/test_box.py",
    "ckpt_tools/model/views.py": "tests/model/test_views.py",
    "ckpt_tools/megatron/fsdp_dtensor/gating.py": "tests/megatron/test_gating.py",
    "ckpt_tools/megatron/torch_dist/rng_grid.py": "tests/megatron/test_rng_grid.py",
    "ckpt_tools/plan/coalesce.py": "tests/plan/test_coalesce.py",
    "ckpt_tools/sharding/topology.py": "tests/sharding/test_topology.py",
}


def _dozen(seed: int) -> list[Mutant]:
    """Two of each file."""
    rng = random.Random(seed)
    found = {file: mutants(file, (REPO / file).read_text()) for file in UNIT_TESTS}
    return [mutant for several in found.values() for mutant in rng.sample(several, 2)]


def test_unit_tests_notice_a_dozen_wrong_lines(tmp_path: Path) -> None:
    """The files as they are pass. Two may live unexplained, as a change of the code draws others."""
    chosen = _dozen(seed=11)
    whole = [Mutant(file, range(1, 2), file, "none", (REPO / file).read_text()) for file in UNIT_TESTS]

    def outcomes(part: int) -> dict[str, str]:
        with Trials(tmp_path / str(part)) as trials:
            mine = [*chosen[part::2], *whole[part::2]]
            return {m.name: trials.try_mutant(m, [UNIT_TESTS[m.file]], 60).how for m in mine}

    with ThreadPoolExecutor(2) as pool:
        found = {name: how for part in pool.map(outcomes, range(2)) for name, how in part.items()}
    assert {found.pop(m.name) for m in whole} == {"survived"}
    alive = {name for name, how in found.items() if how not in ("killed", "hung")} - read_equivalent().keys()
    assert len(found) == 12
    assert len(alive) <= 2, alive


def test_the_named_wrong_lines_follow_the_code() -> None:
    found, problems = named_mutants(REPO, ROOMS)
    assert not problems, "tests/mutants/named.txt holds texts that the code has changed"
    assert len(found) > 30
    for mutant in found:
        compile(mutant.text, mutant.file, "exec")


def test_every_survivor_has_its_reason() -> None:
    reasons = read_equivalent()
    assert all(name and len(reason) > 10 for name, reason in reasons.items())


def test_what_is_for_people_is_left_alone() -> None:
    source = '''
def check(a: int, b: int) -> bool:
    """1 and 2."""
    if a < 1:
        raise ValueError(f"{a} is less than {1}")
    note = "1" if a > 2 else "2"
    return not (a and b)


def describe(a: int) -> str:
    return "a" if a < 1 else "b"
'''
    names = [m.name.partition(": ")[2] for m in mutants("f.py", source)]
    assert sorted(names) == sorted(
        [
            "1 -> (2)",
            "a < 1 -> (a <= 1)",
            "if a < 1: raise ValueError(f'{a} is less than {1}') -> pass",
            "not (a and b) -> (a and b)",
            "a and b -> (a or b)",
            "a and b -> (a)",
            "a and b -> (b)",
            "return not (a and b) -> return True",
            "return not (a and b) -> return False",
        ]
    )
