"""`diff` on pairs of real checkpoints: conversions are equal tensor by tensor, and every kind of change is named.

The stored weights behind the masters that it compares are seen too.
"""

import os
import struct
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.commands.check.diff import DiffRequest, _recorded_tp, diff_checkpoints
from ckpt_tools.commands.convert.to_dtensors import convert_to_dcp, convert_to_fsdp_dtensor
from ckpt_tools.commands.convert.to_torch_dist import convert_to_torch_dist
from ckpt_tools.commands.job.conversion import ConvertOptions
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.formats.locate.detect import Location
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.torch_archive.item_reader import StoredTensor
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.model.box import full_box
from ckpt_tools.model.catalog import Catalog, Chunk, Item, ObjectEntry, TensorEntry
from ckpt_tools.model.roles import Role
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import Source
from ckpt_tools.verify.compare.arrays import Tolerance
from ckpt_tools.verify.compare.differences import (
    DiffOptions,
    DiffReport,
    Side,
    TensorDiff,
    _by_form,
    can_round,
    comparing,
    has_weights,
    summarize,
    weights_not_compared,
)
from ckpt_tools.verify.compare.objects import diff_values
from tests.conftest import LLAMA, MOE, NATIVE, fixture_dir
from tests.damage import copy_of, drop_key, infos_of, keys_with, metadata_of, payload_of, replace_chunk
from tests.folders import root_of
from tests.synthetic import DcpFolder

NORM = "decoder.final_layernorm.weight"
STATE = "optimizer.state.module.module.module."
SAME_RUNS = ("args.save", "args.dump_param_to_param_group_map", "args.dist_ckpt_optim_fully_reshardable")


def differences(a, b, **options):
    report = diff_checkpoints(str(a), str(b), DiffOptions(**options))
    return [t for t in report.tensors if t.kind != "equal"], list(report.values)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (LLAMA, TargetOptions()),
        (MOE, TargetOptions()),
        ("core016_llama_tp2_dp_reshardable", TargetOptions(layer_spec="te")),
        ("main_mla_mtp_moe_fr_tp2", TargetOptions(dialect="core-0.16")),
        ("main_gdn_fr_tp2", TargetOptions(layer_spec="te", dialect="bridge", tp=1)),
        ("main_moe_fr_ep2", TargetOptions(experts="sequential")),
        ("v015_moe_ms_etp2_shared", TargetOptions()),
        ("v013_dense_dpzero_tp2_dp2", TargetOptions()),
        ("bridge_hfimport", TargetOptions(layer_spec="te")),
    ],
)
def test_a_conversion_equals_its_source_in_both_directions(name, options, tmp_path):
    convert_to_fsdp_dtensor(root_of(name), str(tmp_path / "out"), ConvertOptions(target=options))
    for pair in ((root_of(name), str(tmp_path / "out")), (str(tmp_path / "out"), root_of(name))):
        report = diff_checkpoints(*pair)
        assert report.by == "parameters"
        assert [t.name for t in report.tensors if t.kind != "equal"] == []
        assert report.values == ()
        assert sum(t.elements for t in report.tensors) > 1000


@pytest.mark.parametrize("tp", [1, 2])
def test_packed_projections_are_compared_in_the_order_of_a_state_dict(tp, tmp_path):
    """Rows of a gated delta net are in an order that the tensor parallel size decides; the record tells which."""
    source = root_of("main_gdn_fr_tp2")
    convert_to_dcp(source, str(tmp_path / "dcp"), ConvertOptions(target=TargetOptions(tp=tp)))
    for pair in ((source, str(tmp_path / "dcp")), (str(tmp_path / "dcp"), source)):
        assert diff_checkpoints(*pair).is_equal


def test_two_layouts_of_one_run_are_equal():
    report = diff_checkpoints(
        root_of(LLAMA), root_of("core019_llama_tp2_dp_reshardable"), DiffOptions(ignore=SAME_RUNS)
    )
    assert (report.by, report.is_equal) == ("parameters", True)
    assert {s.role: s.tensors for s in summarize(report.tensors)}["master"] == 17


def test_native_training_is_near_its_conversion(tmp_path):
    convert_to_fsdp_dtensor(root_of(LLAMA), str(tmp_path / "out"))
    tensors, values = differences(root_of(NATIVE), tmp_path / "out")
    assert {t.kind for t in tensors} == {"values"}
    assert {v.name.split(".")[0] for v in values} == {"args"}
    near = {"tolerance": Tolerance(atol=1e-3), "ignore": ("rng_state*",)}
    assert differences(root_of(NATIVE), tmp_path / "out", **near)[0] == []


def test_one_changed_bit_is_named_with_its_index(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    key = "model.module.decoder.layers.1.mlp.linear_fc2.weight"
    _, _, data = payload_of(root, key, (0, 32))
    at = 5 * 32 + 7
    changed = bytearray(data)
    changed[4 * at] ^= 1
    replace_chunk(root, key, (0, 32), "float32", bytes(changed))
    (tensor,), values = differences(root_of(NATIVE), root)
    assert (tensor.name, tensor.found.different, tensor.found.index) == (key, 1, (5, 39))
    assert tensor.found.max_ulp == 1
    assert tensor.found.values == tuple(struct.unpack_from("<f", d, 4 * at)[0] for d in (data, changed))
    assert values == []
    assert differences(root_of(NATIVE), root, tolerance=Tolerance(ulp=1)) == ([], [])
    assert differences(root_of(NATIVE), root, ignore=("model.*",)) == ([], [])
    assert differences(root_of(NATIVE), root, keys=("optimizer.*", "args")) == ([], [])


def test_what_stands_on_one_side_only_is_named(tmp_path, capsys):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        drop_key(metadata, STATE + NORM + ".exp_avg")
        drop_key(metadata, "iteration")
    (tensor,), (value,) = differences(root_of(NATIVE), root)
    assert (tensor.name, tensor.kind, tensor.b) == (STATE + NORM + ".exp_avg", "only in A", None)
    assert (value.name, value.a, value.b) == ("iteration", "2", None)
    (tensor,), (value,) = differences(root, root_of(NATIVE))
    assert (tensor.kind, value.a, value.b) == ("only in B", None, "2")
    assert run(["diff", str(root_of(NATIVE)), str(root)]) == 1
    assert "iteration: 2 -> (absent)" in capsys.readouterr().out


def test_a_group_field_that_changed_is_named(tmp_path):
    root = copy_of(NATIVE, tmp_path)
    with metadata_of(root) as metadata:
        wrong = keys_with(metadata, "linear_proj.weight.weight_decay")[0]
        ((index, _),) = infos_of(metadata, wrong).values()
        ((_, right),) = infos_of(metadata, keys_with(metadata, f"{NORM}.weight_decay")[0]).values()
        metadata.storage_data[index] = right
    tensors, (value,) = differences(root_of(NATIVE), root)
    assert (tensors, value.name, value.a, value.b) == ([], wrong, "0.1", "0.0")


def test_shapes_and_types_that_differ_are_named(tmp_path):
    import torch

    root = copy_of(NATIVE, tmp_path)
    first, second = f"model.module.{NORM}", "model.module.output_layer.weight"
    with metadata_of(root) as metadata:
        stored = metadata.state_dict_metadata[first]
        stored.size = stored.chunks[0].sizes = type(stored.size)((16,))
        other = metadata.state_dict_metadata[second]
        other.properties.dtype = torch.int32
    tensors, _ = differences(root_of(NATIVE), root)
    assert {t.name: (t.kind, t.b) for t in tensors} == {
        first: ("shape", ("float32", (16,))),
        second: ("dtype", ("int32", (224, 32))),
    }


def test_other_types_are_a_difference_bitwise_and_compared_by_value_within_a_tolerance(tmp_path):
    for name, dtype in (("half", "bfloat16"), ("full", None)):
        options = ConvertOptions(target=TargetOptions(weights_only=True, dtype=dtype))
        convert_to_fsdp_dtensor(root_of(LLAMA), str(tmp_path / name), options)
    tensors, _ = differences(tmp_path / "half", tmp_path / "full")
    assert {t.kind for t in tensors} == {"dtype"}
    assert any(t.found.different for t in tensors)
    assert differences(tmp_path / "half", tmp_path / "full", tolerance=Tolerance(rtol=2**-8)) == ([], [])


def stored(dtype: str, shape: tuple[int, ...], *values: float, form: str = "f") -> StoredTensor:
    return StoredTensor(dtype, shape, struct.pack(f"<{len(values)}{form}", *values))


NAN, OTHER_NAN = (StoredTensor("float32", (1,), bytes.fromhex(bits)) for bits in ("0000c07f", "0100c07f"))
THREADS = ("a" * 300 + "x" + "b" * 300, "a" * 300 + "y" + "b" * 300)


def four(*last: float) -> StoredTensor:
    return stored("float32", (2, 2), 1, 2, *last)


MATRIX = "float32 [2, 2]: {}.0 at [1, 0], 2 of 4 differ"
CUT = "..." + "a" * 40 + "x" + "b" * 159 + "... ({} characters)"


@pytest.mark.parametrize(
    ("a", "b", "left", "right"),
    [
        (four(3, 4), four(7, 5), MATRIX.format(3), MATRIX.format(7)),
        (stored("int64", (), 5, form="q"), stored("int64", (), 6, form="q"), "int64 []: 5 at [], 1 of 1", None),
        (stored("float32", (2,), 1, 2), stored("float32", (1, 2), 1, 2), "float32 [2]", "float32 [1, 2]"),
        (stored("uint8", (2,), 1, 2, form="B"), stored("int8", (2,), 1, 2, form="b"), "uint8 [2]", "int8 [2]"),
        (NAN, OTHER_NAN, "float32 [1]: nan (0x7fc00000) at [0], 1 of 1 differ", None),
        (THREADS[0], THREADS[1], CUT.format(603), None),
        (THREADS[0].encode(), THREADS[1].encode(), CUT.format(604), None),
        ("a" * 300, "a" * 301, "..." + "a" * 40 + "'", "..." + "a" * 41 + "'"),
        ((*range(199), 0.5), (*range(199), -1), "0.5", "-1"),
        (1, True, "1", "True"),
        (OrderedDict([(n, 0) for n in range(90)]), OrderedDict([(n, 0) for n in reversed(range(90))]), None, None),
        ({*range(90)}, {*range(1, 91)}, None, None),
    ],
)  # fmt: skip
def test_what_differs_is_shown(a, b, left, right):
    """Never the same text for two values that are not the same."""
    found = list(diff_values("v", a, b, Tolerance(nan="bits")))
    assert len(found) == 1
    assert found[0].a != found[0].b
    assert left is None or (found[0].a or "").startswith(left)
    assert right is None or found[0].b == right
    assert max(len(found[0].a or ""), len(found[0].b or "")) < 260


def test_a_large_tensor_is_compared_in_bounded_memory(tmp_path):
    shape = (64, 1 << 20)  # 256 MiB, sparse on disk
    nbytes = 4 * shape[0] * shape[1]
    sides = []
    for name in ("a", "b"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, nbytes)
        chunk = Chunk(full_box(shape), Item(name, 0, nbytes, True))
        catalog = Catalog(str(tmp_path), {"w": TensorEntry("w", "float32", shape, (chunk,))}, {})
        target = TargetTensor("w", "float32", shape, (Source("w"),))
        sides.append(Side(LocalFiles(str(tmp_path)), catalog, {"w": target}, {}))
    with open(tmp_path / "b", "r+b") as file:
        file.seek(4 * (63 * shape[1] + 5))
        file.write(struct.pack("<f", 1.0))
    tracemalloc.start()
    with comparing(sides[0], sides[1], DiffOptions(threads=1)) as found:
        (tensor,) = found()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tensor.found.different, tensor.found.index) == (1, (63, 5))
    assert peak < 64 << 20


@pytest.mark.parametrize(
    ("words", "code"),
    [("", 1), ("--ulp 1", 0), ("--atol 0.5", 0), ("--rtol 0.5", 0), ("--ulp 1 --nan bits", 1),
     ("--ulp 1 --nan different", 1), ("--nan equal", 0)],
)  # fmt: skip
def test_nans_of_other_bits_are_equal_where_there_is_a_tolerance(tmp_path, words, code):
    for name, payload in (("a", 1), ("b", 2)):
        folder = DcpFolder(tmp_path / name)
        folder.tensor(
            "w", "float32", np.array([0x7FC00000 + payload, 0x3F800000], np.uint32).view(np.float32)
        )
        folder.finish()
    assert run(["diff", str(tmp_path / "a"), str(tmp_path / "b"), *words.split()]) == code


def test_the_report_does_not_depend_on_parts(tmp_path, monkeypatch):
    """Neither which difference is named as the largest, nor how many there are."""
    root = copy_of(LLAMA, tmp_path)
    for key in ("decoder.layers.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"):
        with metadata_of(root) as metadata:
            offset = tuple(metadata.state_dict_metadata[key].chunks[0].offsets)
        path, start, data = payload_of(root, key, offset)
        content = bytearray(path.read_bytes())
        for at in (1, len(data) // 2 | 1, len(data) - 1):
            content[start + at] ^= 4
        path.write_bytes(content)
    whole = diff_checkpoints(root_of(LLAMA), str(root))
    assert sum(t.found.different for t in whole.tensors) == 6
    monkeypatch.setattr("ckpt_tools.verify.content.values._PART_ELEMS", 128)
    monkeypatch.setattr("ckpt_tools.verify.content.values._TILE_ELEMS", 48)
    assert diff_checkpoints(root_of(LLAMA), str(root)) == whole


def test_a_round_trip_is_equal_by_keys(tmp_path, capsys):
    """What fsdp_dtensor never holds is a note, not a difference; one that both sides hold is compared."""
    source, there, back = str(root_of(LLAMA)), str(tmp_path / "there"), str(tmp_path / "back")
    assert run(["convert", source, there]) == 0
    out = capsys.readouterr().out
    assert "dropped" not in out and len(out.splitlines()) <= 8
    assert run(["convert", there, back, "--to", "torch_dist", "-q"]) == 0
    report = diff_checkpoints(source, back)
    assert report.by == "keys" and report.is_equal
    assert report.notes == ("rerun_state_machine is in A alone: not compared, no conversion carries it",)
    assert not diff_checkpoints(source, back, DiffOptions(keys=("rerun_state_machine*",))).is_equal
    copied = copy_of(LLAMA, tmp_path)
    with metadata_of(copied) as metadata:
        drop_key(metadata, "rerun_state_machine_state/shard_1_2")
    assert not diff_checkpoints(source, str(copied)).is_equal


@pytest.mark.parametrize(("name", "differing"), [("te_llama_dp2_buckets_fr", 0), ("te_fp8_tp2_fr", 8)])
def test_extra_states_that_hold_nothing_are_a_note(name, differing, tmp_path):
    """Empty tensors and None alike; FP8 scales that a conversion drops are differences, and so is a missing shard."""
    convert_to_fsdp_dtensor(root_of(name), str(tmp_path / "there"))
    convert_to_torch_dist(str(tmp_path / "there"), str(tmp_path / "back"))
    report = diff_checkpoints(root_of(name), str(tmp_path / "back"))
    assert (report.by, len(report.values)) == ("keys", differing)
    assert "extra states of Transformer Engine that hold nothing" in report.notes[-1]
    key = "decoder.layers.mlp.linear_fc1._extra_state/shard_1_2"
    assert not diff_checkpoints(
        root_of(name), str(tmp_path / "back"), DiffOptions(keys=("*_extra_state*",))
    ).is_equal
    with metadata_of(tmp_path / "back") as metadata:
        drop_key(metadata, key)
    more = {value.name for value in diff_checkpoints(root_of(name), str(tmp_path / "back")).values}
    assert {value.name.removesuffix(".0") for value in report.values} | {key} == {
        n.removesuffix(".0") for n in more
    }


@pytest.mark.parametrize(
    ("ranks", "tp"), [([(0, 0), (1, 0)], 1), ([(0, 0), (0, 1), (1, 0), (1, 1)], 2), ([], None)]
)
def test_ranks_of_a_pipeline_are_no_tensor_parallel_ones(ranks, tp, tmp_path):
    keys = [f"rng_state.{rank}.0.np_rng_state.0" for rank in ranks]
    catalog = Catalog("", {}, {key: ObjectEntry(key, Item("f", 0, 1)) for key in keys})
    opened = Opened(Location("dcp", str(tmp_path)), open_files(str(tmp_path)), catalog, CommonState({}, None))
    assert _recorded_tp("dcp", opened) == tp


LLAMA, FP8 = "core019_llama_tp2_fully_reshardable", "te_fp8_tp2_fr"
FC2 = "decoder.layers.mlp.linear_fc2.weight"
LIVE = [f"model.module.decoder.layers.{i}.mlp.linear_fc2.weight" for i in (0, 1)]
ZERO, NAN_BITS = b"\0\0", b"\xc0\x7f"


def filled(root: Path, key: str, dtype: str, element: bytes) -> None:
    """Every element of a stored tensor replaced, in payloads of valid checksums."""
    with metadata_of(root) as metadata:
        offsets = list(infos_of(metadata, key))
    assert offsets
    for offset in offsets:
        count = len(payload_of(root, key, offset)[2]) // len(element)
        replace_chunk(root, key, offset, dtype, element * count)


def damaged(tmp_path: Path, element: bytes) -> Path:
    root: Path = copy_of(LLAMA, tmp_path)
    filled(root, FC2, "bfloat16", element)
    return root


def rows(report: DiffReport, role: str) -> list[TensorDiff]:
    return [t for t in report.tensors if t.role == role and t.kind != "equal"]


def compared(a: object, b: object, **options: Any) -> DiffReport:
    return diff_checkpoints(str(a), str(b), DiffOptions(**options))


@pytest.mark.parametrize("element", [ZERO, NAN_BITS], ids=["zeros", "nan"])
def test_destroyed_weights_behind_sound_masters_differ(element, tmp_path, capsys):
    convert_to_fsdp_dtensor(str(fixture_dir(LLAMA)), str(tmp_path / "fsdp"))
    source = damaged(tmp_path, element)
    for pair in ((source, tmp_path / "fsdp"), (tmp_path / "fsdp", source)):
        report = compared(*pair)
        assert not report.is_equal
        assert [t.name for t in rows(report, "weight")] == LIVE
        assert [t.found.different for t in rows(report, "weight")] == [2048, 2048]
        assert rows(report, "master") == []
        at_source = [t.a if pair[0] == source else t.b for t in rows(report, "weight")]
        assert at_source == [("bfloat16", (32, 64))] * 2
        summary = {row.role: row for row in summarize(report.tensors)}
        assert (summary["weight"].tensors, summary["weight"].different, summary["master"].equal) == (
            17,
            2,
            17,
        )
    words = ["diff", str(tmp_path / "fsdp"), str(source)]
    assert run(words) == 1
    assert f"{LIVE[0]} (weight)" in capsys.readouterr().out
    assert run([*words, "--ignore", "*.linear_fc2.weight"]) == 0


@pytest.mark.parametrize("element", [ZERO, NAN_BITS], ids=["zeros", "nan"])
def test_a_state_dict_and_two_sides_with_weights(element, tmp_path):
    convert_to_dcp(str(fixture_dir(LLAMA)), str(tmp_path / "dcp"))
    source = damaged(tmp_path, element)
    assert compared(fixture_dir(LLAMA), tmp_path / "dcp").is_equal
    assert len(rows(compared(source, tmp_path / "dcp"), "weight")) == 2
    by = DiffRequest(by="parameters")
    assert len(rows(diff_checkpoints(fixture_dir(LLAMA), source, request=by), "weight")) == 2
    assert diff_checkpoints(source, source, request=by).is_equal


def with_norm(tmp_path: Path, name: str, master: int, weight: int) -> Path:
    """A copy whose final norm is this number everywhere, as fp32 and as bf16 bits."""
    (tmp_path / name).mkdir()
    root: Path = copy_of(LLAMA, tmp_path / name)
    filled(root, f"optimizer.state.param.{NORM}", "float32", struct.pack("<I", master))
    filled(root, NORM, "bfloat16", struct.pack("<H", weight))
    return root


def test_of_two_weights_as_near_either_belongs_to_the_master_and_the_odd_ones_are_counted(tmp_path, capsys):
    even, odd = (with_norm(tmp_path, f"{w:x}", 0x3F808000, w) for w in (0x3F80, 0x3F81))
    kept, lost = (
        convert_to_fsdp_dtensor(str(s), str(tmp_path / n)) for s, n in ((even, "fsdp"), (odd, "odd"))
    )
    assert lost.dropped[1:] == kept.dropped
    assert lost.dropped[0].startswith("stored weights: 32 of ")
    assert compared(even, tmp_path / "fsdp").accepted == (0, 0)
    for pair in ((odd, tmp_path / "fsdp"), (tmp_path / "fsdp", odd)):
        assert (compared(*pair).is_equal, compared(*pair).accepted) == (True, (32, 1))
    assert run(["diff", str(odd), str(tmp_path / "fsdp")]) == 0
    assert capsys.readouterr().out.startswith(
        "equal, but 32 elements of 1 stored weights are not their masters"
    )
    (row,) = rows(diff_checkpoints(even, odd, request=DiffRequest(by="parameters")), "weight")
    assert (row.found.different, row.found.accepted) == (32, 0)
    wrong = with_norm(tmp_path, "wrong", 0x3F808000, 0x3F82)
    (row,) = rows(compared(wrong, tmp_path / "fsdp"), "weight")
    assert (row.name, row.found.different) == (f"model.module.{NORM}", row.elements)
    assert row.found.values == (1.015625, 1.0)


def test_masters_within_the_tolerance_excuse_their_weights(tmp_path):
    """They lie on two sides of the middle between two weights, which are further apart than the tolerance."""
    low = with_norm(tmp_path, "low", 0x3F807FFF, 0x3F80)
    high = with_norm(tmp_path, "high", 0x3F808001, 0x3F81)
    convert_to_fsdp_dtensor(str(low), str(tmp_path / "fsdp"))
    report = compared(high, tmp_path / "fsdp")
    assert [len(rows(report, role)) for role in ("master", "weight")] == [1, 1]
    assert compared(high, tmp_path / "fsdp", tolerance=Tolerance(rtol=1e-6)).is_equal
    wrong = with_norm(tmp_path, "wrong", 0x3F808001, 0x3F82)
    near = compared(wrong, tmp_path / "fsdp", tolerance=Tolerance(rtol=1e-6))
    assert [len(rows(near, role)) for role in ("master", "weight")] == [0, 1]


def test_weights_held_in_fp8_belong_to_their_masters(tmp_path):
    source: Path = copy_of(FP8, tmp_path)
    convert_to_fsdp_dtensor(str(source), str(tmp_path / "fsdp"))
    report = compared(source, tmp_path / "fsdp")
    assert report.is_equal
    assert sum(t.role == "weight" for t in report.tensors) == sum(t.role == "master" for t in report.tensors)
    filled(source, FC2, "bfloat16", ZERO)
    assert {t.name for t in rows(compared(source, tmp_path / "fsdp"), "weight")} == set(LIVE)


def test_weights_held_in_fp8_that_a_conversion_rounds_anew_differ(tmp_path):
    source = root_of("te_fp8param_tp2_fr")
    convert_to_fsdp_dtensor(source, str(tmp_path / "there"))
    convert_to_torch_dist(str(tmp_path / "there"), str(tmp_path / "back"))
    there = compared(source, tmp_path / "there")
    assert (there.is_equal, there.accepted) == (True, (68900, 10))
    back = diff_checkpoints(source, str(tmp_path / "back"), request=DiffRequest(by="parameters"))
    assert (len(rows(back, "weight")), sum(t.found.different for t in rows(back, "weight"))) == (10, 68900)
    assert (rows(back, "master"), back.accepted) == ([], (0, 0))


def test_weights_that_no_rounding_is_known_for_are_named():
    master = TargetTensor("w", "float32", (2,), (Source("m"),))
    beside = TargetTensor(
        "w", "float32", (2,), (Source("m"),), must_round_to=(Source("w"),), must_round_dtype="float8_e4m3fn"
    )
    a, b = (Side(LocalFiles("."), Catalog(".", {}, {}), {"w": t}, {}) for t in (beside, master))
    (note,) = weights_not_compared(a, b, DiffOptions())
    assert note.startswith("the stored weights of 1 masters, w the first, were not compared")


def told(
    role: Role, dtype: str = "float32", shape: tuple[int, ...] = (2,), behind: str | None = None
) -> TargetTensor:
    weights = (Source("w"),) if behind else ()
    return TargetTensor(
        "t", dtype, shape, (Source("x"),), role=role, must_round_to=weights, must_round_dtype=behind
    )


@pytest.mark.parametrize(
    ("a", "b", "role", "kind"),
    [
        (told("weight", "bfloat16"), told("master"), "master", "equal"),
        (told("weight", "bfloat16"), told("weight"), "weight", "equal"),
        (told("exp_avg"), told("weight"), "exp_avg", "equal"),
        (told("master"), None, "master", "only in A"),
        (None, told("exp_avg"), "exp_avg", "only in B"),
        (told("weight"), told("master", shape=(3,)), "master", "shape"),
        (told("weight", "int8"), told("weight"), "weight", "dtype"),
        (told("weight", "int8"), told("weight", "int8"), "weight", "equal"),
    ],
)  # fmt: skip
def test_a_weight_against_a_master_is_a_master(a, b, role, kind):
    row = _by_form("t", a, b)
    assert (row.role, row.kind) == (role, kind)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("behind", "other", "has", "can"),
    [
        (None, told("master"), False, True),
        ("bfloat16", told("master"), True, True),
        ("bfloat16", told("weight", "float16"), True, True),
        ("float8_e4m3fn", told("master"), True, False),
        ("bfloat16", told("master", behind="int8"), True, False),
        ("int8", told("master", behind="int8"), True, True),
        ("bfloat16", told("weight", "int8"), True, False),
    ],
)
def test_weights_behind_one_side_are_weights(behind, other, has, can, turned):
    pair = [told("master", behind=behind), other][:: -1 if turned else 1]
    assert (has_weights(pair), can_round(pair)) == (has, can)
