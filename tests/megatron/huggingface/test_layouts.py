"""Layouts against numpy written out by hand, and their two directions against each other."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.mapping.layouts import JOINED, LAYOUTS, Layout, stack
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import Source
from tests.megatron.huggingface.by_rules import materialise


def model(heads: int = 4, groups: int = 2, dim: int = 6, **rest: Any) -> ModelArgs:
    return ModelArgs(num_layers=1, hidden_size=heads * dim, num_attention_heads=heads, num_query_groups=groups,
                     kv_channels=dim, ffn_hidden_size=8, max_position_embeddings=8, **rest)  # fmt: skip


def numbered(*shape: int) -> np.ndarray[Any, Any]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def to_hf(layout: Layout, core: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    targets = [
        TargetTensor(str(i), "float32", t.seen,
                     tuple(Source("core", link.to_hf(t.seen)) for link in layout.links if link.hf == i))
        for i, t in enumerate(layout.tensors)
    ]  # fmt: skip
    made = materialise(targets, {"core": core})
    return [made[str(i)].reshape(t.shape) for i, t in enumerate(layout.tensors)]


def to_core(layout: Layout, hf: list[np.ndarray[Any, Any]], shape: tuple[int, ...], filled: bool) -> Any:
    sources = tuple(Source(str(link.hf), link.to_core(shape)) for link in layout.links)
    seen = {str(i): array.reshape(layout.tensors[i].seen) for i, array in enumerate(hf)}
    return materialise([TargetTensor("core", "float32", shape, sources, zero_filled=filled)], seen)["core"]


def test_qkv_is_cut_by_query_group():
    """4 heads of 6 in 2 groups: q0 q1 k0 v0 q2 q3 k1 v1."""
    core = numbered(8 * 6, 3)
    q, k, v = to_hf(LAYOUTS["qkv"][1](core.shape, model()), core)
    blocks = np.split(core, 8)
    assert np.array_equal(q, np.concatenate([blocks[i] for i in (0, 1, 4, 5)]))
    assert np.array_equal(k, np.concatenate([blocks[i] for i in (2, 6)]))
    assert np.array_equal(v, np.concatenate([blocks[i] for i in (3, 7)]))


def test_interleaved_rotary_rows_are_half_a_head_apart():
    """Megatron rows 0 1 2 3 4 5 of a query or key head are Hugging Face's 0 3 1 4 2 5; values stay."""
    core = numbered(8 * 6, 2)
    q, k, v = to_hf(LAYOUTS["qkv"][1](core.shape, model(rotary_interleaved=True)), core)
    plain = to_hf(LAYOUTS["qkv"][1](core.shape, model()), core)
    for ours, rows in ((q, plain[0]), (k, plain[1])):
        heads = rows.reshape(-1, 6, 2)
        assert np.array_equal(
            ours, np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1).reshape(ours.shape)
        )
    assert np.array_equal(v, plain[2])


def test_gates_follow_the_queries_of_their_group():
    """4 heads of 6 in 2 groups: q0 q1 g0 g1 k0 v0 | q2 q3 g2 g3 k1 v1; a head's own rows are q and g."""
    core = numbered(12 * 6, 3)
    q, k, v = to_hf(LAYOUTS["qkv_gate"][1](core.shape, model()), core)
    blocks = np.split(core, 12)
    assert np.array_equal(q, np.concatenate([blocks[i] for i in (0, 2, 1, 3, 6, 8, 7, 9)]))
    assert np.array_equal(k, np.concatenate([blocks[i] for i in (4, 10)]))
    assert np.array_equal(v, np.concatenate([blocks[i] for i in (5, 11)]))


def joined(layouts: tuple[Layout, ...], parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The one tensor that parts make; `materialise` fails unless they tile it."""
    (tensor,) = layouts[0].tensors
    sources = tuple(
        Source(str(i), link.to_hf(tensor.seen)) for i, layout in enumerate(layouts) for link in layout.links
    )
    made = materialise(
        [TargetTensor("t", "float32", tensor.seen, sources)], {str(i): p for i, p in enumerate(parts)}
    )
    return made["t"]


def test_rows_of_a_key_head_stand_together():
    """2 key heads of 3 rows with 2 value heads of 2 each: q0 k0 v0 v1 | q1 k1 v2 v3, as Qwen3-Next views them."""
    query, key, value = numbered(6, 5), 100 + numbered(6, 5), 200 + numbered(8, 5)
    layouts = JOINED["rows_by_key_head"](
        [part.shape for part in (query, key, value)], model(linear_num_key_heads=2)
    )
    views = [part.reshape(2, -1, 5) for part in (query, key, value)]
    assert np.array_equal(joined(layouts, [query, key, value]), np.concatenate(views, axis=1).reshape(20, 5))
    with pytest.raises(MappingError, match="7 rows of a projection cannot be those of 2 key heads"):
        JOINED["rows_by_key_head"]([(6, 5), (7, 5)], model(linear_num_key_heads=2))


@pytest.mark.parametrize("name", sorted(JOINED))
@given(data=st.data())
def test_parts_tile_one_tensor_and_come_back(name, data):
    heads = data.draw(st.integers(1, 4))
    rest = data.draw(st.sampled_from([(), (3,), (1, 4)]))
    rows = [heads * n for n in data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))]
    parts = [1000 * i + numbered(n, *rest) for i, n in enumerate(rows)]
    layouts = JOINED[name]([part.shape for part in parts], model(linear_num_key_heads=heads))
    whole = joined(layouts, parts)
    if name == "rows":
        assert np.array_equal(whole, np.concatenate(parts))
    for layout, part in zip(layouts, parts, strict=True):
        assert np.array_equal(to_core(layout, [whole], part.shape, filled=False), part)


def test_conv1d_is_three_thirds_of_columns():
    core = numbered(3 * 4 * 6, 5)
    (c_attn,) = to_hf(LAYOUTS["qkv_conv1d"][1](core.shape, model(groups=4)), core)
    heads = core.reshape(4, 3, 6, 5)
    assert np.array_equal(c_attn, heads.transpose(1, 0, 2, 3).reshape(72, 5).T)


def test_interleaved_columns_are_gate_and_up():
    """GPT-OSS: even columns of an (experts, in, out) tensor are the gate."""
    experts = [numbered(8, 3) + 100 * e for e in range(2)]
    layouts = stack([LAYOUTS["gate_up_interleaved"][1]((8, 3), model())] * 2)
    links = [(e, link) for e, layout in enumerate(layouts) for link in layout.links]
    tensor = layouts[0].tensors[0]
    target = TargetTensor(
        "t", "float32", tensor.seen, tuple(Source(str(e), k.to_hf(tensor.seen)) for e, k in links)
    )
    made = materialise([target], {str(e): array for e, array in enumerate(experts)})["t"].reshape(
        tensor.shape
    )
    assert made.shape == (2, 3, 8)
    for e, core in enumerate(experts):
        assert np.array_equal(made[e, :, 0::2], core[:4].T)
        assert np.array_equal(made[e, :, 1::2], core[4:].T)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@given(data=st.data())
def test_both_directions_tile_and_undo_each_other(name, data):
    """`materialise` fails unless each element of each side is shown exactly once."""
    groups, per = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    dim, columns = 2 * data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    columns *= 2 if name == "halves_swapped" else 1
    per = 1 if name == "qkv_conv1d" else per
    gates = per if name == "qkv_gate" else 0
    rows = groups * (per + gates + 2) * dim if "qkv" in name else 2 * data.draw(st.integers(1, 6))
    vocab = data.draw(st.integers(1, rows))
    part = data.draw(st.sampled_from([1.0, 0.25, 0.5, 0.9]))
    settings = model(groups * per, groups, dim, vocab_size=vocab, rotary_interleaved=data.draw(st.booleans()),
                     rotary_percent=part)  # fmt: skip
    flat = name not in ("transposed", "vocab", "halves_swapped") and data.draw(st.booleans())
    core = numbered(rows) if flat else numbered(rows, columns)
    layout = LAYOUTS[name][1](core.shape, settings)
    assert len(layout.tensors) == LAYOUTS[name][0]
    again = to_core(layout, to_hf(layout, core), core.shape, filled=name == "vocab")
    assert np.array_equal(
        again[: vocab if name == "vocab" else None], core[: vocab if name == "vocab" else None]
    )
