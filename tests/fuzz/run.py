"""Fuzzes one parser by hand, guided by coverage: `python -m tests.fuzz.run --parser metadata --minutes 10`.

Needs atheris (`pip install atheris`). Inputs that reach new code are kept in CORPUS and used again by the next run;
failures are written to CORPUS/failures, by libFuzzer itself what crashes, hangs or fills the process.
"""

import argparse
import hashlib
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ckpt_tools"]):
    from tests.fuzz.corpus import kept
    from tests.fuzz.mutate import mutate
    from tests.fuzz.parsers import PARSERS, parse, seeds

MEMORY = 4 << 30  # bytes of address space


class Fuzzer:
    """Counts what happens, and keeps failures: one for each place in the code."""

    def __init__(self, parser: str, failures: Path, seconds: float) -> None:
        self._parser, self._failures, self._seeds = parser, failures, seeds(parser)
        self._outcomes, self._places, self._slowest = Counter[str](), Counter[str](), 0.0
        self._began, self._seconds = time.monotonic(), seconds

    def one(self, data: bytes) -> None:
        began = time.process_time()
        try:
            self._outcomes["taken" if parse(self._parser, data) else "refused"] += 1
        except BaseException as error:
            self._keep(data, error)
        self._slowest = max(self._slowest, time.process_time() - began)
        if time.monotonic() - self._began > self._seconds:
            self.report()
            os._exit(1 if self._outcomes["failed"] else 0)  # libFuzzer never gives control back

    def _keep(self, data: bytes, error: BaseException) -> None:
        self._outcomes["failed"] += 1
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{type(error).__name__} {Path(last.filename).name}:{last.lineno}"
        self._places[place] += 1
        if self._places[place] == 1:
            path = self._failures / f"{self._parser}-{hashlib.sha256(data).hexdigest()[:12]}"
            path.write_bytes(data)
            print(f"{path}: {place}: {str(error)[:300]}", flush=True)

    def mutate(self, data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.1:
            return bytes(atheris.Mutate(data, max_size))
        return mutate(rng, self._parser, data, self._seeds)[:max_size]

    def report(self) -> None:
        minutes = (time.monotonic() - self._began) / 60
        print(
            f"{self._parser}: {sum(self._outcomes.values())} inputs in {minutes:.1f} min, {dict(self._outcomes)}, "
            f"slowest {self._slowest:.2f} s; {dict(self._places)}",
            flush=True,
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--parser", choices=PARSERS, required=True)
    options.add_argument("--minutes", type=float, default=10)
    options.add_argument("--corpus", type=Path, default=Path(tempfile.gettempdir(), "ckpt_tools-fuzz"))
    options.add_argument("--seed", type=int, default=0, help="0: another one each time")
    chosen = options.parse_args()
    corpus, failures = chosen.corpus / chosen.parser, chosen.corpus / "failures"
    for folder in (corpus, failures):
        folder.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(seeds(chosen.parser) + kept(chosen.parser)):
        (corpus / f"seed-{i}").write_bytes(data)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    fuzzer = Fuzzer(chosen.parser, failures, 60 * chosen.minutes)
    flags = [f"-artifact_prefix={failures}{os.sep}", "-timeout=20"]
    flags += ["-rss_limit_mb=2048", "-max_len=65536", f"-seed={chosen.seed}", "-len_control=0"]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], fuzzer.one, custom_mutator=fuzzer.mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
