"""What must hold for a model to be exported or imported, and what the two programs do differently all the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any, NamedTuple

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.dcp.state_dict import without_segments
from ckpt_tools.megatron.huggingface.config.config import in_v4_form
from ckpt_tools.megatron.huggingface.config.megatron_args import SINCE, sparse_attention_problems
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.config.rope_args import (
    GPT_OSS_SCALING,
    RELEASED_GPT_OSS_SCALING,
    TRAINED_LLAMA3_FACTOR,
)
from ckpt_tools.megatron.huggingface.mapping.rules import Family, Pair, allows
from ckpt_tools.model.catalog import TensorEntry
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.views import Shape

PART = (
    "that of the language model in a model of several parts (vision, audio); those are not converted: save the "
    "language model and its text_config as a separate model"
)
DENSE_IN_MTP = "mtp.layers.{m}.transformer_layer.mlp.linear_fc1.weight"
MOST_OF_A_HEAD = 8  # tensors
WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # what names of classes end with
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


class Spec(NamedTuple):
    """Type and shape (elements) of a tensor that is there."""

    dtype: str
    shape: Shape


def specs_of(tensors: Mapping[str, TensorEntry]) -> dict[str, Spec]:
    return {key: Spec(entry.dtype, entry.shape) for key, entry in tensors.items()}


def with_vocabulary(
    model: ModelArgs, parameters: Mapping[str, Spec], given: int | None
) -> tuple[ModelArgs, tuple[str, ...]]:
    """The model with both vocabulary sizes set. `given` is what the user or the args say, not a reference."""
    if EMBEDDING not in parameters:
        raise MappingError(f"the checkpoint has no {EMBEDDING}: not a whole language model")
    rows = parameters[EMBEDDING].shape[0]
    padded = model.padded_vocab_size or rows
    size, notes = given or model.vocab_size or rows, []
    if size > rows and given:
        raise MappingError(f"{EMBEDDING} has {rows} rows, fewer than the vocabulary of {size}")
    if size > rows:
        notes.append(
            f"the reference config's vocab_size {size} exceeds the {rows} rows there are; {rows} is written"
        )
        size = rows
    elif not given and not model.vocab_size:
        notes.append(
            f"the true vocabulary size is not known; all {rows} rows are exported (--vocab-size cuts them)"
        )
    elif size < rows:
        notes.append(f"the vocabulary is cut from {rows} to {size} rows, which drops its padding")
    return replace(model, vocab_size=size, padded_vocab_size=padded), tuple(notes)


def with_stored_norms(model: ModelArgs, parameters: Iterable[str]) -> ModelArgs:
    """The model with norms of queries and keys where they are stored: Bridge's Gemma 3 has them whatever it says."""
    stored = any(name.endswith(".self_attention.q_layernorm.weight") for name in parameters)
    return replace(model, qk_layernorm=model.qk_layernorm or (stored and not model.multi_latent_attention))


def not_of_family(family: Family, model: ModelArgs, reference: Mapping[str, Any] | None) -> list[str]:
    """What keeps the model from being expressed as this family."""
    problems = [
        f"{name} is {getattr(model, name)!r}; {family.architecture} is {needed!r}"
        for name, needed in family.needs.items()
        if name in ModelArgs.__dataclass_fields__
        and not allows(needed, getattr(model, name))
        and model.has(name)
    ]
    config = in_v4_form(reference or {})
    lacking = [one.hf for one in family.fields
               if one.wins == "either" and model.setting(one.arg) is None and one.hf not in config]  # fmt: skip
    if lacking:
        problems.append(f"only a reference config tells {', '.join(lacking)}; pass --hf-config")
    if 0 in model.sliding_layers and not any(one.arg == "sliding_layers" for one in family.fields):
        problems.append(f"sliding windows on some layers only; {family.architecture} has them on all or none")
    if model.rotary_percent != 1 and any(one and one["rope_type"] == "yarn" for one in model.rope_scaling):
        problems.append("YaRN together with rotary_percent: Megatron's YaRN rotates whole heads")
    shared = any(rule.core.startswith("mtp.") and "{" not in rule.hf[0] for rule in family.rules)
    if model.mtp_num_layers > 1 and shared:
        problems.append(
            f"mtp_num_layers is {model.mtp_num_layers}; config.json of {family.architecture} has names for one"
        )
    if model.mtp_num_layers and model.kind(model.num_layers - 1) == "G":
        problems.append(
            "the last layer is a gated delta net, which makes Megatron's prediction layer one; that of "
            f"{family.architecture} is attention"
        )
    if model.rotary_interleaved and (model.qk_layernorm or model.multi_latent_attention):
        problems.append("rotary_interleaved together with q/k norms or MLA has no known Hugging Face order")
    return problems + sparse_attention_problems(model) + contradictions(family, model, config)


_SHARED_BY = (("num_attention_heads", "num_query_groups"), ("linear_num_value_heads", "linear_num_key_heads"))


def contradictions(family: Family, model: ModelArgs, config: Mapping[str, Any]) -> list[str]:
    """Settings that cannot be true together, under their names in config.json."""
    names = {one.arg: one.also if one.also in config else one.hf for one in reversed(family.fields)}

    def clash(one: str, other: str, why: str = "") -> str:
        a, b = (f"{names.get(arg, arg)} is {getattr(model, arg)}" for arg in (one, other))
        return f"{a}, {b}{why}"

    problems, kinds = [], config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) != model.num_layers:
        problems.append(f"layer_types has {len(kinds)} entries, {names['num_layers']} is {model.num_layers}")
    for heads, shared in _SHARED_BY:
        if getattr(model, heads) % (getattr(model, shared) or 1):
            problems.append(clash(heads, shared, ": a multiple of it is expected"))
    experts, chosen = model.num_experts or 0, model.moe_router_topk
    if 0 < experts < chosen:
        problems.append(clash("moe_router_topk", "num_experts"))
    groups, of_groups = model.moe_router_num_groups, model.moe_router_group_topk
    if experts and groups and of_groups:
        if of_groups > groups:
            problems.append(clash("moe_router_group_topk", "moe_router_num_groups"))
        elif experts % groups:
            problems.append(clash("num_experts", "moe_router_num_groups", ": groups have the same size"))
        elif chosen > (most := of_groups * (experts // groups)):
            problems.append(
                clash("moe_router_topk", "moe_router_group_topk", f": {most} experts are in these")
            )
    return problems


def spellings(
    pairs: Iterable[Pair], parameters: Mapping[str, Spec], problems: list[str]
) -> tuple[dict[str, str], list[str]]:
    """Rule name -> the name there is, and the parameters no rule used."""
    spelled: dict[str, str] = {}
    used: set[str] = set()
    for pair in pairs:
        for name, shape in zip(pair.core, pair.shapes, strict=True):
            found = [one for one in (name, *pair.also) if one in parameters]
            used.update(found)
            if not found:
                problems.append(f"{name} {list(shape)} is missing")
                continue
            if len(found) > 1:
                problems.append(f"{' and '.join(found)} are two names of one parameter")
            if parameters[found[0]].shape != shape:
                problems.append(
                    f"{found[0]} has shape {list(parameters[found[0]].shape)}, "
                    f"its settings ask{pair.rule.whose} for {list(shape)}"
                )
            spelled[name] = found[0]
    return spelled, [name for name in parameters if name not in used]


def misfits(
    pairs: Iterable[Pair], tensors: Mapping[str, Spec], prefix: str = ""
) -> tuple[Set[str], list[str]]:
    """The names that config.json asks for, without `prefix`; what is missing, and what has another shape."""
    wanted = {
        name.removeprefix(prefix): (one.shape, pair.rule.whose)
        for pair in pairs
        for name, one in pair.named()
    }
    problems = [
        f"{name} {list(shape)} is missing" for name, (shape, _) in wanted.items() if name not in tensors
    ]
    problems += [
        f"{name} has shape {list(tensors[name].shape)}, config.json asks{origin} for {list(shape)}"
        for name, (shape, origin) in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    return wanted.keys(), problems


def other_heads(
    strange: Iterable[str], wanted: Iterable[str], tensors: Mapping[str, Spec], hidden_size: int
) -> list[str]:
    """The tensors without a rule that are another head: few, outside of the model's modules, one takes its output."""
    modules = {name.split(".")[0] for name in wanted}
    found = sorted(name for name in strange if name.split(".")[0] not in modules)
    is_head = any(tensors[name].shape[1:] == (hidden_size,) for name in found)
    return found if is_head and len(found) <= MOST_OF_A_HEAD else []


WRAPPERS = {
    "base_model.model.": "peft's: merge its adapters and save the model inside (`model.merge_and_unload()`)",
    "module.": "a parallel wrapper's: save the model inside it (`model.module`)",
    "_orig_mod.": "torch.compile's: save the model inside it (`model._orig_mod`)",
    "language_model.": PART,
    "model.language_model.": PART,
}


def refuse_wrapped(extra: Iterable[str], missing: Iterable[str]) -> None:
    """Raise MappingError if all `missing` names are among `extra`, behind a prefix or with a wrapper's segments."""
    there, names = frozenset(extra), list(missing)
    bare = [name.removeprefix("model.") for name in names]
    if not bare:
        return
    inside = {without_segments(name): name for name in there}
    if inside.keys() >= set(names):
        raise MappingError(
            f"the names of {len(names)} tensors have segments of a wrapper inside (torch.compile, FSDP, activation "
            f"checkpointing), such as {inside[names[0]]} for {names[0]}: save the model without the wrapper"
        )
    first = {name.removesuffix(bare[0]) for name in there if name.endswith(f".{bare[0]}")}
    first |= {prefix.removesuffix("model.") for prefix in first if prefix.endswith(".model.")}
    for prefix in sorted(first - {"model."}, key=len):
        if all(not there.isdisjoint((prefix + name, f"{prefix}model.{name}")) for name in bare):
            owner = WRAPPERS.get(prefix, "that of a model which has this one inside: save the model inside")
            raise MappingError(
                f"the names of {len(bare)} tensors have the prefix {prefix!r} before what config.json asks for, such "
                f"as {next(name for name in sorted(there) if name.endswith(bare[0]))}. It is {owner}"
            )


def semantic_notes(family: Family, model: ModelArgs) -> tuple[str, ...]:
    """Differences in what the two programs compute from equal weights and settings."""
    notes = []
    if model.moe_router_num_groups and model.moe_router_group_topk:
        best = model.moe_router_topk // model.moe_router_group_topk
        theirs = 2 if model.moe_router_enable_expert_bias else 1
        if best != theirs:
            notes.append(
                f"routing: Megatron ranks a group by the sum of its best {best} experts, transformers by "
                f"{theirs}: logits will differ"
            )
    if model.multi_latent_attention and model.layernorm_epsilon != 1e-6:
        notes.append(
            "transformers evaluates the norms inside MLA with epsilon 1e-6 whatever config.json says"
        )
    if "M" in model.hybrid_pattern and model.layernorm_epsilon != 1e-5:
        notes.append("Megatron evaluates the norms inside Mamba with epsilon 1e-5 whatever its args say")
    if model.mamba_num_groups > 1 and family.architecture == "Mamba2ForCausalLM":
        notes.append(
            f"transformers 4 normalizes all {model.mamba_num_groups} groups of Mamba heads together, Megatron and "
            "transformers 5 each group by itself: logits of transformers 4 differ"
        )
    if "M" in model.hybrid_pattern and family.architecture == "NemotronHForCausalLM":
        notes.append(
            "transformers keeps the time steps of Mamba above time_step_min, Megatron does not: logits differ where "
            "one is smaller"
        )
    return tuple(notes)


def loading_notes(family: Family, config: Mapping[str, Any]) -> tuple[str, ...]:
    """What of a config.json makes transformers change the weights that it loads, and another class that it names."""
    names = config.get("architectures")
    named = str(names[0]) if isinstance(names, list) and names else family.architecture
    note = f"architectures is {names!r:.80} in config.json; what it has is taken for a {family.architecture}"
    notes = () if named == family.architecture or named.endswith(WITH_HEAD) else (note,)
    return notes + tuple(
        f"{name} is {config[name]!r} in config.json: transformers 5.24 changes weights of {family.architecture} by "
        f"it when it loads them; an export has {value!r}, with which they stay as they are stored"
        for name, value in family.written.items()
        if config.get(name, value) != value
    )


def shared_notes(family: Family, model: ModelArgs) -> tuple[str, ...]:
    """What loading reports for a model without a shared expert if its class always has one."""
    counted = any(one.hf == "n_shared_experts" for one in family.fields)
    if not counted or model.moe_shared_expert_intermediate_size or not model.num_experts:
        return ()
    return (
        "the model has no shared expert: config.json says 0 of them, with which the class computes the same; "
        "transformers names their weights, which have no elements, as missing",
    )


def kept_types(found: Iterable[tuple[str, str, str | None]]) -> tuple[str, ...]:
    """A note on tensors (name, stored type, the one type that their rule knows) that change their type for it."""
    changed: dict[tuple[str, str], list[str]] = {}
    for name, stored, own in found:
        if own not in (None, stored):
            changed.setdefault((stored, str(own)), []).append(name)
    return tuple(
        f"{len(names)} tensors, {names[0]} the first, are {stored} in the source and written as {own}, the type that "
        "both programs hold them in"
        for (stored, own), names in changed.items()
    )


def wider_types(found: Iterable[tuple[str, str]], bulk: str) -> tuple[str, ...]:
    """A note on parameters (name, type) that are wider than most of the model: loading rounds them silently."""
    wider = [(name, dtype) for name, dtype in found if itemsize(dtype) > itemsize(bulk)]
    if not wider:
        return ()
    name, dtype = wider[0]
    return (
        f"{len(wider)} parameters, {name} the first, are {dtype} in a model of {bulk} and written so; a job that "
        f"holds them in {bulk} rounds them as it loads",
    )


def rope_notes(args: Mapping[str, Any] | None, model: ModelArgs) -> tuple[str, ...]:
    """What `--enable-gpt-oss` makes of the rotary embedding, whatever the other arguments say."""
    if not (args or {}).get("enable_gpt_oss"):
        return ()
    ours, theirs = (
        one["original_max_position_embeddings"] for one in (GPT_OSS_SCALING, RELEASED_GPT_OSS_SCALING)
    )
    taken = (model.rope_scaling[0] or {}).get("original_max_position_embeddings")
    reason = "as Megatron-LM computes" if taken == ours else "as the reference config says"
    return (
        f"enable_gpt_oss: Megatron-LM runs YaRN with original_max_position_embeddings {ours}, the released models "
        f"have {theirs}; {taken} is written, {reason}",
    )


def import_notes(family: Family, model: ModelArgs) -> tuple[str, ...]:
    notes = list(semantic_notes(family, model))
    rope = model.rope_scaling[0]
    if rope and rope["rope_type"] == "llama3" and rope["factor"] != TRAINED_LLAMA3_FACTOR:
        notes.append(
            f"rope factor {rope['factor']}: Megatron-LM before #6306 trains with {TRAINED_LLAMA3_FACTOR} whatever "
            "--rope-scaling-factor says"
        )
    if rope and rope["rope_type"] == "linear":
        notes.append("linear rope scaling: Megatron-LM's gpt_builders.py does not pass it on")
    if model.dsa_indexer_n_heads:
        notes.append(SINCE)
    inner = (rule for rule in family.rules if rule.core == DENSE_IN_MTP)
    if (
        model.mtp_num_layers
        and model.is_moe(model.num_layers - 1)
        and any("dense" not in one.when for one in inner)
    ):
        notes.append(
            "the layer of the prediction module is dense, as only Megatron-Bridge builds it; Megatron-LM's is as the "
            "last layer is, with experts"
        )
    if family.published:
        notes.append(
            f"{family.name}: plain Megatron-LM has no such model; its layers come from {family.published}"
        )
    return tuple(notes)
