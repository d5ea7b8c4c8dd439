"""Made tensors through plan, pump and box reader: equal to numpy on whole tensors, whatever the views and chunks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.errors import CorruptCheckpointError
from ckpt_tools.execute.move.read_box import read_box
from ckpt_tools.execute.run import Output, WriteOptions, write_checkpoint
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Catalog, Made, Value, made_entry
from ckpt_tools.model.dtypes import Form
from ckpt_tools.model.kernels.casts import Array
from ckpt_tools.model.kernels.kernel import Dequantize, JoinRemainder, WeightedMean, reshaped
from ckpt_tools.model.kernels.packed import DecodeMxfp4
from ckpt_tools.model.target import Target, TargetTensor
from ckpt_tools.model.transfers import COMPUTED, plan_summary
from ckpt_tools.model.views import Narrow, Permute, Place, Select, Source, view_shape
from ckpt_tools.plan.build import build_plan
from tests.commands import oracle
from tests.execute.conftest import opened
from tests.model.test_kernels import masters
from tests.plan.test_build import rows
from tests.strategies import shapes, tilings, viewed_shapes
from tests.synthetic import DcpFolder


@dataclass(frozen=True)
class Remainders:
    """A weight and its remainders on disk, the catalog with their master, and the master."""

    folder: Path
    catalog: Catalog
    master: Array


def stored_remainders(
    folder: Path, shape: tuple[int, ...], chunks: Sequence[Box], dtype: str = "int16", seed: int = 3
) -> Remainders:
    weight, remainder, master = masters(np.random.default_rng(seed), shape, exponents=2)
    source = DcpFolder(folder)
    source.tensor("weight", "bfloat16", weight, chunks)
    source.tensor("remainder", dtype, remainder.astype(dtype), chunks[::-1])
    _, catalog = opened(source)
    inputs = (Value("bfloat16", shape, (Source("weight"),)), Value(dtype, shape, (Source("remainder"),)))
    entry = made_entry("master", Made(JoinRemainder(dtype), inputs))
    return Remainders(folder, replace(catalog, tensors={**catalog.tensors, "master": entry}), master)


def converted(
    case: Remainders, target: TargetTensor, output: Path, world: int = 1, memory: int = 96 << 20
) -> Array:
    """The target written and read back by stock torch."""
    plan = build_plan(case.catalog, Target((target,)), rows(world), world)
    files = open_files(str(case.folder))
    write_checkpoint(plan, files, Output(output), WriteOptions(threads=1, memory_bytes=memory))
    return oracle.tensors(output)[target.key].numpy()


@settings(max_examples=40)
@given(data=st.data())
def test_any_view_of_a_master_is_the_view_of_the_whole_one(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("view")
    shape, view = data.draw(viewed_shapes().filter(lambda sv: 0 not in view_shape(sv[1], sv[0])))
    case = stored_remainders(folder / "source", shape, data.draw(tilings(shape)))
    whole = replace(case.catalog.tensors["master"], chunks=(), made=None)
    target = TargetTensor(
        "t", "float32", view_shape(view, shape), (Source("master", view),), zero_filled=True
    )
    plain = DcpFolder(folder / "plain")
    plain.tensor("master", whole.dtype, case.master)
    expected = read_box(*opened(plain), target, full_box(target.shape))
    found = read_box(open_files(str(case.folder)), case.catalog, target, full_box(target.shape))
    assert found.tobytes() == expected.tobytes()
    written = converted(case, target, folder / "out", data.draw(st.integers(1, 3)))
    assert written.tobytes() == expected.tobytes()


@pytest.mark.parametrize("view", [(), (Permute((1, 0)),), (Narrow(0, 3, 40), Place((2, 0), (64, 512)))])
def test_tiles_bound_what_a_kernel_works_on(view, tmp_path, monkeypatch):
    shape = (64, 512)
    chunks = [Box((0, 0), (20, 512)), Box((20, 0), (44, 512))]
    case = stored_remainders(tmp_path / "s", shape, chunks, "float32")
    target = TargetTensor(
        "t", "float32", view_shape(view, shape), (Source("master", view),), zero_filled=True
    )
    worked_on: list[int] = []
    compute = JoinRemainder.compute

    def watched(self: JoinRemainder, box: Box, tiles: Sequence[Array]) -> Array:
        worked_on.append(box.volume)
        return compute(self, box, tiles)

    monkeypatch.setattr(JoinRemainder, "compute", watched)
    tile = 64 << 10
    written = converted(case, target, tmp_path / "o", memory=3 * tile)
    assert max(worked_on) * 4 <= tile
    assert sum(worked_on) <= np.prod(target.shape)  # nothing is computed twice
    shown = case.master if not view else case.master.T if isinstance(view[0], Permute) else case.master[3:43]
    assert (written[2:42] if len(view) == 2 else written).tobytes() == np.ascontiguousarray(shown).tobytes()


def test_the_plan_says_what_is_computed_and_from_which_bytes(tmp_path):
    case = stored_remainders(tmp_path / "s", (8, 4), [full_box((8, 4))])
    target = TargetTensor("t", "float32", (4, 4), (Source("master", (Narrow(0, 2, 4),)),))
    plan = build_plan(case.catalog, Target((target,)), rows(1), 1)
    assert plan.source_files == ["__0_0.distcp"]
    assert plan_summary(plan)["bytes_by_strategy"] == {COMPUTED: 16 * (2 + 2)}
    other = replace(target, sources=(Source("master", (Narrow(0, 1, 4),)),))
    assert plan.digest != build_plan(case.catalog, Target((other,)), rows(1), 1).digest


def test_a_master_may_be_cast_and_made_of_made_tensors(tmp_path):
    """The mean of two masters, each joined, written in half precision."""
    shape = (6, 4)
    case = stored_remainders(tmp_path / "s", shape, [full_box(shape)])
    masters_ = Value("float32", shape, (Source("master"),))
    mean = made_entry("mean", Made(WeightedMean("float32", (0.5, 0.5)), (masters_, masters_)))
    case = replace(case, catalog=replace(case.catalog, tensors={**case.catalog.tensors, "mean": mean}))
    target = TargetTensor("t", "float16", shape, (Source("mean"),))
    with np.errstate(over="ignore"):
        expected = case.master.astype(np.float16)
    assert np.isfinite(expected).all()
    assert converted(case, target, tmp_path / "o").tobytes() == expected.tobytes()


def test_numbers_that_no_writer_writes_are_damage_with_key_and_box(tmp_path):
    source = DcpFolder(tmp_path / "s")
    source.tensor("weight", "bfloat16", np.zeros((2, 2), np.uint16))
    source.tensor("remainder", "float32", np.array([[0, 1], [0.5, 2]], np.float32))
    files, catalog = opened(source)
    inputs = tuple(catalog.tensors[key].value for key in ("weight", "remainder"))
    entry = made_entry("master", Made(JoinRemainder("float32"), inputs))
    catalog = replace(catalog, tensors={**catalog.tensors, "master": entry})
    target = TargetTensor("t", "float32", (2, 2), (Source("master"),))
    with pytest.raises(CorruptCheckpointError, match=r"master \[0:2, 0:2\]: 0.5 is not a 16-bit remainder"):
        read_box(files, catalog, target, full_box((2, 2)))


@given(st.data(), shapes(2, 2, max_side=9))
def test_block_scales_follow_any_box(data, shape):
    kernel = Dequantize("float8_e4m3fn", (2, 3))
    grid = tuple(-(-n // b) for n, b in zip(shape, kernel.block, strict=True))
    forms = [Form("float8_e4m3fn", shape), Form("float32", grid)]
    for box in data.draw(tilings(shape)):
        values, scales = kernel.needs(box, forms)
        assert values == box
        assert all(a * b <= c and d <= e * b for a, e, b, c, d in zip(
            scales.start, scales.stop, kernel.block, box.start, box.stop, strict=True))  # fmt: skip
        assert full_box(grid).contains(scales)


@pytest.mark.parametrize(
    ("view", "shown"),
    [
        ((), np.s_[:]),
        ((Permute((2, 3, 1, 0)),), np.s_[:]),
        ((Select(3, 1), Narrow(1, 5, 40)), np.s_[:, 5:45, :, 1]),
        ((Select(3, 0), Select(0, 1), Permute((1, 0))), np.s_[1, :, :, 0]),
        ((Narrow(2, 2, 1),), np.s_[:, :, 2:3]),
    ],
)
def test_a_kernel_may_return_a_view(view, shown, tmp_path):
    """MXFP4 is decoded along its rows, and is shown turned and with its rows in pairs."""
    rng = np.random.default_rng(5)
    shape = (2, 600, 2, 16)
    blocks, scales = rng.integers(0, 256, shape, np.uint8), rng.integers(110, 130, shape[:-1], np.uint8)
    source = DcpFolder(tmp_path / "s")
    source.tensor(
        "blocks", "uint8", blocks, [Box((0, 0, 0, 0), (2, 401, 2, 16)), Box((0, 401, 0, 0), (2, 199, 2, 16))]
    )
    source.tensor("scales", "uint8", scales)
    files, catalog = opened(source)
    inputs = tuple(catalog.tensors[key].value for key in ("blocks", "scales"))
    whole = DecodeMxfp4().compute(full_box((2, 64, 600)), [blocks, scales]).reshape(2, 64, 300, 2)
    entry = made_entry("made", Made(reshaped(DecodeMxfp4(), (2, 64, 600), whole.shape), inputs))
    catalog = replace(catalog, tensors={**catalog.tensors, "made": entry})
    target = TargetTensor("t", "bfloat16", view_shape(view, whole.shape), (Source("made", view),))
    expected = whole[shown]
    for step in view:
        expected = expected.transpose(step.order) if isinstance(step, Permute) else expected
    plan = build_plan(catalog, Target((target,)), rows(1), 1)
    write_checkpoint(plan, files, Output(tmp_path / "o"), WriteOptions(threads=1, memory_bytes=192 << 10))
    written = oracle.tensors(tmp_path / "o")["t"]
    assert written.view(torch.uint16).numpy().tobytes() == np.ascontiguousarray(expected).tobytes()
