"""Every kind of damage is found, and named: which check says it, and where."""

import math
import os
import random
import shutil
import struct

import pytest
import torch

from ckpt_tools.cli.app import run
from ckpt_tools.commands.check.diff import diff_checkpoints
from ckpt_tools.commands.check.verify import verify_checkpoint
from ckpt_tools.megatron.format import Weight
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.verify.checkpoint import meaning
from ckpt_tools.verify.report import VerifyOptions
from tests.conftest import LLAMA, MOE, NATIVE, all_checkpoints, fixture_dir
from tests.damage import (
    ITERATION,
    copy_of,
    drop_key,
    errors_of,
    findings_of,
    flip_bit,
    infos_of,
    keys_with,
    metadata_of,
    only,
    payload_of,
    replace_chunk,
)

FLIPS = int(os.environ.get("CKPT_TOOLS_FLIPS", "15"))  # more by hand
NATIVE_MOE = "core019_moe_dp1_native_fsdp_dtensor"
FC2 = "decoder.layers.mlp.linear_fc2.weight"
NORM = "decoder.final_layernorm.weight"
GROUP = "optimizer.param_to_group_meta.module.module.module."
STATE = "optimizer.state.module.module.module."
BUCKETS = "core019_llama_dp2_dp_reshardable"
BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
TRACKER = "latest_checkpointed_iteration.txt"


UNKNOWN = {"main_llava_fr_tp2"}  # two towers: the settings describe neither
PLAIN = {"tf2_dcp"}  # of PyTorch's own DCP: it stores no settings of Megatron


@pytest.mark.parametrize("name", all_checkpoints())
def test_every_real_checkpoint_is_sound(name):
    root = all_checkpoints()[name]
    place = root / "checkpoint" if (root / "checkpoint").exists() else root
    report = verify_checkpoint(str(place), None, VerifyOptions(content=True))
    assert report.is_valid and not (report.findings and name in (LLAMA, NATIVE, MOE, NATIVE_MOE))
    checks = {check.name: check for check in report.checks}
    assert ("settings" in checks) == (name not in PLAIN)
    if name not in PLAIN:
        assert not checks["settings"].findings + checks["counters"].findings
        assert (checks["settings"].looked_at > 3) == (name not in UNKNOWN)


# --- files and archives


def data_file(root, name="__0_0.distcp"):
    return root / ITERATION / name


def test_a_file_that_is_gone(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    data_file(root, "__1_0.distcp").unlink()
    found = errors_of(root)
    assert found[0][:2] == ("files", "__1_0.distcp") and "does not exist" in found[0][2]


@pytest.mark.parametrize("name", [LLAMA, NATIVE])
def test_a_file_cut_at_every_item_is_found(name, tmp_path):
    root = copy_of(name, tmp_path)
    path = data_file(root)
    with metadata_of(root) as metadata:
        ends = {i.offset + i.length for i in metadata.storage_data.values() if i.relative_path == path.name}
    data = path.read_bytes()
    for end in sorted(ends - {len(data)}, reverse=True)[:: max(1, len(ends) // 20)]:
        path.write_bytes(data[:end])
        found = errors_of(root)
        assert any(f[:2] == ("files", path.name) and " of " in f[2] for f in found), end


@pytest.mark.parametrize(
    ("change", "check", "where", "said"),
    [
        (lambda root: data_file(root, "__9_0.distcp").write_bytes(b"old"), "files", "__9_0.distcp", "no item lies"),
        (lambda root: (root / TRACKER).unlink(), "place", "", "no tracker file"),
        (lambda root: (root / ".iter_0000003.ckpt_tools-partial").mkdir(), "place", ".iter_0000003", "unfinished"),
    ],
)  # fmt: skip
def test_what_is_only_unusual(change, check, where, said, tmp_path):
    root = copy_of(LLAMA, tmp_path)
    change(root)
    found = findings_of(root)
    only(found, check, where, said)
    assert found[0][0] == "warning"


@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_payload_bit_is_found_by_its_checksum(bit, tmp_path):
    root = copy_of(NATIVE, tmp_path)
    key = STATE + "decoder.final_layernorm.weight.exp_avg"
    path, at, data = payload_of(root, key, (0,))
    flip_bit(path, at + len(data) - 4, bit)
    assert errors_of(root) == []
    only(errors_of(root, content=True), "checksums", f"{key} [0:32]", "/data/0", str(at), "CRC-32")


def test_a_flipped_bit_of_an_object_is_found_by_its_checksum(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        _, info = infos_of(metadata, "rng_state.(0, 0).0.np_rng_state")[None]
    path = data_file(root, info.relative_path)
    flip_bit(path, path.read_bytes().index(b"MT19937", info.offset))
    only(errors_of(root), "frames", "np_rng_state", "data.pkl")  # it is summed whenever it is read
    first, second = errors_of(root, content=True)
    only([first], "frames", "np_rng_state", "data.pkl")
    only([second], "checksums", "np_rng_state", "data.pkl")


def norms_item(root):
    """The file of the final norm's item, and the item's storage info."""
    with metadata_of(root) as metadata:
        _, info = infos_of(metadata, NORM)[(0,)]
    return data_file(root, info.relative_path), info


@pytest.mark.parametrize(("record", "content"), [("data.pkl", False), ("data/0", False), ("version", True)])
def test_a_damaged_local_header(record, content, tmp_path):
    root = copy_of(LLAMA, tmp_path)
    path, info = norms_item(root)
    name = path.read_bytes().index(f"/{record}".encode(), info.offset)
    flip_bit(path, path.read_bytes().rindex(b"PK\x03\x04", 0, name))
    found = errors_of(root, content=content)
    assert found[0][0] == ("checksums" if content else "frames")
    assert all(NORM in where and f"/{record}'" in message for _, where, message in found)
    assert "not where the zip directory says" in found[0][2]


def test_a_damaged_zip_directory(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    path, info = norms_item(root)
    flip_bit(path, path.read_bytes().rindex(b"PK\x01\x02", 0, info.offset + info.length))
    only(errors_of(root), "frames", NORM, "zip directory is damaged")


# --- what the metadata says


def resized(metadata, key, change):
    """Let the metadata say another shape."""
    stored = metadata.state_dict_metadata[key]
    stored.size = type(stored.size)(change(tuple(stored.size)))


def shorter_item(metadata):
    infos_of(metadata, NORM)[(0,)][1].length -= 1


def fewer_columns(metadata):
    resized(metadata, FC2, lambda size: (*size[:-1], size[-1] - 1))


def no_place(metadata):
    index, _ = infos_of(metadata, NORM)[(0,)]
    del metadata.storage_data[index]


def missing_chunk(metadata):
    chunk = metadata.state_dict_metadata[FC2].chunks.pop()
    del metadata.storage_data[infos_of(metadata, FC2)[tuple(chunk.offsets)][0]]


def overlapping_chunks(metadata):
    chunk = max(metadata.state_dict_metadata[FC2].chunks, key=lambda c: tuple(c.offsets))
    index, info = infos_of(metadata, FC2)[tuple(chunk.offsets)]
    del metadata.storage_data[index]
    moved = type(chunk.offsets)((*chunk.offsets[:-1], chunk.offsets[-1] - 1))
    object.__setattr__(chunk, "offsets", moved)
    metadata.storage_data[type(index)(FC2, moved, index.index)] = info


def another_type(metadata):
    metadata.state_dict_metadata[NORM].properties.dtype = torch.float16


@pytest.mark.parametrize(
    ("change", "check", "where", "said"),
    [
        (shorter_item, "frames", NORM, ["does not end like"]),
        (fewer_columns, "metadata", ITERATION, [FC2, "outside of shape"]),
        (no_place, "metadata", ITERATION, [NORM, "no file holds"]),
        (missing_chunk, "tiling", FC2, [" of ", "in no part"]),
        (overlapping_chunks, "tiling", FC2, ["overlap"]),
        (another_type, "frames", NORM, ["float16", "bfloat16"]),
    ],
)
def test_metadata_that_does_not_fit_what_is_stored(change, check, where, said, tmp_path):
    root = copy_of(LLAMA, tmp_path)
    with metadata_of(root) as metadata:
        change(metadata)
    only(errors_of(root), check, where, *said)


def test_items_that_share_bytes(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    with metadata_of(root) as metadata:
        (_, first, _), (_, second, info) = sorted(
            (info.offset, index.fqn, info)
            for index, info in metadata.storage_data.items()
            if info.relative_path == "__0_0.distcp" and index.fqn.startswith("optimizer.")
        )[:2]
        info.offset -= 64
    found = errors_of(root)
    assert found[0][:2] == ("files", "__0_0.distcp")
    assert all(part in found[0][2] for part in ("overlap", first, second))


def test_an_alias_is_no_damage(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        _, first = infos_of(metadata, "model.module.decoder.layers.0.input_layernorm.weight")[(0,)]
        _, second = infos_of(metadata, "model.module.decoder.layers.1.input_layernorm.weight")[(0,)]
        second.relative_path, second.offset, second.length = first.relative_path, first.offset, first.length
    assert errors_of(root, content=True) == []


def test_a_tensor_larger_than_its_chunks(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    key = "model.module.output_layer.weight"
    with metadata_of(root) as metadata:
        resized(metadata, key, lambda size: (size[0] + 2, size[1]))
    found = errors_of(root)
    assert found[0][:2] == ("tiling", key) and "64 of 7232 elements" in found[0][2]
    assert [f[0] for f in found[1:]] == ["states", "states"]  # their shapes are no longer the weight's


# --- values


def test_swapped_chunks_do_not_round_to_their_masters(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    with metadata_of(root) as metadata:
        infos = infos_of(metadata, FC2)
        (_, a), (_, b) = (infos[offset] for offset in sorted(infos)[:2])
        a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    assert errors_of(root) == []
    only(errors_of(root, content=True), "masters", "decoder.layers.0.mlp.linear_fc2.weight[", "round")


def test_a_master_of_another_step(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    key = f"optimizer.state.param.{NORM}"
    _, _, data = payload_of(root, key, (0,))
    value = struct.unpack_from("<f", data, 12)[0]
    replace_chunk(root, key, (0,), "float32", data[:12] + struct.pack("<f", value * 1.01) + data[16:])
    only(errors_of(root, content=True), "masters", f"{NORM}[3]", "master 1.00", "bfloat16 weight 0.99")


@pytest.mark.parametrize(("value", "text"), [(math.nan, "1 NaN and 0"), (-math.inf, "0 NaN and 1")])
def test_numbers_that_are_none(value, text, tmp_path):
    root = copy_of(NATIVE, tmp_path)
    key = STATE + NORM + ".exp_avg_sq"
    _, _, data = payload_of(root, key, (0,))
    replace_chunk(root, key, (0,), "float32", struct.pack("<f", value) + data[4:])
    assert errors_of(root) == []
    only(errors_of(root, content=True), "values", key, text, "of 32 elements")
    found = findings_of(root, content=True, allow_nonfinite=True)
    only(found, "values", key, text)
    assert found[0][0] == "warning"


@pytest.mark.parametrize(
    ("name", "key", "where"),
    [
        (NATIVE, f"{STATE}{NORM}.exp_avg_sq", NORM),
        (LLAMA, f"optimizer.state.exp_avg_sq.{NORM}", NORM),
        (BUCKETS, f"{BUCKET}.exp_avg_sq", "exp_avg_sq of output_layer.weight"),
    ],
)
def test_a_second_moment_below_zero(name, key, where, tmp_path):
    """The gaps of a bucket are uninitialised, and are below zero in the fixture."""
    root = copy_of(name, tmp_path)
    _, _, data = payload_of(root, key, (0,))
    replace_chunk(root, key, (0,), "float32", struct.pack("<3f", -0.0, -0.25, -0.5) + data[12:])
    only(errors_of(root, content=True), "values", where, "-0.5 is in it; squares are never negative")
    replace_chunk(root, key, (0,), "float32", struct.pack("<f", -0.0) + data[4:])
    assert findings_of(root, content=True) == []


@pytest.mark.parametrize(("start", "where"), [(0, "exp_avg of output_layer.weight"), (6688, None)])
def test_a_nan_in_a_bucket_is_an_error_but_in_a_gap(start, where, tmp_path):
    root = copy_of(BUCKETS, tmp_path)
    key = f"{BUCKET}.exp_avg"
    _, _, data = payload_of(root, key, (start,))
    replace_chunk(root, key, (start,), "float32", struct.pack("<f", math.nan) + data[4:])
    found = findings_of(root, content=True)
    said = [("error", "values", where, f"1 NaN and 0 infinite of {len(data) // 4} elements")] if where else []
    assert found[1:] == said and found[0][:3] == ("warning", "values", key)
    assert [f[0] for f in findings_of(root, content=True, allow_nonfinite=True)] == ["warning"]


# --- keys that are not there

W_HALF, V_HALF = "layers.0.mlp.linear_fc1.weight_w", "layers.0.mlp.linear_fc1.weight_v"


def drop_keys(metadata, dropped):
    """One key, or all that have this in them."""
    for key in [dropped] if dropped in metadata.state_dict_metadata else keys_with(metadata, dropped):
        drop_key(metadata, key)


@pytest.mark.parametrize(
    ("name", "dropped", "check", "where", "said"),
    [
        (NATIVE, ".layers.0.", "layers", "decoder.layers.", "layers [0] are missing"),
        (NATIVE, ".layers.1.", "layers", "decoder.layers.", "1 layers are stored, the args say 2"),
        (NATIVE_MOE, "experts.local_experts.2.linear_fc2.weight", "experts", "mlp.experts.linear_fc2.weight",
         "experts 0-1, 3 are stored, 4 are expected"),
        (MOE, "experts.experts.linear_fc1", "experts", "experts.linear_fc1.weight", "no expert has this weight"),
        (NATIVE, STATE + NORM + ".exp_avg_sq", "states", NORM, "['exp_avg_sq'] are missing"),
        (NATIVE, V_HALF, "states", W_HALF, "weight_v is missing"),
        (NATIVE, GROUP + NORM + ".lr", "groups", NORM, "lacks ['lr']"),
        (NATIVE, GROUP + NORM, "groups", NORM, "no optimizer.param_to_group_meta"),
    ],
)  # fmt: skip
def test_keys_that_are_missing(name, dropped, check, where, said, tmp_path):
    root = copy_of(name, tmp_path)
    with metadata_of(root) as metadata:
        drop_keys(metadata, dropped)
    only(errors_of(root), check, where, said)


@pytest.mark.parametrize("key", ["args", "iteration", "checkpoint_version"])
def test_an_entry_that_every_loader_asks_for_is_missing(key, tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        drop_key(metadata, key)
    assert ("entries", key) in [f[:2] for f in errors_of(root)]


@pytest.mark.parametrize(
    ("name", "dropped", "check", "message", "count"),
    [
        (NATIVE_MOE, "experts.local_experts.3.", "experts",
         "experts 0-2 are stored, 4 are expected (the rows of the router)", 3),  # fc1_w, fc1_v, fc2
        (NATIVE_MOE, ".experts.", "experts", "there is a router, but no experts are stored", 1),
        (LLAMA, NORM, "states", "there is no weight " + NORM, 1),
        (NATIVE, f"model.module.{NORM}", "states", f"there is no weight model.module.{NORM}", 3),
    ],
)  # fmt: skip
def test_what_several_places_say(name, dropped, check, message, count, tmp_path):
    root = copy_of(name, tmp_path)
    with metadata_of(root) as metadata:
        drop_keys(metadata, dropped)
    found = errors_of(root)
    assert {f[0] for f in found} == {check} and len(found) == count
    assert all(message in f[2] for f in found)


def test_all_states_of_a_weight_are_missing(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    with metadata_of(root) as metadata:
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            drop_key(metadata, f"optimizer.state.{kind}.{NORM}")
    found = findings_of(root)
    only(found, "states", NORM, "no optimizer state")
    assert found[0][0] == "warning"


def test_a_group_of_a_parameter_that_is_not_there(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        for key in [f"model.module.{NORM}", *keys_with(metadata, STATE + NORM)]:
            drop_key(metadata, key)
    only(errors_of(root), "groups", NORM, "it has a group entry, but no optimizer states")


def test_a_step_is_missing(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        drop_key(metadata, STATE + NORM + ".step")
    found = errors_of(root)
    assert [check for check, _, _ in found] == ["states", "groups"]
    assert "step" in found[1][2]


# --- keys that contradict each other


def test_stacked_experts_that_do_not_fit_the_router(tmp_path):
    root = copy_of(MOE, tmp_path)
    with metadata_of(root) as metadata:
        for key in keys_with(metadata, "experts.experts.linear_fc2.weight"):
            resized(metadata, key, lambda size: (3, *size[1:]))
            chunks = metadata.state_dict_metadata[key].chunks
            for chunk in [c for c in chunks if c.offsets[0] == 3]:
                chunks.remove(chunk)
                del metadata.storage_data[infos_of(metadata, key)[tuple(chunk.offsets)][0]]
    only(errors_of(root), "experts", "experts.linear_fc2.weight", "experts 0-2 are stored, 4 are expected")


@pytest.mark.parametrize("rows", [3, 5])
def test_the_rows_of_the_router_say_how_many_experts_there_are(rows):
    """Where no args do, and where args say otherwise."""
    module = "decoder.layers.0.mlp"
    weights = [Weight(f"{module}.router.weight", (rows, 8))]
    weights += [
        Weight(f"{module}.experts.local_experts.{i}.linear_fc{n}.weight", (8, 8))
        for i in range(4)
        for n in (1, 2)
    ]
    for values in ({}, {"num_experts": 4}):
        found = meaning.check_experts(weights, CommonState({}, None, values)).findings
        assert {f.message for f in found} == {
            f"experts 0-3 are stored, {rows} are expected (the rows of the router)"
        }
    weights[0] = Weight(f"{module}.router.weight", (4, 8))
    assert meaning.check_experts(weights, CommonState({}, None)).findings == ()


def test_halves_of_a_gated_weight_with_different_shapes(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        for key in keys_with(metadata, V_HALF):
            if len(getattr(metadata.state_dict_metadata[key], "size", ())) == 2:
                resized(metadata, key, lambda size: (size[0] + 2, size[1]))
    found = [f for f in errors_of(root) if f[0] == "states"]
    assert sorted(where for _, where, _ in found) == [
        f"model.module.decoder.{half}" for half in (V_HALF, W_HALF)
    ]
    assert all("its other half" in message for _, _, message in found)


def test_buckets_of_different_lengths(tmp_path):
    root = copy_of("core019_llama_tp2_dp_reshardable", tmp_path)
    with metadata_of(root) as metadata:
        key = next(k for k in keys_with(metadata, "optimizer.distributed.") if k.endswith(".exp_avg"))
        resized(metadata, key, lambda size: (size[0] + 8,))
    found = [f for f in errors_of(root) if f[0] == "states"]
    only(found, "states", key.removesuffix(".exp_avg"), "different lengths")


def test_the_double_dot_of_nvidias_converter(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        for key in keys_with(metadata, GROUP + NORM):
            wrong = key.replace("module.decoder", "module..decoder")
            ((index, info),) = infos_of(metadata, key).values()
            metadata.state_dict_metadata[wrong] = metadata.state_dict_metadata[key]
            drop_key(metadata, key)
            metadata.planner_data[wrong] = (wrong,)
            metadata.storage_data[type(index)(wrong)] = info
    found = errors_of(root)
    assert {check for check, _, _ in found} == {"groups"}
    assert any("no optimizer.param_to_group_meta" in message for _, _, message in found)


# --- the folder


def test_a_metadata_json_in_an_fsdp_dtensor_folder(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    shutil.copy(fixture_dir(LLAMA) / ITERATION / "metadata.json", root / ITERATION)
    assert ("entries", "metadata.json") in [f[:2] for f in errors_of(root)]
    for command in (["inspect", root], ["strip", root, tmp_path / "out"], ["copy", root, tmp_path / "out"]):
        assert run([*map(str, command), "-q"]) == 4
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"), [("7", "iter_0000007"), ("two", "'two'"), ("", "''"), ("release", "release")]
)
def test_a_tracker_that_names_nothing(text, message, tmp_path):
    root = copy_of(LLAMA, tmp_path)
    (root / TRACKER).write_text(text)
    only(errors_of(root), "place", "", message)
    only(errors_of(root / ITERATION), "place", TRACKER)


def test_a_folder_with_another_number(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    (root / ITERATION).rename(root / "iter_0000005")
    (root / TRACKER).write_text("5")
    only(errors_of(root), "place", "iter_0000005", "iteration 5", "2")


# --- any bit


def test_no_flipped_bit_of_the_data_ends_as_a_silent_wrong_result(tmp_path):
    """Either the content check finds it, or it fell where no reader looks and nothing has changed."""
    root = copy_of(NATIVE, tmp_path)
    path = data_file(root, "__1_0.distcp")
    data, found = path.read_bytes(), 0
    for seed in range(FLIPS):
        at = random.Random(seed).randrange(8 * len(data))
        flip_bit(path, at // 8, at % 8)
        report = verify_checkpoint(str(root), None, VerifyOptions(content=True, threads=1))
        if report.is_valid:
            assert diff_checkpoints(str(fixture_dir(NATIVE)), str(root)).is_equal, f"bit {at} of {path.name}"
        found += not report.is_valid
        path.write_bytes(data)
    assert found > FLIPS / 5  # most of so small items is padding
