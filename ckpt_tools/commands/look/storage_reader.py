"""`StorageReader`: any checkpoint as what `torch.distributed.checkpoint` loads from, without converting it.

The plan is a conversion's: `--to dcp` or `--to fsdp_dtensor`, without its files. DCP's planner then says which boxes
of which keys a rank wants, and these are read through the same expressions that a conversion writes.
"""

# ruff: noqa: E402  torch is asked for by name first

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ckpt_tools.torch_extra import require_torch

require_torch("StorageReader")  # before the classes that this module's derive from

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from ckpt_tools.close_names import close_names
from ckpt_tools.commands.convert.to_dtensors import prepare, prepare_dcp, prepare_model
from ckpt_tools.commands.huggingface.import_hf import ImportOptions, read_huggingface
from ckpt_tools.commands.job.conversion import ConvertOptions, Prepared
from ckpt_tools.commands.job.opened import Opened, closed_on_error, open_checkpoint
from ckpt_tools.commands.job.placements import Layout
from ckpt_tools.commands.look.load_dtensors import check_rank_masters, inline_tensor, to_torch
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.execute.move.read_box import BoxReader
from ckpt_tools.execute.proof.payload_sums import SourceProof
from ckpt_tools.model.box import Box
from ckpt_tools.model.target import InlineTensor, TargetObject, TargetTensor
from ckpt_tools.model.without_gc import without_gc

if TYPE_CHECKING:
    from typing import TypeAlias

    Source: TypeAlias = "TargetTensor | InlineTensor"


_MOST_HINTS = 3  # missing keys for which a suggestion is printed


class StorageReader(TorchStorageReader):  # type: ignore[misc]  # torch is not read by the type checker
    """Reads a checkpoint of any format for `dcp.load(state_dict, storage_reader=StorageReader(path))`.

    Keys, types and values are those of what `convert PATH OUT --to dcp` writes, with `to="fsdp_dtensor"` of
    `convert PATH OUT` or `import-hf PATH OUT --to fsdp_dtensor`; `keys()` lists them. So a `torch_dist` or
    `fsdp_dtensor` checkpoint gives `model.<name>` and `optimizer.state.<name>.exp_avg` of the running module with
    masters in the place of weights, a Hugging Face folder `model.<its names>`, and a PyTorch state dict what it
    holds. Only the boxes that are asked for are read, into plain tensors and DTensors of any mesh, whatever the
    checkpoint's own layout; each rank reads for itself.

    A payload that a rank reads whole is compared with its stored checksum, and its share of the masters with the
    stored weights, as the options say. What a checkpoint holds is looked up once, here: for a folder that has
    changed make another reader.

    Args:
        path: a checkpoint of any kind: a run's root, an iteration directory, a Hugging Face folder.
        to: the format of the keys: ``dcp`` or ``fsdp_dtensor``.
        options: as for the conversion (`weights_only` and `dtype` for a start from weights, `iteration`, ...).

    Raises:
        UsageError: `to` is not a format of these, or options contradict the checkpoint.
        Otherwise the errors of the conversion up to its plan; in `dcp.load`, inside of torch's CheckpointException,
            those of reading.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        to: Literal["dcp", "fsdp_dtensor"] = "dcp",
        options: ConvertOptions | None = None,
    ) -> None:
        if to not in ("dcp", "fsdp_dtensor"):
            raise UsageError(f"to={to!r}: a state dict has the keys of dcp or of fsdp_dtensor")
        super().__init__()
        self._to, self._options = to, options or ConvertOptions()
        self._seen = _plan(os.fspath(path), self._to, self._options)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read from `checkpoint_id` from now on, where one is given."""
        if checkpoint_id is not None:
            self.close()
            self._seen = _plan(os.fspath(checkpoint_id), self._to, self._options)

    def close(self) -> None:
        """Close the checkpoint's files."""
        self._seen.opened.files.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint of some kind is there."""
        try:
            open_checkpoint(os.fspath(checkpoint_id)).files.close()
        except CkptError:
            return False
        return True

    def keys(self) -> list[str]:
        """Every key that can be asked for."""
        return [*self._seen.tensors, *self._seen.objects]

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """What DCP gets: every tensor as one chunk, of which any box can be had."""
        seen = self._seen
        entries: _Entries = _Entries(seen.opened.location.path, self._to)
        entries |= {key: _entry(tensor) for key, tensor in seen.tensors.items()}
        entries |= {key: BytesStorageMetadata() for key in seen.objects}
        paths = {key: path or (key,) for key, path in seen.paths.items()}
        meta = StorageMeta(checkpoint_id=seen.opened.location.path)
        return Metadata(entries, planner_data=paths, storage_meta=meta)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any
    ) -> None:
        """This rank's share of the masters must round to the stored weights."""
        rank, world = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        seen = self._seen
        if self._options.check_masters != "none":
            check_rank_masters(seen.opened.files, seen.prepared, self._options, rank, world)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, unchanged: ranks do not depend on each other."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of a rank's plan, in the order of the plan."""
        seen = self._seen
        proof = SourceProof() if self._options.write.check_source == "all" else None
        with closing(BoxReader(seen.opened.files, seen.prepared.catalog, proof)) as reader:
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(seen.archive(item.storage_index.fqn)))
                else:
                    into = planner.resolve_tensor(item).detach()
                    into.copy_(_read(reader, seen.tensors[item.storage_index.fqn], item))
                    planner.commit_tensor(item, into)
        done: Future[None] = Future()
        done.set_result(None)
        return done


@dataclass
class _Seen:
    """An opened checkpoint as the target of its conversion."""

    opened: Opened
    prepared: Prepared
    tensors: dict[str, Source]
    objects: frozenset[str]
    paths: dict[str, tuple[str | int, ...]]
    archives: Mapping[str, bytes] | None = None

    def archive(self, key: str) -> bytes:
        """A stored or made object, as `torch.save` writes it."""
        if self.archives is None:
            self.archives = dict(self.prepared.archives())
        return self.archives[key]


def _plan(path: str, to: str, options: ConvertOptions) -> _Seen:
    opened = open_checkpoint(path, options.iteration, options.trust_pickle, of_run=True)
    with closed_on_error(opened.files), without_gc():
        prepared = _prepare(opened, to, options)
    target = prepared.target
    sources: tuple[Source, ...] = (*target.tensors, *target.inline)
    tensors = {t.key: t for t in sources}
    items: tuple[Source | TargetObject, ...] = (*sources, *target.objects)
    paths = {item.key: item.path for item in items}
    return _Seen(opened, prepared, tensors, frozenset(o.key for o in target.objects), paths)


def _prepare(opened: Opened, to: str, options: ConvertOptions) -> Prepared:
    """The conversion's target; a Hugging Face folder becomes `fsdp_dtensor` as `import-hf` makes it."""
    if to == "dcp":
        return prepare_dcp(opened, options, Layout())
    if opened.location.kind != "safetensors":
        return prepare(opened, options, Layout())
    target = options.target
    wanted = ImportOptions(to="fsdp_dtensor", dtype=target.dtype, layer_spec=target.layer_spec, fsdp=target)
    _, model = read_huggingface(opened, wanted)
    return prepare_model(model, opened.files, replace(target, weights_only=True, dtype=None), Layout())


class _Entries(dict[str, Any]):
    """The entries of DCP's metadata by key; a missing key gets a suggestion.

    torch names the missing key alone. Whether missing keys are an error is for the planner to say.
    """

    def __init__(self, path: str, to: str) -> None:
        super().__init__()
        self._path, self._to = path, to
        self._missed = 0

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        self._missed += 1
        if self._missed > _MOST_HINTS:  # looking for names costs time, and a partial load may miss thousands
            return False
        close = close_names(str(key), list(self))
        some = ", ".join(sorted(self)[:2])
        hint = f"; did the program mean {', '.join(close)}?" if close else f". Keys are such as {some}."
        warnings.warn(
            f"{key} is not among the keys that {self._path} gives as {self._to}{hint} StorageReader(PATH, "
            f"to={self._to!r}).keys() lists them",
            stacklevel=2,
        )
        return False


def _entry(tensor: Source) -> TensorStorageMetadata:
    shape = torch.Size(tensor.shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, tensor.dtype)), shape, [whole])


def _read(reader: BoxReader, tensor: Source, item: ReadItem) -> torch.Tensor:
    """The box that a rank wants of a tensor."""
    start, size = tuple(item.storage_offsets), tuple(item.lengths)
    if isinstance(tensor, TargetTensor):
        return to_torch(reader.read(tensor, Box(start, size)), tensor.dtype)
    whole = inline_tensor(tensor)
    return whole[tuple(slice(at, at + count) for at, count in zip(start, size, strict=True))]
