"""Command lines with any value for any option: they end with one of the documented exit codes, never as a defect.

By hand: `python -m tests.fuzz.options --minutes 5 --seed 1`.
"""

import argparse
import contextlib
import io
import os
import random
import re
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path

from ckpt_tools.cli.app import run
from ckpt_tools.cli.commands import Commands
from ckpt_tools.commands.huggingface.export_hf import export_hf
from tests.cli.options import OPTIONS
from tests.conftest import DATA, fixture_dir

LLAMA = DATA / "core019_llama_tp2_fully_reshardable"
NATIVE = fixture_dir("core019_llama_tp2_native_fsdp_dtensor")
EXIT_CODES = {0, 1, 2, 3, 4, 5, 6, 7}
MAX_SECONDS = 20.0  # of CPU, for one command line
SOURCES = {
    "inspect": 1, "print-torch-dcp-in-json": 1, "convert": 2, "convert-torch-dist-to-fsdp-dtensor": 2,
    "convert-fsdp-dtensor-to-torch-dist": 2, "build-param-group-map": 1, "plan": 1, "export-hf": 2, "import-hf": 2,
    "verify": 1, "diff": 1, "compare-two-checkpoint": 1, "preflight": 1, "modify-state-dict": 2, "slice": 2,
    "average": 2, "strip": 2, "repair": 2, "merge-adapter": 2, "copy": 2, "ls": 1, "stats": 1, "print-tensor": 1,
}  # fmt: skip
NUMBERS = ["-1", "0", "1", "2", "3", "4", "7", "8", "64", "1000", "2147483647", "2147483648",
          "9223372036854775808", "1e10",
           "1" * 5000, "0x10", "1_0", "\u0664", "nan", "inf", "-inf", "1e400", "5e-324", "-0"]  # fmt: skip
TEXTS = ["", " ", "x", "x" * 5000, "a,b", ",", "*", "**", "[", "[!", "(", "\\", "(a+)+$", "{", "%s",
          "{0}", "\x1b[31m", "\n",
         "\udcff", "\u202e", "-", "--", "../x", "/", "/dev/null", "/proc/self/mem", "s3://", "file://",
          "nope://x",
         "::error::x", "##vso[x]", "0:1", "1:0", ":", "-1:", "0:1:2", "0:99999999999", "...", "None",
          "5GB", "1e999GB",
         "9" * 400 + "GB", "0.0000001", "5 XB", "96MiB", "all", "release", "none", "derive", "remove x",
          "remove (",
         "rename a b", "rename (a) \\2", "rename a", "float32", "bfloat16", "float8_e4m3fn", "int4",
          "optim", "no_shard",
         "decoder.final_layernorm.weight", "args", "iteration", "decoder", "mtp", "model"]  # fmt: skip


class Lines:
    """Draws command lines; they write only into `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._commands = {name: Commands()[name] for name in OPTIONS}
        export_hf(str(LLAMA), str(folder / "hf"))
        for name, data in {"a.json": b"{}", "b.json": b"[1]", "c.yaml": b"a: &a [*a]", "d.yaml": b"family: x",
                           "e": b"\xff\x00"}.items():  # fmt: skip
            (folder / name).write_bytes(data)
        self._files = [
            str(folder / name) for name in ("a.json", "b.json", "c.yaml", "d.yaml", "e", "new", "hf", "no/x")
        ]
        self._inputs = [str(LLAMA), str(LLAMA / "iter_0000002"), str(NATIVE), str(folder / "hf")]

    def draw(self, rng: random.Random) -> list[str]:
        name = rng.choice(list(OPTIONS))
        likely = {
            "import-hf": 3,
            "convert-fsdp-dtensor-to-torch-dist": 2,
            "preflight": 2,
            "print-torch-dcp-in-json": 1,
        }
        usual = self._inputs[likely.get(name, 0)]
        sources = [rng.choice([usual] * 9 + self._inputs) for _ in range(1 if SOURCES[name] else 0)]
        if SOURCES[name] == 2:
            sources.append(str(self._folder / f"out{rng.randrange(3)}"))
        if name in ("diff", "compare-two-checkpoint"):
            sources.append(rng.choice(self._inputs))
        if name == "print-tensor":
            sources.append(rng.choice(["decoder.final_layernorm.weight", "args", "x", rng.choice(TEXTS)]))
        if name == "average":
            sources.insert(0, rng.choice([usual] * 9 + self._inputs))
        words = [name, *sources]
        if name == "slice":
            words += ["--layers", rng.choice(["0:1", "0:2", rng.choice(TEXTS)])]
        for _ in range(rng.choice([1, 1, 2, 3, 5])):
            words += self._option(rng, name)
        return words

    def _option(self, rng: random.Random, name: str) -> list[str]:
        options = [
            p
            for p in self._commands[name].params
            if p.param_type_name == "option" and p.opts[0].startswith("-")
        ]
        one = rng.choice(options)
        spelling = rng.choice([*one.opts, *one.secondary_opts])
        if getattr(one, "is_flag", False):
            return [spelling]
        return (
            [f"{spelling}={self._value(rng, one)}"]
            if spelling.startswith("--")
            else [spelling, self._value(rng, one)]
        )

    def _value(self, rng: random.Random, option: object) -> str:
        kind = type(getattr(option, "type", None)).__name__
        choices = list(getattr(getattr(option, "type", None), "choices", []))
        if choices and rng.random() < 0.8:
            return str(getattr(rng.choice(choices), "value", rng.choice(choices)))
        if "Path" in kind and rng.random() < 0.8:
            return rng.choice(self._files)
        if re.search("Int|Float", kind) and rng.random() < 0.9:
            return rng.choice(NUMBERS)
        return rng.choice([*TEXTS, *NUMBERS])


def outcome(words: list[str]) -> tuple[int, str, float]:
    """Exit code, what was said on stderr, and seconds of CPU of one command line."""
    out, err, began = io.StringIO(), io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(words)
    return code, err.getvalue(), time.process_time() - began


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=5)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    rng, codes, until, slowest = (
        random.Random(chosen.seed),
        Counter[int](),
        time.monotonic() + 60 * chosen.minutes,
        0.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder, "inner")
        inner.mkdir()
        os.chdir(inner)  # names like "x" and "../x" are files here
        lines = Lines(Path(folder))
        while time.monotonic() < until:
            words = lines.draw(rng)
            code, said, seconds = outcome(words)
            codes[code] += 1
            slowest = max(slowest, seconds)
            if code not in EXIT_CODES or seconds > MAX_SECONDS:
                print(f"{code} after {seconds:.1f} s: {words!r:.600}\n{said[-900:]}", flush=True)
    print(f"{sum(codes.values())} command lines, slowest {slowest:.1f} s of CPU: {dict(codes)}", flush=True)


if __name__ == "__main__":
    main()
