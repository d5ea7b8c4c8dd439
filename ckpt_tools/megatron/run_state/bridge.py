"""The small files Megatron-Bridge keeps beside a checkpoint, and the arguments Megatron-LM asks of one.

Bridge reads progress from `train_state.pt` (training/state.py `TrainState`) and settings from `run_config.yaml`;
Megatron-LM reads both from the `args` item. A conversion from one to the other has to make up the other's form.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Any

from ckpt_tools.formats.pickle.unpickle import StandIn, stand_in
from ckpt_tools.formats.torch_archive.item_reader import StoredTensor
from ckpt_tools.formats.torch_archive.object_writer import dump_archive

TRAIN_STATE = "train_state.pt"
RUN_CONFIG = "run_config.yaml"
BRIDGE_FILES = (TRAIN_STATE, RUN_CONFIG)
LATEST_TRAIN_STATE = "latest_train_state.pt"
# What Megatron-LM checks or reads of a checkpoint's args (checkpointing.py `check_checkpoint_args`), by its name
# in the `model` section of a run_config.yaml.
ARGS_FROM_MODEL_CONFIG = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_query_groups",
    "ffn_hidden_size": "ffn_hidden_size",
    "kv_channels": "kv_channels",
    "max_position_embeddings": "seq_length",
    "seq_length": "seq_length",
    "make_vocab_size_divisible_by": "make_vocab_size_divisible_by",
    "tensor_model_parallel_size": "tensor_model_parallel_size",
    "pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "bf16": "bf16",
    "fp16": "fp16",
}
_TRACKED = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")


def train_state_file(common: Mapping[str, Any], args: Mapping[str, Any]) -> bytes:
    """A `train_state.pt` that says what Megatron-LM's common state says about progress."""
    state = {"step": _int64(common.get("iteration") or 0)}
    state |= {name: _int64(args.get(name) or 0) for name in _TRACKED}
    flops = float(common.get("num_floating_point_operations_so_far") or 0)
    state["floating_point_operations_so_far"] = StoredTensor("float32", (), struct.pack("<f", flops))
    flags = {"do_train": True, "do_valid": False, "do_test": False}
    state |= {name: StoredTensor("bool", (), bytes([flag])) for name, flag in flags.items()}
    return dump_archive(state)


def _int64(value: int) -> StoredTensor:
    return StoredTensor("int64", (), struct.pack("<q", value))


def fsdp_run_config(text: bytes) -> bytes:
    """A `run_config.yaml` whose checkpoint format is fsdp_dtensor; everything else stays byte for byte."""
    return re.sub(rb"(?m)^(\s+ckpt_format:\s*)torch_dist\s*$", rb"\g<1>fsdp_dtensor", text, count=1)


def args_from_model_config(model: Mapping[str, Any], iteration: int, swiglu: bool | None = None) -> StandIn:
    """An `argparse.Namespace` with what Megatron-LM asks of a checkpoint, from a Bridge run's own settings.

    All the others stand in it by Bridge's names: once run_config.yaml is gone, they alone tell what the model is.
    `swiglu` is what they say of it. An empty one, for a source that has no settings at all, still lets a job start
    with `--finetune`.
    """
    values = {
        name: value for name, value in model.items() if not name.startswith("_")
    }  # _target_, the provider
    values |= {name: model[key] for name, key in ARGS_FROM_MODEL_CONFIG.items() if key in model}
    if "num_query_groups" in values:
        values["group_query_attention"] = (
            values["num_query_groups"] is not None
        )  # or Megatron-LM has a group a head
    if swiglu is not None:
        values["swiglu"] = swiglu
    values["iteration"] = iteration
    namespace = stand_in("argparse", "Namespace")()
    namespace.__setstate__(values)
    return namespace
