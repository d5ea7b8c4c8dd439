"""Bridge's files beside the checkpoint, and what the other side asks of a source that lacks it."""

import io
import re
import shutil

import pytest
import torch

from ckpt_tools import (
    ConvertOptions,
    ImportOptions,
    TargetOptions,
    ToTorchDistOptions,
    convert_to_fsdp_dtensor,
    convert_to_torch_dist,
    export_hf,
    import_hf,
)
from ckpt_tools.cli.app import run
from ckpt_tools.formats.locate.detect import locate
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions
from tests.commands import oracle
from tests.conftest import DATA, fixture_dir

WEIGHTS = ToTorchDistOptions(target=TorchDistOptions(weights_only=True))


def bridge_root(tmp_path):
    """The Bridge fixture as a run's root."""
    case = fixture_dir("bridge_dense_fr_tp2_dp2")
    root = tmp_path / "run"
    shutil.copytree(case / "checkpoint", root / "iter_0000002")
    for name in ("latest_train_state.pt", "latest_checkpointed_iteration.txt"):
        shutil.copy(case / name, root)
    return root


def convert(source, output, **options):
    return convert_to_fsdp_dtensor(source, output, ConvertOptions(target=TargetOptions(**options)))


def test_a_bridge_run_stays_one(tmp_path):
    root = bridge_root(tmp_path)
    report = convert(root, tmp_path / "out")
    assert report.loader == "bridge"
    source, out = root / "iter_0000002", tmp_path / "out" / "iter_0000002"
    assert (out / "train_state.pt").read_bytes() == (source / "train_state.pt").read_bytes()
    assert (tmp_path / "out" / "latest_train_state.pt").read_bytes() == (
        source / "train_state.pt"
    ).read_bytes()
    before, after = ((d / "run_config.yaml").read_text().splitlines() for d in (source, out))
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert changed == [("  ckpt_format: torch_dist", "  ckpt_format: fsdp_dtensor")]
    assert "args" not in oracle.metadata(out).state_dict_metadata


def test_a_bridge_source_gets_the_args_megatron_lm_asks_for(tmp_path):
    report = convert(bridge_root(tmp_path), tmp_path / "out", dialect="main")
    args = vars(oracle.item(tmp_path / "out" / "iter_0000002", "args"))
    assert {
        "num_layers": 3,
        "hidden_size": 24,
        "num_attention_heads": 4,
        "iteration": 2,
    }.items() <= args.items()
    assert any(note.startswith("args: the source has none") for note in report.notes)
    assert not (tmp_path / "out" / "latest_train_state.pt").exists()


@pytest.mark.parametrize("case", ["bridge_hfimport", "bridge_dense_fr_tp2_dp2"])
def test_a_bridge_run_for_megatron_lm_still_tells_what_it_is(case, tmp_path):
    """run_config.yaml stays behind: the args alone say heads, activation, windows and the rest, to every command."""
    folder = fixture_dir(case) / "checkpoint"
    report = convert(folder, tmp_path / "out", dialect="main", weights_only=True)
    (note,) = (note for note in report.notes if "more settings of its run_config.yaml" in note)
    held = vars(oracle.item(tmp_path / "out", "args"))
    ((made, others),) = re.findall(r"made up with (.*) and (\d+) more settings ", note)
    assert len(made.split(", ")) + int(others) == len(held)
    assert run(["verify", str(tmp_path / "out"), "-q"]) == 0
    direct, later = (
        export_hf(one, tmp_path / name) for one, name in ((folder, "a"), (tmp_path / "out", "b"))
    )
    assert direct.architecture == later.architecture
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    convert_to_torch_dist(tmp_path / "out", tmp_path / "back", WEIGHTS)
    export_hf(tmp_path / "back", tmp_path / "c")
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == (
        tmp_path / "a" / "model.safetensors"
    ).read_bytes()


def test_a_megatron_lm_source_gets_the_progress_bridge_asks_for(tmp_path):
    convert(DATA / "core019_llama_tp2_fully_reshardable", tmp_path / "out", dialect="bridge")
    state = torch.load(tmp_path / "out" / "iter_0000002" / "train_state.pt", weights_only=True)
    native = torch.load(fixture_dir("bridge_dense_fr_tp2_dp2") / "latest_train_state.pt", weights_only=True)
    assert {k: (v.dtype, v.shape) for k, v in state.items()} == {
        k: (v.dtype, v.shape) for k, v in native.items()
    }
    args = vars(oracle.item(tmp_path / "out" / "iter_0000002", "args"))
    assert state["step"] == 2
    assert state["consumed_train_samples"] == args["consumed_train_samples"] > 0


def test_an_import_for_bridge_has_the_progress_that_bridge_asks_for(tmp_path):
    """Without a train_state.pt, and its copy in the root, Bridge does not find the checkpoint."""
    export_hf(DATA / "core019_llama_tp2_fully_reshardable", tmp_path / "hf")
    options = ImportOptions(to="fsdp_dtensor", fsdp=TargetOptions(dialect="bridge"), iteration=7)
    report = import_hf(tmp_path / "hf", tmp_path / "run", options)
    assert (report.loader, report.iteration, report.architecture) == ("bridge", 7, "LlamaForCausalLM")
    state = (tmp_path / "run" / "iter_0000007" / "train_state.pt").read_bytes()
    assert (tmp_path / "run" / "latest_train_state.pt").read_bytes() == state
    assert int(torch.load(io.BytesIO(state))["step"]) == 7
    assert locate(str(tmp_path / "run")).iteration == 7
