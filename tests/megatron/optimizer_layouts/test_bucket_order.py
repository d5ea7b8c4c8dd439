"""Order settles look-alikes where one choice is left, and never wrongly."""

from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.megatron.torch_dist.optimizer_layouts.bucket_order import (
    LookAlikes,
    conventions,
    first_out_of_order,
    registration_rank,
    settle,
)
from ckpt_tools.megatron.torch_dist.optimizer_layouts.buckets import Piece
from ckpt_tools.model.box import full_box
from ckpt_tools.model.catalog import Chunk, Item

NORM = "self_attention.linear_qkv.layer_norm_weight"
LOCAL_LAYER = (NORM, "self_attention.linear_proj.weight", "self_attention.linear_qkv.weight",
               "self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight",
               "mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight")  # fmt: skip
TE_LAYER = (LOCAL_LAYER[1], LOCAL_LAYER[0], *LOCAL_LAYER[2:])


def piece(name: str, expert: int | None = None, shard: tuple[int, int] = (0, 1)) -> Piece:
    chunk = Chunk(full_box((4,)), Item("f", 0, 16))
    return Piece(name, expert, name, (), "bfloat16", chunk, 0, full_box((4,)), (4,), shard)


def model(layers: list[int], leaves: tuple[str, ...]) -> list[Piece]:
    """Pieces of a model chunk in order of registration."""
    names = ["embedding.word_embeddings.weight"] if 0 in layers else []
    names += [f"decoder.layers.{i}.{leaf}" for i in layers for leaf in leaves]
    return [piece(n) for n in [*names, "decoder.final_layernorm.weight", "output_layer.weight"]]


@given(
    layers=st.integers(1, 5),
    local=st.booleans(),
    alike=st.sets(st.sampled_from([*LOCAL_LAYER, "final_layernorm.weight"])),
    extra=st.booleans(),
)
def test_settled_means_settled_right(layers, local, alike, extra):
    """Some leaves look alike in all layers, also in layers that another buffer holds; the truth is never missed."""
    pieces = model(list(range(2, 2 + layers)), LOCAL_LAYER if local else TE_LAYER)[::-1]
    elsewhere = [piece(f"decoder.layers.{i}.{leaf}") for i in (0, 1) for leaf in LOCAL_LAYER] if extra else []
    equal = tuple(p for p in (*pieces, *elsewhere) if any(p.name.endswith(leaf) for leaf in alike))
    shared = LookAlikes(equal)
    slots = [shared if p in equal and len(equal) > 1 else LookAlikes((p,)) for p in pieces]
    own_layers = {p.name.split(".")[2] for p in pieces if ".layers." in p.name}
    allowed = [p for p in equal if ".layers." not in p.name or p.name.split(".")[2] in own_layers]
    results = {c: settle(slots, allowed, c) for c in conventions(shared_embedding=False)}
    for convention, result in results.items():
        if result is not None and convention.local_norms == local:
            assert result == pieces
    certain = {"self_attention.linear_proj.weight", "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight",
               "mlp.linear_fc2.weight"}  # fmt: skip
    if (
        not alike & certain
    ):  # the matrices stand around the vectors: every convention but the right one drops out
        settled = {tuple(r) for r in results.values() if r is not None}
        assert settled == {tuple(pieces)}


def test_experts_are_told_apart_matrix_by_matrix_or_one_by_one():
    def expert(leaf: str, number: int) -> Piece:
        return piece(f"decoder.layers.0.mlp.experts.experts.{leaf}.weight", number)

    grouped = [expert(leaf, e) for leaf in ("linear_fc2", "linear_fc1") for e in (2, 1, 0)]
    sequential = [expert(leaf, e) for e in (2, 1, 0) for leaf in ("linear_fc2", "linear_fc1")]
    for order, flag in ((grouped, False), (sequential, True)):
        fitting = {
            c.sequential_experts
            for c in conventions(shared_embedding=False)
            if settle([LookAlikes((p,)) for p in order], [], c) is not None
        }
        assert fitting == {flag}


def test_more_look_alikes_than_places_are_not_settled():
    """One of two equal norms is frozen: which one has the state is not known."""
    pieces = model([0, 1], TE_LAYER)[::-1]
    query, key = (next(p for p in pieces if f"{x}_layernorm" in p.name) for x in "qk")
    alike = LookAlikes((query, key))
    slots = [alike if p is query else LookAlikes((p,)) for p in pieces if p is not key]
    assert all(settle(slots, alike.members, c) is None for c in conventions(shared_embedding=False))
    assert any(settle(slots, [query], c) for c in conventions(shared_embedding=False))


def test_unknown_modules_have_no_order_below_them():
    convention = conventions(shared_embedding=False)[0]
    a, b = piece("decoder.layers.1.mixer.A_log"), piece("decoder.layers.1.mixer.D")
    lower = piece("decoder.layers.0.mixer.D")
    ranks = [registration_rank(p, convention) for p in (a, b, lower)]
    assert first_out_of_order(ranks) is None
    assert first_out_of_order([ranks[1], ranks[0], ranks[2]]) is None
    assert first_out_of_order([ranks[2], ranks[0]]) == 1
