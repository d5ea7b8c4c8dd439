"""`inspect`: what a checkpoint is and what it holds, by its metadata and common state alone."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import translate
from math import prod
from typing import Any, NamedTuple

from ckpt_tools.close_names import unmatched_lines
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.commands.look.dcp_json import json_value
from ckpt_tools.errors import UsageError, raise_if
from ckpt_tools.formats.locate.detect import Location
from ckpt_tools.formats.storage.files import AnyPath, path_text
from ckpt_tools.megatron.dcp.state_dict import StateDict, is_megatron, read_state_dict
from ckpt_tools.megatron.format import FORMATS
from ckpt_tools.megatron.keys import GROUP_META, bucket_key, part_of, stacked_layers
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.choices import InspectBy
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.roles import Role
from ckpt_tools.plain_data import plain

SCHEMA_VERSION = 1
_BUCKETS = "flat buffers"
_RANK = re.compile(r"__(\d{1,9})_\d+\.distcp")

_PARALLEL_SIZES = tuple(
    f"{axis}_parallel_size"
    for axis in (
        "tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model", "expert_tensor", "data"
    )
)  # fmt: skip
_KEY_ARGUMENTS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "seq_length", "max_position_embeddings", "padded_vocab_size", "vocab_size", "num_experts", "num_moe_experts",
    "moe_layer_freq", "mtp_num_layers", "swiglu", "gated_linear_unit", "add_bias_linear", "normalization",
    "position_embedding_type", "untie_embeddings_and_output_weights", "share_embeddings_and_output_weights",
    "transformer_impl", "bf16", "fp16", "optimizer", "use_distributed_optimizer",
)  # fmt: skip


class Total(NamedTuple):
    """A sum over tensors."""

    tensors: int
    elements: int
    nbytes: int


class TensorRow(NamedTuple):
    """One tensor of the listing."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    chunks: int
    nbytes: int
    role: Role


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything `inspect` tells; `totals` is by (role, dtype) over the whole checkpoint, the rest by `keys`."""

    location: Location
    catalog: Catalog
    writer: str
    iteration: int | None
    common_source: str | None
    layout: str
    parallel_sizes: dict[str, Any]
    arguments: dict[str, Any]
    rows: tuple[TensorRow, ...]  # all tensors
    totals: dict[tuple[Role, str], Total]
    patterns: tuple[str, ...] = ()
    list_group_meta: bool = False
    group_meta: int = 0

    def by(self, axis: InspectBy) -> dict[str, Total]:
        """Sums over the tensors that the patterns name; "": of no layer, or of no rank.

        A tensor of which several sums hold a part counts in each of them.
        """
        names = FORMATS[self.location.kind].parameters(self.catalog) if axis == "layer" else {}
        sums: dict[str, Total] = {}
        for row in self.tensors():
            parts = Counter[str]()
            for label, elements in self._parts(row, axis, names.get(row.key, row.key)):
                parts[label] += elements
            for label, elements in parts.items():
                count, before, nbytes = sums.get(label, Total(0, 0, 0))
                sums[label] = Total(count + 1, before + elements, nbytes + elements * itemsize(row.dtype))
        return dict(sorted(sums.items(), key=lambda pair: _in_order(pair[0])))

    def _parts(self, row: TensorRow, axis: InspectBy, name: str) -> Iterator[tuple[str, int]]:
        if axis in ("role", "dtype"):
            yield getattr(row, axis), prod(row.shape)
            return
        stacked = stacked_layers(name) if self.location.kind == "torch_dist" else []
        for box, item in self.catalog.tensors[row.key].chunks:
            if axis == "file":
                yield item.file, box.volume
            elif axis == "rank":
                writer = _RANK.fullmatch(item.file)
                yield writer[1] if writer else "", box.volume
            elif bucket_key(row.key):
                yield _BUCKETS, box.volume
            elif stacked and box.volume:  # layers are the first axis
                for i in range(box.size[0]):
                    of_layer = f"{name[: stacked[0]]}{box.start[0] + i}.{name[stacked[0] :]}"
                    yield part_of(of_layer).label, box.volume // box.size[0]
            else:
                yield part_of(name).label, box.volume

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return sum(total.elements for (role, _), total in self.totals.items() if role == "weight")

    def tensors(self) -> Iterator[TensorRow]:
        """The tensors that the patterns name, in stored order."""
        wanted = _matcher(self.patterns)
        return (row for row in self.rows if wanted(row.key))

    def objects(self) -> Iterator[tuple[str, int]]:
        """Key and stored bytes of the objects that the patterns name, in stored order."""
        wanted = _matcher(self.patterns)
        for key, entry in self.catalog.objects.items():
            if wanted(key) and (self.list_group_meta or not key.startswith(GROUP_META)):
                yield key, entry.item.length

    def summary(self) -> dict[str, Any]:
        """All but the listings, as JSON values."""
        where = self.location
        return {
            "schema_version": SCHEMA_VERSION,
            "checkpoint": where.path,
            "root": where.root,
            "format": where.kind,
            "writer": self.writer,
            "metadata_class": self.catalog.metadata_class,
            "metadata_version": self.catalog.metadata_version,
            "has_mcore_data": self.catalog.original_shapes is not None,
            "common_state": self.common_source,
            "iteration": self.iteration,
            "release": where.is_release,
            "left_out": list(where.left_out),
            "optimizer_layout": self.layout,
            "parallel_sizes": self.parallel_sizes,
            "arguments": self.arguments,
            "parameters": self.parameters,
            "totals": [
                {"role": role, "dtype": dtype, **plain(total, {"nbytes": "bytes"})}
                for (role, dtype), total in self.totals.items()
            ],
            "tensor_count": len(self.catalog.tensors),
            "object_count": len(self.catalog.objects),
            "param_to_group_meta_count": self.group_meta,
        }


def inspect_checkpoint(
    path: AnyPath,
    iteration: int | None = None,
    keys: Sequence[str] = (),
    list_group_meta: bool = False,
    trust_pickle: bool = False,
) -> Inspection:
    """What the checkpoint at `path` is; `keys` are globs that choose what is listed.

    No tensor byte is read. Raises the errors of `open_checkpoint`, and:
        UsageError: none of `keys` matches anything.
    """
    path = path_text(path)
    with open_checkpoint(path, iteration, trust_pickle) as opened:
        location, catalog, common = opened.location, opened.catalog, opened.common
    idle = unmatched_lines("--keys", keys, (*catalog.tensors, *catalog.objects))
    if len(idle) == len(set(keys)):  # an empty listing would be the answer
        raise_if(idle, UsageError, f"nothing to list of {catalog.root}")
    roles = opened.roles()
    rows = tuple(  # one pass: the chunks of a very large catalog are decoded as they are looked at
        TensorRow(key, entry.dtype, entry.shape, len(entry.chunks), entry.nbytes, roles[key])
        for key, entry in catalog.tensors.items()
    )
    return Inspection(
        location=location,
        catalog=catalog,
        writer=writer_generation(location, catalog, common),
        iteration=location.iteration if location.iteration is not None else common.iteration,
        common_source=common.source,
        layout=FORMATS[location.kind].layout(catalog, common),
        parallel_sizes=_known_arguments(common, (*_PARALLEL_SIZES, "world_size")),
        arguments=_known_arguments(common, _KEY_ARGUMENTS),
        rows=rows,
        totals=_totals(rows),
        patterns=tuple(keys),
        list_group_meta=list_group_meta,
        group_meta=sum(key.startswith(GROUP_META) for key in catalog.objects),
    )


def writer_generation(location: Location, catalog: Catalog, common: CommonState) -> str:
    """Which release line wrote the checkpoint, as far as its files tell (formats: version timeline)."""
    if location.kind == "safetensors":
        return "Hugging Face"
    if location.kind == "dcp":
        return plain_writer(read_state_dict(catalog), common)
    bridge = " by Megatron-Bridge" if location.has_run_config else ""
    if location.kind == "fsdp_dtensor":
        return f"Megatron-FSDP{bridge}"
    return f"Megatron core {_core_versions(catalog, common)}{bridge}"


def plain_writer(found: StateDict, common: CommonState) -> str:
    """Whose a plain state dict is, as far as its keys tell."""
    if is_megatron(found):
        of_megatron = common.arg("ckpt_format") == "torch_dcp"
        return "Megatron (torch_dcp)" if of_megatron else "PyTorch, of a Megatron model"
    if not found.weights:
        return "torch distributed checkpoint"
    if found.model.endswith("model.module."):
        return "PyTorch, of a wrapped module (Megatron-FSDP, DDP)"
    if not found.model and any(key.startswith("train_state.") for key in found.others):
        return "torchtitan"
    return f"PyTorch, weights under {found.model}*" if found.model else "PyTorch, weights at the top"


def _core_versions(catalog: Catalog, common: CommonState) -> str:
    if common.source == "common_state":
        return "0.19 or later (no common.pt)"
    if catalog.metadata_class.endswith(".MCoreMetadata"):
        return "0.15 (common.pt, mcore_data)"
    if catalog.original_shapes is None:
        return "0.16 to 0.18 (common.pt, no mcore_data)"
    if "content_metadata" in common.values:
        return "0.13 to 0.15 (common.pt, mcore_data)"
    return "0.8 to 0.12 (common.pt, mcore_data)"


def _totals(rows: Iterable[TensorRow]) -> dict[tuple[Role, str], Total]:
    sums: defaultdict[tuple[Role, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in rows:
        total = sums[row.role, row.dtype]
        total[0] += 1
        total[1] += prod(row.shape)
        total[2] += row.nbytes
    order = ("weight", "master", "exp_avg", "exp_avg_sq", "other")
    return {
        kind: Total(*sums[kind]) for kind in sorted(sums, key=lambda kind: (order.index(kind[0]), kind[1]))
    }


def _in_order(name: str) -> tuple[bool, list[tuple[int, int | str]]]:
    """Names with their numbers as numbers, the empty one last."""
    parts = re.split(r"(\d+)", name)
    return not name, [(0, int(part)) if part.isdecimal() else (1, part) for part in parts]


def _known_arguments(common: CommonState, names: Sequence[str]) -> dict[str, Any]:
    """The arguments that are there and plain values, in the given order."""
    values = {name: common.arg(name) for name in names}
    return {name: json_value(value) for name, value in values.items() if value is not None}


def _matcher(patterns: Sequence[str]) -> Callable[[str], object]:
    if not patterns:
        return lambda key: True
    return re.compile("|".join(translate(pattern) for pattern in patterns)).match
