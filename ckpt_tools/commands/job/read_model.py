"""READ: the model in an opened checkpoint, one entry a format. Every command that wants a model asks here.

An entry imports what reads its format, as a command meets one or two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.errors import UnsupportedCheckpointError, VerificationError, list_problems
from ckpt_tools.execute.processes.team import Job, Result, Tick, can_fork, results_of, start_jobs
from ckpt_tools.execute.proof.masters import compare_masters
from ckpt_tools.execute.proof.prove_source import prove_payloads
from ckpt_tools.execute.write_job import WriteOptions
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.choices import LayerSpec
from ckpt_tools.model.model import Model, Parameter
from ckpt_tools.model.roles import MASTER
from ckpt_tools.model.target import TargetTensor, rounding_target

if TYPE_CHECKING:
    from ckpt_tools.megatron.torch_dist.optimizer_layouts.bucket_proof import Share
    from ckpt_tools.megatron.torch_dist.read import Extent

_THREADS = 2  # of a process
GO_ON_UNPROVEN = "--check-masters none continues without this check."


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of a model; a reader passes over what its format does not have."""

    optimizer: Extent = "whole"
    ignore_keys: tuple[str, ...] = ()
    unknown_keys: bool = False  # keys that no rule accounts for may be there, and count as dropped
    tp: int | None = None  # that packed projections are for, where the checkpoint does not tell
    layer_spec: LayerSpec | None = None  # te or local, where the arguments do not tell
    workers: int | None = 1  # processes that read what takes a proof by content; None: as many as help


def read_model(opened: Opened, wanted: Wanted | None = None) -> Model:
    """The model that the checkpoint holds."""
    kind = opened.location.kind
    if kind not in READ:
        raise UnsupportedCheckpointError(
            f"{opened.location.path} is of kind {kind}; {' and '.join(READ)} checkpoints are read"
        )
    return READ[kind](opened, wanted or Wanted())


def read_beside_masters(
    opened: Opened, wanted: Wanted, write: WriteOptions, advice: str = GO_ON_UNPROVEN
) -> Model:
    """The model for who takes its stored weights and leaves out the masters that these must be the rounding of.

    Masters that cannot be read are not there, and `Model.unread` says why.
    """
    try:
        return read_model(opened, replace(wanted, optimizer="proven masters", workers=write.workers))
    except VerificationError as error:
        if write.check_source == "all":
            prove_payloads(opened.files, opened.catalog, opened.catalog.tensors, write.threads)
        raise VerificationError(
            f"the masters in the optimizer's buckets do not round to the stored weights:\n"
            f"{list_problems(error.problems)}\nEither the checkpoint is damaged or its masters belong to another "
            f"step. {advice}",
            error.problems,
        ) from error


def _torch_dist(opened: Opened, wanted: Wanted) -> Model:
    from ckpt_tools.megatron.torch_dist.read import read_torch_dist

    return read_torch_dist(
        opened.files,
        opened.catalog,
        wanted.ignore_keys,
        opened.trust_pickle,
        optimizer=wanted.optimizer,
        unknown_keys=wanted.unknown_keys,
        share=shared_by(wanted.workers),
    ).model


def shared_by(workers: int | None) -> Share:
    """Who does the comparing of a proof by content: so many processes; where none can be forked, threads."""
    from ckpt_tools.megatron.torch_dist.optimizer_layouts.bucket_proof import by_threads

    if workers == 1 or not can_fork():
        return by_threads

    def share(work: Callable[[Job], Result], jobs: Sequence[Job], sizes: Sequence[int]) -> list[Result]:
        def one(job: Job, tick: Tick) -> Result:
            tick(0)  # another process may have failed
            return work(job)

        return results_of(
            start_jobs(one, jobs, sizes=sizes, threads=_THREADS, workers=workers, tick=lambda _: None)
        )

    return share


def _fsdp_dtensor(opened: Opened, wanted: Wanted) -> Model:
    """The masters stand in the place of weights: they are there without the rest of an optimizer."""
    from ckpt_tools.megatron.fsdp_dtensor.read import fsdp_model, read_fsdp_source

    weights_only = wanted.optimizer != "whole"
    source = read_fsdp_source(
        opened.files,
        opened.catalog,
        opened.common,
        wanted.ignore_keys,
        opened.trust_pickle,
        weights_only=weights_only,
    )
    return fsdp_model(source, tp=wanted.tp, layer_spec=wanted.layer_spec, weights_only=weights_only)


def _dcp(opened: Opened, wanted: Wanted) -> Model:
    """A plain state dict of a Megatron job."""
    from ckpt_tools.megatron.dcp.read import dcp_model

    def rounds(catalog: Catalog, weight: str, master: str) -> bool:
        target = rounding_target(master, catalog.tensors[master].value, catalog.tensors[weight].value)
        return not compare_masters(opened.files, catalog, [target], "all")[1]

    return dcp_model(
        opened.files,
        opened.catalog,
        opened.common,
        rounds,
        ignored=wanted.ignore_keys,
        trust_pickle=opened.trust_pickle,
        tp=wanted.tp,
        layer_spec=wanted.layer_spec,
        weights_only=wanted.optimizer != "whole",
    )


READ: Mapping[str, Callable[[Opened, Wanted], Model]] = {
    "torch_dist": _torch_dist,
    "fsdp_dtensor": _fsdp_dtensor,
    "dcp": _dcp,
}


def keeps_masters(model: Model) -> bool:
    """Whether fp32 masters are stored in the place of some weights."""
    return any(map(is_master, model.parameters))


def is_master(parameter: Parameter) -> bool:
    """Whether a parameter's fp32 master is stored in the place of its weight."""
    return parameter.weight.dtype == "float32" != parameter.dtype


def master_targets(model: Model) -> list[TargetTensor]:
    """The fp32 master of every parameter that has one, with the stored weight it must round to."""
    return [
        rounding_target(p.name if p.expert is None else f"{p.name} of expert {p.expert}", p.main, p.weight)
        for p in model.parameters
        if MASTER in p.values
    ]
