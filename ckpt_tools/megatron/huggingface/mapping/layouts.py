"""Layouts: where the elements of one Megatron parameter lie in its Hugging Face tensors.

A layout is a list of links. A link says: what these cuts show of the Megatron parameter is what those cuts show
of the Hugging Face tensor, with the axes in another order if `order` is given. Read one way, links export; read
the other way, they import; so the two directions cannot disagree. Links of one parameter tile both sides.

Worked example, grouped queries (2 groups, 2 queries each, head size d), rows of `linear_qkv`::

    Megatron   q0 q1 k0 v0 | q2 q3 k1 v1          one (q..q, k, v) block per group
    HF         q_proj: q0 q1 q2 q3   k_proj: k0 k1   v_proj: v0 v1

`shape` is the header's; `seen` is the same row-major tensor with some axes split so that interleaved columns get
an axis of their own (GPT-OSS): no element moves between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs
from ckpt_tools.model.views import Insert, Narrow, Permute, Place, Select, Shape, Step, View

Cut: TypeAlias = Narrow | Select


class Link(NamedTuple):
    """`core_cuts` of the Megatron parameter == `hf_cuts` of the `hf`-th Hugging Face tensor, axes in `order`."""

    hf: int
    core_cuts: tuple[Cut, ...] = ()
    hf_cuts: tuple[Cut, ...] = ()
    order: tuple[int, ...] = ()  # output axis d of the HF side is axis order[d] of the Megatron side

    def to_hf(self, seen: Shape) -> View:
        """The Megatron parameter as the part of a Hugging Face tensor of shape `seen`."""
        turn: View = (Permute(self.order),) if self.order else ()
        return (*self.core_cuts, *turn, *embed(self.hf_cuts, seen))

    def to_core(self, shape: Shape) -> View:
        """The Hugging Face tensor as the part of a Megatron parameter of `shape`."""
        back = tuple(self.order.index(d) for d in range(len(self.order)))
        turn: View = (Permute(back),) if self.order else ()
        return (*self.hf_cuts, *turn, *embed(self.core_cuts, shape))


class HfShape(NamedTuple):
    """Shape of a Hugging Face tensor in its header, and with split axes as the links see it (elements)."""

    shape: Shape
    seen: Shape


class Layout(NamedTuple):
    """One Megatron parameter laid out in `tensors`."""

    tensors: tuple[HfShape, ...]
    links: tuple[Link, ...]


def embed(cuts: Sequence[Cut], shape: Shape) -> View:
    """The steps that put what `cuts` show of a tensor of `shape` back into its place."""
    shapes = [shape]
    for cut in cuts:
        shapes.append(cut.shape(shapes[-1]))
    steps: list[Step] = []
    for cut, whole in zip(reversed(cuts), reversed(shapes[:-1]), strict=True):
        axis, start = cut.axis, cut.start if isinstance(cut, Narrow) else cut.index
        if isinstance(cut, Select):
            steps.append(Insert(axis))
        if (1 if isinstance(cut, Select) else cut.size) != whole[axis]:
            steps.append(Place(tuple(start if d == axis else 0 for d in range(len(whole))), whole))
    return tuple(steps)


def stack(layouts: Sequence[Layout]) -> tuple[Layout, ...]:
    """The layouts of experts 0..E-1 when their Hugging Face tensors are one, with a leading expert axis."""
    count = len(layouts)
    return tuple(
        Layout(
            tuple(HfShape((count, *t.shape), (count, *t.seen)) for t in layout.tensors),
            tuple(link._replace(hf_cuts=(Select(0, e), *link.hf_cuts)) for link in layout.links),
        )
        for e, layout in enumerate(layouts)
    )


def _same(shape: Shape, model: ModelArgs) -> Layout:
    """As it is."""
    return Layout((HfShape(shape, shape),), (Link(0),))


def _vocab(shape: Shape, model: ModelArgs) -> Layout:
    """Rows of the true vocabulary; the padding of the Megatron side is cut and filled up."""
    rows = model.true_vocab_size
    cut = (rows, *shape[1:])
    return Layout((HfShape(cut, cut),), (Link(0, (Narrow(0, 0, rows),)),))


def _transposed(shape: Shape, model: ModelArgs) -> Layout:
    """Columns for rows."""
    turned = shape[::-1]
    return Layout((HfShape(turned, turned),), (Link(0, order=(1, 0)),))


def _halves_swapped(shape: Shape, model: ModelArgs) -> Layout:
    """The second half of the columns, then the first: of a projection of two inputs, joined the other way (MiMo)."""
    half = shape[1] // 2
    cuts = (Narrow(1, 0, half),), (Narrow(1, half, half),)
    return Layout((HfShape(shape, shape),), (Link(0, cuts[0], cuts[1]), Link(0, cuts[1], cuts[0])))


def _gate_up(shape: Shape, model: ModelArgs) -> Layout:
    """`[gate; up]` rows in two tensors."""
    half = shape[0] // 2
    one = HfShape((half, *shape[1:]), (half, *shape[1:]))
    return Layout((one, one), (Link(0, (Narrow(0, 0, half),)), Link(1, (Narrow(0, half, half),))))


def gate_up_in_turns(shape: Shape, model: ModelArgs) -> Layout:
    """Gate and up rows of experts in turns of a few (`GluInterleave`), in two tensors."""
    assert model.glu_interleave is not None
    (block, parts), half = model.glu_interleave, shape[0] // 2
    part = half // parts  # rows of each half that one rank has
    if half % parts or part % block:
        raise MappingError(
            f"moe_mlp_glu_interleave_size {block} and expert_tensor_parallel_size {parts} do not divide "
            f"the {half} gate rows of an expert"
        )
    one = HfShape((half, *shape[1:]), (half, *shape[1:]))
    links = []
    for rank in range(parts):
        for turn in range(2 * part // block):
            stored_half, row = divmod(turn * block, part)
            start = stored_half * half + rank * part + row
            cut = Narrow(0, rank * part + turn // 2 * block, block)
            links.append(Link(turn % 2, (Narrow(0, start, block),), (cut,)))
    return Layout((one, one), tuple(links))


def _gate_up_interleaved(shape: Shape, model: ModelArgs) -> Layout:
    """`[gate; up]` rows as even and odd columns of one (in, out) tensor (GPT-OSS); a bias has columns only."""
    half, lead = shape[0] // 2, shape[:0:-1]  # (in,) or ()
    tensor = HfShape((*lead, 2 * half), (*lead, half, 2))
    order = (1, 0) if lead else ()
    links = [
        Link(0, (Narrow(0, side * half, half),), (Select(len(lead) + 1, side),), order) for side in range(2)
    ]
    return Layout((tensor,), tuple(links))


def _qkv(shape: Shape, model: ModelArgs, pairs: bool = False) -> Layout:
    """Rows per query group (q..q, k, v) in a query, a key and a value tensor."""
    heads, groups, dim = model.num_attention_heads, model.num_query_groups, model.kv_channels
    q, kv = HfShape(*[(heads * dim, *shape[1:])] * 2), HfShape(*[(groups * dim, *shape[1:])] * 2)
    links = [
        Link(hf, (Narrow(0, core_row, rows),), (Narrow(0, hf_row, rows),))
        for hf, core_row, hf_row, rows in _qkv_rows(model, pairs)
    ]
    return Layout((q, kv, kv), tuple(links))


def _qkv_pairs(shape: Shape, model: ModelArgs) -> Layout:
    """The same, of a class that keeps rotary pairs in neighbouring rows (ERNIE 4.5, GLM-4, Helium)."""
    return _qkv(shape, model, pairs=True)


def _qkv_gate(shape: Shape, model: ModelArgs) -> Layout:
    """Rows per query group (q..q, their gates, k, v) in one of each head's query and gate, a key and a value tensor
    (Qwen3-Next)."""
    heads, groups, dim = model.num_attention_heads, model.num_query_groups, model.kv_channels
    q, kv = HfShape(*[(2 * heads * dim, *shape[1:])] * 2), HfShape(*[(groups * dim, *shape[1:])] * 2)
    queries = heads // groups
    links = []
    for group in range(groups):
        first = group * 2 * (queries + 1) * dim
        for part in range(
            2 * queries
        ):  # all queries, then all gates; a head's own rows are one and the other
            side, query = divmod(part, queries)
            row = (2 * (group * queries + query) + side) * dim
            links.append(Link(0, (Narrow(0, first + part * dim, dim),), (Narrow(0, row, dim),)))
        for hf in (1, 2):
            start = first + (2 * queries + hf - 1) * dim
            links.append(Link(hf, (Narrow(0, start, dim),), (Narrow(0, group * dim, dim),)))
    return Layout((q, kv, kv), tuple(links))


def _qkv_fused(shape: Shape, model: ModelArgs, turned: bool = False) -> Layout:
    """Rows per query group as the queries, then the keys, then the values of one tensor (Phi-3)."""
    heads, groups, dim = model.num_attention_heads, model.num_query_groups, model.kv_channels
    first = (0, heads * dim, (heads + groups) * dim)
    return _qkv_in_one(shape, model, lambda which, row: first[which] + row, turned)


def _qkv_conv1d(shape: Shape, model: ModelArgs) -> Layout:
    """Rows per head (q, k, v) as the query, key and value thirds of GPT-2's c_attn, (in, out) if 2-D."""
    return _qkv_fused(shape, model, turned=True)


def _qkv_grouped(shape: Shape, model: ModelArgs) -> Layout:
    """Rows per query group in one tensor, as Megatron has them but for rotary pairs (GPT-NeoX, Persimmon)."""
    dim, queries = model.kv_channels, model.num_attention_heads // model.num_query_groups

    def grouped(which: int, row: int) -> int:
        head, rest = divmod(row, dim)
        group, place = divmod(head, queries) if which == 0 else (head, queries + which - 1)
        return (group * (queries + 2) + place) * dim + rest

    return _qkv_in_one(shape, model, grouped)


def _qkv_in_one(
    shape: Shape, model: ModelArgs, place: Callable[[int, int], int], turned: bool = False
) -> Layout:
    """One tensor in which the row of a query, key or value (0, 1 or 2) is at `place`; `turned`: (in, out) if 2-D."""
    lead = shape[:0:-1] if turned else ()  # (in,) or ()
    axis, order = len(lead), (1, 0) if lead else ()
    links = [
        Link(0, (Narrow(0, core_row, rows),), (Narrow(axis, place(which, row), rows),), order)
        for which, core_row, row, rows in _qkv_rows(model)
    ]
    stored = shape[::-1] if lead else shape
    return Layout((HfShape(stored, stored),), tuple(links))


def _qkv_rows(model: ModelArgs, pairs: bool = False) -> list[tuple[int, int, int, int]]:
    """(0, 1 or 2 for query, key or value; first row in Megatron; first row in its tensor; rows).

    A side keeps the rotary pairs of a query or key head in neighbouring rows (2j, 2j+1), Megatron with
    `rotary_interleaved` and Hugging Face with `pairs`, or half of them apart (j, d/2 + j). Where only the first rows
    of a head are rotated, the others lie alike.
    """
    heads, groups, dim = model.num_attention_heads, model.num_query_groups, model.kv_channels
    queries = heads // groups
    rows = []
    for group in range(groups):
        first = group * (queries + 2) * dim
        rows.append((0, first, group * queries * dim, queries * dim))
        rows.append((1, first + queries * dim, group * dim, dim))
        rows.append((2, first + (queries + 1) * dim, group * dim, dim))
    if model.rotary_interleaved == pairs:
        return rows
    # Pairs of rows of a head that are rotated; an odd number of rotated rows has the next one to it.
    half = ((dim if model.rotary_percent >= 1 else int(dim * model.rotary_percent)) + 1) // 2

    def turned(row: int) -> int:
        """The row of the other order that is this rotated row of a head."""
        return row % half * 2 + row // half if pairs else row // 2 + row % 2 * half

    found = [one for one in rows if one[0] == 2]
    for which, core, hf, count in (one for one in rows if one[0] < 2):
        for head in range(0, count, dim):
            found += [(which, core + head + r, hf + head + turned(r), 1) for r in range(min(2 * half, dim))]
            if 2 * half < dim:  # the rest of the head lies alike
                found.append((which, core + head + 2 * half, hf + head + 2 * half, dim - 2 * half))
    return found


LAYOUTS: dict[str, tuple[int, Callable[[Shape, ModelArgs], Layout]]] = {  # with the number of HF tensors
    "same": (1, _same),
    "vocab": (1, _vocab),
    "transposed": (1, _transposed),
    "halves_swapped": (1, _halves_swapped),
    "gate_up": (2, _gate_up),
    "gate_up_interleaved": (1, _gate_up_interleaved),
    "qkv": (3, _qkv),
    "qkv_pairs": (3, _qkv_pairs),
    "qkv_gate": (3, _qkv_gate),
    "qkv_fused": (1, _qkv_fused),
    "qkv_grouped": (1, _qkv_grouped),
    "qkv_conv1d": (1, _qkv_conv1d),
}


def _rows(shapes: Sequence[Shape], model: ModelArgs, groups: int = 1) -> tuple[Layout, ...]:
    """The rows of each part, one part after the other."""
    uneven = [shape[0] for shape in shapes if shape[0] % groups]
    if uneven:
        raise MappingError(f"{uneven[0]} rows of a projection cannot be those of {groups} key heads")
    whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    step, first, layouts = whole[0] // groups, 0, []
    for shape in shapes:
        size = shape[0] // groups
        links = [
            Link(0, (Narrow(0, g * size, size),), (Narrow(0, g * step + first, size),)) for g in range(groups)
        ]
        layouts.append(Layout((HfShape(whole, whole),), tuple(links)))
        first += size
    return tuple(layouts)


def _rows_by_key_head(shapes: Sequence[Shape], model: ModelArgs) -> tuple[Layout, ...]:
    """The rows of each part that belong to the first key head, then those of the second (Qwen3-Next)."""
    return _rows(shapes, model, model.linear_num_key_heads)


# How the parts of one projection, which Megatron stores one by one, lie in one Hugging Face tensor.
JOINED: dict[str, Callable[[Sequence[Shape], ModelArgs], tuple[Layout, ...]]] = {
    "rows": _rows,
    "rows_by_key_head": _rows_by_key_head,
}
