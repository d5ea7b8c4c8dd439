"""`import-hf`: a Hugging Face model directory as a Megatron checkpoint of either format, weights only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

from ckpt_tools.commands.convert.to_dtensors import prepare_model
from ckpt_tools.commands.convert.to_torch_dist import write_torch_dist
from ckpt_tools.commands.convert.version_2 import VERSION_2, for_version_2
from ckpt_tools.commands.huggingface.export_source import check_tower, tower_alone
from ckpt_tools.commands.huggingface.folder import (
    families_with,
    prove_equal,
    read_config,
    refuse_adapters,
    seen_as,
    shifted_norms,
    unread_notes,
    without_frequencies,
)
from ckpt_tools.commands.job.conversion import Conversion, Progress, RunOptions, Writer, convert
from ckpt_tools.commands.job.opened import NO_STATE, Opened, closed_on_error
from ckpt_tools.commands.job.outputs import in_root, refuse_overlap
from ckpt_tools.commands.job.placements import Layout, TargetJob, said_tp
from ckpt_tools.commands.job.report import ConversionReport
from ckpt_tools.errors import (
    CkptError,
    CorruptCheckpointError,
    MappingError,
    UnsupportedCheckpointError,
    UsageError,
)
from ckpt_tools.execute.run import Output
from ckpt_tools.formats.locate.detect import MAX_DIGITS, RECORD_FILE, Location, locate
from ckpt_tools.formats.locate.run_layouts import ForeignFormatError, snapshot_of
from ckpt_tools.formats.pickle.unpickle import StandIn, TorchDtype, stand_in
from ckpt_tools.formats.safetensors import read_safetensors_catalog, read_safetensors_header, refuse_pointers
from ckpt_tools.formats.storage.files import AnyPath, Files, absent_folder, read_whole
from ckpt_tools.formats.storage.joined_files import FilesBeside, joined_entry
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.untrusted_documents import DocumentError, parse_json
from ckpt_tools.megatron.fsdp_dtensor.fresh_optimizer import check_fresh, given_settings
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.huggingface.families.identify import family_of_config
from ckpt_tools.megatron.huggingface.lora import peft
from ckpt_tools.megatron.huggingface.mapping.checks import Spec
from ckpt_tools.megatron.huggingface.mapping.rules import Family
from ckpt_tools.megatron.huggingface.mapping.targets import Imported, import_targets, shared_head
from ckpt_tools.megatron.huggingface.quantization.quantized import dequantized
from ckpt_tools.megatron.huggingface.vision import towers
from ckpt_tools.megatron.huggingface.vision.vision_language import vision_language_types
from ckpt_tools.megatron.keys import EXPERTS
from ckpt_tools.megatron.names import BRIDGE, FUSED_FC1_NORM, fuse_local_norm
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.run_state.record import TargetRecord, record_bytes
from ckpt_tools.megatron.run_state.settings import read_settings
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions
from ckpt_tools.megatron.vocab import padded_rows, vocabulary
from ckpt_tools.model.catalog import Catalog, Made, Value, made_entry
from ckpt_tools.model.choices import LayerSpec, MegatronFormat, TowerName
from ckpt_tools.model.dtypes import check_dtype
from ckpt_tools.model.kernels.kernel import AddNumber
from ckpt_tools.model.model import Model, Parameter
from ckpt_tools.model.roles import WEIGHT
from ckpt_tools.model.views import Source
from ckpt_tools.verify.readiness.facts import since

MLA_NORM = re.compile(r"\.linear_(q|kv)_up_proj\.layer_norm_weight$")
_FUSED_ONLY = ("linear_attention_freq", "hybrid_override_pattern")  # arguments of such layers
DIVISOR = 128  # Megatron's own --make-vocab-size-divisible-by
_NEED_OPTIMIZER = since(
    "core-0.18"
)  # programs that start from no checkpoint without one: the rule `warm-start`


@dataclass(frozen=True, slots=True)
class ImportOptions(RunOptions):
    """What a user may decide about an import; the defaults let the model decide."""

    to: MegatronFormat = "torch_dist"
    rules: Path | None = None  # a rule file
    dtype: str | None = None
    vocab_size_padded: int | None = None  # rows of the vocabulary; None: as a job of `--tp` pads it by itself
    layer_spec: LayerSpec | None = None  # te by default
    fsdp: TargetOptions = field(default_factory=TargetOptions)  # its `fresh_optimizer` None: if it is needed
    layout: Layout | None = None
    iteration: int | None = None  # None: a release, or 1 with an optimizer
    adapter: str | None = None  # a PEFT directory to merge into the model
    tower: TowerName | None = None  # the part of a vision-language model


def import_hf(
    source: AnyPath,
    output: AnyPath,
    options: ImportOptions | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> ConversionReport:
    """Import the Hugging Face directory `source` into the run's root `output`; called on every rank.

    Raises:
        UsageError: options that contradict each other, or an output that cannot be taken.
        UnsupportedCheckpointError: no safetensors weights there, or quantized in a way that is not read.
        MappingError: an architecture without rules, an adapter, or a model that is not whole or contradicts its
            config.json.
        VerificationError: a cast that makes infinities.
        CorruptCheckpointError, StorageError: damaged files, full disks.
    """
    return convert(source, output, FROM_HF, options or ImportOptions(), progress, dry_run)


def plan_import(opened: Opened, options: ImportOptions, world: int) -> Conversion:
    """Everything up to the first byte; `world` processes convert."""
    options = completed(options, read_config(opened.location.path))
    _check_options(options)
    imported, model = read_huggingface(opened, options)
    if options.to == "torch_dist":
        wanted = TorchDistOptions(
            options.layer_spec, dtype=options.dtype, dialect=options.fsdp.dialect, weights_only=True
        )
        made = write_torch_dist(model, opened, wanted, world)
    else:
        target = replace(options.fsdp, layer_spec=options.layer_spec)
        layout = options.layout or Layout(world=world, of_job=False)
        prepared = prepare_model(model, opened.files, target, layout)
        if layout.name == VERSION_2:
            prepared = for_version_2(prepared, model.common, layout)
        made = prepared.planned(layout, options.iteration)
    tokens = imported.args["vocab_size"]  # the vocabulary's real size, which config.json tells
    rows = vocabulary(((t.key, t.shape) for t in imported.tensors), model.common.args, tokens)
    job = made.job or TargetJob(TargetRecord())
    job = replace(job, record=replace(job.record, tokens=tokens), vocabulary=rows)
    return replace(
        made,
        iteration=options.iteration,
        job=job,
        extra_files={**made.extra_files, RECORD_FILE: record_bytes(job.record)},
        architecture=imported.family.architecture,
    )


def completed(options: ImportOptions, config: Mapping[str, Any]) -> ImportOptions:
    """The options with what follows where nothing was said: the program that trains the model of this config.json,
    whether there is an optimizer, and which iteration.
    """
    fsdp, iteration = options.fsdp, options.iteration
    if _has_towers(options, config):
        if fsdp.dialect not in (None, BRIDGE):
            kind = config[towers.TYPE]
            raise UsageError(
                f"--target {fsdp.dialect}: Megatron-Bridge alone trains a {kind} with its towers. Leave it out, or "
                "import the language model alone (--tower language)"
            )
        fsdp = replace(fsdp, dialect=BRIDGE)
    if options.to == "fsdp_dtensor":
        of_version_2 = options.layout is not None and options.layout.name == VERSION_2  # starts from weights
        needed = (fsdp.dialect or "main") in _NEED_OPTIMIZER and not of_version_2
        fresh = needed if fsdp.fresh_optimizer is None else fsdp.fresh_optimizer
        fsdp = replace(fsdp, fresh_optimizer=fresh, weights_only=True)
        if fresh and iteration is None:
            iteration = 1
    return replace(options, fsdp=fsdp, iteration=iteration)


def read_huggingface(opened: Opened, options: ImportOptions) -> tuple[Imported, Model]:
    """READ: the weights of a Hugging Face directory as a model, and what was decided about it."""
    catalog = opened.catalog
    refuse_adapters(catalog.tensors)
    catalog, frequencies = without_frequencies(catalog)
    plain = dequantized(catalog, read_config(opened.location.path), opened.files)
    catalog, specs = plain.catalog, plain.specs
    more: tuple[str, ...] = ()
    if options.adapter is not None:
        shared = _shared_head(specs, plain.config, options)
        merged = merge_peft(catalog, options.adapter, shared, _known_family(plain.config, options))
        catalog, specs, more = merged.catalog, merged.specs(specs), merged.notes
    read = _read_tensors(catalog, specs, plain.config, options)
    catalog, imported = read.catalog, read.imported
    if options.layer_spec == "local" and not imported.args.keys().isdisjoint(_FUSED_ONLY):
        raise MappingError(
            f"--layer-spec local: Megatron builds the layers of {imported.family.architecture} of Transformer "
            "Engine's modules only, whatever --transformer-impl says; leave the option out"
        )
    prove_equal(opened.files, catalog, imported.equal)
    dropped = (
        *(f"{key}: redundant" for key in imported.dropped),
        *frequencies,
        *plain.dropped,
        *(f"{key}: of another tower than the language model" for key in read.left_out),
    )
    catalog, imported, lost = _with_offsets(opened.files, catalog, imported)
    notes = (*plain.notes, *more, *read.notes, *imported.notes, *lost, *unread_notes(opened.files))
    imported = replace(imported, dropped=dropped, notes=notes)
    shapes = imported.shapes
    tensors = {key: seen_as(entry, shapes.get(key, entry.shape)) for key, entry in catalog.tensors.items()}
    seen = replace(catalog, tensors=tensors)
    return imported, _model(seen, imported, common_state(imported, options, opened.location.path), options)


def merge_peft(
    base: Catalog, adapter: str, shared: tuple[str, str] | None, family: Family | None
) -> peft.WithAdapter:
    """The tensors of a model with those of the PEFT directory `adapter` added; `shared` and `family` as of
    `with_adapter`.

    Its files are named as among joined folders.
    """
    with closing(open_files(snapshot_of(adapter))) as files:
        if not files.exists(peft.ADAPTER_CONFIG):
            raise UnsupportedCheckpointError(_no_peft(adapter))
        if not files.exists(peft.ADAPTER_WEIGHTS):
            raise UnsupportedCheckpointError(
                f"{adapter} has no {peft.ADAPTER_WEIGHTS}; save it with safe_serialization=True"
            )
        refuse_pointers(files, [peft.ADAPTER_CONFIG, peft.ADAPTER_WEIGHTS])
        try:
            settings = peft.read_peft_settings(parse_json(read_whole(files, peft.ADAPTER_CONFIG)))
        except DocumentError as error:
            raise CorruptCheckpointError(f"{files.location}/{peft.ADAPTER_CONFIG}: {error}") from error
        stored = read_safetensors_header(files, peft.ADAPTER_WEIGHTS)
        entries = {key: joined_entry(files, e, f"{key} of {adapter}") for key, e in stored.items()}
    return peft.with_adapter(base, Catalog(files.location, entries, {}), settings, shared, family)


def _no_peft(adapter: str) -> str:
    """Why nothing is found there."""
    place = Path(adapter.removeprefix("file://"))
    if "://" not in adapter.removeprefix("file://") and not place.is_dir():
        if place.exists():
            return f"{adapter} is a file; give the PEFT directory ({place.parent})"
        return absent_folder(place)
    return f"{adapter} is not a PEFT directory: it has no {peft.ADAPTER_CONFIG}"


def _shared_head(
    specs: Mapping[str, Spec], config: Mapping[str, Any], options: ImportOptions
) -> tuple[str, str] | None:
    """The names in the directory of embedding and head where these are one weight."""
    if not _has_towers(options, config):
        return shared_head(config, specs, families_with(options.rules, config))
    tower = towers.language_tower(config, specs)
    found = shared_head(tower.config, tower.names, tower.families(families_with(None)))
    return found and (tower.name_of(found[0]), tower.name_of(found[1]))


def _known_family(config: Mapping[str, Any], options: ImportOptions) -> Family | None:
    """The family with the rules for the tensors' names; None for a model of towers, or one without rules."""
    try:
        return family_of_config(config, families_with(options.rules, config))
    except MappingError:
        return None


class _Read(NamedTuple):
    """What a directory's tensors become; views see them in `catalog`, some under the names of a language model."""

    catalog: Catalog
    imported: Imported
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _read_tensors(
    catalog: Catalog, specs: Mapping[str, Spec], config: Mapping[str, Any], options: ImportOptions
) -> _Read:
    """The parameters of a language model; of a vision-language model all parts, or its language model alone."""
    read = partial(
        import_targets,
        dtype=options.dtype,
        vocab_multiple=DIVISOR * _tp(options),
        vocab_rows=options.vocab_size_padded,
    )
    if options.tower is None and not _has_towers(options, config):
        return _Read(catalog, read(specs, config, families=families_with(options.rules, config)))
    if options.tower is None:
        towers.known_to_bridge(config)
    catalog, named, tower = tower_alone(catalog, specs, config)
    families = tower.families(families_with(options.rules, tower.config))
    imported = read(named, tower.config, families=families)
    if options.tower is None:
        whole = towers.imported_whole(imported, config, tower, specs, options.dtype)
        return _Read(
            catalog, whole, notes=(f"for Megatron-Bridge, which alone trains a {config[towers.TYPE]}",)
        )
    return _Read(
        catalog, imported, tower.others, (*towers.left_out_notes(tower), *towers.mrope_notes(config))
    )


def _has_towers(options: ImportOptions, config: Mapping[str, Any]) -> bool:
    """Whether the model is imported as a vision-language model with all its parts."""
    return (
        options.tower is None and options.rules is None and config.get(towers.TYPE) in vision_language_types()
    )


def _with_offsets(files: Files, catalog: Catalog, imported: Imported) -> tuple[Catalog, Imported, list[str]]:
    """Norms that Megatron stores as weight - 1 where the model's class takes the weight, made by a kernel."""
    _, notes = shifted_norms(files, catalog, imported.tensors, imported.offsets)
    tensors, made = list(imported.tensors), dict(catalog.tensors)
    for i, target in enumerate(tensors):
        if target.key in imported.offsets:
            offset = imported.offsets[target.key]
            key = f"{target.sources[0].key} {offset:+g}"
            exact = Value("float32", target.shape, target.sources)
            made[key] = made_entry(key, Made(AddNumber(target.dtype, offset), (exact,)))
            tensors[i] = replace(target, sources=(Source(key),))
    return replace(catalog, tensors=made), replace(imported, tensors=tuple(tensors)), notes


def common_state(imported: Imported, options: ImportOptions, source: str) -> CommonState:
    """The common state of a run before its first step: its arguments, as Megatron-LM pickles them."""
    args = dict(imported.args)
    args |= {
        "params_dtype": TorchDtype(args["params_dtype"]),
        "transformer_impl": "local" if options.layer_spec == "local" else "transformer_engine",
        "make_vocab_size_divisible_by": _divisor(args, options),
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": source,
        "ckpt_format": options.to,
    }
    namespace = StandIn.__new__(stand_in("argparse", "Namespace"))
    namespace.state = args
    return CommonState(
        {"args": namespace, "checkpoint_version": 3.0, "iteration": options.iteration or 0}, None
    )


def _check_options(options: ImportOptions) -> None:
    if options.to not in get_args(MegatronFormat):
        formats = " or ".join(get_args(MegatronFormat))
        raise UsageError(f"--to {options.to}: Hugging Face models become {formats}")
    check_dtype(options.dtype)
    check_tower(options.tower)
    if options.tower is not None and options.adapter is not None:
        raise UsageError(
            f"--adapter together with --tower: merge it into the whole model first: {peft.MERGE_WITH_PEFT}"
        )
    rows, fsdp = options.vocab_size_padded, options.fsdp
    if rows is not None and rows < 1:
        raise UsageError(f"--vocab-size-padded {rows}: at least one row is needed")
    if options.to == "torch_dist" and (fsdp.fresh_optimizer or given_settings(fsdp)):
        raise UsageError(
            "a fresh optimizer and its settings need --to fsdp_dtensor: a 3D-parallel job, which loads torch_dist, "
            "starts from weights alone (--finetune)"
        )
    check_fresh(fsdp)
    if fsdp.fresh_optimizer and options.iteration == 0:
        raise UsageError("--iteration 0: a job with an optimizer begins at iteration 1 or later")
    if options.iteration is not None and not 0 <= options.iteration < 10**MAX_DIGITS:
        raise UsageError(f"--iteration {options.iteration}: a number from 0 of at most {MAX_DIGITS} digits")


def _divisor(args: Mapping[str, Any], options: ImportOptions) -> int:
    """A `--make-vocab-size-divisible-by` that makes the rows that are written: Megatron's own, else a round one."""
    rows, tp = args["padded_vocab_size"], _tp(options)
    tried = (*(DIVISOR >> n for n in range(DIVISOR.bit_length())), rows // tp)
    return next((n for n in tried if n and padded_rows(args["vocab_size"], n, tp) == rows), DIVISOR)


def _tp(options: ImportOptions) -> int:
    size = said_tp(options.fsdp.tp, options.layout)
    return 1 if size is None else size.ranks


def _model(catalog: Catalog, imported: Imported, common: CommonState, options: ImportOptions) -> Model:
    """The imported weights as a model."""
    found = []
    has_mla = bool(imported.args.get("multi_latent_attention"))
    for tensor in imported.tensors:
        head, experts, tail = tensor.key.partition(EXPERTS)
        expert, _, leaf = tail.partition(".")
        name = f"{head}{EXPERTS}{leaf}" if experts else tensor.key
        if options.layer_spec == "local":
            name = _local_name(name, has_mla)
        value = Value(tensor.dtype, tensor.shape, tensor.sources, tensor.zero_filled)
        number = int(expert) if experts else None
        found.append(Parameter(name, tensor.shape, tensor.dtype, {WEIGHT: value}, number, origin=name))
    return Model(
        catalog,
        tuple(found),
        common,
        read_settings(common),
        dropped=imported.dropped,
        notes=imported.notes,
    )


def _local_name(name: str, has_mla: bool) -> str:
    """The stored name of a norm under Megatron's own modules, other names as they are.

    They rename the norms on the way to disk, those of experts' layers too; around MLA none (gpt_layer_specs.py).
    """
    if has_mla:
        return FUSED_FC1_NORM.sub(r".pre_mlp_layernorm.\1", MLA_NORM.sub(r".\1_layernorm.weight", name))
    return fuse_local_norm(name)


def _open(source: str, options: ImportOptions) -> Opened:
    folder = snapshot_of(source)
    files = open_files(folder)
    with closed_on_error(files):
        try:
            catalog = read_safetensors_catalog(folder)
        except UnsupportedCheckpointError:
            try:
                locate(folder)
            except ForeignFormatError:  # another program's files, which it makes a model of
                raise
            except CkptError:
                pass
            raise
    if options.adapter is not None:
        files = FilesBeside(files, [open_files(snapshot_of(options.adapter))])
    return Opened(Location("safetensors", folder), files, catalog, NO_STATE)


def _place(source: str, location: Location, output: str, options: ImportOptions) -> Output:
    refuse_overlap(source, location, output)
    if options.adapter is not None:
        refuse_overlap(options.adapter, location, output)
    iteration = completed(options, read_config(location.path)).iteration
    return in_root(output, iteration, options.overwrite, options.resume)


FROM_HF = Writer(open=_open, place=_place, plan=plan_import)
