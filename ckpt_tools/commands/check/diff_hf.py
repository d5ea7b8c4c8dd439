"""A Hugging Face model against a Megatron checkpoint, which is seen as its export by the rules of `export-hf`.

Another Hugging Face model is seen as its import first: so experts one by one are those of one tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

from ckpt_tools.commands.huggingface.export_hf import ExportRequest, export_tensors
from ckpt_tools.commands.huggingface.export_source import ExportOptions, imported_source
from ckpt_tools.commands.huggingface.folder import families_with, read_config
from ckpt_tools.commands.huggingface.import_hf import ImportOptions, read_huggingface
from ckpt_tools.commands.huggingface.tensors import (
    prove_equal,
    seen_as,
    without_frequencies,
)
from ckpt_tools.commands.huggingface.vision_language import holds_several, whole_model_if_one
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError
from ckpt_tools.megatron.huggingface.mapping.checks import Spec
from ckpt_tools.megatron.huggingface.mapping.rules import Family
from ckpt_tools.megatron.huggingface.mapping.targets import Imported, import_targets
from ckpt_tools.megatron.huggingface.quantization.quantized import Dequantized, dequantized
from ckpt_tools.megatron.huggingface.vision.towers import QUANTIZED
from ckpt_tools.megatron.keys import role_of
from ckpt_tools.model.catalog import Catalog, TensorEntry, Value
from ckpt_tools.model.roles import WEIGHT, Role
from ckpt_tools.model.target import InlineTensor, TargetTensor
from ckpt_tools.model.views import Source
from ckpt_tools.verify.compare.differences import Side

Shape = tuple[int, ...]
_NO_CONTENT = "no content of its own, as import-hf says"
_SAME = "the same values as {}, as config.json says"
_EXACT = {("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64")}  # every value has its like


def sides_by_export(
    model: Opened,
    checkpoint: Opened,
    ignore_keys: tuple[str, ...] = (),
    rules: Path | None = None,
    headers: bool = False,
) -> tuple[Side, Side, list[str]]:
    """The model and the checkpoint under the model's names, and notes on what is not compared.

    Args:
        ignore_keys: as `export-hf --ignore-keys`: globs of the checkpoint's keys that the model was made without.
        rules: as `export-hf --rules`.
        headers: no payload is read; the notes say what else the checkpoint alone has.
    """
    folder = model.location.path
    options = ExportOptions(
        hf_config=folder,
        rules=rules,
        trust_pickle=checkpoint.trust_pickle,
        ignore_keys=ignore_keys,
        check_masters="none",
    )
    config = read_config(folder)
    whole = whole_model_if_one(folder, config)
    others = whole.others if whole is not None and not holds_several(checkpoint.catalog) else {}
    kept, left_out = without_frequencies(model.catalog)
    plain = dequantized(kept, config, model.files)
    kept = plain.catalog
    imported = None
    if checkpoint.location.kind == "safetensors":
        imported = imported_source(read_huggingface(checkpoint, ImportOptions(rules=rules))[1])
    made = export_tensors(checkpoint, ExportRequest(options, plain.specs, whole, imported), headers)
    notes = list(made.notes)
    if headers:
        roles = {key: role_of(key) for key in checkpoint.catalog.tensors}
        states = [role for role in roles.values() if role not in (WEIGHT, "other")]
        notes += [*made.source.dropped, *([no_optimizer(states)] if states else [])]
    if others:
        notes.append(
            f"the language model alone: {len(others)} tensors of the model's other towers are not compared"
        )
    views: dict[str, TargetTensor | InlineTensor] = {tensor.key: tensor for tensor in made.ready}
    shapes = {key: view.shape for key, view in views.items() if key in made.exported.shapes}
    catalog = replace(kept, tensors={key: _reshaped(e, shapes) for key, e in kept.tensors.items()})
    families = families_with(rules, plain.config if whole is None else whole.tower.config)
    redundant = _redundant(replace(model, catalog=kept), plain, views, families, headers)
    stored: dict[str, TargetTensor | InlineTensor] = {
        key: TargetTensor(key, _compared_dtype(entry, views.get(key)), entry.shape, (Source(key),))
        for key, entry in catalog.tensors.items()
        if key not in redundant and key not in plain.parts and key not in others
    }
    wider = [key for key, tensor in stored.items() if tensor.dtype != catalog.tensors[key].dtype]
    if wider:
        notes.append(
            f"{len(wider)} tensors, {wider[0]} the first, are {views[wider[0]].dtype} in the checkpoint and "
            f"{catalog.tensors[wider[0]].dtype} in the model; they are compared as the wider type, which is exact"
        )
    notes = [
        "weights are compared as export-hf would write them; config.json, arguments and optimizer are not",
        *notes,
        *left_out,
        *plain.dropped,
        *plain.notes,
        *(f"{key}: {why}" for key, why in redundant.items()),
    ]
    return (
        Side(model.files, catalog, stored, {}),
        Side(checkpoint.files, made.source.catalog, views, {}, checkpoint.trust_pickle),
        notes,
    )


def sides_of_one_model(a: Opened, b: Opened) -> tuple[tuple[Side, Side], list[str]] | None:
    """Two Hugging Face models as by `sides_by_export`; None where rules do not say that they are of one class."""
    try:
        if any(read_config(side.location.path).get(QUANTIZED) for side in (a, b)):
            return None
        model, other, notes = sides_by_export(a, b)
    except (MappingError, UnsupportedCheckpointError):
        return None
    return (model, other), notes


def no_optimizer(roles: Iterable[Role]) -> str:
    """A note on a checkpoint's tensors that no Hugging Face model has."""
    counts = ", ".join(f"{count} of {role}" for role, count in Counter(roles).items())
    return f"in the checkpoint alone, since a Hugging Face model has no optimizer: {counts}"


def _compared_dtype(entry: TensorEntry, view: TargetTensor | InlineTensor | None) -> str:
    """The stored type, or the other side's where that holds every value of it."""
    return view.dtype if view is not None and (entry.dtype, view.dtype) in _EXACT else entry.dtype


def _reshaped(entry: TensorEntry, shapes: Mapping[str, Shape]) -> TensorEntry:
    """The stored tensor with the axes that the view of the other side has; its bytes are the same."""
    shape = shapes.get(entry.key, entry.shape)
    if shape == entry.shape or prod(shape) != entry.numel:
        return entry
    return seen_as(entry, shape)


def _redundant(
    model: Opened,
    plain: Dequantized,
    views: Mapping[str, object],
    families: Mapping[str, Family],
    headers: bool,
) -> dict[str, str]:
    """What the model stores though it follows from the rest, with why: an export does not write it.

    That is proven, if more than headers may be read.
    """
    specs = plain.specs
    imported = _as_imported(plain, families) if not specs.keys() <= views.keys() else None
    if imported is None:
        return {}
    paired = {key for pair in imported.equal for key in pair}
    found = {key: _NO_CONTENT for key in imported.dropped if key not in views and key not in paired}
    for pair in imported.equal:
        if sum(key in views for key in pair) == 1 and (headers or _is_proven(model, specs, pair)):
            one, other = sorted(pair, key=lambda key: key in views)
            found[one] = _SAME.format(other)
    return found


def _as_imported(plain: Dequantized, families: Mapping[str, Family]) -> Imported | None:
    """What an import would make of the model; None where it is not a whole one, which a comparison says better."""
    try:
        return import_targets(plain.specs, plain.config, families=families)
    except MappingError:
        return None


def _is_proven(model: Opened, specs: Mapping[str, Spec], pair: tuple[str, str]) -> bool:
    catalog: Catalog = model.catalog
    try:
        prove_equal(
            model.files,
            catalog,
            {key: Value(specs[key].dtype, specs[key].shape, (Source(key),)) for key in pair},
            [pair],
        )
    except MappingError:
        return False
    return True
