"""Every kind of damage is found, and named: which check says it, and where."""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import struct

import pytest

from ckpt_tools.commands.check.diff import diff_checkpoints
from ckpt_tools.commands.check.verify import VerifyOptions, verify_checkpoint
from ckpt_tools.errors import CkptError
from ckpt_tools.megatron.format import Weight
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.verify.checkpoint import meaning
from tests.conftest import all_checkpoints, fixture_dir
from tests.damage import (
    ITERATION,
    copy_of,
    drop_key,
    flip_bit,
    infos_of,
    keys_with,
    metadata_of,
    payload_of,
    replace_chunk,
)

FLIPS = int(os.environ.get("CKPT_TOOLS_FLIPS", "30"))  # more by hand
LLAMA = "core019_llama_tp2_fully_reshardable"
NATIVE = "core019_llama_tp2_native_fsdp_dtensor"
MOE = "core019_moe_ep2_fully_reshardable"
NATIVE_MOE = "core019_moe_dp1_native_fsdp_dtensor"
FC2 = "decoder.layers.mlp.linear_fc2.weight"
NORM = "decoder.final_layernorm.weight"
GROUP = "optimizer.param_to_group_meta.module.module.module."
STATE = "optimizer.state.module.module.module."


def errors_of(root, **options):
    """[(check, where, message)] of a copy, and proof that the original had none of them."""
    report = verify_checkpoint(str(root), None, VerifyOptions(**options))
    return [(f.check, f.where, f.message) for f in report.findings if f.severity == "error"]


def warnings_of(root, **options):
    report = verify_checkpoint(str(root), None, VerifyOptions(**options))
    assert report.is_valid
    return [(f.check, f.where, f.message) for f in report.findings]


def only(found, check, where, *parts):
    """One finding, of this check, at this place, whose message has all the parts."""
    assert [f[0] for f in found] == [check], found
    assert where in found[0][1]
    for part in parts:
        assert part in found[0][2], found
    return True


@pytest.mark.parametrize("name", [LLAMA, NATIVE, MOE, NATIVE_MOE])
def test_the_originals_are_sound(name, tmp_path):
    assert errors_of(copy_of(name, tmp_path), content=True) == []
    assert warnings_of(copy_of(name, tmp_path / "again"), content=True) == []


@pytest.mark.parametrize("root", [pytest.param(path, id=name) for name, path in all_checkpoints().items()])
def test_every_real_checkpoint_is_sound(root):
    place = root / "checkpoint" if (root / "checkpoint").exists() else root
    assert errors_of(place, content=True) == []


def test_a_truncated_file(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    path = root / ITERATION / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    found = errors_of(root)
    assert found[0][:2] == ("files", "__0_0.distcp")
    assert "1 of " in found[0][2]
    assert {check for check, _, _ in found} == {"files", "frames"}


def test_an_absent_file(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    (root / ITERATION / "__1_0.distcp").unlink()
    found = errors_of(root)
    assert found[0][:2] == ("files", "__1_0.distcp")
    assert "does not exist" in found[0][2]


def test_a_left_over_file_is_only_unusual(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    (root / ITERATION / "__9_0.distcp").write_bytes(b"old")
    only(warnings_of(root), "files", "__9_0.distcp", "no item lies in this file")


def test_a_truncated_metadata(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    path = root / ITERATION / ".metadata"
    path.write_bytes(path.read_bytes()[:-20])
    only(errors_of(root), "metadata", ITERATION)


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
    path = root / ITERATION / info.relative_path
    at = path.read_bytes().index(b"MT19937", info.offset)
    flip_bit(path, at)
    only(errors_of(root), "frames", "np_rng_state", "data.pkl")  # it is summed whenever it is read
    first, second = errors_of(root, content=True)
    only([first], "frames", "np_rng_state", "data.pkl")
    only([second], "checksums", "np_rng_state", "data.pkl")


@pytest.mark.parametrize(("record", "content"), [("data.pkl", False), ("data/0", False), ("version", True)])
def test_a_damaged_local_header(record, content, tmp_path):
    root = copy_of(LLAMA, tmp_path)
    with metadata_of(root) as metadata:
        _, info = infos_of(metadata, NORM)[(0,)]
    path = root / ITERATION / info.relative_path
    name = path.read_bytes().index(f"/{record}".encode(), info.offset)
    flip_bit(path, path.read_bytes().rindex(b"PK\x03\x04", 0, name))
    found = errors_of(root, content=content)
    assert found[0][0] == ("checksums" if content else "frames")
    assert all(NORM in where and f"/{record}'" in message for _, where, message in found)
    assert "not where the zip directory says" in found[0][2]


def test_a_damaged_zip_directory(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    with metadata_of(root) as metadata:
        _, info = infos_of(metadata, NORM)[(0,)]
    path = root / ITERATION / info.relative_path
    flip_bit(path, path.read_bytes().rindex(b"PK\x01\x02", 0, info.offset + info.length))
    only(errors_of(root), "frames", NORM, "zip directory is damaged")


def test_a_wrong_item_length(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    with metadata_of(root) as metadata:
        infos_of(metadata, NORM)[(0,)][1].length -= 1
    only(errors_of(root), "frames", NORM, "does not end like")


def test_items_that_share_bytes(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    with metadata_of(root) as metadata:
        infos = sorted(
            (info.offset, index.fqn, info)
            for index, info in metadata.storage_data.items()
            if info.relative_path == "__0_0.distcp" and index.fqn.startswith("optimizer.")
        )
        infos[1][2].offset -= 64
        names = infos[0][1], infos[1][1]
    found = errors_of(root)
    assert found[0][:2] == ("files", "__0_0.distcp")
    assert "overlap" in found[0][2]
    assert all(name in found[0][2] for name in names)


def test_an_alias_is_no_damage(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        _, first = infos_of(metadata, "model.module.decoder.layers.0.input_layernorm.weight")[(0,)]
        _, second = infos_of(metadata, "model.module.decoder.layers.1.input_layernorm.weight")[(0,)]
        second.relative_path, second.offset, second.length = first.relative_path, first.offset, first.length
    assert errors_of(root, content=True) == []


def test_a_missing_chunk(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    with metadata_of(root) as metadata:
        chunk = metadata.state_dict_metadata[FC2].chunks.pop()
        index, _ = infos_of(metadata, FC2)[tuple(chunk.offsets)]
        del metadata.storage_data[index]
    only(errors_of(root), "tiling", FC2, f"{math.prod(chunk.sizes)} of ", "in no part")


def test_overlapping_chunks(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    with metadata_of(root) as metadata:
        chunks = metadata.state_dict_metadata[FC2].chunks
        chunk = max(chunks, key=lambda c: tuple(c.offsets))
        index, info = infos_of(metadata, FC2)[tuple(chunk.offsets)]
        del metadata.storage_data[index]
        moved = type(chunk.offsets)((*chunk.offsets[:-1], chunk.offsets[-1] - 1))
        object.__setattr__(chunk, "offsets", moved)
        metadata.storage_data[type(index)(FC2, moved, index.index)] = info
    only(errors_of(root), "tiling", FC2, "overlap")


def test_a_chunk_outside_of_its_tensor(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    with metadata_of(root) as metadata:
        stored = metadata.state_dict_metadata[FC2]
        stored.size = type(stored.size)((*stored.size[:-1], stored.size[-1] - 1))
    only(errors_of(root), "metadata", ITERATION, FC2, "outside of shape")


def test_a_tensor_larger_than_its_chunks(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    key = "model.module.output_layer.weight"
    with metadata_of(root) as metadata:
        stored = metadata.state_dict_metadata[key]
        stored.size = type(stored.size)((stored.size[0] + 2, stored.size[1]))
    found = errors_of(root)
    assert found[0][:2] == ("tiling", key)
    assert "64 of 7232 elements" in found[0][2]
    assert [f[0] for f in found[1:]] == ["states", "states"]  # their shapes are no longer the weight's


def test_an_item_without_a_place(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    with metadata_of(root) as metadata:
        index, _ = infos_of(metadata, NORM)[(0,)]
        del metadata.storage_data[index]
    only(errors_of(root), "metadata", ITERATION, NORM, "no file holds")


def test_another_element_type_than_stored(tmp_path):
    import torch

    root = copy_of(LLAMA, tmp_path)
    with metadata_of(root) as metadata:
        metadata.state_dict_metadata[NORM].properties.dtype = torch.float16
    only(errors_of(root), "frames", NORM, "float16", "bfloat16")


def test_swapped_chunks_do_not_round_to_their_masters(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    with metadata_of(root) as metadata:
        infos = infos_of(metadata, FC2)
        (_, a), (_, b) = (infos[offset] for offset in sorted(infos)[:2])
        a.offset, b.offset = b.offset, a.offset
        a.relative_path, b.relative_path = b.relative_path, a.relative_path
        a.length, b.length = b.length, a.length
    assert errors_of(root) == []
    only(
        errors_of(root, content=True), "masters", "decoder.layers.0.mlp.linear_fc2.weight[", "does not round"
    )


def test_a_master_of_another_step(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    key = f"optimizer.state.param.{NORM}"
    _, _, data = payload_of(root, key, (0,))
    value = struct.unpack_from("<f", data, 12)[0]
    changed = data[:12] + struct.pack("<f", value * 1.01) + data[16:]
    replace_chunk(root, key, (0,), "float32", changed)
    only(errors_of(root, content=True), "masters", f"{NORM}[3]", "master 1.00", "bfloat16 weight 0.99")


@pytest.mark.parametrize(("value", "text"), [(math.nan, "1 NaN and 0"), (-math.inf, "0 NaN and 1")])
def test_numbers_that_are_none(value, text, tmp_path):
    root = copy_of(NATIVE, tmp_path)
    key = STATE + NORM + ".exp_avg_sq"
    _, _, data = payload_of(root, key, (0,))
    replace_chunk(root, key, (0,), "float32", struct.pack("<f", value) + data[4:])
    assert errors_of(root) == []
    only(errors_of(root, content=True), "values", key, text, "of 32 elements")
    only(warnings_of(root, content=True, allow_nonfinite=True), "values", key, text)


def test_a_layer_is_missing_in_the_middle(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        for key in keys_with(metadata, ".layers.0."):
            drop_key(metadata, key)
    only(errors_of(root), "layers", "decoder.layers.", "layers [0] are missing")


def test_a_layer_is_missing_at_the_end(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        for key in keys_with(metadata, ".layers.1."):
            drop_key(metadata, key)
    only(errors_of(root), "layers", "decoder.layers.", "1 layers are stored, the args say 2")


def test_an_expert_is_missing(tmp_path):
    root = copy_of(NATIVE_MOE, tmp_path)
    with metadata_of(root) as metadata:
        for key in keys_with(metadata, "experts.local_experts.2.linear_fc2.weight"):
            drop_key(metadata, key)
    only(
        errors_of(root),
        "experts",
        "mlp.experts.linear_fc2.weight",
        "experts 0-1, 3 are stored, 4 are expected",
    )


def test_the_last_expert_is_missing(tmp_path):
    root = copy_of(NATIVE_MOE, tmp_path)
    with metadata_of(root) as metadata:
        for key in keys_with(metadata, "experts.local_experts.3."):
            drop_key(metadata, key)
    found = errors_of(root)
    assert {(check, message) for check, _, message in found} == {
        ("experts", "experts 0-2 are stored, 4 are expected (the rows of the router)")
    }
    assert len(found) == 3  # fc1_w, fc1_v, fc2


def test_all_experts_lack_a_weight(tmp_path):
    root = copy_of(MOE, tmp_path)
    with metadata_of(root) as metadata:
        for key in keys_with(metadata, "experts.experts.linear_fc1"):
            drop_key(metadata, key)
    only(errors_of(root), "experts", "experts.linear_fc1.weight", "no expert has this weight")


def test_stacked_experts_that_do_not_fit_the_router(tmp_path):
    root = copy_of(MOE, tmp_path)
    with metadata_of(root) as metadata:
        for key in keys_with(metadata, "experts.experts.linear_fc2.weight"):
            stored = metadata.state_dict_metadata[key]
            stored.size = type(stored.size)((3, *stored.size[1:]))
            for chunk in [c for c in stored.chunks if c.offsets[0] == 3]:
                stored.chunks.remove(chunk)
                del metadata.storage_data[infos_of(metadata, key)[tuple(chunk.offsets)][0]]
    only(errors_of(root), "experts", "experts.linear_fc2.weight", "experts 0-2 are stored, 4 are expected")


def test_one_state_of_a_weight_is_missing(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        drop_key(metadata, STATE + NORM + ".exp_avg")
    only(errors_of(root), "states", NORM, "['exp_avg'] are missing")


def test_all_states_of_a_weight_are_missing(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    with metadata_of(root) as metadata:
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            drop_key(metadata, f"optimizer.state.{kind}.{NORM}")
    only(warnings_of(root), "states", NORM, "no optimizer state")


def test_a_state_without_a_weight(tmp_path):
    for name, key in ((LLAMA, NORM), (NATIVE, f"model.module.{NORM}")):
        root = copy_of(name, tmp_path)
        with metadata_of(root) as metadata:
            drop_key(metadata, key)
        found = errors_of(root)
        assert {check for check, _, _ in found} == {"states"}
        assert all("there is no weight" in message and NORM in message for _, _, message in found)


def test_halves_of_a_gated_weight_with_different_shapes(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        for key in keys_with(metadata, "layers.0.mlp.linear_fc1.weight_v"):
            stored = metadata.state_dict_metadata[key]
            if hasattr(stored, "size") and len(stored.size) == 2:
                stored.size = type(stored.size)((stored.size[0] + 2, stored.size[1]))
    found = [f for f in errors_of(root) if f[0] == "states"]
    names = [f"model.module.decoder.layers.0.mlp.linear_fc1.weight_{half}" for half in "wv"]
    assert sorted(where for _, where, _ in found) == sorted(names)
    assert all("its other half" in message for _, _, message in found)


def test_a_group_of_a_parameter_that_is_not_there(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        drop_key(metadata, f"model.module.{NORM}")
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            drop_key(metadata, f"{STATE}{NORM}.{kind}")
    only(errors_of(root), "groups", NORM, "it has a group entry, but no optimizer states")


def test_buckets_of_different_lengths(tmp_path):
    root = copy_of("core019_llama_tp2_dp_reshardable", tmp_path)
    with metadata_of(root) as metadata:
        key = next(k for k in keys_with(metadata, "optimizer.distributed.") if k.endswith(".exp_avg"))
        stored = metadata.state_dict_metadata[key]
        stored.size = type(stored.size)((stored.size[0] + 8,))
    found = [f for f in errors_of(root) if f[0] == "states"]
    only(found, "states", key.removesuffix(".exp_avg"), "different lengths")


def test_a_router_without_experts(tmp_path):
    root = copy_of(NATIVE_MOE, tmp_path)
    with metadata_of(root) as metadata:
        for key in keys_with(metadata, ".experts."):
            drop_key(metadata, key)
    found = errors_of(root)
    assert {(check, message) for check, _, message in found} == {
        ("experts", "there is a router, but no experts are stored")
    }


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


def test_half_of_a_gated_weight_is_missing(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        for key in keys_with(metadata, "layers.0.mlp.linear_fc1.weight_v"):
            drop_key(metadata, key)
    only(errors_of(root), "states", "layers.0.mlp.linear_fc1.weight_w", "weight_v is missing")


def test_a_group_field_is_missing(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        drop_key(metadata, GROUP + NORM + ".lr")
    only(errors_of(root), "groups", NORM, "lacks ['lr']")


def test_a_group_is_missing(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        for key in keys_with(metadata, GROUP + NORM):
            drop_key(metadata, key)
    only(errors_of(root), "groups", NORM, "no optimizer.param_to_group_meta")


def test_a_step_is_missing(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        drop_key(metadata, STATE + NORM + ".step")
    found = errors_of(root)
    assert [check for check, _, _ in found] == ["states", "groups"]
    assert "step" in found[1][2]


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


@pytest.mark.parametrize("key", ["args", "iteration", "checkpoint_version"])
def test_an_entry_that_every_loader_asks_for_is_missing(key, tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        drop_key(metadata, key)
    found = errors_of(root)
    assert ("entries", key) in [f[:2] for f in found]


def test_a_metadata_json_in_an_fsdp_dtensor_folder(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    shutil.copy(copy_of(LLAMA, tmp_path) / ITERATION / "metadata.json", root / ITERATION)
    assert ("entries", "metadata.json") in [f[:2] for f in errors_of(root)]


@pytest.mark.parametrize(
    ("text", "message"), [("7", "iter_0000007"), ("two", "'two'"), ("", "''"), ("release", "release")]
)
def test_a_tracker_that_names_nothing(text, message, tmp_path):
    root = copy_of(LLAMA, tmp_path)
    (root / "latest_checkpointed_iteration.txt").write_text(text)
    only(errors_of(root), "place", "", message)
    only(errors_of(root / ITERATION), "place", "latest_checkpointed_iteration.txt")


def test_a_folder_with_another_number(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    (root / ITERATION).rename(root / "iter_0000005")
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    only(errors_of(root), "place", "iter_0000005", "iteration 5", "2")


def test_no_tracker_is_only_unusual(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    (root / "latest_checkpointed_iteration.txt").unlink()
    only(warnings_of(root), "place", "", "no tracker file")


def test_an_unfinished_conversion_is_only_unusual(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    (root / ".iter_0000003.ckpt_tools-partial").mkdir()
    only(warnings_of(root), "place", ".iter_0000003", "unfinished")


def test_no_flipped_bit_of_the_data_ends_as_a_silent_wrong_result(tmp_path):
    """Either the content check finds it, or it fell where no reader looks and nothing has changed."""
    root = copy_of(NATIVE, tmp_path)
    path = root / ITERATION / "__1_0.distcp"
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


def test_a_flipped_bit_of_the_metadata_gives_a_report_or_our_own_error(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    path = root / ITERATION / ".metadata"
    data = path.read_bytes()
    for seed in range(FLIPS):
        at = random.Random(seed).randrange(8 * len(data))
        flip_bit(path, at // 8, at % 8)
        with contextlib.suppress(CkptError):
            verify_checkpoint(str(root))
        path.write_bytes(data)


@pytest.mark.parametrize("name", [LLAMA, NATIVE])
def test_a_file_cut_at_every_item_is_found(name, tmp_path):
    root = copy_of(name, tmp_path)
    path = root / ITERATION / "__0_0.distcp"
    with metadata_of(root) as metadata:
        ends = {i.offset + i.length for i in metadata.storage_data.values() if i.relative_path == path.name}
    data = path.read_bytes()
    for cut in sorted(ends - {len(data)}, reverse=True)[:: max(1, len(ends) // 20)]:
        path.write_bytes(data[:cut])
        assert ("files", path.name) in [f[:2] for f in errors_of(root)], cut
        path.write_bytes(data)
