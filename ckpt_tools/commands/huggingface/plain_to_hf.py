"""A plain PyTorch state dict with Hugging Face names as a Hugging Face directory.

What a job saves that trains a model of transformers (FSDP2, accelerate, slime): nothing is translated, so there is no
model in the middle. The way of the data::

    formats/dcp                         the catalog
    megatron/dcp/wrappers               names without wrappers, and what is not the model's
    megatron/huggingface/mapping        names and shapes of the model that config.json describes: equal, or refused
    commands/huggingface/folder         shards, index, config.json, tokenizer
    plan/weight_files, execute          as every export
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from ckpt_tools.commands.huggingface.export_source import ExportOptions, model_directory
from ckpt_tools.commands.huggingface.folder import architecture_of, families_with, read_config
from ckpt_tools.commands.huggingface.tensors import prove_equal, without_frequencies
from ckpt_tools.commands.job.conversion import Conversion
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.errors import MappingError, UsageError, list_problems
from ckpt_tools.formats.locate.run_layouts import snapshot_of
from ckpt_tools.formats.safetensors import INDEX_FILE, SINGLE_FILE, read_safetensors_catalog
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.megatron.dcp.read import refuse_group_map
from ckpt_tools.megatron.dcp.state_dict import (
    NamedModel,
    is_megatron,
    named_model,
    possible_names,
    read_state_dict,
)
from ckpt_tools.megatron.huggingface.mapping.checks import specs_of
from ckpt_tools.megatron.huggingface.mapping.targets import (
    Expected,
    bulk_dtype,
    expected_by_rules,
    expected_by_weights,
)
from ckpt_tools.megatron.huggingface.quantization.quantized import SETTINGS
from ckpt_tools.model.catalog import Catalog, TensorEntry, leave_out
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.model.target import Target, TargetTensor
from ckpt_tools.model.views import Source

_TYPES = ("dtype", "torch_dtype")  # what transformers 5 and 4 call the weights' type


def is_plain(opened: Opened) -> bool:
    """Whether it is a state dict without Megatron's names."""
    kinds = (
        "dcp",
        "fsdp_dtensor",
    )  # a program that saves a wrapped module may have keys like Megatron-FSDP's
    return opened.location.kind in kinds and not is_megatron(read_state_dict(opened.catalog))


def plan_plain(opened: Opened, options: ExportOptions, hf_config: str) -> Conversion:
    """Everything up to the first byte."""
    _refuse_meaningless(options)
    refuse_group_map(opened.files.location, opened.catalog)
    catalog, ignored = leave_out(opened.catalog, options.ignore_keys)
    catalog, frequencies = without_frequencies(catalog)
    config = read_config(hf_config)
    expected = expected_model(catalog, config, options.rules, hf_config)
    model = named_model(catalog, expected.shapes)
    entries = {name: catalog.tensors[key] for name, key in model.keys.items()}
    equal, extra = expected.superfluous(sorted(entries.keys() - expected.shapes.keys()))
    problems = [*_misfits(entries, expected, set(extra))]
    problems += [f"{key}: {expected.told_by} knows of no such tensor" for key in model.stray]
    if problems:
        raise _not_that_model(opened, hf_config, expected, model, problems)
    bases = {name: one.value for name, one in entries.items()}
    prove_equal(opened.files, catalog, bases, equal)
    tensors = [_target(name, entries[name], expected, options.dtype) for name in expected.shapes]
    written, changed = _config(config, bulk_dtype(tensors))
    tied = {other: one for one, other in equal}
    dropped = (
        *ignored,
        *frequencies,
        *(f"{model.keys[n]}: {superfluous(n, tied)}" for n in extra),
        *_left_out(catalog, model),
    )
    notes = (*_type_notes(entries, tensors, options.dtype), *changed)
    if model.prefix:
        notes = (f"the names are those behind {model.prefix!r} in the checkpoint", *notes)
    target = Target(tuple(tensors), dropped=dropped, notes=notes)
    return model_directory(
        opened, options, catalog, tensors, written, target, {}, architecture=architecture_of(config)
    )


def _refuse_meaningless(options: ExportOptions) -> None:
    given = {
        "--tower": options.tower,
        "--quantize": options.quantize,
        "--vocab-size": options.vocab_size,
        "--tp": options.tp,
        "--mtp-copies": options.mtp_copies or None,
    }
    if useless := [option for option, value in given.items() if value is not None]:
        raise UsageError(
            f"{', '.join(useless)}: no meaning for a checkpoint with Hugging Face names: its tensors are written "
            "unchanged"
        )


def expected_model(
    catalog: Catalog, config: Mapping[str, Any], rules: Path | None, hf_config: str
) -> Expected:
    """What the model has: by the rules of its architecture; without such, by the weights next to the config.json."""
    families = families_with(rules, config)
    plain = {name: value for name, value in config.items() if name != SETTINGS}
    try:
        return expected_by_rules(plain, possible_names(catalog), families)
    except MappingError as error:
        place = snapshot_of(hf_config)
        with closing(open_files(place)) as files:
            has_weights = any(files.exists(name) for name in (INDEX_FILE, SINGLE_FILE))
        if not has_weights or rules is not None:
            raise MappingError(
                f"names and shapes of the model are not known: {error} If --hf-config names a folder with weights of "
                "this architecture next to its config.json, those tell (only their headers are read)",
                error.problems,
            ) from error
        stored = without_frequencies(read_safetensors_catalog(place))[0].tensors
        return expected_by_weights(specs_of(stored), config)


def _misfits(entries: Mapping[str, TensorEntry], expected: Expected, superfluous: set[str]) -> Iterator[str]:
    for name, shape in expected.shapes.items():
        if name not in entries:
            yield f"{name} {list(shape)} is missing"
        elif entries[name].shape != shape:
            yield f"{name} is {list(entries[name].shape)}; {expected.told_by} asks for {list(shape)}"
    for name, entry in entries.items():
        if name not in expected.shapes and name not in superfluous:
            yield f"{entry.key}: {expected.told_by} knows of no {name}"


def _not_that_model(
    opened: Opened, hf_config: str, expected: Expected, model: NamedModel, problems: list[str]
) -> MappingError:
    found = len(model.keys.keys() & expected.shapes.keys())
    advice = "--ignore-keys GLOB leaves out what is not the model's."
    if not found:
        advice = (
            "A program with other names translates them itself (torchtitan: "
            "scripts/checkpoint_conversion/convert_to_hf.py)."
        )
    return MappingError(
        f"{opened.location.path} is not the model of {hf_config}: of {len(expected.shapes)} tensors that "
        f"{expected.told_by} asks for it has {found} by name. {advice}\n" + list_problems(problems),
        problems,
    )


def _target(name: str, entry: TensorEntry, expected: Expected, dtype: str | None) -> TargetTensor:
    """The stored tensor, or its cast; what is not floating point (or FP8) keeps its type."""
    written = entry.dtype
    if dtype is not None and entry.dtype in CASTABLE:
        written = expected.types.get(name, dtype)
    return TargetTensor(name, written, entry.shape, (Source(entry.key),))


def _config(config: Mapping[str, Any], dtype: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """config.json with the type of what is written, and without the quantization of what is not."""
    written, notes = {key: value for key, value in config.items() if key != SETTINGS}, list[str]()
    if written != config:
        notes.append(f"{SETTINGS} of --hf-config is left out: the weights are not codes")
    names = [name for name in _TYPES if name in config] or ["torch_dtype"]
    said = [str(config[name]) for name in names if name in config and config[name] != dtype]
    if said:
        notes.append(f"config.json says {dtype}, as the weights are; --hf-config said {said[0]}")
    return written | dict.fromkeys(names, dtype), tuple(notes)


def _type_notes(
    entries: Mapping[str, TensorEntry], tensors: Iterable[TargetTensor], dtype: str | None
) -> Iterator[str]:
    """Which types are written: those that are stored unless --dtype says otherwise."""
    counts = Counter((entries[one.key].dtype, one.dtype) for one in tensors)
    for (stored, written), count in sorted(counts.items()):
        if stored != written:
            yield f"{count} tensors are cast from {stored} to {written}"
        elif dtype is not None and written != dtype:
            yield f"{count} tensors stay {written}"
        elif dtype is None and written in ("float32", "float64"):
            yield f"{count} tensors are {written}, as they are stored; --dtype bfloat16 casts them"


def superfluous(name: str, tied: Mapping[str, str]) -> str:
    """Why a tensor of a state dict is left out; `tied` has the one that it must equal."""
    return f"tied to {tied[name]}, which has the same bytes" if name in tied else "its class does not load it"


def _left_out(catalog: Catalog, model: NamedModel) -> Iterator[str]:
    """A line for each dict of optimizers, and of what else is not the model's."""
    for keys, why in ((model.optimizer, "optimizer states"), (model.beside, "not of the model")):
        groups: dict[str, list[str]] = {}
        for key in keys:
            path = catalog.planner_paths.get(key) or (key,)
            outer = "".join(f"{step}." for step in path[:-1][:2])
            groups.setdefault(f"{outer}*" if outer else key, []).append(key)
        for glob, inside in groups.items():
            nbytes = sum(catalog.tensors[key].nbytes for key in inside if key in catalog.tensors)
            yield f"{glob}: {why} ({len(inside)} keys, {nbytes:,} bytes in tensors)"
