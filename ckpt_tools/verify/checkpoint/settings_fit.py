"""Do the settings that a checkpoint carries describe the tensors beside them: the model that a job would build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_tools.megatron.format import Weight
from ckpt_tools.megatron.hybrid import is_hybrid, says_hybrid
from ckpt_tools.megatron.keys import HALVES, decoder_layer
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.run_state.settings import settings_of
from ckpt_tools.megatron.torch_dist.stacking import layer_counts
from ckpt_tools.model.choices import CheckpointKind
from ckpt_tools.verify.checkpoint.model_rules import expert_layers, model_parts, model_sizes, mtp_layers
from ckpt_tools.verify.readiness.facts import Facts, Stored
from ckpt_tools.verify.readiness.job import Job
from ckpt_tools.verify.report import Check, Findings

EMBEDDING, OUTPUT, FC1 = "embedding.word_embeddings.weight", "output_layer.weight", "linear_fc1.weight"
_MODULES = frozenset({"embedding", "decoder", "output_layer", "mtp", "rotary_pos_emb"})  # of GPTModel
# Settings that make layers of which only the code of the run knows the sizes.
_OF_OTHER_CODE = ("spec", "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
_DERIVED = (
    "kv_channels",
    "num_query_groups",
)  # from the heads, where a Bridge configuration leaves them open


def check_settings(kind: CheckpointKind, weights: Sequence[Weight], common: CommonState) -> Check:
    """Whether every weight has the size that the stored settings ask for, and is there exactly if they ask for it.

    A model that is not the one decoder which Megatron's settings describe is passed over: a hybrid, one of several
    towers, one of layers from other code. So is a setting that the checkpoint does not carry.
    """
    found = Findings("settings", "settings")
    shapes = {weight.name: weight.shape for weight in weights}
    settings = common.args or _of_bridge(common.model_config)
    if _is_known(shapes, settings):
        facts = Facts(kind, Job(settings), settings, _stored(shapes))
        for setting, problem in (*_sizes(facts), *(_parts(facts) if common.args else ())):
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


def _stored(shapes: Mapping[str, tuple[int, ...]]) -> Stored:
    layers = layer_counts(shapes)
    predicting = next((count for block, count in layers.items() if block.startswith("mtp.")), 0)
    return Stored(shapes, shapes[EMBEDDING][0] if EMBEDDING in shapes else None, mtp_layers=predicting)


def _of_bridge(model: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes in a Bridge configuration under the names that Megatron's arguments have."""
    swiglu = settings_of(model, bridge=True).swiglu  # the one gate whose halves may be stored apart
    found = {"num_experts": model.get("num_moe_experts"), "swiglu": swiglu, **model}
    found["group_query_attention"] = found.get("num_query_groups") is not None
    return {name: value for name, value in found.items() if value is not None or name in _DERIVED}


def _sizes(f: Facts) -> Iterator[tuple[str, str | None]]:
    """For each size that is told and stored its settings, and how they contradict the weight."""
    told = f.job.settings
    for size in model_sizes(f):
        if size.stored is None or not all(name in told for name in size.settings):
            continue
        named = ", ".join(f"{name} {told[name]}" for name in size.settings)
        yield (
            named,
            None
            if size.wanted == size.stored
            else (f"{size.what} would be {size.wanted}, the checkpoint has {size.stored}"),
        )


def _parts(f: Facts) -> Iterator[tuple[str, str | None]]:
    """For each setting that makes a weight, whether that is there; and which layers have experts."""
    names, told = f.stored.shapes, f.job.settings
    parts = [*model_parts(f)]
    untied = "untie_embeddings_and_output_weights"
    parts.append((untied, f.on(untied), OUTPUT, OUTPUT in names))
    by_swiglu = f.on("swiglu") or not f.on("gated_linear_unit")  # another gate of Bridge's tells of no halves
    if f.kind == "fsdp_dtensor" and by_swiglu and any(FC1 in name for name in names):
        parts.append(
            (
                "swiglu",
                f.on("swiglu"),
                f"{FC1}{HALVES[0]}",
                any(FC1 in n and n.endswith(HALVES[0]) for n in names),
            )
        )
    for setting, wanted, what, stored in parts:
        if setting in told:
            problem = None if wanted == stored else f"{what} {'is' if stored else 'is not'} stored"
            yield f"{setting} {told[setting]}", problem
    if "mtp_num_layers" in told:
        count, needed = f.stored.mtp_layers, mtp_layers(f)
        yield f"mtp_num_layers {needed}", None if count == needed else f"{count} such layers are stored"
    # The padded vocabulary is not asked for: Megatron loads an embedding of other rows than the job has.
    if problem := expert_layers(f):
        yield "moe_layer_freq", problem
