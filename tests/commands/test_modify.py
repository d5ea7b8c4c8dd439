"""`modify-state-dict` against stock `dcp.load`: kept values bit for bit, other keys gone, nothing invented."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp

from ckpt_tools import diff_checkpoints, modify_state_dict
from ckpt_tools.commands.edit.modify import new_names, new_path, parse_operation
from ckpt_tools.errors import MappingError, UsageError
from tests.commands import oracle
from tests.conftest import fixture_dir
from tests.folders import is_sound

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

STATE = {
    "kept": torch.full((3, 5), 7.0, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty((0, 4)),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "big": torch.arange(300_000, dtype=torch.int64),
    "gone": torch.ones(4),
    "value": {"a": 1, "b": [1, 2]},
    "number": 3,
}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    dcp.save(STATE, checkpoint_id=folder, no_dist=True)
    return folder


def loaded(folder):
    """Everything in a checkpoint, by torch alone."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    state = {
        key: torch.full(tuple(meta.size), 99, dtype=meta.properties.dtype) if hasattr(meta, "size") else None
        for key, meta in metadata.state_dict_metadata.items()
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        is_tensor = isinstance(value, torch.Tensor)
        assert oracle.same_bytes(found[key], value) if is_tensor else found[key] == value, key


def test_removing_keeps_every_other_value(source, tmp_path):
    before = loaded(source)
    edited = modify_state_dict(source, tmp_path / "out", ["remove ^gone$", "remove ^value"])
    assert set(edited.edits.removed) == {"gone", "value.a", "value.b"}
    assert_same(loaded(tmp_path / "out"), {k: v for k, v in before.items() if k not in edited.edits.removed})


def test_a_rename_alone_keeps_everything(source, tmp_path):
    before = loaded(source)
    edited = modify_state_dict(source, tmp_path / "out", [r"rename ^(k)ept$ \1.new"])
    assert edited.edits.renamed == {"kept": "k.new"}
    assert_same(loaded(tmp_path / "out"), {"k.new" if k == "kept" else k: v for k, v in before.items()})


def test_renames_over_a_removal(source, tmp_path):
    operations = ["rename ^(.*)$ model.\\1", "rename kept never", "remove scalar", "rename g x"]
    with pytest.raises(UsageError, match="rename kept never"):
        modify_state_dict(source, tmp_path / "out", operations)
    modify_state_dict(source, tmp_path / "out", operations[:1] + operations[2:3])
    expected = {f"model.{k}": v for k, v in loaded(source).items() if k != "scalar"}
    assert_same(loaded(tmp_path / "out"), expected)


def test_chunks_and_files_stay_as_they_are(tmp_path):
    root = fixture_dir("core019_llama_tp2_native_fsdp_dtensor")
    modify_state_dict(root, tmp_path / "out", ["remove rng_state"])
    before, after = (
        pickle.loads((folder / "iter_0000002" / ".metadata").read_bytes())
        for folder in (root, tmp_path / "out")
    )
    kept = {k: v for k, v in before.state_dict_metadata.items() if "rng_state" not in k}
    assert after.state_dict_metadata.keys() == kept.keys()
    for key, meta in kept.items():
        if hasattr(meta, "chunks"):
            boxes = [sorted((tuple(c.offsets), tuple(c.sizes)) for c in m.chunks)
                     for m in (meta, after.state_dict_metadata[key])]  # fmt: skip
            assert boxes[0] == boxes[1], key
    assert after.planner_data == {k: before.planner_data[k] for k in kept}
    tensors = [i for i in after.storage_data if hasattr(kept[i.fqn], "chunks")]
    assert {i.fqn: after.storage_data[i].relative_path for i in tensors if not i.offset} == {
        i.fqn: before.storage_data[i].relative_path
        for i in before.storage_data
        if i.fqn in kept and hasattr(kept[i.fqn], "chunks") and not i.offset
    }


@pytest.mark.parametrize(
    "name", ["core019_moe_ep2_fully_reshardable", "core016_llama_tp2_dp_reshardable", "v015_dense_ms_tp2_dp2"]
)
def test_a_torch_dist_checkpoint_stays_one(name, tmp_path):
    root = fixture_dir(name)
    root = root / "checkpoint" if (root / "checkpoint").exists() else root
    out = tmp_path / "out"
    modify_state_dict(root, out, ["remove rerun_state_machine_state|_extra_state"])
    assert is_sound(out)
    report = diff_checkpoints(root, out)
    assert all(t.kind == "equal" for t in report.tensors)
    assert all("rerun" in v.name or "_extra_state" in v.name for v in report.values)


def test_flattened_states_keep_their_original_shapes(tmp_path):
    root = fixture_dir("v015_dense_ms_tp2_dp2") / "checkpoint"
    modify_state_dict(root, tmp_path / "out", ["rename ^decoder dec", r"rename \.decoder\. .dec."])
    before = _mcore_data(root)
    after = _mcore_data(tmp_path / "out")
    assert after == {k.replace("decoder", "dec"): v for k, v in before.items() if v}


def _mcore_data(folder):
    from ckpt_tools.formats.dcp.metadata_read import read_catalog
    from ckpt_tools.formats.storage.files import LocalFiles

    shapes = read_catalog(LocalFiles(str(folder))).original_shapes
    assert shapes
    return shapes


@pytest.mark.parametrize(
    ("operations", "error", "message"),
    [
        ([], UsageError, "at least one"),
        (["remove"], UsageError, "expected 'remove REGEX'"),
        (["rename a"], UsageError, "expected 'remove REGEX'"),
        (["drop a"], UsageError, "expected 'remove REGEX'"),
        (["remove ("], UsageError, "unterminated subpattern"),
        ([r"rename a \2"], UsageError, "invalid group reference"),
        (["remove ."], UsageError, "no key would be left"),
        (["remove nowhere"], UsageError, "no key needs"),
        (["rename ^kept$ gone"], MappingError, "gone"),
        (["rename k.* x", "rename g.* x"], MappingError, "x"),
    ],
)
def test_what_is_refused_writes_nothing(source, tmp_path, operations, error, message):
    with pytest.raises(error, match=message):
        modify_state_dict(source, tmp_path / "out", operations)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_first_matching_rename_wins_and_removals_come_first():
    operations = [parse_operation(text) for text in ("rename a b", "rename q|a c", "remove z")]
    assert new_names(["a1", "aa2", "q", "az", "x"], operations) == {
        "a1": "b1",
        "aa2": "bb2",
        "q": "c",
        "x": "x",
    }


steps = st.lists(st.sampled_from(["a", "b", "a.b", "x", 0, 1]), min_size=1, max_size=5).map(tuple)


@given(steps, st.text("abx01.", min_size=1, max_size=9))
def test_a_new_path_spells_the_new_name(path, name):
    assert ".".join(map(str, new_path(path, name))) == name


def test_a_new_path_changes_only_the_step_that_was_renamed():
    path = ("optimizer", "state", "module.module.decoder.w", "exp_avg")
    assert new_path(path, "optimizer.state.module.dec.w.exp_avg") == (*path[:2], "module.dec.w", "exp_avg")
    assert new_path(("rng", 0, "x"), "rng.0.y") == ("rng", 0, "y")
