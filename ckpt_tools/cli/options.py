"""Command line options that several commands share, and how they become library options."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import Enum
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ckpt_tools.commands.placements import Layout


class LayerSpec(str, Enum):
    TE = "te"
    LOCAL = "local"


class Experts(str, Enum):
    GROUPED = "grouped"
    SEQUENTIAL = "sequential"


class Check(str, Enum):
    SAMPLE = "sample"
    ALL = "all"
    NONE = "none"


class SourceCheck(str, Enum):
    ALL = "all"
    NONE = "none"


class Dialect(str, Enum):
    CORE_0_16 = "core-0.16"
    CORE_0_17 = "core-0.17"
    CORE_0_19 = "core-0.19"
    MAIN = "main"
    BRIDGE = "bridge"


class LayoutName(str, Enum):
    MFSDP_V1 = "mfsdp-v1"
    MFSDP_V2 = "mfsdp-v2"
    FSDP2 = "fsdp2"
    EVEN = "even"


def in_a_folder(file: Path | None) -> Path | None:
    """`file`, if it can be made where it is to be: told before the work, not after it.

    Raises:
        UsageError: its folder is not there or cannot be written, or it is a folder or a file that cannot.
    """
    if file is None or str(file) == "-":  # stdout
        return file
    from ckpt_tools.errors import UsageError
    from ckpt_tools.formats.files import absent_folder

    if file.is_dir():
        why = "it is a folder; give the name of a file"
    elif not file.parent.is_dir():
        why = absent_folder(file.parent)
    elif file.is_symlink() and not file.exists():
        why = "it is a link to nothing"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        why = "check its permissions" if file.exists() else f"check the permissions of {file.parent}"
    else:
        return file
    raise UsageError(f"{file} cannot be written: {why}")


# More than any machine has; a typing mistake must not fill its memory with plans for them.
MAX_RANKS, MAX_THREADS, MAX_ROWS = 1 << 20, 1024, (1 << 31) - 1
_MODEL, _PLACE, _RUN = "The model and its target", "Placement", "How to run"

Target = Annotated[
    Dialect | None,
    typer.Option("--target", help="Program that will load the result. Default: bridge for a Bridge checkpoint, "
                 "else main.", rich_help_panel=_MODEL),
]  # fmt: skip
LayerSpecOption = Annotated[
    LayerSpec | None,
    typer.Option("--layer-spec", help="Norm names: Transformer Engine's or the local spec's. Default: the args.",
                 rich_help_panel=_MODEL),
]  # fmt: skip
ExpertsOption = Annotated[
    Experts | None,
    typer.Option("--experts", help="Expert names: one grouped module or one module each. Default: the args.",
                 rich_help_panel=_MODEL),
]  # fmt: skip
Swiglu = Annotated[
    bool | None,
    typer.Option("--swiglu/--no-swiglu", help="Whether gated MLPs use SwiGLU. Default: the args.",
                 rich_help_panel=_MODEL),
]  # fmt: skip
SwigluModules = Annotated[
    str,
    typer.Option("--swiglu-modules", help="Comma-separated modules whose MLPs are SwiGLU. Default: by shape.",
                 rich_help_panel=_MODEL),
]  # fmt: skip
RenameMtp = Annotated[
    bool,
    typer.Option("--rename-mtp-keys", help="Name MTP inner layers mtp_model_layer whatever the target.",
                 rich_help_panel=_MODEL),
]  # fmt: skip
GroupMapFile = Annotated[
    Path | None,
    typer.Option("--param-to-param-group-map-json", help="Parameter groups to use instead of derived ones.",
                 rich_help_panel=_MODEL),
]  # fmt: skip
StrictMap = Annotated[
    bool,
    typer.Option("--strict-map", help="Names missing from the map are errors.", rich_help_panel=_MODEL),
]
Aliases = Annotated[
    bool,
    typer.Option("--aliases", help="Also give every item the names other targets would ask for, at no cost.",
                 rich_help_panel=_MODEL),
]  # fmt: skip
WeightsOnly = Annotated[
    bool,
    typer.Option("--weights-only", help="Leave out optimizer, scheduler and rng: a warm start.",
                 rich_help_panel=_MODEL),
]  # fmt: skip
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="With --weights-only: element type of the weights, e.g. bfloat16.",
                 rich_help_panel=_MODEL),
]  # fmt: skip
VocabSizePadded = Annotated[
    int | None,
    typer.Option("--vocab-size-padded", max=MAX_ROWS,
                 help="Rows of the vocabulary in the target: padding is cut or zeros added.",
                 rich_help_panel=_MODEL),
]  # fmt: skip
VocabSize = Annotated[
    int | None,
    typer.Option("--vocab-size", max=MAX_ROWS, help="Real tokens: the rows after them are padding.",
                 rich_help_panel=_MODEL),
]  # fmt: skip
ModelPrefix = Annotated[
    str,
    typer.Option(
        "--output-model-weight-prefix", help="Prefix of weights in the output.", rich_help_panel=_MODEL
    ),
]
StatePrefix = Annotated[
    str | None,
    typer.Option("--output-optimizer-state-prefix", help="Prefix of optimizer states in the output. Default: "
                 "optimizer.state.module.module.module, one module less for fp32 training.",
                 rich_help_panel=_MODEL),
]  # fmt: skip

ExtraState = Annotated[
    str,
    typer.Option("--extra-state", help="Transformer Engine's extra-state objects: derive (a torch_dist source's own "
                 "are kept), none, or a torch_dist checkpoint of the same model to take their keys from.",
                 rich_help_panel=_MODEL),
]  # fmt: skip
Stacked = Annotated[
    bool | None,
    typer.Option("--stacked/--per-layer", help="Layers of a block in one tensor, or one by one. Default: as a "
                 "torch_dist source has them, else the args.",
                 rich_help_panel=_MODEL),
]  # fmt: skip
HfConfig = Annotated[
    Path | None,
    typer.Option("--hf-config", help="Directory of the original Hugging Face model, for tokenizer and settings.",
                 rich_help_panel=_MODEL),
]  # fmt: skip
MaxShardSize = Annotated[
    str, typer.Option("--max-shard-size", help="Largest file, e.g. 5GB.", rich_help_panel=_MODEL)
]
Rules = Annotated[
    Path | None,
    typer.Option(
        "--rules", help="YAML file with the rules of one more architecture.", rich_help_panel=_MODEL
    ),
]
MtpCopies = Annotated[
    bool,
    typer.Option("--mtp-copies", help="Repeat embedding and head in DeepSeek's prediction layers.",
                 rich_help_panel=_MODEL),
]  # fmt: skip
VocabMultiple = Annotated[
    int,
    typer.Option("--vocab-multiple", max=MAX_ROWS, help="Rows of the vocabulary are filled up with zeros to a "
                 "multiple of this: make-vocab-size-divisible-by times tensor parallel size.",
                 rich_help_panel=_MODEL),
]  # fmt: skip
OneIteration = Annotated[
    int | None, typer.Option("--iteration", help="Iteration of a root, instead of its latest.")
]

Gpus = Annotated[
    int | None,
    typer.Option("--gpus", help="GPUs of the training job; the sizes that are not given follow from it.",
                 rich_help_panel=_PLACE),
]  # fmt: skip
DpShard = Annotated[int | None, typer.Option("--dp-shard", help="Ranks that shard.", rich_help_panel=_PLACE)]
DpOuter = Annotated[
    int, typer.Option("--dp-outer", help="Replicas of the sharding group (HSDP).", rich_help_panel=_PLACE)
]
Tp = Annotated[
    int | None,
    typer.Option("--tp", help="Tensor parallel size of the target; with --to torch_dist or hf, the one that the "
                 "source is for.",
                 rich_help_panel=_PLACE),
]  # fmt: skip
Cp = Annotated[int, typer.Option("--cp", help="Context parallel size.", rich_help_panel=_PLACE)]
Pp = Annotated[
    int, typer.Option("--pp", help="Pipeline parallel size: 1 for Megatron-FSDP.", rich_help_panel=_PLACE)
]
Ep = Annotated[int, typer.Option("--ep", help="Expert parallel size.", rich_help_panel=_PLACE)]
Etp = Annotated[
    int | None,
    typer.Option("--etp", help="Expert tensor parallel size. Default: --tp.", rich_help_panel=_PLACE),
]
DEFAULT_STRATEGY, DEFAULT_OUTER_STRATEGY = "optim_grads_params", "no_shard"
Strategy = Annotated[
    str,
    typer.Option(
        "--strategy", help="no_shard, optim, optim_grads or optim_grads_params.", rich_help_panel=_PLACE
    ),
]
OuterStrategy = Annotated[
    str, typer.Option("--outer-strategy", help="no_shard or optim.", rich_help_panel=_PLACE)
]
LayoutOption = Annotated[
    LayoutName | None,
    typer.Option("--layout", help="Whose placement. Default: mfsdp-v1 with --gpus or --dp-shard, else even.",
                 rich_help_panel=_PLACE),
]  # fmt: skip
Units = Annotated[
    list[str] | None,
    typer.Option("--units", help="Modules that have a flat buffer of Megatron-FSDP each (fsdp_unit_modules of the "
                 "job), as paths (glob, repeatable; **. for leading modules). Default: Megatron-Core's layers. FSDP2 "
                 "cuts every parameter on its own.",
                 rich_help_panel=_PLACE),
]  # fmt: skip
WorldSize = Annotated[
    int | None,
    typer.Option("--world-size", help="Target ranks, each with files of its own. Default: the converting ranks.",
                 rich_help_panel=_PLACE),
]  # fmt: skip

Iteration = Annotated[
    str | None,
    typer.Option(
        "--iteration", help="Iteration of a root, or all. Default: the latest.", rich_help_panel=_RUN
    ),
]
CheckMasters = Annotated[
    Check,
    typer.Option("--check-masters", help="How many rows of every master must be shown to round to the weights.",
                 rich_help_panel=_RUN),
]  # fmt: skip
CheckSource = Annotated[
    SourceCheck,
    typer.Option("--check-source", help="Prove every payload that is read from against the checksum its writer "
                 "stored, whole or in pieces; none: take damage over unseen.", rich_help_panel=_RUN),
]  # fmt: skip
IgnoreKeys = Annotated[
    list[str] | None,
    typer.Option("--ignore-keys", help="Source keys to leave out, tensors too (glob, repeatable).",
                 rich_help_panel=_RUN),
]  # fmt: skip
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an output that is there.", rich_help_panel=_RUN)
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with a conversion that was stopped.", rich_help_panel=_RUN)
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Plan and check everything, write nothing.", rich_help_panel=_RUN)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=_RUN)]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report", callback=in_a_folder, help="Write the report there as JSON.", rich_help_panel=_RUN
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="The report as JSON on stdout.", rich_help_panel=_RUN)]
Threads = Annotated[
    int,
    typer.Option("--threads", min=1, max=MAX_THREADS, help="Threads per process.", rich_help_panel=_RUN),
]
MaxMemory = Annotated[
    str, typer.Option("--max-memory", help="Buffer memory per process, e.g. 96MiB.", rich_help_panel=_RUN)
]
Fsync = Annotated[
    bool,
    typer.Option("--fsync", help="Make the output durable before it is published.", rich_help_panel=_RUN),
]
Direct = Annotated[
    bool,
    typer.Option("--direct", help="Write past the page cache (O_DIRECT), which stays as it is for others; best with "
                 "--threads 4 or more.",
                 rich_help_panel=_RUN),
]  # fmt: skip
OomTraceback = Annotated[
    bool, typer.Option("--oom-traceback", help="Accepted for NVIDIA's script; changes nothing.", hidden=True)
]


JOB_SIZES = (
    "layout", "world_size", "gpus", "dp_shard", "dp_outer", "tp", "cp", "ep", "etp", "pp", "strategy",
    "outer_strategy", "units",
)  # fmt: skip


def layout_of(given: Mapping[str, Any]) -> Layout | None:
    """The layout that the placement options ask for; None when they ask for nothing.

    Raises:
        UsageError: sizes that do not multiply to the world, or a topology Megatron-FSDP refuses.
    """
    return choose_layout(**{name: given[name] for name in JOB_SIZES})


def choose_layout(
    layout: str | None,
    world_size: int | None,
    gpus: int | None,
    dp_shard: int | None,
    dp_outer: int,
    tp: int | None,
    cp: int,
    ep: int,
    etp: int | None,
    pp: int,
    strategy: str,
    outer_strategy: str,
    units: Sequence[str] | None = None,
) -> Layout | None:
    """As `layout_of`."""
    from ckpt_tools.commands.placements import Layout
    from ckpt_tools.errors import UsageError
    from ckpt_tools.sharding.topology import Topology

    sizes = [size for size in (dp_shard, dp_outer, tp, cp, pp) if size is not None]
    if any(size > MAX_RANKS for size in (world_size or 1, gpus or 1, ep, etp or 1, *sizes, prod(sizes))):
        raise UsageError(
            f"a job of more than {MAX_RANKS:,} ranks is asked for; is a size of the topology mistyped?"
        )
    if units and layout not in (None, LayoutName.MFSDP_V1.value, LayoutName.MFSDP_V2.value):
        raise UsageError(
            f"--units {', '.join(units)}: with --layout {layout} every tensor is cut on its own; leave it out"
        )
    is_even = layout in (None, LayoutName.EVEN.value)
    if units and layout is None:
        layout = LayoutName.MFSDP_V1.value  # no other layout has units
        is_even = False
    if gpus is None and dp_shard is None and is_even:
        alone = (dp_outer, cp, ep, etp, pp, strategy, outer_strategy)
        if alone != (1, 1, 1, None, 1, DEFAULT_STRATEGY, DEFAULT_OUTER_STRATEGY):
            raise UsageError(
                "--dp-outer, --cp, --ep, --etp, --pp, --strategy and --outer-strategy describe a training job, which "
                "needs its size too: give --gpus or --dp-shard"
            )
        return None if world_size is None else Layout(world=_positive(world_size))
    if gpus is not None and world_size not in (None, gpus):
        raise UsageError(
            f"--gpus {gpus} contradicts --world-size {world_size}: both are the ranks of the job"
        )
    world = world_size if gpus is None else gpus
    if world is None:
        if dp_shard is None:
            raise UsageError(f"--layout {layout or ''} needs the size of the job: give --gpus or --dp-shard")
        world = dp_shard * dp_outer * cp * (tp or 1) * pp
    topology = Topology.of_world(
        world,
        dp_shard=dp_shard,
        dp_outer=dp_outer,
        tp=1 if tp is None else tp,
        cp=cp,
        ep=ep,
        etp=0 if etp is None else _positive(etp, "--etp"),
        pp=pp,
        strategy=strategy,
        outer_strategy=outer_strategy,
    )
    return Layout(
        layout or LayoutName.MFSDP_V1.value,
        topology,
        tp_given=tp is not None,
        name_given=layout is not None,
        units=tuple(units or ()),
    )


def _positive(ranks: int, option: str = "--world-size") -> int:
    from ckpt_tools.errors import UsageError

    if ranks < 1:
        raise UsageError(f"{option} {ranks}: at least one rank is needed")
    return ranks


def parse_bytes(text: str) -> int:
    """Bytes from a size as people write it: `96MiB`, `5GB`, `1048576`.

    kB, MB, GB and TB are powers of 1000, as Hugging Face reads them; kiB and so on of 1024.

    Raises:
        UsageError: not a size, or no byte.
    """
    import re

    from ckpt_tools.errors import UsageError

    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kKmMgGtT]?)(i?)[bB]?\s*", text)
    size = 0
    if match:
        base = 1024 if match[3] else 1000
        size = int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))
    if size < 1:
        raise UsageError(f"{text!r} is not a size; write for example 96MiB, 5GB or 1048576")
    return size
