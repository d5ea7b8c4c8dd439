"""Options that several commands share, a row each, and how options become a command.

A row's name is that of the field that it fills. A command is a function that declares its arguments, and the names of
its options. `with_options` makes of both the signature that Typer reads; the function gets the values by name, as
the library takes them, and `fill` puts them into the library's options classes, which have fields of the same names.
A field's default is its row's too, which a test compares: importing the classes would make `--help` three times as
slow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Set
from copy import copy
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, cast, get_args, get_origin

import typer

from ckpt_tools.cli import options as v
from ckpt_tools.cli.options import Row, flag, option
from ckpt_tools.model import choices as c

MODEL: Final = "The model and its target"
PLACE: Final = "Placement"
RUN: Final = "How to run"
FRESH: Final = "A fresh optimizer"

Checkpoint = Annotated[str, typer.Argument(help="A run, one of its iterations, or any PyTorch DCP folder.")]
OutputDir = Annotated[str, typer.Argument(help="The run to make; if named iter_N, that folder alone.")]

# In the order in which help lists them.
TABLE: dict[str, Row] = {
    "swiglu": option(bool, "--swiglu/--no-swiglu", panel=MODEL,
                     help="Whether gated MLPs use SwiGLU. Default: from the checkpoint."),
    "swiglu_modules": option(str, "--swiglu-modules", default="", read=v.words, panel=MODEL,
                             help="Modules with SwiGLU MLPs, separated by commas. Default: by shape."),
    "group_map": option(Path, "--param-to-param-group-map-json", read=v.group_map, panel=MODEL,
                        help="Parameter groups to use instead of derived ones."),
    "strict_map": flag("--strict-map", panel=MODEL, help="Names missing from the map are errors."),
    "state_prefix": option(str, "--output-optimizer-state-prefix", panel=MODEL,
                           help="Prefix of optimizer states in the output. Default: "
                                "optimizer.state.module.module.module, one module less for fp32 training."),
    "model_prefix": option(str, "--output-model-weight-prefix", default="model.module", panel=MODEL,
                           help="Prefix of weights in the output."),
    "rename_mtp": flag("--rename-mtp-keys", panel=MODEL,
                       help="Name MTP inner layers mtp_model_layer for every target."),
    "dialect": option(c.DialectName, "--target", panel=MODEL,
                      help="Megatron version that will load the output: names differ. Default: bridge for a "
                           "Bridge checkpoint, else main."),
    "layer_spec": option(c.LayerSpec, "--layer-spec", panel=MODEL,
                         help="Norm names: Transformer Engine's or the local spec's. Default: from the checkpoint."),
    "experts": option(c.ExpertModules, "--experts", panel=MODEL,
                      help="Expert names: one grouped module or one module each. Default: from the checkpoint."),
    "weights_only": flag("--weights-only", panel=MODEL,
                         help="Leave out optimizer, scheduler and random states: a warm start."),
    "dtype": option(str, "--dtype", panel=MODEL,
                    help="With --weights-only: element type of the weights, e.g. bfloat16."),
    "vocab_size_padded": option(int, "--vocab-size-padded", max=v.MAX_ROWS, panel=MODEL,
                                help="Rows of the vocabulary in the output: padding is cut, or zeros are added."),
    "vocab_size": option(int, "--vocab-size", max=v.MAX_ROWS, panel=MODEL,
                         help="Number of real tokens: the rows after them are padding."),
    "fresh_optimizer": option(bool, "--fresh-optimizer/--no-fresh-optimizer", panel=FRESH,
                              help="With --weights-only: a fresh optimizer (zero moments, step 0), so "
                                   "that a strict load starts from weights."),
    "lr": option(float, "--lr", panel=FRESH, help="Highest learning rate. Default: that of the run."),
    "min_lr": option(float, "--min-lr", panel=FRESH, help="Lowest learning rate. Default: that of the run."),
    "weight_decay": option(float, "--weight-decay", panel=FRESH, help="Weight decay. Default: that of the run."),
    "adam_beta1": option(float, "--adam-beta1", panel=FRESH, help="Default: that of the run, else Megatron's 0.9."),
    "adam_beta2": option(float, "--adam-beta2", panel=FRESH, help="Default: that of the run, else Megatron's 0.999."),
    "adam_eps": option(float, "--adam-eps", panel=FRESH, help="Default: that of the run, else Megatron's 1e-8."),
    "extra_state": option(str, "--extra-state", default="derive", panel=MODEL,
                          help="Transformer Engine's extra states: derive (keep those of a torch_dist source), none, "
                               "or a torch_dist checkpoint of the same model to take the keys from."),
    "stacked": option(bool, "--stacked/--per-layer", panel=MODEL,
                      help="Layers of a block in one tensor, or one by one. Default: like a torch_dist source, "
                           "else from its arguments."),
    "hf_config": option(Path, "--hf-config", read=v.model_folder, panel=MODEL,
                        help="Directory of the original Hugging Face model, for tokenizer and settings."),
    "rules": option(Path, "--rules", panel=MODEL, help="YAML file with the rules of one more architecture."),
    "max_shard_bytes": option(str, "--max-shard-size", default="5GB", read=v.parse_bytes, panel=MODEL,
                              help="Largest file, e.g. 5GB."),
    "mtp_copies": flag("--mtp-copies", panel=MODEL,
                       help="Repeat embedding and head in DeepSeek's prediction layers."),
    "alpha": option(float, "--alpha", panel=MODEL,
                    help="Alpha of the adapter, if no run_config.yaml has it; its scale is alpha / rank."),
    "layout": option(c.LayoutName, "--layout", panel=PLACE,
                     help="Which rank owns which rows. Default: mfsdp-v1 with --gpus or --dp-shard, else even."),
    "world_size": option(int, "--world-size", panel=PLACE,
                         help="Number of ranks to write files for. Default: the ranks that convert."),
    "gpus": option(int, "--gpus", panel=PLACE,
                   help="All GPUs of the training job: each rank gets a file that it reads sequentially."),
    "dp_shard": option(int, "--dp-shard", panel=PLACE, help="Data-parallel ranks that shard. Default: from --gpus."),
    "dp_outer": option(int, "--dp-outer", default=1, panel=PLACE, help="Replicas of the ranks that shard (HSDP)."),
    "tp": option(int, "--tp", panel=PLACE,
                 help="Tensor parallel size of the training job; with --to torch_dist or hf: of the job that wrote "
                      "the source."),
    "cp": option(int, "--cp", default=1, panel=PLACE, help="Context parallel size."),
    "ep": option(int, "--ep", default=1, panel=PLACE, help="Expert parallel size."),
    "etp": option(int, "--etp", panel=PLACE, help="Expert tensor parallel size. Default: --tp."),
    "pp": option(int, "--pp", default=1, panel=PLACE, help="Pipeline parallel size: 1 for Megatron-FSDP."),
    "strategy": option(str, "--strategy", default="optim_grads_params", panel=PLACE,
                       help="no_shard, optim, optim_grads or optim_grads_params."),
    "outer_strategy": option(str, "--outer-strategy", default="no_shard", panel=PLACE,
                             help="no_shard or optim."),
    "units": option(list[str], "--units", read=v.globs, panel=PLACE,
                    help="Modules with one flat buffer each (fsdp_unit_modules of the job), as paths (glob, "
                         "repeatable; **. for leading modules). Default: Megatron-Core's layers."),
    "iteration": option(str, "--iteration", metavar="NUMBER", read=v.one_iteration,
                        help="Iteration of the run. Default: the latest."),
    "check_masters": option(c.CheckLevel, "--check-masters", default="sample", panel=RUN,
                            help="Check that fp32 masters, rounded, equal the stored weights: sample, all or none "
                                 "of the rows."),
    "check_source": option(c.SourceCheck, "--check-source", default="all", panel=RUN,
                           help="Compare everything that is read with the checksum that its writer stored; none: "
                                "skip the check, corruption is copied; unread: also copy "
                                "parts of tensors without reading them, so that they get no checksum."),
    "ignore_keys": option(list[str], "--ignore-keys", read=v.globs, panel=RUN,
                          help="Leave out the keys and tensors that match this glob (repeatable)."),
    "overwrite": flag("--overwrite", panel=RUN, help="Replace the checkpoint at exactly this output path."),
    "resume": flag("--resume", panel=RUN, help="Continue a conversion that was stopped."),
    "hard_link": flag("--hard-link", panel=RUN,
                      help="Do not copy data files: give the source's a second name, where only keys change. Never "
                           "edit such a file in place: it belongs to both."),
    "verify_output": flag("--verify", panel=RUN,
                      help="Read the output back and compare every value before it is published."),
    "dry_run": flag("--dry-run", panel=RUN, help="Plan and check everything, write nothing."),
    "workers": option(int, "--workers", min=1, max=v.MAX_WORKERS, panel=RUN,
                      help="Processes on this machine, or of each rank of a launcher. Default: chosen from cores, "
                           "memory and size, at most 16; 1 if ranks share a machine."),
    "threads": option(int, "--threads", default=2, min=1, max=v.MAX_THREADS, panel=RUN,
                      help="Threads per process."),
    "memory_bytes": option(str, "--max-memory", read=v.given_bytes, panel=RUN,
                           help="Memory for buffers of all workers together, e.g. 1GiB. Default: 96MiB; with an "
                                "object store 32MiB a thread, at least 128MiB."),
    "fsync": flag("--fsync", panel=RUN, help="Flush the output to the disk before it is published."),
    "direct": flag("--direct", panel=RUN,
                   help="Write past the page cache (O_DIRECT); best with --threads 4 or more."),
    "report_format": option(c.ReportFormat, "--format", default="text",
                            help="text, json, github (annotations) or markdown."),
    "quiet": flag("--quiet", "-q", callback=v.be_quiet,
                  help="Print only errors and JSON."),
    "as_json": flag("--json", help="Print JSON."),
    "verbose": flag("--verbose", "-v", panel=RUN, help="Print the whole report: renamed, copied, filled in."),
    "report": option(Path, "--report", callback=v.in_a_folder, panel=RUN,
                     help="Write the report to this file as JSON."),
    "junit": option(Path, "--junit", callback=v.in_a_folder, help="Also write the report to this file as JUnit XML."),
    "trust_pickle": flag("--unknown-classes", "--trust-pickle",
                         help="Read unknown classes as inert placeholders instead of refusing; nothing is executed."),
    "enable_msc": flag("--enable-msc", callback=v.allow_msc, help="Open msc:// locations with multi-storage-client."),
    "follow_links": flag("--follow-links", callback=v.follow_links,
                         help="Allow links that lead out of the checkpoint's folder."),
    "oom_traceback": flag("--oom-traceback", hidden=True, help="Accepted for NVIDIA's script; changes nothing."),
}  # fmt: skip

# Of commands that can go through all iterations of a run.
ITERATIONS = option(
    str, "--iteration", metavar="NUMBER|all", read=v.iteration, panel=RUN,
    help="One iteration, or all that the output does not have yet. Default: the latest.",
)  # fmt: skip

# Of commands that only look at them.
EVERY_ITERATION = option(
    str, "--iteration", metavar="NUMBER|all", read=v.iteration,
    help="One iteration, or all. Default: the latest.",
)  # fmt: skip

OPENING = frozenset({"enable_msc", "follow_links", "quiet"})
READING = OPENING | {"iteration", "trust_pickle"}
FRESH_OPTIMIZER = frozenset({
    "fresh_optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps",
})  # fmt: skip
FSDP_TARGET = FRESH_OPTIMIZER | frozenset({
    "swiglu", "swiglu_modules", "group_map", "strict_map", "state_prefix", "model_prefix", "rename_mtp", "dialect",
    "layer_spec", "experts", "weights_only", "dtype", "vocab_size_padded", "vocab_size",
    "tp",
})  # fmt: skip
DCP_TARGET = frozenset({
    "group_map", "strict_map", "dialect", "layer_spec", "experts", "weights_only", "dtype", "vocab_size_padded",
    "vocab_size", "tp",
})  # fmt: skip
TORCH_DIST_TARGET = frozenset({
    "dialect", "layer_spec", "weights_only", "dtype", "extra_state", "stacked",
    "gpus", "tp", "ep", "etp",
})  # fmt: skip
# Of commands with many options, those that `--help` shows, besides the command's own.
EVERYDAY = frozenset({
    "dialect", "weights_only", "dtype", "gpus", "tp", "iteration", "overwrite", "resume", "dry_run", "as_json",
})  # fmt: skip
REWRITING = frozenset({"check_source", "overwrite", "as_json", "verbose"})
RUNNING = OPENING | REWRITING | {
    "resume", "verify_output", "dry_run", "workers", "threads", "memory_bytes", "fsync", "direct", "report",
}  # fmt: skip

AnyOptions = TypeVar("AnyOptions")
Given = Mapping[str, Any]
"""Values of options by the names of their rows, as the library takes them."""


def with_options(
    function: Callable[..., None],
    names: Set[str],
    own: Mapping[str, Row] | None = None,
) -> Callable[..., None]:
    """A function that Typer makes a command of: the arguments of `function`, and the options as keywords.

    Args:
        function: takes its own parameters, and the values of the options (see `Given`) as `**given`.
        names: of the options that it has of the shared table.
        own: rows of this command alone, and those that stand for one of the table.
    """
    assert names <= TABLE.keys()
    signature = inspect.signature(function, eval_str=True)
    own = own or {}
    rows = {name: row for name, row in own.items() if name not in TABLE}
    rows |= {name: own.get(name, row) for name, row in TABLE.items() if name in {*names, *own}}
    arguments = [
        _argument(p)
        for p in signature.parameters.values()
        if p.kind is not p.VAR_KEYWORD and p.name not in rows
    ]
    made = [row.parameter(name) for name, row in rows.items()]

    def command(*args: Any, **given: Any) -> None:
        values = {name: row.value(given.pop(name)) for name, row in rows.items()}
        function(*args, **given, **values)

    command.__signature__ = signature.replace(parameters=[*arguments, *made])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in (*arguments, *made)}
    command.__doc__ = function.__doc__
    command.everyday = EVERYDAY | own.keys()  # type: ignore[attr-defined]
    return command


def _argument(parameter: inspect.Parameter) -> inspect.Parameter:
    """An argument under its name in capitals, which not every version of Typer gives it."""
    if get_origin(parameter.annotation) is not Annotated:
        return parameter  # the context
    kind, given = get_args(parameter.annotation)
    name = parameter.name.upper()
    info = copy(given)
    info.metavar = given.metavar or (f"{name.removesuffix('S')}..." if get_origin(kind) is list else name)
    return parameter.replace(annotation=Annotated[kind, info])


def fill(options: type[AnyOptions], given: Given, **more: Any) -> AnyOptions:
    """Options of the library from the given values of the same names, options inside them too; `more` wins."""
    values = dict(more)
    for field in fields(options):  # type: ignore[arg-type]
        inner: Any = field.default_factory
        if field.name in values:
            continue
        if field.name in given:
            values[field.name] = given[field.name]
        elif is_dataclass(inner):
            values[field.name] = fill(cast(Any, inner), given)
    return options(**values)
