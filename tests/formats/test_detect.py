"""What a path means, and the one paragraph that says why it means nothing."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from ckpt_tools.errors import CkptError, CorruptCheckpointError, UnsupportedCheckpointError, UsageError
from ckpt_tools.formats.locate.detect import locate
from tests.conftest import fixture_dir

LLAMA = "core019_llama_tp2_fully_reshardable"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A writable copy of a run's root with one iteration."""
    shutil.copytree(fixture_dir(LLAMA), tmp_path / "run", copy_function=shutil.copyfile)
    for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        path.chmod(0o755)
    return tmp_path / "run"


def test_root_follows_its_tracker(root):
    found = locate(str(root))
    assert (found.kind, found.path, found.root, found.iteration) == (
        "torch_dist",
        f"{root}/iter_0000002",
        str(root),
        2,
    )
    assert found.tracker == "latest_checkpointed_iteration.txt"
    assert (found.has_metadata_json, found.has_common_pt, found.has_run_config) == (True, False, False)


def test_iteration_directory_knows_its_root(root):
    assert locate(f"{root}/iter_0000002/") == locate(f"{root}/iter_0000002/", iteration=2)
    found = locate(str(root / "iter_0000002"))
    assert (found.root, found.iteration) == (str(root), 2)


def test_release(root):
    (root / "iter_0000002").rename(root / "release")
    (root / "latest_checkpointed_iteration.txt").write_text("release\n")
    found = locate(str(root))
    assert (found.path, found.iteration, found.is_release) == (f"{root}/release", None, True)


def test_bridge_tracker(root):
    (root / "latest_checkpointed_iteration.txt").unlink()
    torch.save({"step": torch.tensor(2, dtype=torch.int32)}, root / "latest_train_state.pt")
    found = locate(str(root))
    assert (found.iteration, found.tracker) == (2, "latest_train_state.pt")
    torch.save({"step": "two"}, root / "latest_train_state.pt")
    with pytest.raises(CorruptCheckpointError, match="names no step"):
        locate(str(root))


def test_several_iterations(root):
    shutil.copytree(root / "iter_0000002", root / "iter_0000010")
    assert locate(str(root)).iteration == 2
    assert locate(str(root), iteration=10).iteration == 10
    with pytest.raises(
        UnsupportedCheckpointError, match=r"iter_0000007 is meant.*There are 2: iter_0000002, iter_0000010"
    ):
        locate(str(root), iteration=7)
    (root / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(UsageError, match=r"no tracker file. Choose with --iteration. There are 2"):
        locate(str(root))
    shutil.rmtree(root / "iter_0000010")
    assert locate(str(root)).iteration == 2


def test_kinds():
    native = fixture_dir("core019_llama_tp2_native_fsdp_dtensor")
    assert locate(str(native)).kind == "fsdp_dtensor"
    groups = locate(str(fixture_dir(LLAMA) / "param_to_param_group_map"))
    assert (groups.kind, groups.root, groups.iteration) == ("dcp", None, None)
    bridge = locate(str(fixture_dir("bridge_dense_fr_tp2_dp2") / "checkpoint"))
    assert (bridge.kind, bridge.has_run_config, bridge.has_train_state) == ("torch_dist", True, True)


def test_weights_folder_of_nemo(root, tmp_path):
    (tmp_path / "nemo").mkdir()
    (root / "iter_0000002").rename(tmp_path / "nemo" / "weights")
    assert locate(str(tmp_path / "nemo")).path == f"{tmp_path}/nemo/weights"


def test_safetensors(tmp_path):
    (tmp_path / "model.safetensors").touch()
    assert locate(str(tmp_path)).kind == "safetensors"


def test_iteration_directory_with_another_iteration(root):
    with pytest.raises(UsageError, match="is one checkpoint, not a run with an iteration 3"):
        locate(str(root / "iter_0000002"), iteration=3)


def damage_nothing_there(root: Path) -> str:
    return str(root.parent / "rum")


def damage_no_parent(root: Path) -> str:
    return str(root / "x" / "y")


def damage_link(root: Path) -> str:
    (root.parent / "link").symlink_to("nowhere")
    return str(root.parent / "link")


def damage_link_above(root: Path) -> str:
    return f"{damage_link(root)}/iter_0000002"


def damage_file(root: Path) -> str:
    return str(root / "iter_0000002" / ".metadata")


def damage_empty(root: Path) -> str:
    (root / "new").mkdir()
    return str(root / "new")


def damage_other_folder(root: Path) -> str:
    return str(root.parent)


def damage_legacy(root: Path) -> str:
    shutil.rmtree(root / "iter_0000002")
    (root / "iter_0000002" / "mp_rank_00").mkdir(parents=True)
    return str(root)


def damage_zarr(root: Path) -> str:
    (root / "iter_0000002" / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    return str(root)


def damage_backend(root: Path) -> str:
    (root / "iter_0000002" / "metadata.json").write_text('{"sharded_backend": "torch_disu"}')
    return str(root)


def damage_json(root: Path) -> str:
    (root / "iter_0000002" / "metadata.json").write_text("{")
    return str(root)


def damage_json_list(root: Path) -> str:
    (root / "iter_0000002" / "metadata.json").write_text("[1]")
    return str(root)


def damage_json_null(root: Path) -> str:
    (root / "iter_0000002" / "metadata.json").write_text("null")
    return str(root)


def damage_json_empty(root: Path) -> str:
    (root / "iter_0000002" / "metadata.json").write_text("{}")
    return str(root)


def damage_interrupted(root: Path) -> str:
    (root / "iter_0000002" / ".metadata").unlink()
    return str(root)


def damage_tracker(root: Path) -> str:
    (root / "latest_checkpointed_iteration.txt").write_text("../../etc")
    return str(root)


def damage_tracker_target(root: Path) -> str:
    (root / "latest_checkpointed_iteration.txt").write_text("30")
    return str(root)


def damage_single_file(root: Path) -> str:
    (root.parent / "apart").mkdir()
    (root.parent / "apart/STRANGER.pt").touch()
    return str(root.parent / "apart/STRANGER.pt")


@pytest.mark.parametrize(
    ("damage", "code", "message"),
    [
        (damage_nothing_there, 3, "rum does not exist. Did you mean {parent}/run?"),
        (damage_no_parent, 3, "y does not exist. Nor does {root}/x."),
        (
            damage_link,
            3,
            "{parent}/link is a link to nowhere, where nothing is. Mend it, or give another folder.",
        ),
        (damage_link_above, 3, "{parent}/link is a link to nowhere, where nothing is."),
        (damage_file, 3, "is a file; give the checkpoint's folder ({root}/iter_0000002)"),
        (damage_single_file, 3, "STRANGER.pt is a file; single files are not read"),
        (damage_empty, 3, "new is empty; there is no checkpoint in it"),
        (
            damage_other_folder,
            3,
            "holds no checkpoint: neither .metadata nor latest_checkpointed_iteration.txt",
        ),
        (damage_legacy, 3, "is a legacy 'torch' checkpoint (mp_rank_* folders)"),
        (damage_zarr, 3, "is a 'zarr' checkpoint"),
        (
            damage_backend,
            4,
            "metadata.json names the sharded_backend 'torch_disu'; Megatron writes 'torch_dist'",
        ),
        (damage_json, 4, "metadata.json does not name a sharded_backend"),
        (damage_json_list, 4, "a sharded_backend (it holds a list, not fields)"),
        (damage_json_null, 4, "a sharded_backend (it holds None, not fields)"),
        (damage_json_empty, 4, "a sharded_backend (no such field)"),
        (damage_interrupted, 3, "the save was interrupted before it was complete"),
        (damage_tracker, 4, "holds '../../etc', not an iteration or 'release'"),
        (
            damage_tracker_target,
            3,
            "iter_0000030 is meant, but there is no such folder. There are 1: iter_0000002.",
        ),
    ],
)
def test_refusals(root, damage, code, message):
    path = damage(root)
    with pytest.raises(CkptError) as found:
        locate(path)
    assert found.value.exit_code == code
    assert message.format(parent=root.parent, root=root) in str(found.value)
    assert "\n" not in str(found.value)


def run_root(folder: Path, *numbers: int) -> Path:
    for number in numbers:
        (folder / f"iter_{number:07d}").mkdir(parents=True)
        (folder / f"iter_{number:07d}" / ".metadata").write_bytes(b"decoder.layers.")
        (folder / f"iter_{number:07d}" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (folder / "latest_checkpointed_iteration.txt").write_text(str(numbers[-1]))
    return folder


def test_weights_beside_the_iterations_of_a_run_do_not_make_it_a_model(tmp_path):
    root = run_root(tmp_path / "run", 1, 2)
    (root / "truth.safetensors").touch()
    found = locate(str(root))
    assert (found.kind, found.iteration) == ("torch_dist", 2)
    assert "truth.safetensors: next to the run's iterations" in found.left_out
    assert locate(str(root), 1).iteration == 1


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model.safetensors"])
def test_a_model_beside_the_iterations_of_a_run_stays_one(name, tmp_path):
    """And says what else is there; an iteration that is asked for is the run's."""
    root = run_root(tmp_path / "run", 1, 2)
    for one in ("model-00001-of-00001.safetensors", name):
        (root / one).touch()
    found = locate(str(root))
    assert (found.kind, found.path) == ("safetensors", str(root))
    assert found.left_out == (
        f"{root} holds the model twice: these files, and a run; --iteration chooses one of its iterations",
    )
    assert locate(str(root), of_run=True).path == f"{root}/iter_0000002"
    asked = locate(str(root), 1)
    assert (asked.kind, asked.iteration) == ("torch_dist", 1)
    assert any("model-00001-of-00001.safetensors" in line for line in asked.left_out)


@pytest.mark.parametrize("inner", ["checkpoint", "run"])
def test_weights_beside_a_checkpoints_folder_name_the_folder(inner, tmp_path):
    if inner == "run":
        run_root(tmp_path / "run", 1)
    else:
        (tmp_path / "checkpoint").mkdir()
        (tmp_path / "checkpoint" / ".metadata").touch()
    (tmp_path / "truth.safetensors").touch()
    with pytest.raises(
        UnsupportedCheckpointError, match=rf"truth.safetensors.*and 1 checkpoint: {tmp_path / inner}\. "
    ):
        locate(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert locate(str(tmp_path)).kind == "safetensors"


def test_parts_of_ranks_are_a_model_wherever_they_lie(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / ".metadata").touch()
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").touch()
    assert locate(str(tmp_path)).kind == "safetensors"


@pytest.mark.parametrize(
    "inside",
    ["checkpoint-5/model.safetensors", "checkpoint-5/model.safetensors.index.json", "step=5/weights/.metadata",
     "actor/.metadata", "run/latest_checkpointed_iteration.txt"],
)  # fmt: skip
def test_a_folder_above_a_checkpoint_names_it(inside, tmp_path):
    file = tmp_path / inside
    file.parent.mkdir(parents=True)
    file.touch()
    with pytest.raises(UnsupportedCheckpointError, match=re.escape(f"Did you mean {file.parent}?")):
        locate(str(tmp_path))
