"""What a path means, and the one paragraph that says why it means nothing.

Folders of other programs are found, or named with what to pass.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_tools.cli.app import run
from ckpt_tools.errors import CkptError, CorruptCheckpointError, UnsupportedCheckpointError, UsageError
from ckpt_tools.formats.locate.detect import iteration_numbers, locate
from tests.commands import oracle
from tests.commands.rewritten import read, write
from tests.conftest import DATA, LLAMA, fixture_dir


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


SAVED = DATA / "core019_llama_tp2_fully_reshardable" / "iter_0000002"


def put(folder: Path) -> Path:
    """A torch_dist checkpoint, and the folders above it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(SAVED, folder)
    return folder


def model(folder: Path) -> Path:
    """A Hugging Face model, as far as finding one goes."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "config.json").write_text("{}")
    return folder


def first_layout(run_: Path, *steps: int) -> Path:
    """verl up to 0.7: everything in `dist_ckpt`, tokenizer and config in `huggingface`."""
    for step in steps:
        role = run_ / f"global_step_{step}" / "actor"
        put(role / "dist_ckpt")
        (role / "huggingface").mkdir()
        (role / "huggingface" / "config.json").write_text("{}")
        (run_ / f"global_step_{step}" / "data.pt").write_bytes(b"x")
    (run_ / "latest_checkpointed_iteration.txt").write_text(str(steps[-1]))
    return run_


def second_layout(role: Path, contents: dict[str, Any]) -> Path:
    """verl 0.9: model, optimizer and the rest apart, and a file that says what is where."""
    for part in ("model", "optimizer", "extra"):
        put(role / part / "dist_ckpt")
    (role / "transformer_config.json").write_text("{}")
    (role / "ckpt_contents.json").write_text(json.dumps({"schema_version": 2, "contents": contents}))
    return role


CONTENTS = {
    "model": {"path": "model/dist_ckpt", "format": "megatron_dist_checkpoint"},
    "optimizer": {"path": "optimizer/dist_ckpt", "format": "megatron_dist_checkpoint"},
    "rng_state": {"path": "extra/dist_ckpt", "format": "megatron_dist_checkpoint"},
}


def test_a_run_of_verl_has_iterations(tmp_path):
    root = first_layout(tmp_path / "run", 5, 10)
    found = locate(str(root))
    assert (found.kind, found.iteration, found.root) == ("torch_dist", 10, str(root))
    assert found.path == f"{root}/global_step_10/actor/dist_ckpt"
    assert locate(str(root), 5).path == f"{root}/global_step_5/actor/dist_ckpt"
    assert iteration_numbers(str(root)) == [5, 10]
    assert [line.partition(":")[0] for line in found.left_out] == ["huggingface", "data.pt"]
    with pytest.raises(UnsupportedCheckpointError, match=r"There are 2: global_step_10, global_step_5"):
        locate(str(root), 7)


@pytest.mark.parametrize("inner", ["", "/actor", "/actor/dist_ckpt"])
def test_any_folder_on_the_way_is_taken(inner, tmp_path):
    root = first_layout(tmp_path / "run", 10)
    found = locate(f"{root}/global_step_10{inner}")
    assert found.path == f"{root}/global_step_10/actor/dist_ckpt"
    assert found.iteration == (None if inner.endswith("dist_ckpt") else 10)
    with pytest.raises(UsageError, match="not a run with an iteration 3"):
        locate(f"{root}/global_step_10{inner}", 3)


def test_several_models_are_listed(tmp_path):
    root = first_layout(tmp_path / "run", 10)
    put(root / "global_step_10" / "critic" / "dist_ckpt")
    with pytest.raises(UsageError, match=r"several models; give one: .*/actor, .*/critic"):
        locate(str(root))
    assert locate(f"{root}/global_step_10/critic").path.endswith("/critic/dist_ckpt")


def test_one_model_twice_is_listed(tmp_path):
    root = first_layout(tmp_path / "run", 10)
    (root / "global_step_10" / "actor" / "huggingface" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match=r"more than once; give one: .*actor/dist_ckpt, .*actor/huggingface"):
        locate(str(root))


@pytest.mark.parametrize("inner", ["", "/global_step_4", "/global_step_4/actor"])
@pytest.mark.parametrize("with_config", [False, True])
def test_a_run_of_fsdp_is_named(inner, with_config, tmp_path):
    role = tmp_path / "run" / "global_step_4" / "actor"
    role.mkdir(parents=True)
    for part in ("model", "optim", "extra_state"):
        (role / f"{part}_world_size_2_rank_0.pt").write_bytes(b"x")
    if with_config:
        (role / "huggingface").mkdir()
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("4")
    with pytest.raises(
        UnsupportedCheckpointError, match=r"verl\.model_merger merge .*/actor --target_dir HF"
    ):
        locate(f"{tmp_path}/run{inner}")
    if with_config:  # and weights, which are the same step's
        (role / "huggingface" / "model.safetensors").write_bytes(b"")
        assert locate(f"{tmp_path}/run{inner}").path == f"{role}/huggingface"


def test_what_verl_wrote_of_it_decides(tmp_path):
    role = second_layout(tmp_path / "global_step_7" / "actor", CONTENTS)
    found = locate(str(role))
    assert (found.path, found.iteration) == (f"{role}/model/dist_ckpt", 7)
    names = [line.partition(":")[0] for line in found.left_out]
    assert names == ["optimizer/dist_ckpt", "extra/dist_ckpt", "transformer_config.json"]
    model(role / "model" / "huggingface")
    assert locate(str(role)).path == f"{role}/model/dist_ckpt"


@pytest.mark.parametrize(
    ("contents", "error", "said"),
    [
        ({"optimizer": CONTENTS["optimizer"]}, UnsupportedCheckpointError, "verl saved no model here; its"),
        (
            {**CONTENTS, "peft_adapters": {"path": "model/adapters"}},
            UsageError,
            "a model and adapters for it",
        ),
        (
            {"model": {"path": "../../elsewhere"}},
            CorruptCheckpointError,
            "'../../elsewhere', which is not a folder",
        ),
        ({"model": {"path": "/etc"}}, CorruptCheckpointError, "'/etc', which is not a folder inside"),
        ({"model": {"path": 3}}, CorruptCheckpointError, "which is not a folder inside"),
        ({"model": "model/dist_ckpt"}, CorruptCheckpointError, "not what verl writes"),
        ([], CorruptCheckpointError, "not what verl writes"),
    ],
)
def test_what_it_says_is_not_trusted(contents, error, said, tmp_path):
    role = second_layout(tmp_path / "actor", contents)
    with pytest.raises(error, match=said):
        locate(str(role))


def test_a_role_that_is_a_link_elsewhere_is_refused(tmp_path):
    put(tmp_path / "elsewhere" / "dist_ckpt")
    (tmp_path / "run" / "global_step_1").mkdir(parents=True)
    (tmp_path / "run" / "global_step_1" / "actor").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpointError, match="outside the checkpoint's folder"):
        locate(str(tmp_path / "run"))


def test_one_iteration_of_both_programs_is_refused(tmp_path):
    root = first_layout(tmp_path / "run", 2)
    put(root / "iter_0000002")
    with pytest.raises(UsageError, match=r"several folders of iteration 2; give one: .*global_step_2"):
        locate(str(root))


def test_commands_take_a_run_of_verl(tmp_path, capsys):
    root = first_layout(tmp_path / "run", 2)
    out = tmp_path / "out"
    assert run(["convert", str(root), str(out), "-q", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["iteration"] == 2
    assert {"huggingface", "data.pt"} <= {line.partition(":")[0] for line in report["dropped"]}
    assert (out / "iter_0000002" / ".metadata").exists()
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert run(["verify", str(root)]) == 0
    assert run(["diff", str(root), str(out)]) == 0
    assert run(["inspect", str(root)]) == 0
    assert "data.pt: where verl's data loader is" in capsys.readouterr().out
    assert run(["convert", str(root), str(tmp_path / "all"), "--iteration", "all", "-q"]) == 0
    assert (tmp_path / "all" / "iter_0000002" / ".metadata").exists()
    assert run(["convert", f"{root}/global_step_2/actor", str(tmp_path / "one"), "-q"]) == 0
    assert (tmp_path / "one" / "iter_0000002" / ".metadata").exists()


def test_what_bridge_keeps_beside_a_checkpoint_is_listed(tmp_path):
    folder = put(tmp_path / "run" / "iter_0000002")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("2")
    for name in ("tokenizer", "modelopt_state", "hf"):
        (folder / name).mkdir()
    for name in ("run_config.yaml", "train_dataloader_dprank000.pt", "train_dataloader_dprank001.pt"):
        (folder / name).write_bytes(b"")
    names = [line.partition(":")[0] for line in locate(str(tmp_path / "run")).left_out]
    assert sorted(names) == [
        "hf", "modelopt_state", "tokenizer", "train_dataloader_dprank000.pt", "train_dataloader_dprank001.pt"
    ]  # fmt: skip
    with pytest.raises(
        UnsupportedCheckpointError, match=r"ModelOpt's state, not a checkpoint; give .*/iter_0000002\."
    ):
        locate(str(folder / "modelopt_state"))


READERS = ("verify", "inspect", "stats", "plan", "preflight", "diff")


@pytest.mark.parametrize("command", [["convert", "-v"], ["strip"], ["slice", "--layers", "0:1"], ["average"],
                                     ["modify-state-dict", "--op", "remove rng_state.*"],
                                     *([name] for name in READERS)])  # fmt: skip
def test_every_command_says_so(command, tmp_path, capsys):
    folder = put(tmp_path / "run" / "iter_0000002")
    (folder / "tokenizer").mkdir()
    for name in ("run_config.yaml", "train_state.pt", "layer_wise_optimizer_0.pt"):
        (folder / name).write_bytes(b"{}")
    name, *options = command
    sources = [str(folder)] * (2 if name in ("average", "diff") else 1)
    output = [] if name in READERS else [str(tmp_path / "out")]
    assert run([name, *sources, *output, *options]) == (name == "preflight")
    said, told = capsys.readouterr()
    for line in ("the tokenizer's files", "states of a layer-wise optimizer"):
        assert f"not read: {line}" in re.sub(r"(?<=not read: )\S+: ", "", said + told)
    if name == "convert":
        assert "run_config.yaml, train_state.pt: Megatron-Bridge's, which main does not read" in said


def test_a_models_own_files_are_not_listed(tmp_path):
    assert locate(str(model(tmp_path / "hf"))).left_out == ()


@pytest.mark.parametrize("place", ["", "3", "session/3"])
@pytest.mark.parametrize("name", ["iter_0000100_3_local.pt", "iter_0000100_3_local.dirty.pt"])
def test_a_local_checkpoint_is_named(place, name, tmp_path):
    folder = tmp_path / place
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"x")
    for path in (tmp_path, folder, folder / name):
        with pytest.raises(
            UnsupportedCheckpointError, match=r"is a local checkpoint of NVIDIA Resiliency .*--save"
        ):
            locate(str(path))


def test_the_schedule_is_found_under_verls_name(tmp_path):
    """`lr_scheduler`, which Megatron takes as well (training/checkpointing.py)."""
    parts = read(SAVED)
    parts.common["lr_scheduler"] = parts.common.pop("opt_param_scheduler")
    source = write(tmp_path / "global_step_3" / "actor" / "dist_ckpt", parts)
    assert run(["convert", str(source), str(tmp_path / "out"), "-q"]) == 0
    assert oracle.item(tmp_path / "out", "opt_param_scheduler.max_lr") == 0.01


def put_dcp(folder: Path) -> Path:
    """A checkpoint whose metadata names a weight."""
    dcp.save(
        {"model_state": {"model": {"model.norm.weight": torch.ones(3)}}}, checkpoint_id=folder, no_dist=True
    )
    return folder


def test_slimes_model_is_in_a_folder_of_the_iteration(tmp_path, capsys):
    root = tmp_path / "run"
    for number in (2, 3):
        put_dcp(root / f"iter_{number:07d}" / "model")
        put_dcp(root / f"iter_{number:07d}" / "optimizer")
        (root / f"iter_{number:07d}" / "rng.pt").write_bytes(b"")
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    model = f"{root}/iter_0000003/model"
    for path in (root, root / "iter_0000003"):
        found = locate(str(path))
        assert (found.kind, found.path, found.iteration) == ("dcp", model, 3)
        assert [line.partition(":")[0] for line in found.left_out] == ["optimizer", "rng.pt"]
    assert locate(str(root), 2).path == f"{root}/iter_0000002/model"
    assert run(["ls", str(root), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["latest"], [row["latest"] for row in listed["iterations"]]) == (
        "iter_0000003",
        [False, True],
    )


def test_of_torchtitans_steps_the_latest_whole_one_is_taken_and_named(tmp_path):
    root = tmp_path / "checkpoint"
    put_dcp(root / "step-5")
    assert (locate(str(root)).path, locate(str(root)).left_out) == (f"{root}/step-5", ())
    put_dcp(root / "step-10")
    (root / "step-20").mkdir()  # its save did not end
    found = locate(str(root))
    assert (found.path, found.iteration, found.root) == (f"{root}/step-10", 10, None)
    assert found.left_out == (
        f"{root}: step-10 is read, the latest whole one of 3 steps; --iteration chooses another",
    )
    assert (locate(str(root), 5).iteration, locate(str(root), 5).left_out) == (5, ())
    assert locate(f"{root}/step-5", 5).path == f"{root}/step-5"
    assert iteration_numbers(str(root)) == [5, 10, 20]
    for path, wanted, said in (
        (root, 7, "There are 3: step-10, step-20, step-5"),
        (root / "step-5", 7, "not a run"),
    ):
        with pytest.raises((UnsupportedCheckpointError, UsageError), match=said):
            locate(str(path), wanted)


@pytest.mark.parametrize("inner", ["", "/global_step_4", "/global_step_4/actor"])
def test_an_import_of_its_pickles_says_how_to_make_a_model_of_them(inner, tmp_path, capsys):
    role = tmp_path / "run" / "global_step_4" / "actor"
    role.mkdir(parents=True)
    (role / "model_world_size_1_rank_0.pt").write_bytes(b"x")
    assert run(["import-hf", f"{tmp_path}/run{inner}", str(tmp_path / "out")]) == 3
    assert "python -m verl.model_merger merge --backend fsdp" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("form", ["", "layers", "no zero", "trainer"])
@pytest.mark.parametrize("inner", ["", "/global_step100", None])
@pytest.mark.parametrize("command", ["inspect", "verify", "ls", "import-hf"])
def test_deepspeed_is_named_with_its_own_way_out(form, inner, command, user_cases, tmp_path, capsys):
    root = tmp_path / "run"
    shutil.copytree(user_cases / "deepspeed_folders" / "run", root)
    step = root / "global_step100"
    match form:
        case "layers":  # of its pipeline
            for path in step.iterdir():
                path.unlink()
            (step / "layer_00-model_00-model_states.pt").touch()
        case "no zero":
            (root / "zero_to_fp32.py").unlink()
        case "trainer":
            (root / "config.json").write_text("{}")
    given = str(tmp_path) if inner is None else f"{root}{inner}"
    assert run([command, given, *[str(tmp_path / "out")] * (command == "import-hf")]) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert f"zero_to_fp32 {root} OUT --safe_serialization -t global_step100" in said
    assert f"ds_to_universal --input_folder {step} " in said


def test_a_model_beside_deepspeeds_files_is_read(user_cases, tmp_path):
    shutil.copytree(user_cases / "deepspeed_folders" / "run", tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").touch()
    assert locate(str(tmp_path / "run")).kind == "safetensors"


def test_a_run_of_nemo_rl(user_cases, capsys):
    root = user_cases / "nemo_folders" / "rl"
    model = "policy/weights/iter_0000000"
    for inner in ("", "/step_20", "/step_20/policy", "/step_20/policy/weights"):
        assert locate(f"{root}{inner}").path == f"{root}/step_20/{model}"
    assert locate(str(root), 10).path == f"{root}/step_10/{model}"
    unfinished = "tmp_step_30: NeMo RL is still writing it, or its save did not end"
    assert locate(str(root)).left_out == (
        f"{root}: step_20 is read, the latest whole one of 2 steps; --iteration chooses another",
        f"{root}/{unfinished}",
    )
    with pytest.raises(UnsupportedCheckpointError, match=unfinished):
        locate(f"{root}/tmp_step_30")
    assert run(["ls", str(root), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["iterations"]
    assert [(row["name"], row["inside"], row["state"], row["latest"]) for row in rows] == [
        ("step_10", model, "complete", False),
        ("step_20", model, "complete", True),
        ("tmp_step_30", "", "incomplete", False),
    ]
    for command in (["verify"], ["inspect"]):
        assert run([*command, str(root)]) == 0
    assert "not a whole checkpoint" not in capsys.readouterr().out


def test_other_forms_of_nemo_rl(tmp_path):
    (tmp_path / "tmp_step_1").mkdir()
    with pytest.raises(
        UnsupportedCheckpointError, match=r"holds no whole step.*tmp_step_1: NeMo RL is still"
    ):
        locate(str(tmp_path))
    for place in ("step_3/policy/weights", "step_4/policy/weights/model"):
        put_dcp(tmp_path / place)
        found = locate(str(tmp_path))
        assert (found.path, found.iteration) == (str(tmp_path / place), int(place[5]))
    (tmp_path / "step_4" / "policy" / "optimizer").mkdir()
    assert [line.partition(":")[0] for line in locate(str(tmp_path / "step_4")).left_out] == ["optimizer"]
    put_dcp(tmp_path / "step_4" / "value" / "weights")
    with pytest.raises(UsageError, match=r"several models; give one: .*/policy, .*/value"):
        locate(str(tmp_path))
