"""An installation without torch: everything runs, and what cannot says how to get torch."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.errors import UsageError
from ckpt_tools.torch_extra import require_torch
from tests.conftest import FSDP, REPO, RUN
from tests.ports import free_port

ABSENT = 'raise ModuleNotFoundError("No module named \'torch\'", name="torch")\n'
WAY_OUT = "pip install 'ckpt-tools[torch]'"


@pytest.fixture
def no_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch cannot be imported, nor anything that imports it."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "torch.py").write_text(ABSENT)
    path = os.pathsep.join(filter(None, [str(tmp_path / "path"), str(REPO), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def _run(environ: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)], env=environ, capture_output=True, text=True, check=False
    )


def test_commands_need_none(no_torch, tmp_path):
    out = tmp_path / "out"
    commands = [
        ["convert", RUN, out / "fsdp", "--workers", "2"],
        ["convert", out / "fsdp", out / "back", "--to", "torch_dist"],
        ["verify", out / "fsdp", "--content"],
        ["diff", RUN, out / "fsdp"],
        ["export-hf", RUN, out / "hf"],
        ["import-hf", out / "hf", out / "imported", "--to", "fsdp_dtensor", "--no-fresh-optimizer"],
        ["average", FSDP, FSDP, out / "mean"],
        ["slice", RUN, out / "part", "--layers", "0:1"],
        ["strip", RUN, out / "weights"],
        ["print-tensor", RUN, "decoder.final_layernorm.weight", "--stats"],
        ["plan", RUN, "--gpus", "4", "--svg", tmp_path / "plan.svg"],
        ["preflight", FSDP],
    ]
    program = "import sys; from ckpt_tools.cli.app import run\n"
    program += "\n".join(f"print(run({list(map(str, words))!r}), file=sys.stderr)" for words in commands)
    done = _run(no_torch, "-W", "error", "-c", program)
    assert [line for line in done.stderr.split() if line.isdigit()] == ["0"] * len(commands), done.stderr


def test_the_public_names_are_there_or_ask_for_it(no_torch):
    """A class of torch's cannot be made without it; everything else is there."""
    program = (
        "import ckpt_tools\nfor name in ckpt_tools.__all__:\n    try: getattr(ckpt_tools, name)\n"
        "    except ckpt_tools.CkptError as error: print(name, error)"
    )
    done = _run(no_torch, "-c", program)
    assert done.stderr == ""
    asked = done.stdout.splitlines()
    assert len(asked) <= 1
    assert all(WAY_OUT in line for line in asked)


def test_the_quickstart_needs_none(no_torch, tmp_path):
    script = REPO / "example-scripts" / "quickstart.sh"
    installs = [line for line in script.read_text().splitlines() if "pip install" in line]
    assert len(installs) == 1 and "torch" not in installs[0]
    done = subprocess.run(
        ["bash", str(script), str(tmp_path / "out")],
        env=no_torch | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "is ready for --load" in done.stdout


def test_several_ranks_need_none(no_torch, tmp_path):
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [sys.executable, "-m", "ckpt_tools", "convert", str(RUN), str(tmp_path / "out"), "-q"]
    ranks = [subprocess.Popen(words, env=no_torch | job | {"RANK": str(rank)}) for rank in range(2)]
    assert [process.wait(100) for process in ranks] == [0, 0]


def test_load_dtensors_asks_for_it(no_torch):
    program = (
        "import ckpt_tools\ntry: ckpt_tools.load_dtensors('run', None)\n"
        "except ckpt_tools.CkptError as error: print(error)"
    )
    said = _run(no_torch, "-c", program).stdout
    assert said.startswith("load_dtensors needs torch, which is not installed: ")
    assert WAY_OUT in said


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "which is not installed"),
        (ModuleNotFoundError("No module named 'sympy'", name="sympy"), "No module named 'sympy'"),
        (ImportError("libcudart.so.12: cannot open"), "libcudart.so.12: cannot open"),
    ],
)
def test_absent_is_told_from_broken(error, part, monkeypatch):
    import builtins

    found = builtins.__import__

    def fail(name: str, *rest: Any) -> Any:
        if name == "torch":
            raise error
        return found(name, *rest)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(UsageError, match=r"x needs torch, .*ckpt-tools\[torch\]") as caught:
        require_torch("x")
    assert part in str(caught.value)


def test_torch_is_imported_only_behind_the_question():
    """A module that imports torch at run time calls `require_torch`, or is called by one that did."""
    importers = {
        str(path.relative_to(REPO / "ckpt_tools"))
        for path in (REPO / "ckpt_tools").rglob("*.py")
        for line in path.read_text().splitlines()
        if line.lstrip().startswith(("import torch", "from torch"))
    }
    assert importers >= {"torch_extra.py", "commands/look/load_dtensors.py"}
    for name in importers:
        assert "require_torch(" in (REPO / "ckpt_tools" / name).read_text(), name
