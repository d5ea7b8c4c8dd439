"""Masters or remainders: what numbers under one key and of one type are, told by the numbers alone."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from ckpt_tools.errors import MappingError, VerificationError
from ckpt_tools.execute.move.read_box import read_box
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.torch_dist.optimizer_layouts.reader import read_optimizer_states
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import OptimizerStates
from ckpt_tools.model.box import Box, full_box
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.kernels.casts import Array
from ckpt_tools.model.target import TargetTensor
from tests.model.test_kernels import masters
from tests.synthetic import DcpFolder

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


def stored(
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
    catalog, states = stored(tmp_path / "s", {"a.weight": (weight, remainder.astype(dtype))})
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
    catalog, states = stored(tmp_path / "s", {"a.weight": (weight, joined if plain else remainder)}, aware)
    assert not states.has_made
    assert master(tmp_path / "s", catalog, states, "a.weight") == (joined if plain else remainder).tobytes()


ZERO = (np.zeros(4, np.uint16), np.zeros(4, np.float32))


def test_what_can_be_both_follows_the_others(tmp_path):
    weight, remainder, joined = numbers()
    _, states = stored(tmp_path / "1", {"a.weight": (weight, remainder), "a.bias": ZERO})
    assert states.states["master", "a.bias"].dtype == "float32"
    assert len(states.payloads) == 2
    _, states = stored(tmp_path / "2", {"a.weight": (weight, joined), "a.bias": ZERO})
    assert not states.has_made


def test_what_can_be_both_and_has_no_company_is_refused(tmp_path):
    with pytest.raises(
        VerificationError, match=r"masters as well as the remainders(.|\n)*a\.bias(.|\n)*--weights-only"
    ):
        stored(tmp_path / "1", {"a.bias": ZERO})
    (weight, remainder, _), (other, _, joined) = numbers(1), numbers(2)
    with pytest.raises(VerificationError, match="as well as"):
        stored(tmp_path / "2", {"a.weight": (weight, remainder), "b.weight": (other, joined), "a.bias": ZERO})


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
