"""Reads the optimizer states of a `torch_dist` checkpoint, whatever their layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.errors import CorruptCheckpointError, UnsupportedCheckpointError
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.torch_archive.item_reader import TensorBytes, load_object, outline_object
from ckpt_tools.megatron.keys import bucket_key, bucket_object, canonical_kind, state_key
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.torch_dist.optimizer_layouts.bucket_order import Stretch
from ckpt_tools.megatron.torch_dist.optimizer_layouts.bucket_proof import (
    Reader,
    Share,
    by_threads,
    find_stretches,
)
from ckpt_tools.megatron.torch_dist.optimizer_layouts.buckets import (
    Bucket,
    Buffer,
    find_buffers,
    flatten,
    weight_pieces,
)
from ckpt_tools.megatron.torch_dist.optimizer_layouts.remainders import joined_masters
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import (
    OptimizerStates,
    StateTensor,
    model_space_states,
    optimizer_layout,
    order_kinds,
    refuse_encoded,
)
from ckpt_tools.megatron.torch_dist.optimizers import refuse_partial_states
from ckpt_tools.model.box import full_box
from ckpt_tools.model.catalog import Catalog, Chunk, Item, TensorEntry
from ckpt_tools.model.roles import MASTER
from ckpt_tools.model.views import Place, Source, Unflatten, View

_BUCKET_LAYOUTS = ("dp_reshardable", "fully_sharded_bucket_space", "dp_zero_gather_scatter")


def read_optimizer_states(
    files: Files,
    catalog: Catalog,
    common: CommonState,
    *,
    sample_only: bool = False,
    share: Share = by_threads,
) -> OptimizerStates | None:
    """Where every optimizer state lies, or None for a checkpoint without an optimizer.

    Bucket layouts are proven by content, which reads all masters and weights once; with `sample_only` only
    some elements of each, for a caller who compares all of them later (`TargetTensor.must_round_to`). `share` is who
    does the comparing.
    """
    layout = optimizer_layout(catalog, common)
    if layout == "none":
        return None
    if layout == "fsdp_dtensor":
        raise UnsupportedCheckpointError(
            f"{catalog.root}: optimizer layout {layout!r} is not one of torch_dist's"
        )
    if layout not in _BUCKET_LAYOUTS:
        states = model_space_states(catalog, layout, common.arg("moe_use_legacy_grouped_gemm"))
        return joined_masters(files, catalog, common, states)
    if layout == "dp_zero_gather_scatter":
        buffers = coalesced_buffers(files, catalog)
    else:
        numels = {
            where: load_object(files, item) for where, item in _objects(catalog, "per_bucket_numel_unpadded")
        }
        buffers = find_buffers(catalog, numels)
    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    refuse_partial_states(((bucket.name, bucket.states.keys()) for bucket in buckets), common)
    has_own = any(map(state_key, catalog.tensors))  # of a layer-wise optimizer, next to another one's buckets
    layer_wise = model_space_states(catalog, layout) if has_own else OptimizerStates(layout, (), {})
    pieces = tuple(piece for piece in weight_pieces(catalog) if (MASTER, piece.key) not in layer_wise.states)
    stretches = find_stretches(buffers, pieces, Reader(files), sample_only=sample_only, share=share)
    of_buckets = bucket_states(catalog, layout, buffers, stretches)
    merged = replace(
        of_buckets,
        kinds=order_kinds((*of_buckets.kinds, *layer_wise.kinds)),
        states={**of_buckets.states, **layer_wise.states},
        consumed=of_buckets.consumed | layer_wise.consumed,
    )
    return joined_masters(files, catalog, common, merged)


def bucket_states(
    catalog: Catalog, layout: str, buffers: Iterable[Buffer], stretches: Iterable[Stretch]
) -> OptimizerStates:
    """The states in proven stretches, by kind and weight; of equal copies the first counts."""
    slices: dict[tuple[str, str], dict[tuple[int, ...], dict[object, Source]]] = {}
    dtypes: dict[tuple[str, str], str] = {}
    for bucket, start, piece in stretches:
        for kind, flat in bucket.states.items():
            step: View = (*flat.view, Unflatten(start, piece.box.size))
            if piece.box != full_box(piece.slice_shape):
                step = (*step, Place(piece.box.start, piece.slice_shape))
            parts = slices.setdefault((kind, piece.key), {}).setdefault(piece.lead, {})
            parts.setdefault(piece, Source(flat.entry.key, step))
            known = dtypes.setdefault((kind, piece.key), flat.entry.dtype)
            if known != flat.entry.dtype:
                raise CorruptCheckpointError(
                    f"{flat.entry.key} is {flat.entry.dtype}, other {kind} states {known}"
                )
    states = {
        where: StateTensor(
            dtypes[where], slices={lead: tuple(parts.values()) for lead, parts in leads.items()}
        )
        for where, leads in slices.items()
    }
    entries = [flat.entry for b in buffers for bucket in b.buckets for flat in bucket.states.values()]
    return OptimizerStates(
        layout,
        order_kinds(kind for kind, _ in states),
        states,
        payloads={e.key: e for e in entries if e.key not in catalog.tensors},
        consumed=frozenset((*filter(bucket_key, catalog.tensors), *filter(bucket_object, catalog.objects))),
    )


def coalesced_buffers(files: Files, catalog: Catalog) -> tuple[Buffer, ...]:
    """The buffers inside the `param_state` objects of `dp_zero_gather_scatter`, their tensors addressed in place.

    Each object is ``[{gbuf: {(dtype, dtype): {kind: 1-D tensor, 'numel_unpadded': n}}, 'buckets_coalesced':
    True}]``.
    """
    buffers = []
    for (chain, group), item in _objects(catalog, "param_state"):
        where = f"chain {chain}, dp_group_idx_{group}: param_state"
        try:
            (state,) = outline_object(files, item)
            if not state.pop("buckets_coalesced"):
                raise ValueError
            for gbuf, by_dtype in sorted(state.items()):
                ((dtypes, kinds),) = by_dtype.items()
                name = f"{where}[{gbuf}]"
                buffers.append(Buffer(chain, group, gbuf, (_coalesced(name, dtypes[0].name, kinds, item),)))
        except (TypeError, ValueError, AttributeError, KeyError):
            raise UnsupportedCheckpointError(
                f"{where} does not have the form that Megatron core 0.8-0.14 writes. "
                "Re-save with a newer release and --dist-ckpt-optim-fully-reshardable; --weights-only converts the "
                "stored weights."
            ) from None
    return tuple(sorted(buffers, key=lambda b: (b.chain, b.group, b.gbuf)))


def _coalesced(name: str, dtype: str, kinds: Mapping[str, Any], item: Item) -> Bucket:
    entries = {
        canonical_kind(kind): _payload(f"{name}.{kind}", tensor, item.file)
        for kind, tensor in kinds.items()
        if isinstance(tensor, TensorBytes)
    }
    refuse_encoded(entries.values())
    numel = kinds["numel_unpadded"]
    if MASTER not in entries or {entry.shape for entry in entries.values()} != {(numel,)}:
        raise CorruptCheckpointError(
            f"{name}: {numel} elements were saved, but its tensors are "
            + ", ".join(f"{kind} {entry.shape}" for kind, entry in entries.items())
        )
    return Bucket(name, dtype, numel, {kind: flatten(entry) for kind, entry in entries.items()}, bounds=None)


def _payload(key: str, tensor: TensorBytes, file: str) -> TensorEntry:
    """A tensor inside an object as a tensor of one bare chunk."""
    if len(tensor.shape) != 1 or not tensor.is_row_major:
        raise ValueError(key)
    item = Item(file, tensor.payload_offset, tensor.nbytes, bare=True, crc32=tensor.crc32)
    return TensorEntry(key, tensor.dtype, tensor.shape, (Chunk(full_box(tensor.shape), item),))


def _objects(catalog: Catalog, what: str) -> list[tuple[tuple[int, int], Item]]:
    items = []
    for key, entry in catalog.objects.items():
        about = bucket_object(key)
        if about and about.what == what:
            items.append(((about.chain, about.group), entry.item))
    return items
