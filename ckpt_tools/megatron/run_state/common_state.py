"""The common state: what a run saved once for all ranks (arguments, scheduler, groups, progress).

Megatron core up to 0.18 writes it as `common.pt`, later ones as the object `common_state/shard_0_1`; readers of
every version prefer the file. An `fsdp_dtensor` checkpoint has the same entries as objects of their own.

Megatron-Bridge reads progress from `train_state.pt` (training/state.py `TrainState`) and settings from
`run_config.yaml`; Megatron-LM reads both from the `args` item. A conversion makes the other's form of them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpt_tools.errors import CorruptCheckpointError
from ckpt_tools.formats.pickle.unpickle import StandIn, stand_in
from ckpt_tools.formats.storage.files import Files, read_whole
from ckpt_tools.formats.torch_archive.item_reader import StoredTensor, load_object, whole_file
from ckpt_tools.formats.torch_archive.object_writer import dump_archive
from ckpt_tools.formats.untrusted_documents import DocumentError, parse_yaml
from ckpt_tools.megatron.keys import COMMON_ITEMS, COMMON_OBJECT
from ckpt_tools.megatron.run_state.stored_values import (
    check_settings,
    checked_field,
    corrupt,
    fields_at,
    optimizer_groups,
)
from ckpt_tools.model.catalog import Catalog

COMMON_FILE = "common.pt"
RUN_CONFIG = "run_config.yaml"
TRAIN_STATE = "train_state.pt"
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


@dataclass(frozen=True, slots=True)
class CommonState:
    """`values` as saved, and where they were found: `common.pt`, `common_state`, `items` or None.

    `model_config` and `optimizer_config` are those sections of Bridge's `run_config.yaml`, which replaces the
    arguments.
    """

    values: dict[str, Any]
    source: Literal["common.pt", "common_state", "items"] | None
    model_config: dict[str, Any] = field(default_factory=dict)
    optimizer_config: dict[str, Any] = field(default_factory=dict)

    @property
    def args(self) -> dict[str, Any]:
        """Megatron's arguments by name; empty when the writer stored none."""
        namespace = self.values.get("args")
        return namespace.attributes if isinstance(namespace, StandIn) else {}

    def arg(self, name: str, default: Any = None) -> Any:
        """One argument: from Megatron's namespace, else Bridge's model configuration."""
        args = self.args
        return args[name] if name in args else self.model_config.get(name, default)

    @property
    def settings(self) -> dict[str, Any]:
        """All arguments, or Bridge's model configuration where the writer stored none."""
        return self.args or self.model_config

    @property
    def of_torch_dist(self) -> bool:
        """Whether a `torch_dist` checkpoint had it: `fsdp_dtensor` has no entry for all of it."""
        return self.source in ("common.pt", "common_state")

    @property
    def scheduler(self) -> Mapping[str, Any]:
        """The state of the learning-rate schedule in a `torch_dist` checkpoint; empty if it has none."""
        return self.values.get("opt_param_scheduler") or self.values.get("lr_scheduler") or {}

    @property
    def iteration(self) -> int | None:
        value = self.values.get("iteration")
        return value if isinstance(value, int) else None


def read_common_state(files: Files, catalog: Catalog, trust_pickle: bool = False) -> CommonState:
    """The common state of a checkpoint, its values checked; empty (source None) when it has none."""
    config = _run_config(files)
    sections = {name: _section(config, name) for name in ("model", "optimizer")}
    if _section(config, "scheduler").get("no_weight_decay_cond_type") == "qwen3_next":  # Bridge's name for it
        sections["optimizer"]["apply_wd_to_qk_layernorm"] = True
    source: Literal["common.pt", "common_state", "items"] | None
    if files.exists(COMMON_FILE):
        stored = load_object(files, whole_file(files, COMMON_FILE), trust_pickle)
        values, source, where = (
            _as_dict(stored, f"{files.location}/{COMMON_FILE}"),
            "common.pt",
            f"{COMMON_FILE}: ",
        )
    elif entry := catalog.objects.get(COMMON_OBJECT):
        stored = load_object(files, entry.item, trust_pickle)
        stored = stored[0] if isinstance(stored, list) and len(stored) == 1 else stored
        values, source, where = _as_dict(stored, COMMON_OBJECT), "common_state", f"{COMMON_OBJECT}: "
    else:
        items = {key: catalog.objects[key].item for key in COMMON_ITEMS if key in catalog.objects}
        values = {key: load_object(files, item, trust_pickle) for key, item in items.items()}
        source, where = "items" if values else None, ""
    _check(values, where)
    for name, section in sections.items():
        check_settings(section, f"{RUN_CONFIG}: {name}")
    return CommonState(values, source, sections["model"], sections["optimizer"])


def _check(values: dict[str, Any], where: str) -> None:
    if (args := values.get("args")) is not None:
        if not isinstance(args, StandIn):
            raise corrupt(f"{where}args", args, "a namespace of settings")
        check_settings(args.attributes, f"{where}args")
    for name in ("iteration", "checkpoint_version", "num_floating_point_operations_so_far"):
        checked_field(name, values.get(name), f"{where}{name}")
    for name in ("optimizer", "content_metadata"):
        if values.get(name) is not None and not isinstance(values[name], Mapping):
            raise corrupt(f"{where}{name}", values[name], "a mapping")
    for name in ("opt_param_scheduler", "lr_scheduler"):
        if values.get(name) is not None:
            fields_at(values[name], f"{where}{name}")
    optimizer_groups(values.get("optimizer"), f"{where}optimizer")


def _as_dict(values: Any, where: str) -> dict[str, Any]:
    if isinstance(values, dict) and all(isinstance(name, str) for name in values):
        return values
    raise CorruptCheckpointError(f"{where}: holds a {type(values).__name__}, expected a dict of names.")


def _run_config(files: Files) -> Any:
    if not files.exists(RUN_CONFIG):
        return None
    try:
        return parse_yaml(read_whole(files, RUN_CONFIG))
    except DocumentError as error:
        raise CorruptCheckpointError(
            f"{files.location}/{RUN_CONFIG}: not readable YAML ({error})."
        ) from error


def _section(config: Any, name: str) -> dict[str, Any]:
    section = config.get(name) if isinstance(config, dict) else None
    return section if isinstance(section, dict) else {}


# ---- the files of Megatron-Bridge, and the arguments that Megatron-LM asks for in their place


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
    """A `run_config.yaml` with checkpoint format fsdp_dtensor; everything else stays byte for byte."""
    return re.sub(rb"(?m)^(\s+ckpt_format:\s*)torch_dist\s*$", rb"\g<1>fsdp_dtensor", text, count=1)


def args_from_model_config(model: Mapping[str, Any], iteration: int, swiglu: bool | None = None) -> StandIn:
    """An `argparse.Namespace` with what Megatron-LM asks of a checkpoint, from a Bridge run's own settings.

    All the others are in it by Bridge's names: once run_config.yaml is gone, they alone tell what the model is.
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
