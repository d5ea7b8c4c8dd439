"""Every form of a key in a Megatron checkpoint, and what it names. Keys are taken apart here and nowhere else.

`torch_dist` (megatron-core dist_checkpointing; up to core 0.13 a chain of optimizers puts `chained_<i>.` in front)::

    decoder.layers.mlp.linear_fc1.weight                          weight, the layers along its first axis
    decoder.layers.3.mlp.linear_fc1.weight                        weight of one layer
    decoder.layers.mlp.experts.experts.linear_fc1.weight          all experts along the axis behind the layers'
    decoder.layers.mlp.experts.experts.7.linear_fc1.weight        one expert (`singleton_local_shards`)
    decoder.layers.mlp.experts.experts.7.linear_fc1.weight_w      its gate, kept apart from up, `_v`
    decoder.layers.self_attention.in_proj.weight.query            part of a projection that running models fuse
    module.decoder.layers...                                      NeMo 2 puts `module.` in front of every weight
    optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight  state under the key of its weight
    optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg
                                                                  state of a flat bucket
    optimizer.distributed.dp_group_idx_0.per_bucket_numel_unpadded/shard_0_1  what a rank says of its buckets
    decoder.layers.mlp.linear_fc1._extra_state/shard_0_2          object: its place in a grid, and the grid
    rng_state/shard_0.1_1.2                                       object of (pp, tp) rank (0, 1); some add dp
    common_state/shard_0_1                                        what all ranks share; `common.pt` before core 0.19

`fsdp_dtensor` (Megatron-LM checkpointing.py `preprocess_fsdp_dtensor_state_dict`; `module.` once a wrapper)::

    model.module.decoder.layers.0.mlp.linear_fc1.weight_w         value of a live parameter, here of a gate half
    model.module.decoder.layers.0.mlp.experts.linear_fc1.weight7  one expert of a grouped module
    model.module.decoder.layers.0.mlp.experts.local_experts.7.linear_fc1.weight  one expert as a separate module
    optimizer.state.module.module.module.decoder.layers.0.mlp.linear_fc1.weight_w.exp_avg
    optimizer.param_to_group_meta.module.module.module.decoder.layers.0.mlp.linear_fc1.weight.lr
    opt_param_scheduler.max_lr, rng_state.(0, 1).0.np_rng_state.0, optimizer.grad_scaler.scale, args, iteration

Group-map dumps (`--dump-param-to-param-group-map`) name live parameters behind their wrappers::

    module.module.decoder.layers.0.mlp.linear_fc1.weight          some programs write `model.module.` in front

Kinds of state stay as they are stored; `canonical_kind` joins the two spellings of masters. Numbers that no job can
have (ten digits) make a key one of another form, so that nobody computes with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from ckpt_tools.errors import MappingError, list_problems
from ckpt_tools.model.roles import MASTER, WEIGHT, Role

COMMON_OBJECT = "common_state/shard_0_1"  # the only shard there is: one object, saved by one rank
# Prefix of keys that versions before 0.3 wrote next to those that a job loads; nothing reads them.
KEPT = "kept."
COMMON_ITEMS = ("args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far")
NESTED_STATES = ("opt_param_scheduler.", "rng_state.", "optimizer.grad_scaler.")
MODEL_PREFIX = "model.module"
STATE_PREFIX = "optimizer.state.module.module.module"
STATE_PREFIX_FP32 = "optimizer.state.module.module"  # no Float16Module around the model
GROUP_META = "optimizer.param_to_group_meta."
FSDP_PREFIXES = (
    "model.",
    "optimizer.state.",
    GROUP_META,
)  # of the three kinds of names, before their wrappers
DECODER_LAYERS = "decoder.layers."
EXPERTS = ".experts.experts."  # running models have one `experts` less, or `local_experts.<i>`
HALVES = ("_w", "_v")  # gate and up of an fc1
STEP = "step"
# Buffers of modules, not parameters: fp32 whatever the model's type is, never sharded, no states (moe/router.py).
BUFFERS = (".expert_bias", ".local_tokens_per_expert")

# Modules of transformers that Megatron-Bridge's vision-language models hold as they are: whole on every rank, layer
# by layer, and without what Megatron's own modules store besides weights.
OF_TRANSFORMERS = (
    "visual",
    "vision_tower",
    *(
        f"vision_model.{name}"
        for name in ("patch_embed", "pos_embed", "blocks", "merger", "deepstack_merger_list")
    ),
    *(f"multi_modal_projector.{name}" for name in ("norm", "patch_merger", "linear_1", "linear_2")),
)

_STARTS_OF_TRANSFORMERS = tuple([f"{module}." for module in OF_TRANSFORMERS])

_RANK = r"[0-9]{1,9}"
_CHAIN = r"(?:chained_(?P<chain>[0-9]{1,9})\.)?optimizer\."
_GROUP = rf"(?P<group>{_RANK})"
_DOTTED = r"[0-9]{1,18}(?:\.[0-9]{1,18})*"

_OPTIMIZER = re.compile(_CHAIN)
_RUN_STATE = re.compile(
    r"(?:rng_state|rerun_state_machine(?:_state)?|opt_param_scheduler|lr_scheduler)(?:[./]|$)"
    rf"|{re.escape(KEPT)}"
)
_STATE = re.compile(rf"{_CHAIN}state\.(?P<kind>[^.]+)\.(?P<weight>.+)")
_STATE_PREFIX = re.compile(_CHAIN + r"state\.[^.]+\.")
_BUCKET = re.compile(
    rf"(?P<bucket>{_CHAIN}distributed\.dp_group_idx_{_GROUP}\.gbuf_idx_(?P<gbuf>{_RANK})"
    rf"\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)\.bucket_idx_(?P<number>{_RANK}))\.(?P<kind>[^.]+)"
)
_BUCKET_OBJECT = re.compile(rf"{_CHAIN}distributed\.dp_group_idx_{_GROUP}\.(?P<what>\w+)/shard_.+")
_SHARD = re.compile(rf"(?P<name>.+)/shard_(?P<place>{_DOTTED})_(?P<grid>{_DOTTED})")
_STACKED_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d+\.)")
_LAYER = re.compile(rf"(?:^|\.)layers\.({_RANK})\.")
_EXPERT_NUMBER = re.compile(rf"(?<=\.experts\.experts\.)({_RANK})\.")

_MODEL = re.compile(r"model\.(?:module\.)*(?P<name>.+)")
_FSDP_STATE = re.compile(r"optimizer\.state\.(?:module\.)*(?P<name>.+)\.(?P<kind>[^.]+)")
_FSDP_GROUP = re.compile(re.escape(GROUP_META) + r"(?:module\.)*(?P<name>.+)\.(?P<field>[^.]+)")
_FSDP_PREFIX = re.compile(
    rf"(?:{re.escape(KEPT)})?(?:(?:model|optimizer\.state|optimizer\.param_to_group_meta)\.(?:module\.)*)?"
)
_RNG = re.compile(rf"rng_state\.\((?P<pp>{_RANK}), (?P<tp>{_RANK})\)\.(?P<rest>.+)")
_RANKS = re.compile(rf"\(({_RANK}), ({_RANK})\)")
_WRAPPERS = re.compile(r"(?:module\.|model\.)+")
_HALF = re.compile(r"(?P<whole>.+\.(?:weight|bias)\d*)(?P<half>_[wv])")
_SEQUENTIAL_EXPERT = re.compile(rf"(?P<module>.*)\.experts\.local_experts\.(?P<expert>{_RANK})\.(?P<leaf>.+)")
_GROUPED_EXPERT = re.compile(
    rf"(?P<module>.*)\.experts\.(?P<leaf>(?!experts\.|local_experts\.).*\D)(?P<expert>{_RANK})"
)
_PART = re.compile(
    r"(?P<base>.*(?:in_proj|conv1d)\.(?:weight|bias))\.(?P<part>query|key|value|z|beta|alpha|f|b|w|x|B|C|dt)"
)
# The gate or up of one expert: `singleton_local_shards` (mlp.py `apply_swiglu_sharded_factory`) put the half behind
# the leaf, `expert_name` the expert's number behind that.
_EXPERT_HALF = re.compile(r"(?P<base>.*\.linear_fc1\.(?:weight|bias))(?P<part>_[wv])(?P<expert>\d*)")

_MASTER_NAMES = frozenset({"param", "fp32_param"})  # since core 0.15; before
_MOMENTS: tuple[Role, ...] = ("exp_avg", "exp_avg_sq")
# States that are means, sums or maxima of squares or sizes: of Adam, Adafactor, RMSprop, Adadelta, Adagrad, Adamax.
SQUARES = frozenset(
    ("exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "row_var", "col_var", "variance",
     "square_avg", "acc_delta", "sum", "exp_inf")
)  # fmt: skip


# ---- torch_dist


class StateKey(NamedTuple):
    """An optimizer state under the key of its weight."""

    kind: str
    weight: str


class BucketKey(NamedTuple):
    """An optimizer state of a flat bucket; `bucket` is the key without the kind, `dtype` the parameters' type."""

    bucket: str
    chain: int
    group: int
    gbuf: int
    dtype: str
    number: int
    kind: str


class BucketObject(NamedTuple):
    """What one model-parallel rank says of its buckets: `per_bucket_numel`, `optimizer`, `param_state`, ..."""

    chain: int
    group: int
    what: str


class ObjectShard(NamedTuple):
    """One shard of an object: where it is in the grid of all, a number an axis."""

    name: str
    place: tuple[int, ...]
    grid: tuple[int, ...]


class Rank(NamedTuple):
    """Whose rng states an object holds; `dp` is None where data-parallel ranks share them."""

    pp: int
    tp: int
    dp: int | None = None


class Layer(NamedTuple):
    """A name's layer: `block` ends with `layers.`, `leaf` is the name inside of the layer."""

    block: str
    number: int
    leaf: str


def is_optimizer_key(key: str) -> bool:
    """Whether the key belongs to the optimizer, with or without the `chained_<i>.` prefix; of either format."""
    return _OPTIMIZER.match(key) is not None


def is_run_state(key: str) -> bool:
    """Whether a job with --no-save-optim and --no-save-rng does not save this key."""
    return _RUN_STATE.match(key) is not None


def state_key(key: str) -> StateKey | None:
    """What `optimizer.state.<kind>.<weight>` names; None for other keys."""
    match = _STATE.fullmatch(key)
    return StateKey(match["kind"], match["weight"]) if match else None


def bucket_key(key: str) -> BucketKey | None:
    """What the key of a bucket's state names; None for other keys."""
    match = _BUCKET.fullmatch(key)
    if match is None:
        return None
    chain, group, gbuf = int(match["chain"] or 0), int(match["group"]), int(match["gbuf"])
    return BucketKey(match["bucket"], chain, group, gbuf, match["dtype"], int(match["number"]), match["kind"])


def bucket_object(key: str) -> BucketObject | None:
    """What the key of an object about buckets names; None for other keys."""
    match = _BUCKET_OBJECT.fullmatch(key)
    return BucketObject(int(match["chain"] or 0), int(match["group"]), match["what"]) if match else None


def object_shard(key: str) -> ObjectShard | None:
    """What `<name>/shard_<place>_<grid>` names; None for other keys."""
    match = _SHARD.fullmatch(key)
    return ObjectShard(match["name"], _numbers(match["place"]), _numbers(match["grid"])) if match else None


def shard_key(name: str, place: Iterable[int], grid: Iterable[int]) -> str:
    """The key of one shard of an object: the inverse of `object_shard`."""
    return f"{name}/shard_{'.'.join(map(str, place))}_{'.'.join(map(str, grid))}"


def rng_shard(key: str) -> Rank | None:
    """The rank of the rng states in a `torch_dist` object; None for other keys."""
    shard = object_shard(key) if key.startswith("rng_state/") else None
    return Rank(*shard.place) if shard and shard.name == "rng_state" and len(shard.place) in (2, 3) else None


def stacked_layers(key: str) -> list[int]:
    """Where in a key the layer numbers are left out, since the tensor has them along an axis; one place at most."""
    return [match.end() for match in _STACKED_LAYERS.finditer(key)]


def layer_of(name: str) -> Layer | None:
    match = _LAYER.search(name)
    return Layer(name[: match.start(1)], int(match[1]), name[match.end() :]) if match else None


def decoder_layer(name: str) -> tuple[int, str] | None:
    """(number, name inside of the layer) of a weight in the decoder's layers; None for any other."""
    layer = layer_of(name)
    return layer[1:] if layer and layer.block == DECODER_LAYERS else None


def is_of_transformers(name: str) -> bool:
    """Whether a parameter is of a module that transformers has built."""
    return name.startswith(_STARTS_OF_TRANSFORMERS)


def expert_of(key: str) -> tuple[str, int | None]:
    """The key without the number of its expert, and that number; None where the experts are an axis, or not there."""
    match = _EXPERT_NUMBER.search(key)
    return (key[: match.start()] + key[match.end() :], int(match[1])) if match else (key, None)


def one_expert(name: str, expert: int | None) -> str:
    """The key of one expert as `singleton_local_shards` stores it; `name` unchanged if `expert` is None."""
    return name if expert is None else name.replace(EXPERTS, f"{EXPERTS}{expert}.")


def has_expert_axis(key: str) -> bool:
    return EXPERTS in key and expert_of(key)[1] is None


def stacked_axes(key: str) -> int:
    """Number of leading (layer, expert) axes of the tensor with this key."""
    return len(stacked_layers(key)) + has_expert_axis(key)


# ---- fsdp_dtensor


class ParameterKey(NamedTuple):
    """A value of a parameter: `WEIGHT`, a state's kind, or `STEP`; halves keep their `_w` and `_v`."""

    name: str
    kind: str


class GroupKey(NamedTuple):
    name: str
    field: str


class RngKey(NamedTuple):
    pp: int
    tp: int
    rest: str


def is_version_2(keys: Iterable[str]) -> bool:
    """Whether weights, and optimizer states where there are some, have the names that Megatron-FSDP v2 asks for."""
    own = [key for key in keys if key.startswith(FSDP_PREFIXES)]
    of_version_1 = (f"{MODEL_PREFIX}.", f"{STATE_PREFIX}.")
    return bool(own) and not any(key.startswith(of_version_1) for key in own)


def model_name(key: str) -> str | None:
    """The parameter or buffer that a `model.*` key holds; None for other keys."""
    match = _MODEL.fullmatch(key)
    return match["name"] if match else None


def fsdp_state(key: str) -> ParameterKey | None:
    """What `optimizer.state.<wrappers><name>.<kind>` names; None for other keys."""
    match = _FSDP_STATE.fullmatch(key)
    return ParameterKey(match["name"], match["kind"]) if match else None


def parameter_of(key: str) -> ParameterKey | None:
    """The parameter's value that `key` holds, kept ones too; None for keys of no parameter."""
    name = model_name(key)
    return ParameterKey(name, WEIGHT) if name is not None else fsdp_state(key.removeprefix(KEPT))


def parameter_name(key: str) -> str | None:
    """The stored name of the parameter that `key` holds a value of; None for other keys."""
    parameter = parameter_of(key)
    return parameter.name if parameter else None


def group_key(key: str) -> GroupKey | None:
    """What `optimizer.param_to_group_meta.<wrappers><name>.<field>` names; None for other keys."""
    match = _FSDP_GROUP.fullmatch(key)
    return GroupKey(match["name"], match["field"]) if match else None


def rng_key(key: str) -> RngKey | None:
    """What `rng_state.(pp, tp).<rest>` names; None for other keys."""
    match = _RNG.fullmatch(key)
    return RngKey(int(match["pp"]), int(match["tp"]), match["rest"]) if match else None


def rank_of(text: str) -> tuple[int, int] | None:
    """`(0, 1)` as numbers: how rng states name the (pp, tp) rank that they are of."""
    match = _RANKS.fullmatch(text)
    return (int(match[1]), int(match[2])) if match else None


def left_out_by(
    rules: Sequence[tuple[str, str]], keys: Iterable[str], unknown_keys: bool = False
) -> list[str]:
    """A line for each key with the reason that the rules (glob, reason) have; others are refused.

    `unknown_keys` may be there, and count as left out.
    """
    dropped, unknown = list[str](), list[str]()
    for key in keys:
        reason = next((why for glob, why in rules if fnmatchcase(key, glob)), None)
        if reason is None:
            unknown.append(key)
        else:
            dropped.append(f"{key}: {reason}")
    if unknown_keys:
        return dropped + [f"{key}: no rule accounts for it" for key in unknown]
    if unknown:
        of_optimizer = any(map(is_optimizer_key, unknown))
        weights = "; --weights-only leaves out the whole optimizer" if of_optimizer else ""
        raise MappingError(
            "the checkpoint holds keys that no rule accounts for; leave them out with --ignore-keys GLOB if the "
            f"target can do without them{weights}:\n" + list_problems(unknown),
            unknown,
        )
    return dropped


def strip_wrappers(name: str) -> str:
    """A parameter name without the leading `module.` and `model.` segments of its wrappers."""
    match = _WRAPPERS.match(name)
    return name[match.end() :] if match else name


# ---- parts of parameters, in either format


def split_half(name: str) -> tuple[str, str]:
    """The name of the whole parameter, and which half of it this is: `_w`, `_v` or nothing."""
    match = _HALF.fullmatch(name)
    return (match["whole"], match["half"]) if match else (name, "")


def split_expert_half(name: str) -> tuple[str, str] | None:
    """The live name of the fc1 of one expert, and the half `_w` or `_v` of it that `torch_dist` kept apart."""
    match = _EXPERT_HALF.fullmatch(name)
    return (match["base"] + match["expert"], match["part"]) if match else None


def split_projection(name: str) -> tuple[str, str] | None:
    """The projection that running models fuse, and the part of it that `name` is; None for other names."""
    match = _PART.fullmatch(name)
    return (match["base"], match["part"]) if match else None


def expert_name(name: str, expert: int, grouped: bool) -> str:
    """`...mlp.experts.experts.linear_fc1.weight` as the live name of one expert (global number)."""
    if grouped:
        return f"{name.replace(EXPERTS, '.experts.')}{expert}"
    return name.replace(EXPERTS, f".experts.local_experts.{expert}.")


def split_expert(name: str) -> tuple[str, int | None]:
    """The stored name of a live one and the expert it belongs to: the inverse of `expert_name` in either style."""
    match = _SEQUENTIAL_EXPERT.fullmatch(name) or _GROUPED_EXPERT.fullmatch(name)
    if match is None:
        return name, None
    return f"{match['module']}{EXPERTS}{match['leaf']}", int(match["expert"])


# ---- what a key is about


def name_start(key: str, fsdp: bool) -> int:
    """Where in a key of `fsdp_dtensor` or of `torch_dist` the weight's name begins, behind prefixes and wrappers."""
    match = (_FSDP_PREFIX if fsdp else _STATE_PREFIX).match(key)
    return match.end() if match else 0


def canonical_kind(stored: str) -> str:
    """'master' for either spelling of the fp32 weights, any other state's own name."""
    return MASTER if stored in _MASTER_NAMES else stored


def state_role(kind: str) -> Role:
    """What an optimizer state of this kind is, for reports."""
    kind = canonical_kind(kind)
    return "master" if kind == MASTER else next((role for role in _MOMENTS if role == kind), "other")


def role_of(key: str) -> Role:
    """What a tensor of either format is, for reports."""
    is_kept, key = key.startswith(KEPT), key.removeprefix(KEPT)
    if not is_optimizer_key(key):
        return "other" if is_kept or is_run_state(key) else "weight"
    named = (state_key(key), bucket_key(key), fsdp_state(key))
    return next((role for n in named if n and (role := state_role(n.kind)) != "other"), "other")


def is_square(key: str) -> bool:
    """Whether the key is that of a weight's state that is never below zero, in either format."""
    return any(state is not None and state.kind in SQUARES for state in (state_key(key), fsdp_state(key)))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


_OTHER_LAYERS = re.compile(r"(?P<block>(?:.*?\.)?(?:h|blocks?|layer))\.(?P<number>\d{1,9})\.(?P<leaf>.+)")

_NUMBER = re.compile(r"(?<=\.)\d{1,9}(?=\.)")

_TRAILING_NUMBER = re.compile(r"(?:(?<=weight)|(?<=bias))\d{1,9}$")  # of an expert in a grouped module


class Part(NamedTuple):
    """Where in a model a tensor is; `leaf` is the same for all layers and experts."""

    block: str  # `decoder.layers`; "" outside of layers
    layer: int | None
    leaf: str

    @property
    def label(self) -> str:
        """The layer's name; "" outside of layers."""
        return "" if self.layer is None else f"{self.block}.{self.layer}"


def part_of(name: str) -> Part:
    layer = layer_of(name)
    if layer is not None:
        return Part(layer.block.rstrip("."), layer.number, _same_for_all(layer.leaf))
    other = _OTHER_LAYERS.fullmatch(name)  # GPT-2, and what vision and other models call their layers
    if other is not None:
        return Part(other["block"], int(other["number"]), _same_for_all(other["leaf"]))
    return Part("", None, _same_for_all(name))


def _same_for_all(leaf: str) -> str:
    """A name in a layer with `*` for the numbers of experts and other modules that are there several times."""
    leaf = _NUMBER.sub("*", f".{leaf}")[1:]
    return _TRAILING_NUMBER.sub("*", leaf) if ".experts." in f".{leaf}" else leaf
