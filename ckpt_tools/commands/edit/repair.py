"""`repair`: a copy of an `fsdp_dtensor` checkpoint with wrong keys corrected, where the checkpoint proves how.

The rest stays, byte for byte and chunk by chunk. Weights and masters keep their values.

What is repaired, and what shows that it is right:

* fp32 masters that stand among the optimizer's states, where Megatron-LM's converter parks them: each rounds to the
  value under `model.*`, which is where Megatron-FSDP has its masters;
* group fields under a name with an empty step (`module..decoder`) or of a half, as the same converter writes them:
  the name is that of a stored parameter, and both halves say the same;
* weights under the layer numbers of a pipeline stage (MLM#7452): states have the model's numbers, and fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckpt_tools.commands.edit.modify import renamed_archives, renamed_target
from ckpt_tools.commands.job.conversion import Conversion, EditOptions, Progress, open_source
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.commands.job.report import ConversionReport, Edits
from ckpt_tools.commands.job.rewrite import edit, rewrite
from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, raise_if
from ckpt_tools.execute.processes.meeting import connect
from ckpt_tools.formats.torch_archive.item_reader import read_archive
from ckpt_tools.megatron.format import FORMATS
from ckpt_tools.megatron.fsdp_dtensor.read import ISSUE, LocalNumbers, local_numbers, ranges
from ckpt_tools.megatron.keys import (
    DECODER_LAYERS,
    GROUP_META,
    STEP,
    canonical_kind,
    decoder_layer,
    fsdp_state,
    group_key,
    model_name,
    split_half,
)
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.roles import MASTER
from ckpt_tools.model.target import TargetTensor, rounding_target


@dataclass(frozen=True, slots=True)
class Repaired:
    """What `repair` did."""

    source: str
    output: str
    changes: tuple[Change, ...]
    left_out: tuple[str, ...]  # a line for each of the source's other files that is not copied
    report: ConversionReport | None  # None: there is nothing to repair


def repair_checkpoint(
    source: str,
    output: str,
    options: EditOptions | None = None,
    progress: Progress | None = None,
) -> Repaired:
    """Write what the checkpoint at `source` was meant to be to `output`; `source` is not changed.

    Where nothing is to be repaired, nothing is written and the report has no changes.

    Raises:
        UnsupportedCheckpointError: not `fsdp_dtensor`.
        MappingError: damage that is known and that nothing in the checkpoint can repair.
        VerificationError: nothing shows what is right.
        Otherwise the errors of opening, reading, planning and writing.
    """
    options = options or EditOptions()
    with connect().ending_together() as ranks, open_source(source, options) as opened:
        location, catalog, files = opened.location, opened.catalog, opened.files
        if location.kind != "fsdp_dtensor":
            raise UnsupportedCheckpointError(
                f"{location.path} is {location.kind}. repair corrects keys of fsdp_dtensor checkpoints and nothing "
                "else: it changes no weights and no masters. `verify --content` shows what is damaged; use another "
                "iteration, or a copy of the damaged file"
            )

        def is_same(a: str, b: str) -> bool:
            return read_archive(files, catalog.objects[a].item) == read_archive(
                files, catalog.objects[b].item
            )

        made, done = RepairedKeys({key: key for key in (*catalog.tensors, *catalog.objects)}), None
        _take_masters(catalog, made)
        _name_groups(catalog, made, is_same)
        _number_layers(catalog, opened.common, made)
        if made.changes:
            done = edit(
                source, output, lambda _: _plan(opened, made), options, progress, opened=opened, ranks=ranks
            )
    return Repaired(source, output, tuple(made.changes), location.left_out, done)


def _plan(opened: Opened, made: RepairedKeys) -> Conversion:
    return rewrite(
        opened,
        renamed_target(opened.catalog, made.names, made.taken_from),
        renamed_archives(opened, made.names),
        Edits(),
        masters="as_stored",
        must_round=made.must_round,
        check_masters="all",
        advice="They cannot take its place: weights and masters of different steps are not repairable.",
    )


_LAYOUTS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_layers_per_virtual_pipeline_stage",
    "virtual_pipeline_model_parallel_size",
)


@dataclass(frozen=True, slots=True)
class Change:
    """One kind of damage, the stored keys that have it, and what shows that what is made of them is right."""

    cause: str
    keys: tuple[str, ...]
    proof: str
    issue: str | None = None


@dataclass
class RepairedKeys:
    """Stored key -> key in the output, for keys that stay; values that come from elsewhere; what must be proven."""

    names: dict[str, str]
    taken_from: dict[str, str] = field(default_factory=dict)  # stored key of a weight -> that of its master
    must_round: list[TargetTensor] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


def _take_masters(catalog: Catalog, made: RepairedKeys) -> None:
    """Masters into the place of the weights that they round to."""
    weights = {name: key for key in catalog.tensors if (name := model_name(key))}
    problems = []
    for key, entry in catalog.tensors.items():
        state = fsdp_state(key)
        if state is None or canonical_kind(state.kind) != MASTER:
            continue
        weight = catalog.tensors.get(weights.get(state.name, ""))
        if weight is None or weight.shape != entry.shape or entry.dtype != "float32":
            found = "missing" if weight is None else f"{weight.dtype} {weight.shape}"
            problems.append(f"{key}: {entry.dtype} {entry.shape}; its weight: {found}")
            continue
        made.must_round.append(rounding_target(weight.key, entry.value, weight.value))
        made.taken_from[weight.key] = key
        del made.names[key]
    raise_if(problems, MappingError, "masters that fit no weight")
    if made.must_round:
        count = len(made.must_round)
        made.changes.append(
            Change(
                "masters-beside-weights",
                tuple(target.sources[0].key for target in made.must_round),
                f"every element of {count} masters rounds to the weight that stood in its place",
            )
        )


def _name_groups(catalog: Catalog, made: RepairedKeys, same: Callable[[str, str], bool]) -> None:
    """Group fields under the names that a job asks for; `same`: two objects are stored with the same bytes."""
    known = {split_half(name)[0] for key in catalog.tensors if (name := model_name(key))}
    renamed: dict[str, str] = {}
    for key in catalog.objects:
        group = group_key(key)
        if group is None:
            continue
        name = split_half(group.name.lstrip("."))[0]
        if name != group.name and name in known:
            wrappers = key[len(GROUP_META) : len(key) - len(f"{group.name}.{group.field}")]
            renamed[key] = f"{GROUP_META}{wrappers}{name}.{group.field}"
    taken = {new: new for new in renamed.values() if new in catalog.objects}
    problems = []
    for key, new in renamed.items():
        first = taken.setdefault(new, key)
        if first == key:
            made.names[key] = new
        elif same(key, first):
            del made.names[key]
        else:
            problems.append(f"{key} and {first} differ")
    raise_if(problems, MappingError, "group fields that would get one name do not say the same")
    if renamed:
        proof = (
            f"the names are those of {len({*renamed.values()})} fields of stored parameters, and halves agree"
        )
        made.changes.append(Change("group-names", tuple(renamed), proof))


def _number_layers(catalog: Catalog, common: CommonState, made: RepairedKeys) -> None:
    """The layers of a pipeline stage under their numbers in the model."""
    weights = {name: key for key in catalog.tensors if (name := model_name(key))}
    states = {found.name for found in map(fsdp_state, catalog.tensors) if found}
    groups = {found.name for found in map(group_key, catalog.objects) if found}
    ranks = {pp for pp, _ in FORMATS["fsdp_dtensor"].rng_ranks(catalog)}
    found = local_numbers(weights, (*states, *groups), common, len(ranks))
    if found is None:
        return
    if found.offset is None:
        raise MappingError(f"{found}.\n{found.way_out[:1].upper()}{found.way_out[1:]}")
    names = {key: _shifted(name, found.offset) for name, key in weights.items()}
    problems = [
        *_contradictions(found, common, ranks),
        *_misfits(catalog, {name: key for key, name in names.items()}),
    ]
    raise_if(problems, MappingError, f"{found}. They cannot be given others")
    for name, key in weights.items():
        if names[key] != name:
            made.names[key] = f"{key[: len(key) - len(name)]}{names[key]}"
    moved = tuple(key for name, key in weights.items() if names[key] != name)
    proof = (
        f"layers {ranges(found.weights)} have the shapes of the optimizer's states of layers {ranges(found.states)}, "
        "each of them one, and the args agree"
    )
    made.changes.append(Change("stage-numbers", moved, proof, ISSUE))


def _shifted(name: str, offset: int) -> str:
    layer = decoder_layer(name)
    return name if layer is None else f"{DECODER_LAYERS}{layer[0] + offset}.{layer[1]}"


def _contradictions(found: LocalNumbers, common: CommonState, ranks: set[int]) -> Iterator[str]:
    """What the args and the rng states say against the numbers that the optimizer has."""
    stages, layers, count = found.stages, found.layers, len(found.weights)
    if layers is not None and found.states[-1] >= layers:
        yield f"the optimizer has layer {found.states[-1]}, the args say {layers} layers"
    if layers is None or layers % stages or any(common.arg(name) for name in _LAYOUTS):
        return  # the args do not decide
    if count != layers // stages or found.states[0] % count:
        yield f"a stage has {layers // stages} of {layers} layers by the args, here are layers {ranges(found.states)}"
    elif len(ranks) == 1 and ranks != {found.states[0] // count}:
        yield f"the rng states are those of stage {next(iter(ranks))}, the layers those of {found.states[0] // count}"


def _misfits(catalog: Catalog, weights: dict[str, str]) -> Iterator[str]:
    """States without a weight of their shape."""
    for key, entry in catalog.tensors.items():
        state = fsdp_state(key)
        if state is None or (state.kind == STEP and not entry.shape):
            continue
        weight = weights.get(state.name)
        if weight is None or catalog.tensors[weight].shape != entry.shape:
            yield f"{key}: {entry.shape}, its weight {'missing' if weight is None else catalog.tensors[weight].shape}"
