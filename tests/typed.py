"""The fenced blocks of a document as steps, in the order in which a reader types them, and what runs them.

The convention, for README.md, `ckpt_tools/for-agents.md` and every page under `.github/docs`:

* ```bash: each line of this program is run, in one folder for each page, so later lines find earlier outputs; only
  `OUT*` is deleted before every block. `# exit code N` at the end of a line is the expected code, otherwise 0.
* ```python: run in the same folder, one module for each page; so is the argument of `python -c`.
* ```text: each line, except for blanks, is contained in the output of the block before it, in this order; `...` is
  for other lines. stdout comes before stderr.
* `PLACES` exist from the start. `s3://` is a file system in memory.
* Lines of other programs are in `ELSEWHERE`, which says what runs them.
"""

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckpt_tools.cli.app import run
from tests.altered import scaled, without_numbers
from tests.conftest import DATA, fixture_dir
from tests.megatron.adapter_checkpoints import lora
from tests.megatron.huggingface.vision_language import directory

PLACES = ("RUN", "LATER", "FSDP", "MOE", "HF", "LORA", "PEFT", "BAD", "STRANGER", "DUMP", "VL")
PROGRAM = re.compile(r"^(?:torchrun .*-m ckpt_tools|python3? -m ckpt_tools|checkpoint-inspector) ")
ELSEWHERE = {
    r"pip install |python3 -m venv ": ".ci/run and .ci/wheel",
    r"bash example-scripts/quickstart\.sh$": "tests/test_without_torch.py",
    r"uvx |pipx ": ".ci/wheel",
    r"podman ": ".ci/container",
    r"cd /somewhere ": "`places` makes the same link",
    r"(?:INPUT=\S+ OUTPUT=\S+ )?sbatch |srun ": "tests/clusters",
    r"torchrun .*example-scripts/": "tests/test_examples.py",
}
_FENCE = re.compile(r"^```(bash|python|text)\n(.*?)^```$", re.S | re.M)


@dataclass(frozen=True)
class Step:
    """The text between two fences, and the line of the document where it starts."""

    kind: str
    body: str
    line: int


def steps(text: str) -> list[Step]:
    """The blocks that are run or compared."""
    return [Step(m[1], m[2], text.count("\n", 0, m.start()) + 2) for m in _FENCE.finditer(text)]


def typed(body: str) -> Iterator[tuple[str, int]]:
    """The lines of a shell block, continuations joined, each with its expected exit code."""
    for line in body.replace("\\\n", " ").splitlines():
        words, _, comment = line.partition(" #")
        code = re.search(r"exit code (\d+)", comment)
        if words.strip() and not words.startswith("#"):
            yield " ".join(words.split()), int(code[1]) if code else 0


def places(folder: Path) -> Path:
    """Make everything in `PLACES`."""
    folder.mkdir()
    run_folder = DATA / "core019_llama_tp2_fully_reshardable"
    (folder / "RUN").symlink_to(run_folder)
    (folder / "MOE").symlink_to(fixture_dir("core019_moe_ep2_fully_reshardable"))
    scaled(run_folder, folder / "LATER", 0.5)
    without_numbers(run_folder, folder / "BAD", "output_layer.weight")
    (folder / "STRANGER").mkdir()
    shutil.copy(DATA / "hostile" / "global_system.metadata", folder / "STRANGER" / ".metadata")
    lora().save(folder / "LORA")
    shutil.copytree(run_folder / "param_to_param_group_map", folder / "DUMP")
    assert run(["convert", str(run_folder), str(folder / "FSDP"), "-q"]) == 0
    directory(folder / "VL", "qwen3_vl")
    hf, peft = str(folder / "HF"), str(folder / "PEFT")
    assert run(["export-hf", str(run_folder), hf, "-q"]) == 0
    assert run(["export-hf", str(folder / "LORA"), peft, "--peft", "--hf-config", hf, "-q"]) == 0
    return folder


class Reader:
    """Runs a document's steps in the current folder; `printed` is the last output."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.printed = ""
        self.module: dict[str, object] = {"__name__": "page"}

    def take(self, step: Step) -> None:
        """Run a block, or compare it with the last output."""
        if step.kind == "text":
            self._compare(step)
            return
        self.capsys.readouterr()
        if step.kind == "python":
            exec(compile(step.body, f"line {step.line}", "exec"), self.module)
        else:
            self._type(step)
        self.printed = "".join(self.capsys.readouterr())

    def _type(self, step: Step) -> None:
        for out in Path().glob("OUT*"):
            shutil.rmtree(out) if out.is_dir() else out.unlink()
        for line, code in typed(step.body):
            if PROGRAM.match(line):
                words = shlex.split(PROGRAM.sub("", line).replace("s3://", "memory://"))
                ended = run(words)
                assert ended == code, (
                    f"line {step.line}: {line} ends with {ended}\n{self.capsys.readouterr().err}"
                )
            elif line.startswith("python -c "):
                exec(shlex.split(line)[2], {})
            else:
                assert any(re.match(known, line) for known in ELSEWHERE), (
                    f"line {step.line}: what runs {line}"
                )

    def _compare(self, step: Step) -> None:
        rest = iter([" ".join(line.split()) for line in self.printed.splitlines()])
        for line in step.body.splitlines():
            expected = " ".join(line.split())
            if expected not in ("", "..."):
                assert any(expected in printed for printed in rest), (
                    f"line {step.line}: not printed, or not here: {line}\n{self.printed}"
                )

    def close(self) -> None:
        """Empty the file system in memory."""
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]
