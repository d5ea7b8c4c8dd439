"""Does the model that a job builds have the tensors that are stored: names and sizes, by Megatron's defaults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ckpt_tools.megatron.keys import DECODER_LAYERS, HALVES, decoder_layer
from ckpt_tools.verify.facts import Facts, Rule
from ckpt_tools.verify.job import VERSIONS
from ckpt_tools.verify.report import ERROR


def _tied(f: Facts) -> str | None:
    untied = f.value("untie_embeddings_and_output_weights")
    if f.job.settings.get("share_embeddings_and_output_weights") is not None:
        untied = not f.job.settings["share_embeddings_and_output_weights"]
    stored = f.stored.output_layer
    if untied is None or stored is None or bool(untied) == stored:
        return None
    wants = "an output layer of its own" if untied else "a tied one"
    return f"the job has {wants}, the checkpoint {'has' if stored else 'has no'} output_layer.weight"


def _swiglu(f: Facts) -> str | None:
    wanted, stored = f.value("swiglu"), f.stored.gated
    if wanted is None or stored is None or bool(wanted) == stored:
        return None
    return f"swiglu is {'on' if wanted else 'off'}, fc1 is stored {'in halves' if stored else 'whole'}"


def _experts(f: Facts) -> str | None:
    grouped, apart = f.value("moe_grouped_gemm"), f.stored.sequential_experts
    if grouped is None or apart is None or bool(grouped) != apart:
        return None
    return f"moe_grouped_gemm is {'on' if grouped else 'off'}, experts are stored as " + (
        "local_experts.N" if apart else "one grouped module"
    )


def _layer_spec(f: Facts) -> str | None:
    wanted, local = f.value("transformer_impl"), f.stored.local_norms
    if wanted not in ("local", "transformer_engine") or local is None or f.value("spec") or _is_hybrid(f):
        return None
    if (wanted == "local") == local:
        return None
    how = "modules of their own" if local else "part of the projection behind them"
    return f"transformer_impl is {wanted}, norms are stored as {how}"


def _mtp(f: Facts) -> str | None:
    wanted = f.value("mtp_num_layers", 0)
    if f.job.is_bridge and "mtp_num_layers" not in f.job.given:
        return None
    return (
        None if wanted == f.stored.mtp_layers else f"mtp_num_layers is {wanted}, {f.stored.mtp_layers} stored"
    )


def _is_hybrid(f: Facts) -> bool:
    """Whether HybridModel is built: its layers are those of a pattern, always of Transformer Engine's names."""
    return any(f.value(name) is not None for name in ("hybrid_layer_pattern", "hybrid_override_pattern"))


def _is_plain_decoder(f: Facts) -> bool:
    """Whether the stored model is the one decoder that the settings describe: not two towers, not a hybrid."""
    return not _is_hybrid(f) and not f.job.is_bridge and any(map(decoder_layer, f.stored.shapes))


def _first(f: Facts, ending: str) -> tuple[int, ...] | None:
    """The shape of the first decoder layer's weight with this ending, whole or as one half."""
    endings = (ending, ending + HALVES[0])
    layers = ((decoder_layer(name), shape) for name, shape in f.stored.shapes.items())
    return next((shape for layer, shape in layers if layer and layer[1] in endings), None)


def _has(f: Facts, ending: str) -> bool:
    return _first(f, ending) is not None


class _Model:
    """Sizes that a job's settings make, with the defaults that validate_args fills in."""

    def __init__(self, f: Facts) -> None:
        value = f.value
        self.hidden = value("hidden_size", 0)
        self.heads = value("num_attention_heads", 1)
        self.groups = value("num_query_groups", 1) if f.on("group_query_attention") else self.heads
        self.channels = value("kv_channels", self.hidden // self.heads if self.heads else 0)
        gated = f.on("swiglu")
        wide = int((4 * self.hidden * 2 / 3) / 64) * 64 if gated else 4 * self.hidden
        self.ffn = value("ffn_hidden_size", wide)
        self.moe_ffn = value("moe_ffn_hidden_size", self.ffn)
        self.shared_ffn = value("moe_shared_expert_intermediate_size", 0)
        self.latent = f.on("multi_latent_attention")
        self.whole_gate = 2 if f.on("quick_geglu") and not gated else 1  # both halves in one stored fc1


def _sizes(f: Facts) -> str | None:
    if not _is_plain_decoder(f):
        return None
    found = [f"{what}: job {wanted}, stored {stored}" for what, wanted, stored in _pairs(f, _Model(f))
             if stored is not None and wanted != stored]  # fmt: skip
    return "; ".join(found) or None


def _pairs(f: Facts, m: _Model) -> Iterator[tuple[str, Any, Any]]:
    """(what the settings decide, its size in the job, its size in the checkpoint or None)."""

    def size(ending: str, axis: int = 0) -> int | None:
        shape = _first(f, ending)
        return shape[axis] if shape is not None and len(shape) > axis else None

    embedding = f.stored.shapes.get("embedding.word_embeddings.weight", ())
    yield "hidden size", m.hidden, embedding[1] if len(embedding) == 2 else None
    gate = m.heads if f.on("attention_output_gate") else 0
    if not m.latent:
        yield (
            "rows of linear_qkv",
            (m.heads + gate + 2 * m.groups) * m.channels,
            size("self_attention.linear_qkv.weight"),
        )
        if _has(f, "self_attention.linear_qkv.weight"):
            yield "columns of linear_proj", m.heads * m.channels, _attention_columns(f)
    else:
        rank = f.value("kv_lora_rank", 0) + f.value("qk_pos_emb_head_dim", 0)
        yield "rows of linear_kv_down_proj", rank, size("self_attention.linear_kv_down_proj.weight")
        yield (
            "rows of linear_q_down_proj",
            f.value("q_lora_rank"),
            size("self_attention.linear_q_down_proj.weight"),
        )
        heads = f.value("v_head_dim", 0) * m.heads
        yield "columns of linear_proj", heads, size("self_attention.linear_proj.weight", 1)
    yield "ffn_hidden_size", m.ffn * m.whole_gate, size("mlp.linear_fc1.weight")
    for ending in ("mlp.experts.linear_fc1.weight0", "mlp.experts.local_experts.0.linear_fc1.weight"):
        yield "moe_ffn_hidden_size", m.moe_ffn * m.whole_gate, size(ending)
    yield (
        "moe_shared_expert_intermediate_size",
        m.shared_ffn * m.whole_gate,
        size("mlp.shared_experts.linear_fc1.weight"),
    )
    yield "num_experts", f.value("num_experts"), size("mlp.router.weight")
    positions = f.stored.shapes.get("embedding.position_embeddings.weight") or (None,)
    yield "max_position_embeddings", f.value("max_position_embeddings"), positions[0]


def _attention_columns(f: Facts) -> int | None:
    """Columns of linear_proj in a layer that has linear_qkv: other kinds of attention have their own."""
    for name in f.stored.shapes:
        layer = decoder_layer(name)
        if layer and layer[1] == "self_attention.linear_qkv.weight":
            shape = f.stored.shapes.get(f"{DECODER_LAYERS}{layer[0]}.self_attention.linear_proj.weight")
            return shape[1] if shape is not None and len(shape) == 2 else None
    return None


def _parts(f: Facts) -> str | None:
    if not _is_plain_decoder(f):
        return None
    found = [f"{setting} is {f.value(setting)}, {what} {'is' if stored else 'is not'} stored"
             for setting, wanted, what, stored in _presences(f) if wanted != stored]  # fmt: skip
    return "; ".join(dict.fromkeys(found)) or None


def _presences(f: Facts) -> Iterator[tuple[str, bool, str, bool]]:
    """(setting, whether it makes a tensor, the tensor, whether that is stored)."""
    names, latent = f.stored.shapes, f.on("multi_latent_attention")
    learned = f.value("position_embedding_type") == "learned_absolute"
    positions = "embedding.position_embeddings.weight"
    yield "position_embedding_type", learned, positions, positions in names
    bias = "decoder.final_layernorm.bias"
    if "decoder.final_layernorm.weight" in names:
        yield "normalization", f.value("normalization") == "LayerNorm", bias, bias in names
    linear = f.on("add_bias_linear")
    yield (
        "multi_latent_attention",
        latent,
        "linear_kv_down_proj",
        any(_has(f, f"self_attention.linear_{kind}_down_proj.weight") for kind in ("kv", "qkv")),
    )
    if _has(f, "self_attention.linear_qkv.weight"):
        stored = _has(f, "self_attention.linear_qkv.bias")
        yield (
            "add_bias_linear" if linear else "add_qkv_bias",
            linear or f.on("add_qkv_bias"),
            "linear_qkv.bias",
            stored,
        )
        yield (
            "qk_layernorm",
            f.on("qk_layernorm"),
            "q_layernorm",
            _has(f, "self_attention.q_layernorm.weight"),
        )
    if _has(f, "mlp.linear_fc2.weight"):
        yield "add_bias_linear", linear, "linear_fc2.bias", _has(f, "mlp.linear_fc2.bias")
    yield "num_experts", bool(f.value("num_experts")), "a router", _has(f, "mlp.router.weight")
    if _has(f, "mlp.router.weight"):
        shared = "mlp.shared_experts.linear_fc1.weight"
        wanted = f.value("moe_shared_expert_intermediate_size") is not None
        yield "moe_shared_expert_intermediate_size", wanted, "a shared expert", _has(f, shared)
        expert_bias = f.on("moe_router_enable_expert_bias")
        yield "moe_router_enable_expert_bias", expert_bias, "expert_bias", _has(f, "mlp.router.expert_bias")
    variant = f.value("experimental_attention_variant") == "gated_delta_net"
    yield "experimental_attention_variant", variant, "a gated delta net", _has(f, "self_attention.A_log")


def _layers(names: Iterable[str], ending: str) -> set[int]:
    return {layer[0] for layer in map(decoder_layer, names) if layer and layer[1] == ending}


def decoder_layers(names: Iterable[str]) -> int:
    """How many layers of the decoder are stored."""
    return len({layer[0] for layer in map(decoder_layer, names) if layer})


def gated_delta_nets(names: Iterable[str]) -> set[int]:
    """The decoder layers whose attention is a gated delta net."""
    return _layers(names, "self_attention.A_log")


def _frequency(f: Facts) -> str | None:
    """Which layers are mixtures of experts: every Nth from the first one on, or as a list says."""
    routers, freq = _layers(f.stored.shapes, "mlp.router.weight"), f.value("moe_layer_freq")
    if not _is_plain_decoder(f) or not routers or freq is None:
        return None
    every = range(decoder_layers(f.stored.shapes))
    sparse = {i for i in every if (i % freq == 0 if isinstance(freq, int) else i < len(freq) and freq[i])}
    if sparse == routers:
        return None
    return f"moe_layer_freq {freq} makes experts in layers {sorted(sparse)}, stored in {sorted(routers)}"


def _modules(f: Facts) -> str | None:
    """Modules of transformers beside the language model, which Megatron-Bridge's models alone have."""
    parts = {name.partition(".")[0] for name in f.stored.shapes}
    if (
        "language_model" not in parts or "vision_projection" in parts
    ):  # the latter is Megatron-LM's own LLaVAModel
        return None
    others = sorted(parts - {"language_model"})
    return f"the checkpoint holds {', '.join(others)} beside its language model" if others else None


_CONVERT = "convert with --layer-spec, --experts or --swiglu as the job has it, or change the job"
_STRICT = "the key sets differ, which a strict load refuses"
_FLAGS = "the flags of the run that wrote the weights; preflight without flags prints them"
_SPECS = "models/gpt/gpt_layer_specs.py"
MODEL_RULES = (
    Rule("tied-embeddings", ERROR, _tied, _STRICT,
         "--untie-embeddings-and-output-weights as in the run that wrote the weights", "models/gpt/gpt_model.py"),
    Rule("swiglu", ERROR, _swiglu, "weight_w and weight_v are asked for exactly when --swiglu is given", _CONVERT,
         "training/checkpointing.py preprocess_fsdp_dtensor_state_dict"),
    Rule("experts", ERROR, _experts, "expert names follow --moe-grouped-gemm", _CONVERT, _SPECS),
    Rule("layer-spec", ERROR, _layer_spec, "norm names follow --transformer-impl", _CONVERT, _SPECS),
    Rule("mtp", ERROR, _mtp, _STRICT, "--mtp-num-layers as stored", "models/gpt/gpt_model.py"),
    Rule("sizes", ERROR, _sizes, "a size mismatch is fatal", _FLAGS, _SPECS, VERSIONS),
    Rule("parts", ERROR, _parts, _STRICT, _FLAGS, _SPECS, VERSIONS),
    Rule("modules", ERROR, _modules, "Megatron-LM has no such model, Megatron-Bridge has", "--target bridge",
         "models/ of Megatron-Bridge", VERSIONS),
    Rule("expert-layers", ERROR, _frequency, _STRICT, "--moe-layer-freq as stored", _SPECS, VERSIONS),
)  # fmt: skip
