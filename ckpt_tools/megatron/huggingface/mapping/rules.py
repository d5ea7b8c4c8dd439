"""Rules: which Megatron parameter is which Hugging Face tensors, for a whole family of models.

Megatron parameters are named as `torch_dist` names them with layers and experts written one by one:
``decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight``. Placeholders in names: ``{l}`` a decoder layer,
``{m}`` a multi-token prediction layer, ``{n}`` its number when counted on from the decoder's, ``{e}`` an expert,
``{p}`` a part of a projection that running models fuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from operator import eq
from typing import Any, NamedTuple

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.config.codecs import Field
from ckpt_tools.megatron.huggingface.config.model_args import MAX_SIZE, ModelArgs
from ckpt_tools.megatron.huggingface.mapping.layouts import (
    JOINED,
    LAYOUTS,
    HfShape,
    Layout,
    Link,
    gate_up_in_turns,
    stack,
)
from ckpt_tools.model.views import Shape


@dataclass(frozen=True, slots=True)
class Rule:
    """`core` of `shape` is stored as `hf` in `layout`, in models where all of `when` holds.

    `shape` names dimensions (`dimensions`). `also` lists other spellings of `core` that versions of Megatron
    write. `norm` marks weights that one side may store as weight - 1. `dtype` is kept on both sides whatever is
    asked. `fused` is a Hugging Face tensor of all experts, or another name, that readers accept in place of `hf`.
    `parts` are the parts of which one Hugging Face tensor is made, each with the name of its rows; `shape` has the
    other dimensions then. `plain` marks a norm of which a class of 1 + weight norms takes the weight unchanged.
    `place` is that of the rule in a user's file.
    """

    core: str
    hf: tuple[str, ...]
    layout: str
    shape: tuple[str, ...]
    when: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    norm: bool = False
    dtype: str | None = None
    fused: str | None = None
    parts: tuple[tuple[str, str], ...] = ()
    plain: bool = False
    place: str = field(default="", compare=False)

    @property
    def whose(self) -> str:
        """Who says which shape a tensor of this rule has, where it is not of the known rules: for messages."""
        return f" by {' x '.join(self.shape)}, {self.place} of the rule file," if self.place else ""


class OneOf(NamedTuple):
    """Several values that a family admits; what is written without another reason is the first."""

    values: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"one of {', '.join(map(repr, self.values))}"


@dataclass(frozen=True, slots=True)
class Condition:
    """What a setting is: one of `values`, or set at all; `holds` False for the opposite.

    Of a setting that has a value for each layer, that of the layer counts.
    """

    setting: str
    values: tuple[Any, ...] = ()
    holds: bool = True

    def __call__(self, model: ModelArgs, layer: int) -> bool:
        value = model.setting(self.setting)
        if isinstance(value, tuple):
            if value and len(value) != model.num_layers:
                raise MappingError(f"{self.setting} has {len(value)} values for {model.num_layers} layers")
            value = value[layer] if value else None
        return (value in self.values if self.values else bool(value)) == self.holds


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: its rules, and what its config.json says.

    `fields` ties config.json to `ModelArgs` (config.py); `fixed` are config fields with one value; `needs` are
    `ModelArgs` values (or `OneOf` several) without which the model is not of this family. `plus_one` says that the
    Hugging Face model computes 1 + weight in its norms. `copies` are further names under which weights are repeated.
    `ignored` are patterns of Hugging Face tensors without content.
    `like` is the known family that a rule file copied fields from. In a model of windows and full attention in
    turns, the last of `window_turn` layers sees all keys. `unset` are fields that are written as null where no
    reference has them: the class's own value is beyond a smaller vocabulary, and it fails to load. `also_types` are
    further model types of the same class, which a reference keeps. `dimensions` are further names of sizes, each a
    setting, and `conditions` further words for `when`. `settings` are arguments that `ModelArgs` has no field for.
    `published` names the project with the layers' modules and the mapping that the rules follow, where plain
    Megatron-LM has no such model. `written` are fields with the one value with which transformers takes the weights
    as they are stored: with another, it changes them when it loads them.
    """

    name: str
    architecture: str
    rules: tuple[Rule, ...]
    fields: tuple[Field, ...]
    model_type: str = ""  # "" for the same as `name`
    fixed: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[str, Any] = field(default_factory=dict)
    plus_one: bool = False
    copies: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    like: str = ""
    window_turn: int = 0
    also_types: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    dimensions: Mapping[str, str] = field(default_factory=dict)
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    published: str = ""
    written: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config_fields(self) -> set[str]:
        return {one.hf for one in self.fields}


def allows(needed: Any, value: Any, same: Callable[[Any, Any], bool] = eq) -> bool:
    return any(same(value, one) for one in (needed.values if isinstance(needed, OneOf) else (needed,)))


def first_of(needed: Any) -> Any:
    return needed.values[0] if isinstance(needed, OneOf) else needed


@dataclass(frozen=True, slots=True)
class Pair:
    """A rule for one layer: Megatron parameters (one, or one per expert or part) and the tensors they fill together.

    `shapes[i]` and `layouts[i]` belong to `core[i]`; all layouts have the same Hugging Face tensors.
    """

    core: tuple[str, ...]
    shapes: tuple[Shape, ...]
    hf: tuple[str, ...]
    layouts: tuple[Layout, ...]
    rule: Rule
    also: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[HfShape, ...]:
        return self.layouts[0].tensors

    @property
    def shape(self) -> Shape:
        """The shape of the first parameter, which is that of all but for parts."""
        return self.shapes[0]

    def named(self) -> Iterator[tuple[str, HfShape]]:
        return zip(self.hf, self.tensors, strict=True)


MAMBA_KERNEL = 4  # Megatron's mamba_mixer.py `d_conv`, for which there is no option


def dimensions(model: ModelArgs) -> dict[str, int]:
    """Sizes by the names that rules use for them, in elements."""
    heads, groups, dim = model.num_attention_heads, model.num_query_groups, model.kv_channels
    gate = 2 if model.gated else 1
    shared = model.moe_shared_expert_intermediate_size or 0
    nope, rope, value = model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim
    return {
        "one": 1,
        "hidden": model.hidden_size,
        "hidden2": 2 * model.hidden_size,
        "vocab": model.padded_vocab_size or 0,
        "positions": model.max_position_embeddings,
        "heads": heads,
        "head_dim": dim,
        "query": heads * dim,
        "qkv": (heads + 2 * groups) * dim,
        "ffn": model.ffn_hidden_size,
        "fc1": gate * model.ffn_hidden_size,
        "experts": model.num_experts or 0,
        "moe_ffn": model.moe_ffn_hidden_size,
        "moe_fc1": gate * model.moe_ffn_hidden_size,
        "shared_ffn": shared,
        "shared_fc1": gate * shared,
        "q_rank": model.q_lora_rank or 0,
        "kv_rank": model.kv_lora_rank,
        "mla_query": heads * (nope + rope),
        "mla_kv_down": model.kv_lora_rank + rope,
        "mla_kv_up": heads * (nope + value),
        "mla_value": heads * value,
        "index_heads": model.dsa_indexer_n_heads,
        "index_dim": model.dsa_indexer_head_dim,
        "index_query": model.dsa_indexer_n_heads * model.dsa_indexer_head_dim,
        "key": groups * dim,
        "qkv_gate": 2 * (heads + groups) * dim,
        "delta_key": model.linear_num_key_heads * model.linear_key_head_dim,
        "delta_value": model.linear_num_value_heads * model.linear_value_head_dim,
        "delta_heads": model.linear_num_value_heads,
        "delta_head_dim": model.linear_value_head_dim,
        "delta_kernel": model.linear_conv_kernel_dim,
        "mamba_inner": model.mamba_num_heads * model.mamba_head_dim,
        "mamba_state": model.mamba_num_groups * model.mamba_state_dim,
        "mamba_heads": model.mamba_num_heads,
        "mamba_kernel": MAMBA_KERNEL,
        "latent": model.moe_latent_size or model.hidden_size,
    }


CONDITIONS: dict[str, Callable[[ModelArgs, int], bool]] = {
    "untied": lambda model, layer: not model.tied,
    "linear_bias": lambda model, layer: model.add_bias_linear,
    "qkv_bias": lambda model, layer: model.add_qkv_bias or model.add_bias_linear,
    "qk_norm": lambda model, layer: model.qk_layernorm,
    "dense": lambda model, layer: not model.is_moe(layer),
    "moe": lambda model, layer: model.is_moe(layer),
    "shared_experts": lambda model, layer: bool(model.moe_shared_expert_intermediate_size),
    "shared_gate": lambda model, layer: model.moe_shared_expert_gate,
    "expert_bias": lambda model, layer: model.moe_router_enable_expert_bias,
    "q_lora": lambda model, layer: model.q_lora_rank is not None,
    "no_q_lora": lambda model, layer: model.q_lora_rank is None,
    "indexer": lambda model, layer: model.has_indexer(layer),
    "attention_layer": lambda model, layer: model.kind(layer) == "*",
    "delta_net_layer": lambda model, layer: model.kind(layer) == "G",
    "mamba_layer": lambda model, layer: model.kind(layer) in "MP",
    "mlp_layer": lambda model, layer: model.kind(layer) == "-",
    "experts_layer": lambda model, layer: model.kind(layer) == "E",
    "latent_experts": lambda model, layer: model.moe_latent_size is not None,
}


SMALLEST = ModelArgs(num_layers=1, hidden_size=1, num_attention_heads=1, num_query_groups=1, kv_channels=1,
                     ffn_hidden_size=1, max_position_embeddings=1)  # fmt: skip
DIMENSIONS = tuple(dimensions(SMALLEST))


def expand(family: Family, model: ModelArgs, present: Iterable[str] = ()) -> list[Pair]:
    """All pairs of a model, in the order of its layers.

    `present` are the tensors of a Hugging Face directory that is being read: where the `fused` tensor of a rule
    is among them, the pair is about it.
    """
    sizes, there = dimensions(model), frozenset(present)
    sizes |= {name: _size(model, setting) for name, setting in family.dimensions.items()}
    conditions: dict[str, Callable[[ModelArgs, int], bool]] = CONDITIONS | dict(family.conditions)
    pairs: list[Pair] = []
    for rules, layers in _by_layer(family.rules, model):
        for layer, names in layers:
            for rule in rules:
                if all(conditions[condition](model, layer) for condition in rule.when):
                    pairs.extend(pairs_of(rule, names, model, sizes, there))
    return pairs


def _size(model: ModelArgs, setting: str) -> int:
    value = model.setting(setting) or 0
    if type(value) is not int or not 0 <= value <= MAX_SIZE:
        raise MappingError(f"{setting} is {str(value)[:60]!r}, and a rule file has it for a size")
    return value


def _by_layer(
    rules: tuple[Rule, ...], model: ModelArgs
) -> Iterator[tuple[list[Rule], list[tuple[int, dict[str, int]]]]]:
    """Rules with the layers they are repeated for: the model's own first, then decoder layers, then MTP.

    An MTP layer is built like the last decoder layer (Megatron gpt_layer_specs.py `get_gpt_mtp_block_spec`).
    """
    layers = [(layer, {"l": layer}) for layer in range(model.num_layers)]
    mtp = [(model.num_layers - 1, {"m": m, "n": model.num_layers + m}) for m in range(model.mtp_num_layers)]
    yield [r for r in rules if "{l}" not in r.core and "{m}" not in r.core], [(0, {})]
    yield [r for r in rules if "{l}" in r.core], layers
    yield [r for r in rules if "{m}" in r.core], mtp


def pairs_of(
    rule: Rule, names: dict[str, int], model: ModelArgs, sizes: Mapping[str, int], there: frozenset[str]
) -> Iterator[Pair]:
    """The pairs of a rule for the layer that `names` give numbers; `there` as `present` of `expand`."""
    if rule.parts:
        yield _joined(rule, names, model, sizes)
        return
    shape = tuple(sizes[name] for name in rule.shape)
    fused = _fill(rule.fused, names) if rule.fused else None
    layout_name, hf = ("same", (fused,)) if fused in there and fused else (rule.layout, rule.hf)
    layout = _laid_out(rule, layout_name, shape, model)
    also = tuple(_fill(name, names) for name in rule.also)
    if "{e}" not in rule.core:
        yield Pair((_fill(rule.core, names),), (shape,), _all(hf, names), (layout,), rule, also)
        return
    experts = range(model.num_experts or 0)
    core = tuple(_fill(rule.core, names | {"e": e}) for e in experts)
    if any("{e}" in name for name in hf):
        for e in experts:
            yield Pair((core[e],), (shape,), _all(hf, names | {"e": e}), (layout,), rule)
    elif core:
        yield Pair(core, (shape,) * len(core), _all(hf, names), stack([layout] * len(core)), rule)


def _laid_out(rule: Rule, name: str, shape: Shape, model: ModelArgs) -> Layout:
    """The layout of a shape, which those of a user's rule have to fit."""
    made = rule_layout(rule, model, name)
    if not rule.place:
        return made(shape, model)
    try:
        layout = made(shape, model)
        shown = sum(prod(_shown(link, shape)) for link in layout.links)
    except (ValueError, IndexError):
        shown = -1
    if shown != prod(shape) and not (name == "vocab" and shown >= 0):
        raise MappingError(
            f"layout {name} does not fit {list(shape)} ({' x '.join(rule.shape)}), {rule.place} of the rule file"
        )
    return layout


def _shown(link: Link, shape: Shape) -> Shape:
    for cut in link.core_cuts:
        shape = cut.shape(shape)
    if link.order and len(link.order) != len(shape):
        raise IndexError(f"{len(link.order)} axes of {shape}")
    return shape


def _joined(rule: Rule, names: Mapping[str, int], model: ModelArgs, sizes: Mapping[str, int]) -> Pair:
    """All parts of a projection that are one tensor on the other side."""
    rest = tuple(sizes[name] for name in rule.shape)
    shapes = tuple((sizes[rows], *rest) for _, rows in rule.parts)
    core = tuple(_fill(rule.core, {**names, "p": part}) for part, _ in rule.parts)
    return Pair(core, shapes, _all(rule.hf, names), JOINED[rule.layout](shapes, model), rule)


def rule_layout(
    rule: Rule, model: ModelArgs, layout: str | None = None
) -> Callable[[Shape, ModelArgs], Layout]:
    """The layout of a rule (or another one), with regard to experts that have gate and up rows in turns."""
    layout = layout or rule.layout
    if not model.glu_interleave or "{e}" not in rule.core or ".linear_fc1." not in rule.core:
        return LAYOUTS[layout][1]
    if layout != "gate_up":
        raise MappingError(
            f"moe_mlp_glu_interleave_size is {model.glu_interleave.block}, and the rule of {rule.core} has the "
            f"layout {layout}; rows in turns are known for gate_up only"
        )
    return gate_up_in_turns


def _all(templates: Iterable[str], names: Mapping[str, int | str]) -> tuple[str, ...]:
    return tuple(_fill(template, names) for template in templates)


def _fill(template: str, names: Mapping[str, int | str]) -> str:
    for name, number in names.items():
        template = template.replace(f"{{{name}}}", str(number))
    return template
