"""What the values of stored objects must be, each checked where it is read: a pickle holds anything.

What Megatron keeps nowhere else goes by name: its settings, the fields of parameter groups and of the schedule.
Values of other names are carried over, and nothing is calculated from them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from ckpt_tools.errors import CorruptCheckpointError
from ckpt_tools.formats.pickle.machine import brief
from ckpt_tools.formats.torch_archive.item_reader import StoredTensor, TensorBytes
from ckpt_tools.megatron.keys import group_key, rng_shard

MOST = 1 << 40  # of anything that is counted
_BEYOND = 1 << 63
_FROM_ONE = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "tensor_parallel_num_weight_shards",
    "expert_tensor_parallel_num_weight_shards", "num_attention_heads", "micro_batch_size", "global_batch_size",
    "eval_micro_batch_size", "eval_global_batch_size",
)  # fmt: skip
_FROM_ZERO = (
    "seq_length", "max_position_embeddings", "num_layers", "num_experts", "cpu_offloading_num_layers", "hidden_size",
    "num_query_groups", "kv_channels", "ffn_hidden_size", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "kv_lora_rank", "qk_pos_emb_head_dim", "q_lora_rank", "v_head_dim",
    "mtp_num_layers", "make_vocab_size_divisible_by", "vocab_size", "padded_vocab_size",
)  # fmt: skip
COUNTED = dict.fromkeys(_FROM_ONE, 1) | dict.fromkeys(_FROM_ZERO, 0)
"""Settings that are whole numbers, and the least of each."""
_MORE_COUNTED = dict.fromkeys(
    ("num_moe_experts", "world_size", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "train_iters",
     "train_samples", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples"), 0
)  # fmt: skip
_NUMBERS = frozenset({
    "lr", "min_lr", "max_lr", "init_lr", "initial_lr", "lr_mult", "pre_lr_mult", "lr_warmup_fraction",
    "weight_decay", "wd_mult", "pre_wd_mult", "start_weight_decay", "end_weight_decay", "start_wd", "end_wd",
    "eps", "adam_beta1", "adam_beta2", "adam_eps", "momentum", "sgd_momentum", "is_decoupled_lr",
    "is_expert_parallel", "num_steps", "lr_decay_steps", "lr_warmup_steps", "wd_incr_steps",
})  # fmt: skip
_MAYBE_TENSORS = ("lr", "step", "common_step")
_PAIRS = ("betas",)
_FORMS = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}


def corrupt(where: str, value: object, wanted: str) -> CorruptCheckpointError:
    """What to raise for a stored value of another kind than its reader can use."""
    return CorruptCheckpointError(
        f"{where} is {brief(value)}, and {wanted} belongs there. The checkpoint is damaged, or another program has "
        "changed it: take another copy, or another iteration"
    )


def check_settings(settings: Mapping[str, Any], where: str) -> None:
    """Raise CorruptCheckpointError if a setting that sizes are calculated from is not a number."""
    for name, least in (COUNTED | _MORE_COUNTED).items():
        if (value := settings.get(name)) is not None and not counts(value, least):
            raise corrupt(f"{where}.{name}", value, f"a whole number from {least} to {MOST:,}")
    for name in _NUMBERS & settings.keys():
        checked_field(name, settings[name], f"{where}.{name}")


def counts(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= MOST


def checked_field(name: str, value: Any, where: str) -> Any:
    """A field of a parameter group or of the schedule as it is stored."""
    is_tensor = isinstance(value, StoredTensor | TensorBytes)
    if name in _MAYBE_TENSORS and value is not None:
        if not isinstance(value, TensorBytes):  # of an outline, which has no numbers
            number_of(value, where)
    elif name in _NUMBERS and value is not None and (is_tensor or not _is_number(value)):
        raise corrupt(where, value, "a 64-bit number")
    elif name in _PAIRS and not (isinstance(value, list | tuple) and all(map(_is_number, value))):
        raise corrupt(where, value, "a tuple of numbers")
    return value


def number_of(value: Any, where: str) -> Any:
    """A stored number, or that which a tensor of one element holds."""
    if isinstance(value, StoredTensor):
        form = _FORMS.get(value.dtype)
        if form is None or struct.calcsize(form) != len(value.data):
            raise corrupt(where, value, "a tensor of one number")
        value = struct.unpack(form, value.data)[0]
    if not _is_number(value):
        raise corrupt(where, value, "a 64-bit number")
    return value


def _is_number(value: object) -> bool:
    """Whether a 64-bit number holds it: those of pickles may be too large for any float."""
    return isinstance(value, int | float) and not abs(value) >= _BEYOND  # what is no number may be stored


def fields_at(value: Any, where: str) -> Mapping[str, Any]:
    """A stored mapping of names: a parameter group, the schedule, a loss scaler; its fields are checked."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise corrupt(where, value, "a mapping of names")
    for name, field in value.items():
        checked_field(name, field, f"{where}.{name}")
    return value


def check_object(key: str, value: Any) -> None:
    """Whether an object of its own is what the readers of its key take."""
    if of_group := group_key(key):
        checked_field(of_group.field, value, key)
    elif key.startswith("opt_param_scheduler."):
        checked_field(key.rpartition(".")[2], value, key)
    elif rng_shard(key):
        rng_at(only_one(value, key), key)


def rng_at(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise corrupt(where, value, "a list of states")
    for number, state in enumerate(value):
        fields_at(state, f"{where}.{number}")
    return value


def only_one(value: Any, where: str) -> Any:
    """What Megatron has wrapped into a list, as every object of a grid."""
    if not isinstance(value, list) or len(value) != 1:
        raise corrupt(where, value, "a list of one value")
    return value[0]


def optimizer_groups(optimizer: Any, where: str = "optimizer") -> list[dict[str, Any]]:
    """The parameter groups in the `optimizer` part of a common state, in id order; empty when it holds none.

    Accepts one optimizer, a chain of them ({0: ..., 1: ...}) and a bare inner optimizer.
    """
    if not isinstance(optimizer, Mapping):
        return []
    if optimizer and all(isinstance(key, int) for key in optimizer):
        return [
            group for key in sorted(optimizer) for group in optimizer_groups(optimizer[key], f"{where}.{key}")
        ]
    if "param_groups" not in optimizer:
        return optimizer_groups(optimizer.get("optimizer"), f"{where}.optimizer")
    groups, where = optimizer["param_groups"], f"{where}.param_groups"
    if not isinstance(groups, list | tuple):
        raise corrupt(where, groups, "a list of groups")
    return [
        {name: value for name, value in fields_at(group, f"{where}.{number}").items() if name != "params"}
        for number, group in enumerate(groups)
    ]
