"""Optimizer keys that name weights: spellings, missing masters, masters or remainders, and what is refused."""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import (
    CorruptCheckpointError,
    MappingError,
    UnsupportedCheckpointError,
    VerificationError,
)
from ckpt_tools.execute.move.read_box import read_box
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.torch_dist.optimizer_layouts.reader import read_optimizer_states
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import OptimizerStates, model_space_states
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Catalog, Chunk, Item, TensorEntry
from ckpt_tools.model.kernels.casts import Array
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import Select, Source
from tests.model.test_kernels import masters
from tests.synthetic import DcpFolder

from .materialise import read_sources
from .synthetic import MemoryFiles

WEIGHT = "decoder.layers.mlp.linear_fc2.weight"


def catalog(shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str] | None = None) -> Catalog:
    def entry(key: str, shape: tuple[int, ...]) -> TensorEntry:
        dtype = (dtypes or {}).get(key, "float32")
        return TensorEntry(key, dtype, shape, (Chunk(full_box(shape), Item("f", 0, 1)),))

    return Catalog("memory", {k: entry(k, s) for k, s in shapes.items()}, {})


def state(kind: str, weight: str = WEIGHT) -> str:
    return f"optimizer.state.{kind}.{weight}"


@pytest.mark.parametrize("master", ["param", "fp32_param", ""])
@pytest.mark.parametrize("prefix", ["", "chained_1."])
def test_both_spellings_of_masters_and_the_chain_prefix(prefix, master):
    stored = {kind: prefix + state(kind) for kind in ("exp_avg", "momentum_buffer", master) if kind}
    made = catalog({WEIGHT: (4, 8, 6), **dict.fromkeys(stored.values(), (4, 8, 6))})
    found = read_optimizer_states(MemoryFiles(), made, CommonState({}, None))
    assert found is not None and found.consumed == set(stored.values())
    assert found.kinds == (*(["master"] if master else []), "exp_avg", "momentum_buffer")
    if master:
        assert found.sources("master", WEIGHT, (3,)) == (Source(stored[master], (Select(0, 3),)),)
        assert found.states["exp_avg", WEIGHT].dtype == "float32"
    else:
        with pytest.raises(MappingError, match=f"no optimizer state 'master' is stored for {WEIGHT}"):
            found.sources("master", WEIGHT)


def test_no_optimizer():
    assert read_optimizer_states(MemoryFiles(), catalog({WEIGHT: (2, 3)}), CommonState({}, None)) is None


@pytest.mark.parametrize(
    ("shapes", "dtype", "error", "messages"),
    [
        ({state("param"): (4, 6), state("fp32_param"): (4, 6)}, "float32", CorruptCheckpointError, ["another key"]),
        *(({state(kind): (4, 6)}, dtype, UnsupportedCheckpointError, ["precision-aware", f"{WEIGHT} is {dtype}"])
          for kind, dtype in (("param", "uint8"), ("exp_avg", "int16"), ("exp_avg_sq", "float8_e4m3fn"))),
        ({state("exp_avg"): (4, 5), state("exp_avg_sq"): (3, 1, 8), state("exp_avg", "gone.weight"): (4,)}, "float32",
         MappingError, ["3 optimizer states", "shape (4, 5), but the weight has shape (4, 6)",
                        f"exp_avg_sq.{WEIGHT}: Defragment", "there is no weight gone.weight"]),
    ],
)  # fmt: skip
def test_states_that_do_not_fit_are_refused_by_name(shapes, dtype, error, messages):
    with pytest.raises(error) as caught:
        model_space_states(catalog({WEIGHT: (4, 6), **shapes}, dict.fromkeys(shapes, dtype)), "x")
    assert [text for text in messages if text not in str(caught.value)] == []


Floats = npt.NDArray[np.float32]


def flatten(value: Floats, fragments: tuple[int, ...]) -> Floats:
    """What Megatron stored (v0.15 strategies/resharding.py): row c is the flattened part at grid position c."""
    local = tuple(n // f for n, f in zip(value.shape, fragments, strict=True))
    out = np.empty((*fragments, math.prod(local)), np.float32)
    for cell in np.ndindex(*fragments):
        part = value[tuple(slice(c * n, (c + 1) * n) for c, n in zip(cell, local, strict=True))]
        out[cell] = part.reshape(-1)
    return out


def stored(
    files: MemoryFiles,
    weight: tuple[str, tuple[int, ...]],
    state: Floats,
    originals: dict[str, tuple[int, ...]] | None,
    pieces: int = 1,
) -> Catalog:
    """A catalog of a weight (key, shape) and its exp_avg, cut into data-parallel chunks along the last axis."""
    key = f"optimizer.state.exp_avg.{weight[0]}"
    grid, row = state.shape[:-1], state.shape[-1]
    cuts = sorted({row * i // pieces for i in range(pieces + 1)})
    chunks = [
        Chunk(Box((*cell, a), (*(1 for _ in grid), b - a)), files.add("f", state[cell][a:b]))
        for cell in np.ndindex(*grid)
        for a, b in itertools.pairwise(cuts)
    ]
    tensors = {
        weight[0]: TensorEntry(weight[0], "bfloat16", weight[1], ()),
        key: TensorEntry(key, "float32", state.shape, tuple(chunks)),
    }
    return Catalog("memory", tensors, {}, original_shapes=originals)


@st.composite
def cut_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    fragments = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    return tuple(f * draw(st.integers(1, 3)) for f in fragments), fragments


@given(cut=cut_shapes(), pieces=st.integers(1, 3), noted=st.booleans(), data=st.data())
def test_any_cut_is_undone(cut, pieces, noted, data):
    """All axes may be cut at once, and any number of leading axes selected; with and without `mcore_data`."""
    shape, fragments = cut
    value = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    files = MemoryFiles()
    originals = {"optimizer.state.exp_avg.w": shape} if noted else None
    catalog = stored(files, ("w", shape), flatten(value, fragments), originals, pieces)
    states = model_space_states(catalog, "fully_sharded_model_space")
    lead = tuple(data.draw(st.integers(0, n - 1)) for n in shape[: data.draw(st.integers(0, len(shape)))])
    got = read_sources(files, catalog, states, states.sources("exp_avg", "w", lead))
    assert got.tobytes() == np.ascontiguousarray(value[lead]).tobytes()


def test_one_dimensional_states_before_core_0_11_are_stored_as_they_are():
    """Synthetic: 1-D states had no entry in `mcore_data` and their own shape, cut by data parallelism only."""
    value = np.arange(12, dtype=np.float32)
    files = MemoryFiles()
    catalog = stored(files, ("decoder.final_layernorm.weight", (12,)), value, {}, pieces=3)
    states = model_space_states(catalog, "x")
    assert states.states["exp_avg", "decoder.final_layernorm.weight"].whole.view == ()  # type: ignore[union-attr]
    got = read_sources(files, catalog, states, states.sources("exp_avg", "decoder.final_layernorm.weight"))
    assert got.tobytes() == value.tobytes()


def test_a_note_of_another_shape_is_refused():
    files = MemoryFiles()
    state = np.zeros((1, 1, 24), np.float32)
    catalog = stored(files, ("w", (4, 6)), state, {"optimizer.state.exp_avg.w": (3, 8)})
    with pytest.raises(
        MappingError, match=r"flattened from shape \(3, 8\), but the weight has shape \(4, 6\)"
    ):
        model_space_states(catalog, "x")


def grouped_mlp(
    hidden: int,
    ffn: int,
    tp: int,
    *,
    gated: bool,
    transposed: bool,
    noted: bool,
    layers: int = 2,
    experts: int = 3,
) -> tuple[MemoryFiles, Catalog, dict[str, Floats]]:
    """Expert states as core <= 0.15 flattened them; legacy GroupedMLP in its own, transposed layout.

    Synthetic, from v0.15 moe/experts.py `GroupedMLP.sharded_state_dict`: local shapes [1, H, F/tp] for each half of
    fc1 and [1, F/tp, H] for fc2.
    """
    files = MemoryFiles()
    rng = np.random.default_rng(0)
    out = (2 if gated else 1) * ffn
    module = "decoder.layers.mlp.experts.experts."
    values = {
        f"{module}linear_fc1.weight": rng.random((layers, experts, out, hidden), np.float32),
        f"{module}linear_fc2.weight": rng.random((layers, experts, hidden, ffn), np.float32),
    }
    tensors: dict[str, TensorEntry] = {}
    originals: dict[str, tuple[int, ...]] = {}
    for key, value in values.items():
        parts = tp * (2 if gated and "fc1" in key else 1)
        cut = (parts, 1) if "fc1" in key else (1, parts)
        written = value.swapaxes(-1, -2) if transposed else value
        cut = cut[::-1] if transposed else cut
        state = flatten(np.ascontiguousarray(written), (layers, experts, *cut))
        one = stored(files, (key, value.shape), state, None)
        tensors |= one.tensors
        originals[f"optimizer.state.exp_avg.{key}"] = written.shape
    return files, Catalog("memory", tensors, {}, original_shapes=originals if noted else None), values


@pytest.mark.parametrize("noted", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("hidden", "ffn"), [(8, 8), (8, 12), (8, 4)])
def test_legacy_grouped_experts(*, hidden, ffn, transposed, tp, gated, noted):
    """(8, 8): fc2 is square; (8, 4) gated: fc1 is. Shapes decide, unless nothing is cut and no shape noted or
    everything is square; then the training argument does."""
    files, catalog, values = grouped_mlp(hidden, ffn, tp, gated=gated, transposed=transposed, noted=noted)
    undecided = not gated and tp == 1 and (hidden == ffn or not noted)
    states = model_space_states(catalog, "x", transposed if undecided else None)
    for key, value in values.items():
        got = read_sources(files, catalog, states, states.sources("exp_avg", key, (1, 2)))
        assert got.tobytes() == np.ascontiguousarray(value[1, 2]).tobytes()


SHAPE = (6, 300)
CHUNKS = [Box((0, 0), (2, 300)), Box((2, 0), (4, 300))]
OTHER = [Box((0, 0), (6, 130)), Box((0, 130), (6, 170))]


def numbers(seed: int = 1, shape: tuple[int, ...] = SHAPE) -> tuple[Array, Array, Array]:
    """bf16 weights, float32 remainders and the masters of both; no master lies midway between two weights."""
    weight, remainder, _ = masters(np.random.default_rng(seed), shape, exponents=2)
    remainder = np.where(remainder == -(1 << 15), np.int16(1), remainder).astype(np.int16)
    joined = ((weight.astype(np.uint32) << 16) + remainder.astype(np.int32).view(np.uint32)).view(np.float32)
    return weight, remainder.astype(np.float32), joined


def common(aware: bool | None) -> CommonState:
    values = {} if aware is None else {"use_precision_aware_optimizer": aware}
    return CommonState({}, None, model_config=values)


def stored_numbers(
    folder: Path, tensors: Mapping[str, tuple[Array, Array]], aware: bool | None = True
) -> tuple[Catalog, OptimizerStates]:
    """(weight, what stands in the place of its master) by name, read back."""
    source = DcpFolder(folder)
    for name, (weight, param) in tensors.items():
        cut = weight.shape == SHAPE
        source.tensor(name, "bfloat16", weight, CHUNKS if cut else None)
        source.tensor(f"optimizer.state.param.{name}", str(param.dtype), param, OTHER if cut else None)
        source.tensor(f"optimizer.state.exp_avg.{name}", "float32", param.astype(np.float32))
    source.finish()
    files = open_files(str(folder))
    catalog = read_catalog(files)
    states = read_optimizer_states(files, catalog, common(aware))
    assert states is not None
    return Catalog(catalog.root, {**catalog.tensors, **states.payloads}, {}), states


def master(folder: Path, catalog: Catalog, states: OptimizerStates, name: str) -> bytes:
    shape = catalog.tensors[name].shape
    target = TargetTensor(
        "t", states.states["master", name].dtype, shape, states.sources("master", name), zero_filled=False
    )
    return read_box(open_files(str(folder)), catalog, target, full_box(shape)).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_remainders_are_joined_whatever_their_chunks(dtype, tmp_path):
    weight, remainder, joined = numbers()
    catalog, states = stored_numbers(tmp_path / "s", {"a.weight": (weight, remainder.astype(dtype))})
    assert states.has_made
    assert master(tmp_path / "s", catalog, states, "a.weight") == joined.tobytes()


@pytest.mark.parametrize(
    ("plain", "aware"), [(True, True), (True, False), (True, None), (False, False), (False, None)]
)
def test_plain_masters_stay_as_they_are_and_so_do_whole_numbers_where_no_setting_allows_remainders(
    plain, aware, tmp_path
):
    """The proof of masters then says of the latter that they do not round."""
    weight, remainder, joined = numbers()
    catalog, states = stored_numbers(
        tmp_path / "s", {"a.weight": (weight, joined if plain else remainder)}, aware
    )
    assert not states.has_made
    assert master(tmp_path / "s", catalog, states, "a.weight") == (joined if plain else remainder).tobytes()


ZERO = (np.zeros(4, np.uint16), np.zeros(4, np.float32))


def test_what_can_be_both_follows_the_others(tmp_path):
    weight, remainder, joined = numbers()
    _, states = stored_numbers(tmp_path / "1", {"a.weight": (weight, remainder), "a.bias": ZERO})
    assert states.states["master", "a.bias"].dtype == "float32"
    assert len(states.payloads) == 2
    _, states = stored_numbers(tmp_path / "2", {"a.weight": (weight, joined), "a.bias": ZERO})
    assert not states.has_made


def test_what_can_be_both_and_has_no_company_is_refused(tmp_path):
    with pytest.raises(
        VerificationError, match=r"masters as well as the remainders(.|\n)*a\.bias(.|\n)*--weights-only"
    ):
        stored_numbers(tmp_path / "1", {"a.bias": ZERO})
    (weight, remainder, _), (other, _, joined) = numbers(1), numbers(2)
    with pytest.raises(VerificationError, match="as well as"):
        stored_numbers(
            tmp_path / "2", {"a.weight": (weight, remainder), "b.weight": (other, joined), "a.bias": ZERO}
        )


def test_remainders_beside_weights_of_another_type_are_refused(tmp_path):
    source = DcpFolder(tmp_path / "s")
    source.tensor("w", "float16", np.zeros(4, np.float16))
    source.tensor("optimizer.state.param.w", "int16", np.zeros(4, np.int16))
    source.tensor("optimizer.state.exp_avg.w", "float32", np.zeros(4, np.float32))
    source.finish()
    files = open_files(str(tmp_path / "s"))
    with pytest.raises(
        MappingError, match=r"master of w cannot be joined: int16 remainders belong to bfloat16"
    ):
        read_optimizer_states(files, read_catalog(files), common(True))
