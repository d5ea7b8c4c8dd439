"""Tries wrong lines by hand: `python -m tests.mutants --rooms execute,megatron --count 150 --seed 1`.

Sites are drawn by room and kind of mistake; each mutant runs against the tests that cover its line, in a copy of the
repository. The first run measures which those are (minutes; needs `pip install coverage`) and keeps that outside the
repository. Survivors that cannot hurt are listed with their reason in `equivalent.txt`; any other fails the run.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

from tests.conftest import REPO
from tests.mutants.coverage_map import CoverageMap, load_map, make_map
from tests.mutants.named import named_mutants
from tests.mutants.sites import Mutant, mutants
from tests.mutants.trial import Outcome, Trials, make_tree

ROOMS = ("model", "formats", "megatron", "sharding", "plan", "execute", "verify", "commands", "cli")
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
_FOR_PEOPLE = {  # modules that only show something, or only bound time and memory
    "commands": ("picture", "environment", "close_names"),
    "cli": (
        "help",
        "render",
        "environment",
        "commands",
        "progress",
        "manual",
        "findings",
        "reports",
        "inspect",
    ),
    "verify": ("report", "meter"),
    "sharding": ("describe", "memory"),
    "model": ("without_gc",),
}
_SLOW = ("torch", "typer", "rich.console", "yaml", "orjson", "safetensors", "fsspec")  # to import
_RARE = {"swapped arguments": 0.3, "off by one": 0.6, "truth value": 0.5}  # mostly a TypeError, or a limit


def main() -> int:
    options = _options()
    os.nice(10)
    rooms = tuple(options.rooms.split(","))
    kept = options.folder / "map.json"
    if not kept.exists():
        make_map(make_tree(options.folder / "measured"), kept)
    tests, reasons = load_map(kept), read_equivalent()
    chosen, problems = named_mutants(REPO, rooms)
    chosen += draw(rooms, options.count, options.seed)
    last = options.folder / "alive.txt"
    again = set(last.read_text().splitlines()) if options.again else None
    chosen = [m for m in chosen if options.only in m.name and (again is None or m.name in again)]
    with ExitStack() as stack:
        trials = [
            stack.enter_context(Trials(options.folder / f"copy{i}", _SLOW)) for i in range(options.parallel)
        ]
        outcomes = try_all(chosen, trials, tests, options.seconds)
        outcomes = without_false_alarms(outcomes, trials[0])
    last.write_text("".join(f"{m.name}\n" for m in _alive(outcomes)))
    return report(outcomes, reasons, problems)


def try_all(
    chosen: list[Mutant], trials: list[Trials], tests: CoverageMap, seconds: float
) -> dict[Mutant, Outcome]:
    """How each mutant fared, told as it becomes known."""
    free: SimpleQueue[Trials] = SimpleQueue()
    for one in trials:
        free.put(one)

    def attempt(mutant: Mutant) -> Outcome:
        one = free.get()
        try:
            outcome = Outcome("not covered")
            for some in covering(tests, mutant, seconds):
                outcome = one.try_mutant(mutant, some, 4 * seconds + 60)
                if outcome.how != "survived":
                    break
        finally:
            free.put(one)
        place = f"[{mutant.kind}, line {mutant.lines[-1]}]"
        print(f"{outcome.how:12} {mutant.name}  {place} {outcome.by}", flush=True)
        return outcome

    with ThreadPoolExecutor(len(trials)) as pool:
        return dict(zip(chosen, pool.map(attempt, chosen), strict=True))


def without_false_alarms(outcomes: dict[Mutant, Outcome], trials: Trials) -> dict[Mutant, Outcome]:
    """A test that fails on the code as it is has not noticed anything: its mutants count as alive."""
    noticed = sorted({outcome.by for outcome in outcomes.values() if outcome.how == "killed"})
    false = trials.failing(noticed, 1800) if noticed else set()
    for test in sorted(false):
        print(f"fails without any mutant: {test}")
    return {m: Outcome("survived") if o.by in false else o for m, o in outcomes.items()}


def _alive(outcomes: dict[Mutant, Outcome]) -> list[Mutant]:
    return [m for m, outcome in outcomes.items() if outcome.how in ("survived", "not covered")]


def _options() -> argparse.Namespace:
    memory = Path("/dev/shm")
    default = (
        memory if memory.is_dir() else Path(tempfile.gettempdir())
    ) / f"ckpt_tools-mutants-{os.getuid()}"
    options = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    options.add_argument("--rooms", default=",".join(ROOMS))
    options.add_argument("--count", type=int, default=150, help="beside the named ones")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument(
        "--seconds", type=float, default=40, help="of tests for each mutant, as they were measured"
    )
    options.add_argument("--parallel", type=int, default=2)
    options.add_argument("--again", action="store_true", help="only those that the last run left alive")
    options.add_argument("--only", default="", help="mutants with this in their name")
    options.add_argument(
        "--folder", type=Path, default=default, help="for copies and the map; delete it to measure anew"
    )
    return options.parse_args()


def draw(rooms: Iterable[str], count: int, seed: int) -> list[Mutant]:
    """As many of every room, the kinds of mistakes mixed; the same ones for the same seed and sources."""
    rng = random.Random(seed)
    by_room = {room: _shuffled(room, rng) for room in rooms}
    chosen: list[Mutant] = []
    while len(chosen) < count and any(by_room.values()):
        for left in by_room.values():
            if left and len(chosen) < count:
                chosen.append(left.pop())
    return chosen


def _shuffled(room: str, rng: random.Random) -> list[Mutant]:
    """All of a room, so that the kinds take turns from the end on."""
    kinds: dict[str, list[Mutant]] = defaultdict(list)
    for path in sorted((REPO / "ckpt_tools" / room).rglob("*.py")):
        file = str(path.relative_to(REPO))
        if path.stem not in _FOR_PEOPLE.get(room, ()):
            for mutant in mutants(file, path.read_text()):
                kinds[mutant.kind].append(mutant)
    keyed = []
    for kind, found in sorted(kinds.items()):
        rng.shuffle(found)
        keyed += [(i / _RARE.get(kind, 1.0) + rng.random(), mutant) for i, mutant in enumerate(found)]
    return [mutant for _, mutant in sorted(keyed, key=lambda pair: -pair[0])]


def covering(tests: CoverageMap, mutant: Mutant, seconds: float) -> list[list[str]]:
    """The tests to try, in two steps: the room's own, then all others; each as many as `seconds` allow."""
    lines = mutant.lines
    if not tests.is_current(mutant.file):
        lines = range(max(1, lines[0] - 15), lines[-1] + 16)  # where it may have stood
    table = table_at(mutant)
    if table:  # read when its module is imported: what counts is who uses it
        users = users_of(table)
        found = list(dict.fromkeys(test for file, used in users.items() for test in tests.tests(file, used)))
        found.sort(key=lambda test: tests.seconds.get(test, 0.0))
    else:
        found = tests.tests(mutant.file, lines)
    if all("::" not in test for test in found):
        found = tests.whole_module(mutant.file)
    own = f"tests/{mutant.file.split('/')[1]}/"
    steps = [[test for test in found if test.startswith(own) == first] for first in (True, False)]
    return [_within(in_turns(step), tests, seconds) for step in steps if step]


def _within(found: list[str], tests: CoverageMap, seconds: float) -> list[str]:
    chosen: list[str] = []
    spent = 0.0
    for test in found:
        spent += tests.seconds.get(test, 1.0)
        if spent > seconds and chosen:
            break
        chosen.append(test)
    return chosen


def in_turns(tests: list[str]) -> list[str]:
    """The quickest of each file, then a second one of each: they differ more than neighbours do."""
    turns: Counter[str] = Counter()
    keyed = []
    for number, test in enumerate(tests):
        file = test.partition("::")[0]
        turns[file] += 1
        keyed.append((turns[file], number, test))
    return [test for *_, test in sorted(keyed)]


def table_at(mutant: Mutant) -> str:
    """The name of the module's constant that a mutant changes; "" when it is none."""
    for line in reversed((REPO / mutant.file).read_text().splitlines()[: mutant.lines[0]]):
        if line[:1].strip() and line[0] not in ")]}":
            match = re.match(r"(\w+)(?::[^=]*)? = ", line)
            return match[1] if match else ""
    return ""


def users_of(name: str, depth: int = 2) -> dict[str, set[int]]:
    """Lines that use a constant, by file, also through other constants."""
    found: dict[str, set[int]] = defaultdict(set)
    word = re.compile(rf"\b{name}\b") if name else re.compile("(?!)")
    for path in (REPO / "ckpt_tools").rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not word.search(line) or line.lstrip().startswith(("#", "from ", "import ")):
                continue
            found[str(path.relative_to(REPO))].add(number)
            names = re.match(r"(\w+(?:, \w+)*)(?::[^=]*)? = ", line)
            for other in names[1].split(", ") if names and depth else ():
                for file, lines in users_of(other, depth - 1).items() if other != name else ():
                    found[file] |= lines
    return found


def read_equivalent() -> dict[str, str]:
    """Reasons by the names of mutants that cannot hurt: lines `name | reason`."""
    lines = [line for line in EQUIVALENT.read_text().splitlines() if line and not line.startswith("#")]
    return {name.strip(): reason.strip() for name, _, reason in (line.rpartition(" | ") for line in lines)}


def report(outcomes: dict[Mutant, Outcome], reasons: dict[str, str], problems: list[str]) -> int:
    """Print a table by room, and say what is left to do; the exit code."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant, outcome in outcomes.items():
        counts[mutant.file.split("/")[1]][outcome.how] += 1
    columns = ("killed", "hung", "survived", "not covered")
    print(f"\n{'room':10} {'tried':>6}" + "".join(f"{column:>13}" for column in columns))
    for room, count in (*counts.items(), ("all", sum(counts.values(), Counter[str]()))):
        print(f"{room:10} {count.total():6}" + "".join(f"{count[column]:13}" for column in columns))
    alive = _alive(outcomes)
    for mutant in alive:
        print(f"alive: {mutant.name}: {reasons.get(mutant.name, 'NO REASON GIVEN')}")
    for problem in problems:
        print(f"cannot be made: {problem}")
    return 1 if problems or any(m.name not in reasons for m in alive) else 0


if __name__ == "__main__":
    sys.exit(main())
