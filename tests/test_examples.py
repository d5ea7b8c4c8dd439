"""The library's examples: each runs and is short, and together they show the whole API."""

import ast
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import ckpt_tools
from tests.conftest import FSDP, REPO, RUN, fixture_dir
from tests.megatron.adapter_checkpoints import lora

SCRIPTS = sorted((REPO / "example-scripts").glob("*.py"))
MOE = fixture_dir("core019_moe_ep2_fully_reshardable")

ADAPTER = "an adapter of RUN"

# script -> arguments (numbers: outputs), exit code, what it must say
CASES: dict[str, tuple[list[object], int, str]] = {
    "library_inspect": ([RUN], 0, "32,928 parameters"),
    "library_plan": ([RUN], 0, "rank 3: "),
    "library_convert": ([RUN, 1, 2], 0, "back in "),
    "library_verify": ([RUN], 0, "checksums"),
    "library_diff": ([RUN, FSDP], 1, "compared by parameters: different"),
    "library_huggingface": ([RUN, 1, 2], 0, "LlamaForCausalLM: 21 tensors"),
    "library_load_dtensors": ([RUN], 0, "rank 1 holds "),
    "library_storage_reader": ([RUN, 1], 0, "(128, 32) is the same"),
    "library_preflight": ([FSDP, "--", "--use-torch-fsdp2"], 1, "error: use_torch_fsdp2 is on"),
    "library_edit": ([RUN, 1, 2], 0, "bfloat16 (32,)"),
    "library_average": ([1, 2, 3, RUN, RUN], 0, "shares of the mean: 0.90, 0.10"),
    "library_merge_adapter": ([RUN, ADAPTER, 1, 2, 3], 0, "LlamaForCausalLM: 28 matrices"),
    "library_repair": ([FSDP, 1], 0, "repair knows no fault of its keys"),
    "library_look": ([RUN, RUN, FSDP], 0, "no NaN in 60 tensors"),
    "library_group_map": ([MOE], 0, "model.module.decoder.layers.0."),
}


def in_this_process(script: Path, words: list[str]) -> object:
    """What the script leaves with."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(sys, "argv", [str(script), *words])
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as stop:
            return stop.code
    return 0


@pytest.mark.parametrize("name", CASES)
def test_example(name, tmp_path, capfd):
    arguments, code, said = CASES[name]
    found: object
    arguments = [lora().save(tmp_path / "lora") if word is ADAPTER else word for word in arguments]
    words = [str(tmp_path / str(word)) if isinstance(word, int) else str(word) for word in arguments]
    script = REPO / "example-scripts" / f"{name}.py"
    if name == "library_load_dtensors":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
        found = subprocess.run([*launcher, script, *words], env=env, timeout=120, check=False).returncode
    else:
        found = in_this_process(script, words)
    out, err = capfd.readouterr()
    assert (found or 0) == code, err
    assert said in out and "Traceback" not in err


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_without_arguments_an_example_says_how_it_is_used(script):
    usage = str(in_this_process(script, []))
    assert f"python example-scripts/{script.name} " in usage or "torchrun" in usage


def test_every_example_is_run_and_short():
    assert {script.stem for script in SCRIPTS} == CASES.keys()
    for script in SCRIPTS:
        text = script.read_text()
        assert len(text.splitlines()) <= 30, script.name
        usage = ast.get_docstring(ast.parse(text)) or ""
        assert f"example-scripts/{script.name}" in usage
        assert all((REPO / path).is_dir() for path in re.findall(r"tests/data/\S+", usage)), script.name


def test_the_examples_show_the_whole_public_api():
    shown = {
        alias.name
        for script in SCRIPTS
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "ckpt_tools"
        for alias in node.names
    } | {
        node.attr
        for script in SCRIPTS
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "ckpt_tools"
    }
    assert shown == set(ckpt_tools.__all__) - {"__version__"}


def test_type_checkers_see_the_public_names():
    """What `__getattr__` finds while running, a type checker reads from the imports it alone executes."""
    tree = ast.parse(Path(ckpt_tools.__file__).read_text())
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ckpt_tools.")
        for alias in node.names
    }
    assert seen == {name: f"ckpt_tools.{module}" for name, module in ckpt_tools._PUBLIC.items()}
