"""The checks of `verify`: what metadata says, the small files next to the tensors, and masters against weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_tools.commands.huggingface.folder import documents_of, prove_equal, without_frequencies
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.read_model import Wanted, master_targets, read_model
from ckpt_tools.commands.look.ls import COMPLETE, iteration_row
from ckpt_tools.errors import (
    NEVER_FINDINGS,
    CkptError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedCheckpointError,
    UsageError,
)
from ckpt_tools.execute.proof.masters import compare_all_masters
from ckpt_tools.formats.locate.detect import RECORD_FILE, Location
from ckpt_tools.formats.storage.files import path_in
from ckpt_tools.formats.storage.open_files import files_below, open_files
from ckpt_tools.megatron.dcp.state_dict import is_megatron, read_state_dict
from ckpt_tools.megatron.format import FORMATS
from ckpt_tools.megatron.keys import bucket_key
from ckpt_tools.megatron.run_state.common_state import read_common_state
from ckpt_tools.megatron.run_state.record import read_record
from ckpt_tools.megatron.torch_dist.optimizer_layouts.reader import coalesced_buffers
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import optimizer_layout
from ckpt_tools.megatron.torch_dist.read import stored_groups
from ckpt_tools.model.box import full_box
from ckpt_tools.model.catalog import Catalog, Item
from ckpt_tools.model.choices import CheckpointKind
from ckpt_tools.model.model import Model
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.plan.overlap import ChunkFinder, TargetReader
from ckpt_tools.verify.checkpoint import meaning, structure
from ckpt_tools.verify.checkpoint.counters import check_counters
from ckpt_tools.verify.checkpoint.hf_folder import check_hf_folder
from ckpt_tools.verify.checkpoint.meaning import check_plain_groups, check_plain_states
from ckpt_tools.verify.checkpoint.place import (
    check_fsdp_entries,
    check_metadata_json,
    check_place,
    check_torch_dist_entries,
    earlier_iteration,
)
from ckpt_tools.verify.content.manifest import INTEGRITY, check_integrity
from ckpt_tools.verify.readiness.model_rules import check_settings
from ckpt_tools.verify.report import ERROR, Check, Findings, Meter, VerifyOptions, failed_check

if TYPE_CHECKING:
    from ckpt_tools.verify.content.content import Scanned


def check_metadata(opened: Opened, options: VerifyOptions, digests: bool, meter: Meter) -> list[Check]:
    """Every check that looks at no values, of a checkpoint of which the common state is not read yet.

    With `options.content` alone the sums of `integrity.json` are taken, and tied weights of a Hugging Face model are
    compared. `meter` gets how many bytes all checks will read: with `digests`, a manifest's too.
    """
    location, files, catalog, trust_pickle = (
        opened.location,
        opened.files,
        opened.catalog,
        opened.trust_pickle,
    )
    content = options.content
    has_integrity = files.exists(INTEGRITY)
    passes = content * (1 + has_integrity) + 2 * digests  # of files and tensors
    meter.total = passes * sum(item.length for _, item in structure.all_items(catalog))
    checks = []
    of_format = _OF_FORMAT[location.kind]
    if of_format.has_pickles:
        try:
            opened = replace(opened, common=read_common_state(files, catalog, trust_pickle))
        except (CorruptCheckpointError, UnsupportedCheckpointError) as error:
            checks.append(failed_check("common state", location.path, error))
    if of_format.reads_record:
        try:
            read_record(files)
        except CorruptCheckpointError as error:
            checks.append(failed_check("record", RECORD_FILE, error))
    judge = partial(_wrong_with, location.root or "", trust_pickle)
    with nullcontext() if location.root is None else closing(open_files(location.root)) as root:
        checks.append(check_place(location, root, opened.common, not options.every_iteration, judge))
    checks += [
        structure.check_tiling(catalog),
        structure.check_planner(catalog),
        structure.check_shards(catalog, opened.common),
    ]
    if of_format.has_pickles:
        checks.append(structure.check_plans(files, trust_pickle))
    checks.append(_with_way_out(location, structure.check_files(files, catalog)))
    checks.append(structure.check_frames(files, catalog, trust_pickle))
    if location.has_metadata_json:
        checks.append(check_metadata_json(files))
    if has_integrity:
        checks.append(check_integrity(files, content, meter))
    return checks + of_format.checks(opened, content)


def _wrong_with(root: str, trust_pickle: bool, name: str) -> str:
    """What `ls` finds wrong with an iteration; "" in a store, where each look costs, and where it cannot look."""
    if "://" in root:
        return ""
    place = path_in(root, name)
    try:
        row = iteration_row(name, place, None, files_below(place), trust_pickle)
    except (StorageError, UsageError):  # it is another iteration that was asked for
        return ""
    return "" if row.state == COMPLETE else f"{row.state}: {row.why}"


def _with_way_out(location: Location, check: Check) -> Check:
    """The check of files, with the run's earlier iteration that can be used in place of a damaged one."""
    if not check.errors or location.root is None:
        return check
    with closing(open_files(location.root)) as root:
        earlier = earlier_iteration(location, root)
    if earlier is None:
        return check
    way_out = f"another copy of the file, or an earlier iteration (--iteration {earlier})"
    findings = (f._replace(fix=way_out) if f.severity == ERROR else f for f in check.findings)
    return replace(check, findings=tuple(findings))


def _torch_dist(opened: Opened) -> list[Check]:
    weights, problems = FORMATS["torch_dist"].weights(opened.catalog)
    entries = check_torch_dist_entries(opened.location, opened.catalog, opened.common)
    return [
        entries,
        *_torch_dist_optimizer(opened),
        meaning.check_layers(weights, problems, opened.common),
        meaning.check_experts(weights, opened.common),
        check_settings("torch_dist", weights, opened.common),
        check_counters(opened.files, opened.catalog, opened.common, opened.trust_pickle),
    ]


def fsdp_entries_and_keys(opened: Opened) -> tuple[Check, Check, Check, Check, Check]:
    """Whether a strict load finds every key that it asks for: entries, layers, experts, states and groups."""
    catalog, common = opened.catalog, opened.common
    weights = FORMATS["fsdp_dtensor"].weights(catalog).found
    return (
        check_fsdp_entries(opened.location, catalog),
        meaning.check_layers(weights, (), common, meaning.stage_numbers(catalog, common)),
        meaning.check_experts(weights, common),
        meaning.check_fsdp_states(catalog, common),
        meaning.check_fsdp_groups(catalog),
    )


def _fsdp_dtensor(opened: Opened) -> list[Check]:
    files, catalog, common = opened.files, opened.catalog, opened.common
    entries, layers, experts, states, groups = fsdp_entries_and_keys(opened)
    weights = FORMATS["fsdp_dtensor"].weights(catalog).found
    return [
        *(entries, states, groups, meaning.check_packing(files, catalog, common), layers, experts),
        check_settings("fsdp_dtensor", weights, common),
        check_counters(files, catalog, common, opened.trust_pickle),
    ]


def _state_dict(opened: Opened) -> list[Check]:
    """The optimizers of a plain state dict, and what Megatron's names say."""
    files, catalog, common, trust_pickle = opened.files, opened.catalog, opened.common, opened.trust_pickle
    found = read_state_dict(catalog)
    checks = list[Check]()
    if found.optimizers:
        checks.append(check_plain_states(files, catalog, found, trust_pickle))
        checks.append(check_plain_groups(files, catalog, found, trust_pickle))
    if is_megatron(found):
        weights = FORMATS["dcp"].weights(catalog).found
        checks += [meaning.check_layers(weights, [], common), meaning.check_experts(weights, common)]
        checks.append(check_counters(files, catalog, common, trust_pickle))
    return checks


def _torch_dist_optimizer(opened: Opened) -> list[Check]:
    """States and groups; one that cannot be read does not stop the other."""
    files, catalog, common = opened.files, opened.catalog, opened.common
    layout = optimizer_layout(catalog, common)
    checks, groups, inside = list[Check](), tuple[Mapping[str, Any], ...](), set[str]()
    try:
        groups = stored_groups(files, catalog, common)
        has_step = meaning.has_step(common.values.get("optimizer"))
        checks.append(meaning.check_torch_dist_groups(layout != "none", groups, has_step))
    except CkptError as error:
        checks.append(failed_check("groups", "optimizer", error))
    try:
        if layout == "dp_zero_gather_scatter":
            buckets = [bucket for buffer in coalesced_buffers(files, catalog) for bucket in buffer.buckets]
            inside = {kind for bucket in buckets for kind in bucket.states}
        states = meaning.check_torch_dist_states(catalog, common, groups, inside)
    except CkptError as error:
        states = failed_check("states", "optimizer", error)
    return [states, *checks]


class _OfFormat(NamedTuple):
    """What is checked of a format besides what is of every checkpoint."""

    checks: Callable[[Opened, bool], list[Check]]  # and with content
    has_pickles: bool = True  # a common state, save plans
    reads_record: bool = True  # on its own: of fsdp_dtensor the packing is checked with it
    masters: Callable[[Catalog, int | None], Wanted | None] = lambda _, __: None  # how to read them


_OF_FORMAT: Mapping[CheckpointKind, _OfFormat] = {
    "torch_dist": _OfFormat(
        lambda opened, _: _torch_dist(opened),
        masters=lambda _, workers: Wanted(unknown_keys=True, workers=workers),
    ),
    "fsdp_dtensor": _OfFormat(lambda opened, _: _fsdp_dtensor(opened), reads_record=False),
    "dcp": _OfFormat(
        lambda opened, _: _state_dict(opened),
        masters=lambda catalog, _: (
            Wanted("masters")
            if any(optimizer.masters for optimizer in read_state_dict(catalog).optimizers)
            else None
        ),
    ),
    "safetensors": _OfFormat(
        lambda opened, content: check_hf_folder(
            opened.files,
            without_frequencies(opened.catalog)[0],
            documents_of(opened.files.list()),
            partial(prove_equal, opened.files) if content else lambda *_: None,
        ),
        has_pickles=False,
        reads_record=False,
    ),
}


def masters_check(
    opened: Opened, options: VerifyOptions, workers: int | None
) -> Callable[[Scanned], list[Check]]:
    """Read the model with `workers`, and return what checks that every fp32 master rounds to its stored weight.

    That is given what the scan has found, and gives nothing where there cannot be any masters. Of flat buckets it
    adds what is wrong in parameters' states, which only the model tells from gaps.
    """
    files, catalog = opened.files, opened.catalog
    wanted = _OF_FORMAT[opened.location.kind].masters(catalog, workers)
    if wanted is None:
        return lambda _: []
    found = Findings("masters", "elements")
    try:
        common = read_common_state(files, catalog, opened.trust_pickle)
        model = read_model(replace(opened, common=common), wanted)
        targets = master_targets(model)
    except NEVER_FINDINGS:
        raise
    except CkptError as error:
        found.error("optimizer", str(error))
        return lambda _: [found.done()]

    def compare(scanned: Scanned) -> list[Check]:
        threads, recipe = options.threads, model.settings.fp8_recipe
        try:
            report, problems = compare_all_masters(
                files, model.catalog, targets, threads, options.workers, recipe, scanned.rounded
            )
            states = _bucket_states(model, scanned.in_buckets)
        except NEVER_FINDINGS:
            raise
        except CkptError as error:
            found.error("optimizer", str(error))
            return [found.done()]
        found.looked_at = report.elements
        for problem in problems:
            element, _, values = problem.partition(": ")
            found.error(element, f"{values}: the master does not round to the weight")
        return [found.done(), *([states] if states.errors else [])]

    return compare


def _bucket_states(model: Model, wrong: Mapping[Item, list[str]]) -> Check:
    """What is wrong in the items that states of parameters cover: of the others, gaps, nobody reads a value."""
    found, finder, covered = Findings("values", "states"), ChunkFinder(model.catalog), Counter[Item]()
    for parameter in model.parameters if wrong else ():
        for kind, value in parameter.values.items():
            if not any(bucket_key(source.key) for source in value.sources):
                continue
            name = f"{kind} of {parameter.name}"
            reader = TargetReader(finder, TargetTensor(name, value.dtype, value.shape, value.sources))
            for at in reader.locate(full_box(value.shape)):
                chunk = reader.chunk(at)
                covered[chunk.item] += at.piece.box.volume
                if covered[chunk.item] == chunk.box.volume:
                    for problem in wrong.get(chunk.item, ()):
                        found.error(name, problem)
    return found.done()
