"""Does a model have the tensors that are stored: names and sizes by a job's settings, or by the stored ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tools.megatron.format import Weight
from ckpt_tools.megatron.huggingface.config.layer_patterns import has_some, in_turns
from ckpt_tools.megatron.hybrid import is_hybrid, says_hybrid
from ckpt_tools.megatron.keys import DECODER_LAYERS, HALVES, decoder_layer
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.run_state.settings import contradicted_dtype, settings_of
from ckpt_tools.model.choices import CheckpointKind
from ckpt_tools.verify.readiness.facts import OUTPUT, Facts, Rule, stored_style
from ckpt_tools.verify.readiness.job import VERSIONS, Job
from ckpt_tools.verify.report import ERROR, Check, Findings

_FC1 = "linear_fc1.weight"
_MODULES = frozenset({"embedding", "decoder", "output_layer", "mtp", "rotary_pos_emb"})  # of GPTModel
# Settings that make layers of which only the code of the run knows the sizes.
_OF_OTHER_CODE = ("spec", "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
_DERIVED = (
    "kv_channels",
    "num_query_groups",
)  # from the heads, where a Bridge configuration leaves them open


def _tied(f: Facts) -> str | None:
    untied = f.value("untie_embeddings_and_output_weights")
    if f.job.settings.get("share_embeddings_and_output_weights") is not None:
        untied = not f.job.settings["share_embeddings_and_output_weights"]
    stored = f.stored.output_layer
    if untied is None or stored is None or bool(untied) == stored:
        return None
    wants = "a separate output layer" if untied else "a tied one"
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
    wanted = mtp_layers(f)
    if f.job.is_bridge and "mtp_num_layers" not in f.job.given:
        return None
    return (
        None if wanted == f.stored.mtp_layers else f"mtp_num_layers is {wanted}, {f.stored.mtp_layers} stored"
    )


def mtp_layers(f: Facts) -> int:
    """How many layers of multi-token prediction the settings make."""
    wanted: int = f.value("mtp_num_layers", 0)
    return min(wanted, 1) if f.on("mtp_use_repeated_layer") else wanted


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


def _is_half(f: Facts, ending: str) -> bool:
    """Whether the weights with this ending are stored as two halves each."""
    return any(name.endswith(ending + HALVES[0]) for name in f.stored.shapes)


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
        apart = gated and f.kind == "fsdp_dtensor"  # which keeps them as two tensors
        self.is_gated = gated or f.on("quick_geglu") or f.on("gated_linear_unit")  # the last by Bridge alone
        self.is_apart = apart


# Spellings of the first expert's projections, the last in torch_dist, where experts are an axis.
_EXPERTS = ("mlp.experts.{}0", "mlp.experts.local_experts.0.{}", "mlp.experts.experts.{}")


class Size(NamedTuple):
    """One size of a weight, and the settings that decide it."""

    what: str
    wanted: Any  # by the settings
    stored: int | None  # None: there is no such weight
    settings: tuple[str, ...]


def _sizes(f: Facts) -> str | None:
    if not _is_plain_decoder(f):
        return None
    found = [f"{one.what}: job {one.wanted}, stored {one.stored}" for one in model_sizes(f)
             if one.stored is not None and one.wanted != one.stored]  # fmt: skip
    return "; ".join(found) or None


def model_sizes(f: Facts) -> Iterator[Size]:
    """The sizes of a plain decoder's weights that its settings decide."""
    m = _Model(f)

    def rows(of: str, wanted: Any, *settings: str, axis: int = 0) -> Size:
        shape = _first(f, of)
        stored = shape[axis] if shape is not None and len(shape) > axis else None
        what = of.removesuffix(".weight").rpartition(".")[2]
        return Size(f"{'columns' if axis else 'rows'} of {what}", wanted, stored, settings)

    embedding = f.stored.shapes.get("embedding.word_embeddings.weight", ())
    yield Size("hidden size", m.hidden, embedding[1] if len(embedding) == 2 else None, ("hidden_size",))
    heads, groups, channels = "num_attention_heads", "num_query_groups", "kv_channels"
    if not m.latent:
        gate = m.heads if f.on("attention_output_gate") else 0
        wanted = (m.heads + gate + 2 * m.groups) * m.channels
        yield rows("self_attention.linear_qkv.weight", wanted, heads, groups, channels)
        if _has(f, "self_attention.linear_qkv.weight"):
            wanted = m.heads * m.channels
            yield Size("columns of linear_proj", wanted, _attention_columns(f), (heads, channels))
    else:
        yield from _latent_sizes(f, m, rows)
    for modules, wanted, setting in (
        (("mlp.{}",), m.ffn, "ffn_hidden_size"),
        (_EXPERTS, m.moe_ffn, "moe_ffn_hidden_size"),
        (("mlp.shared_experts.{}",), m.shared_ffn, "moe_shared_expert_intermediate_size"),
    ):
        for module in modules:
            into, out = (module.format(f"{projection}.weight") for projection in ("linear_fc1", "linear_fc2"))
            width = rows(out, wanted, setting, axis=1)._replace(what=setting)
            yield width
            if width.stored is not None:
                halves = 2 if m.is_gated and not (m.is_apart or _is_half(f, into)) else 1  # in one stored fc1
                yield rows(into, width.stored * halves, "swiglu")
    yield rows("mlp.router.weight", f.value("num_experts"), "num_experts")._replace(what="num_experts")
    positions = f.stored.shapes.get("embedding.position_embeddings.weight") or (None,)
    most = "max_position_embeddings"
    yield Size(most, f.value(most), positions[0], (most,))


def _latent_sizes(f: Facts, m: _Model, rows: Callable[..., Size]) -> Iterator[Size]:
    """Those of multi-latent attention."""
    names = ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    kv_rank, q_rank, head, rotated, value = (f.value(name, 0) for name in names)
    heads, (kv, q, qk, rope, v) = "num_attention_heads", names
    yield rows("self_attention.linear_kv_down_proj.weight", kv_rank + rotated, kv, rope)
    yield rows("self_attention.linear_q_down_proj.weight", f.value(q), q)
    yield rows("self_attention.linear_qkv_down_proj.weight", q_rank + kv_rank + rotated, q, kv, rope)
    for projection in ("linear_q_proj", "linear_q_up_proj"):
        yield rows(f"self_attention.{projection}.weight", m.heads * (head + rotated), heads, qk, rope)
    yield rows("self_attention.linear_kv_up_proj.weight", m.heads * (head + value), heads, qk, v)
    yield rows("self_attention.linear_proj.weight", m.heads * value, heads, v, axis=1)


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
             for setting, wanted, what, stored in model_parts(f) if wanted != stored]  # fmt: skip
    return "; ".join(dict.fromkeys(found)) or None


def model_parts(f: Facts) -> Iterator[tuple[str, bool, str, bool]]:
    """(setting, whether it makes a tensor, the tensor, whether that is stored)."""
    names, latent = f.stored.shapes, f.on("multi_latent_attention")
    learned = f.value("position_embedding_type") == "learned_absolute" and not f.on("enable_gpt_oss")
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
    layers = decoder_layers(names)
    sparse = has_some("moe_layer_freq", f.value("moe_layer_freq"), layers)
    yield "num_experts", bool(f.value("num_experts")) and sparse, "a router", _has(f, "mlp.router.weight")
    if _has(f, "mlp.router.weight"):
        shared = "mlp.shared_experts.linear_fc1.weight"
        wanted = f.value("moe_shared_expert_intermediate_size") is not None
        yield "moe_shared_expert_intermediate_size", wanted, "a shared expert", _has(f, shared)
        expert_bias = f.on("moe_router_enable_expert_bias")
        yield "moe_router_enable_expert_bias", expert_bias, "expert_bias", _has(f, "mlp.router.expert_bias")
    variant = f.value("experimental_attention_variant") == "gated_delta_net" and has_some(
        "linear_attention_freq", f.value("linear_attention_freq"), layers
    )
    yield "experimental_attention_variant", variant, "a gated delta net", _has(f, "self_attention.A_log")


def _layers(names: Iterable[str], ending: str) -> set[int]:
    return {layer[0] for layer in map(decoder_layer, names) if layer and layer[1] == ending}


def decoder_layers(names: Iterable[str]) -> int:
    """How many layers of the decoder are stored."""
    return len({layer[0] for layer in map(decoder_layer, names) if layer})


def gated_delta_nets(names: Iterable[str]) -> set[int]:
    """The decoder layers with a gated delta net as attention."""
    return _layers(names, "self_attention.A_log")


def expert_layers(f: Facts) -> str | None:
    """Which layers are mixtures of experts: every Nth from the first one on, or as a list says."""
    routers, freq = _layers(f.stored.shapes, "mlp.router.weight"), f.value("moe_layer_freq")
    if not _is_plain_decoder(f) or not routers or freq is None:
        return None
    layers = decoder_layers(f.stored.shapes)
    wanted = in_turns("moe_layer_freq", freq, layers) if isinstance(freq, int) else freq[:layers]
    sparse = {i for i, has_experts in enumerate(wanted) if has_experts}
    if sparse == routers:
        return None
    return f"moe_layer_freq {freq} makes experts in layers {sorted(sparse)}, stored in {sorted(routers)}"


def _modules(f: Facts) -> str | None:
    """Modules of transformers next to the language model, which only Megatron-Bridge's models have."""
    parts = {name.partition(".")[0] for name in f.stored.shapes}
    if (
        "language_model" not in parts or "vision_projection" in parts
    ):  # the latter is Megatron-LM's own LLaVAModel
        return None
    others = sorted(parts - {"language_model"})
    return f"the checkpoint holds {', '.join(others)} next to its language model" if others else None


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
    Rule("expert-layers", ERROR, expert_layers, _STRICT, "--moe-layer-freq as stored", _SPECS, VERSIONS),
)  # fmt: skip


def check_settings(kind: CheckpointKind, weights: Sequence[Weight], common: CommonState) -> Check:
    """Whether every weight has the size that the stored settings ask for, and is there exactly if they ask for it.

    A model that is not the one decoder which Megatron's settings describe is skipped: a hybrid, one of several
    towers, one of layers from other code. So is a setting that the checkpoint does not carry.
    """
    found = Findings("settings", "settings")
    shapes = {weight.name: weight.shape for weight in weights}
    settings = common.args or _of_bridge(common.model_config)
    if problem := contradicted_dtype(common):
        found.warning("params_dtype", problem)
    if _is_known(shapes, settings):
        facts = Facts(kind, Job(settings), settings, stored_style(shapes))
        for setting, problem in (*_size_problems(facts), *(_part_problems(facts) if common.args else ())):
            found.looked_at += 1
            if problem:
                found.error(setting, problem)
    return found.done()


def _is_known(shapes: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any]) -> bool:
    """Whether it is the model that the settings describe, all of it."""
    return (
        isinstance(settings.get("hidden_size"), int)
        and any(map(decoder_layer, shapes))
        and {name.partition(".")[0] for name in shapes} <= _MODULES
        and not (says_hybrid(settings) or is_hybrid(shapes) or any(map(settings.get, _OF_OTHER_CODE)))
    )


def _of_bridge(model: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes in a Bridge configuration under the names that Megatron's arguments have."""
    swiglu = settings_of(model, bridge=True).swiglu  # the only gate that may be stored in separate halves
    found = {"num_experts": model.get("num_moe_experts"), "swiglu": swiglu, **model}
    found["group_query_attention"] = found.get("num_query_groups") is not None
    return {name: value for name, value in found.items() if value is not None or name in _DERIVED}


def _size_problems(f: Facts) -> Iterator[tuple[str, str | None]]:
    """For each size that is set and stored its settings, and how they contradict the weight."""
    settings = f.job.settings
    for size in model_sizes(f):
        if size.stored is None or not all(name in settings for name in size.settings):
            continue
        named = ", ".join(f"{name} {settings[name]}" for name in size.settings)
        yield (
            named,
            None
            if size.wanted == size.stored
            else (f"{size.what} would be {size.wanted}, the checkpoint has {size.stored}"),
        )


def _part_problems(f: Facts) -> Iterator[tuple[str, str | None]]:
    """For each setting that makes a weight, whether that is there; and which layers have experts."""
    names, settings = f.stored.shapes, f.job.settings
    parts = [*model_parts(f)]
    untied = "untie_embeddings_and_output_weights"
    parts.append((untied, f.on(untied), OUTPUT, OUTPUT in names))
    by_swiglu = f.on("swiglu") or not f.on("gated_linear_unit")  # another gate of Bridge's tells of no halves
    if f.kind == "fsdp_dtensor" and by_swiglu and any(_FC1 in name for name in names):
        parts.append(
            (
                "swiglu",
                f.on("swiglu"),
                f"{_FC1}{HALVES[0]}",
                any(_FC1 in n and n.endswith(HALVES[0]) for n in names),
            )
        )
    for setting, wanted, what, stored in parts:
        if setting in settings:
            problem = None if wanted == stored else f"{what} {'is' if stored else 'is not'} stored"
            yield f"{setting} {settings[setting]}", problem
    if "mtp_num_layers" in settings:
        count, needed = f.stored.mtp_layers, mtp_layers(f)
        yield f"mtp_num_layers {needed}", None if count == needed else f"{count} such layers are stored"
    # The padded vocabulary is not asked for: Megatron loads an embedding of other rows than the job has.
    if problem := expert_layers(f):
        yield "moe_layer_freq", problem
