"""Optimizer keys that name weights: spellings, prefixes, missing masters, and what is refused."""

from __future__ import annotations

import pytest

from ckpt_tools.errors import CorruptCheckpointError, MappingError, UnsupportedCheckpointError
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.torch_dist.optimizer_layouts.natural import model_space_states
from ckpt_tools.megatron.torch_dist.optimizer_layouts.reader import read_optimizer_states
from ckpt_tools.model.box import full_box
from ckpt_tools.model.catalog import Catalog, Chunk, Item, TensorEntry
from ckpt_tools.model.views import Select, Source

from .synthetic import MemoryFiles

WEIGHT = "decoder.layers.mlp.linear_fc2.weight"


def catalog(shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str] | None = None) -> Catalog:
    def entry(key: str, shape: tuple[int, ...]) -> TensorEntry:
        dtype = (dtypes or {}).get(key, "float32")
        return TensorEntry(key, dtype, shape, (Chunk(full_box(shape), Item("f", 0, 1)),))

    return Catalog("memory", {k: entry(k, s) for k, s in shapes.items()}, {})


@pytest.mark.parametrize("master", ["param", "fp32_param"])
@pytest.mark.parametrize("prefix", ["", "chained_1."])
def test_both_spellings_of_masters_and_the_chain_prefix(prefix: str, master: str) -> None:
    keys = {kind: f"{prefix}optimizer.state.{kind}.{WEIGHT}" for kind in ("exp_avg", master)}
    states = model_space_states(catalog({WEIGHT: (4, 8, 6), **dict.fromkeys(keys.values(), (4, 8, 6))}), "x")
    assert states.kinds == ("master", "exp_avg")
    assert states.sources("master", WEIGHT, (3,)) == (Source(keys[master], (Select(0, 3),)),)
    assert states.dtype("exp_avg", WEIGHT) == "float32"
    assert states.consumed == set(keys.values())


def test_an_optimizer_without_masters_has_none() -> None:
    states = model_space_states(catalog({WEIGHT: (2, 3), f"optimizer.state.exp_avg.{WEIGHT}": (2, 3)}), "x")
    assert states.kinds == ("exp_avg",)
    assert not states.has("master", WEIGHT)
    with pytest.raises(MappingError, match=f"no optimizer state 'master' is stored for {WEIGHT}"):
        states.sources("master", WEIGHT)


def test_states_of_other_optimizers_keep_their_names() -> None:
    made = catalog({WEIGHT: (2, 3), f"optimizer.state.momentum_buffer.{WEIGHT}": (2, 3)})
    states = read_optimizer_states(MemoryFiles(), made, CommonState({}, None))
    assert states is not None and states.kinds == ("momentum_buffer",)


def test_no_optimizer() -> None:
    assert read_optimizer_states(MemoryFiles(), catalog({WEIGHT: (2, 3)}), CommonState({}, None)) is None


def test_a_state_under_two_keys_is_refused() -> None:
    keys = [f"optimizer.state.{kind}.{WEIGHT}" for kind in ("param", "fp32_param")]
    with pytest.raises(CorruptCheckpointError, match=r"also stored under another key"):
        model_space_states(catalog({WEIGHT: (2,), **dict.fromkeys(keys, (2,))}), "x")


@pytest.mark.parametrize(
    ("kind", "dtype"), [("param", "uint8"), ("exp_avg", "int16"), ("exp_avg_sq", "float8_e4m3fn")]
)
def test_encoded_states_are_refused_by_name(kind: str, dtype: str) -> None:
    """Synthetic: Megatron widens 8-bit moments before it stores them."""
    key = f"optimizer.state.{kind}.{WEIGHT}"
    with pytest.raises(UnsupportedCheckpointError, match=f"precision-aware(.|\n)*{kind}.{WEIGHT} is {dtype}"):
        model_space_states(catalog({WEIGHT: (2,), key: (2,)}, {key: dtype}), "x")


def test_all_states_that_do_not_fit_are_named_at_once() -> None:
    made = catalog(
        {
            WEIGHT: (4, 6),
            f"optimizer.state.exp_avg.{WEIGHT}": (4, 5),
            f"optimizer.state.exp_avg_sq.{WEIGHT}": (3, 1, 8),
            "optimizer.state.exp_avg.gone.weight": (4,),
        }
    )
    with pytest.raises(MappingError) as error:
        model_space_states(made, "x")
    message = str(error.value)
    assert "3 optimizer states" in message
    assert f"exp_avg.{WEIGHT}: has shape (4, 5), but the weight has shape (4, 6)" in message
    assert f"exp_avg_sq.{WEIGHT}: Defragment" in message
    assert "there is no weight gone.weight" in message
