"""A PEFT directory, and its adapter merged into the tensors of a Hugging Face model."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_tools.commands.adapters.merge_adapter import read_adapter_source
from ckpt_tools.commands.huggingface.folder import as_json, families_with, read_config
from ckpt_tools.commands.job.conversion import Conversion
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.errors import CorruptCheckpointError, UnsupportedCheckpointError, UsageError
from ckpt_tools.formats.locate.run_layouts import snapshot_of
from ckpt_tools.formats.safetensors import read_safetensors_header, refuse_pointers
from ckpt_tools.formats.storage.files import Files, absent_folder, read_whole
from ckpt_tools.formats.storage.joined_files import joined_entry
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.untrusted_documents import DocumentError, parse_json
from ckpt_tools.megatron.huggingface.config.config import read_config as model_of_config
from ckpt_tools.megatron.huggingface.families.identify import family_of_config
from ckpt_tools.megatron.huggingface.lora.peft import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    WithAdapter,
    read_peft_settings,
    with_adapter,
)
from ckpt_tools.megatron.huggingface.lora.peft_targets import peft_target, with_vocabulary
from ckpt_tools.megatron.huggingface.mapping.rules import Family, expand
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.target import Target
from ckpt_tools.plan.build import WeightFile, build_safetensors_plan

if TYPE_CHECKING:
    from ckpt_tools.commands.huggingface.export_source import ExportOptions


def merge_peft(
    base: Catalog, adapter: str, shared: tuple[str, str] | None, family: Family | None
) -> WithAdapter:
    """The tensors of a model with those of the PEFT directory `adapter` added; `shared` and `family` as of
    `with_adapter`.

    Its files are named as among joined folders.
    """
    with closing(open_files(snapshot_of(adapter))) as files:
        if not files.exists(ADAPTER_CONFIG):
            raise UnsupportedCheckpointError(_no_peft(adapter))
        if not files.exists(ADAPTER_WEIGHTS):
            raise UnsupportedCheckpointError(
                f"{adapter} has no {ADAPTER_WEIGHTS}; save it with safe_serialization=True"
            )
        refuse_pointers(files, [ADAPTER_CONFIG, ADAPTER_WEIGHTS])
        try:
            settings = read_peft_settings(parse_json(read_whole(files, ADAPTER_CONFIG)))
        except DocumentError as error:
            raise CorruptCheckpointError(f"{files.location}/{ADAPTER_CONFIG}: {error}") from error
        stored = read_safetensors_header(files, ADAPTER_WEIGHTS)
        entries = {key: joined_entry(files, e, f"{key} of {adapter}") for key, e in stored.items()}
    return with_adapter(base, Catalog(files.location, entries, {}), settings, shared, family)


def _no_peft(adapter: str) -> str:
    """Why nothing is found there."""
    place = Path(adapter.removeprefix("file://"))
    if "://" not in adapter.removeprefix("file://") and not place.is_dir():
        if place.exists():
            return f"{adapter} is a file; give the PEFT directory ({place.parent})"
        return absent_folder(place)
    return f"{adapter} is not a PEFT directory: it has no {ADAPTER_CONFIG}"


def peft_files(path: str) -> Files:
    """The files of a PEFT directory."""
    return open_files(snapshot_of(path))


def plan_peft(opened: Opened, options: ExportOptions) -> Conversion:
    """Everything up to the first byte."""
    if options.hf_config is None:
        raise UsageError("--peft: the names are those of the base model; pass its directory with --hf-config")
    config = read_config(options.hf_config)
    family = family_of_config(config, families_with(options.rules, config))
    model = with_vocabulary(model_of_config(family, config))
    source = read_adapter_source(
        opened, options.alpha, opened, "; without --peft the model itself is exported"
    )
    made = peft_target(
        opened.catalog,
        source.adapters,
        expand(family, model),
        model,
        source.alpha,
        options.hf_config,
        options.dtype,
    )
    return Conversion(
        to="hf",
        loader="peft",
        iteration=opened.location.iteration,
        catalog=opened.catalog,
        target=Target(made.tensors, notes=(source.summary, *made.notes)),
        plan=build_safetensors_plan(opened.catalog, [WeightFile(ADAPTER_WEIGHTS, made.tensors)], {}),
        extra_files={ADAPTER_CONFIG: as_json(dict(made.config))},
        architecture=family.architecture,
    )
