"""Options that are fields of the library's options classes: the commands' signatures are made from one table.

A row's name is the field's name; its default is the field's (a test compares them: the classes are not imported for
`--help`). A command names the rows that it has, gets their values by name, and `fill` puts them into the classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from ckpt_tools.cli import options as o
from ckpt_tools.cli.inspect import EnableMsc, TrustPickle

AnyOptions = TypeVar("AnyOptions")
Given = Mapping[str, Any]
"""Values of options by the names of their rows, as the library takes them."""


class Row(NamedTuple):
    """How an option is spelled and explained, its default, and how the field's value is made of what was given."""

    annotation: Any
    default: Any = None
    read: Callable[[Any], Any] | None = None


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _group_map(file: Any) -> Mapping[str, int] | None:
    if not file:
        return None
    from ckpt_tools.commands.group_map import load_group_map

    return load_group_map(file)


def _text(path: Any) -> str | None:
    return None if path is None else str(path)


# In the order in which help lists them.
TABLE = {
    "swiglu": Row(o.Swiglu),
    "swiglu_modules": Row(o.SwigluModules, "", _words),
    "group_map": Row(o.GroupMapFile, None, _group_map),
    "strict_map": Row(o.StrictMap, False),
    "state_prefix": Row(o.StatePrefix),
    "model_prefix": Row(o.ModelPrefix, "model.module"),
    "rename_mtp": Row(o.RenameMtp, False),
    "dialect": Row(o.Target),
    "aliases": Row(o.Aliases, False),
    "layer_spec": Row(o.LayerSpecOption),
    "experts": Row(o.ExpertsOption),
    "weights_only": Row(o.WeightsOnly, False),
    "dtype": Row(o.Dtype),
    "vocab_size_padded": Row(o.VocabSizePadded),
    "vocab_size": Row(o.VocabSize),
    "vocab_multiple": Row(o.VocabMultiple, 128),
    "extra_state": Row(o.ExtraState, "derive"),
    "stacked": Row(o.Stacked),
    "hf_config": Row(o.HfConfig, None, _text),
    "rules": Row(o.Rules),
    "max_shard_bytes": Row(o.MaxShardSize, "5GB", o.parse_bytes),
    "mtp_copies": Row(o.MtpCopies, False),
    "layout": Row(o.LayoutOption),
    "world_size": Row(o.WorldSize),
    "gpus": Row(o.Gpus),
    "dp_shard": Row(o.DpShard),
    "dp_outer": Row(o.DpOuter, 1),
    "tp": Row(o.Tp),
    "cp": Row(o.Cp, 1),
    "ep": Row(o.Ep, 1),
    "etp": Row(o.Etp),
    "pp": Row(o.Pp, 1),
    "strategy": Row(o.Strategy, o.DEFAULT_STRATEGY),
    "outer_strategy": Row(o.OuterStrategy, o.DEFAULT_OUTER_STRATEGY),
    "units": Row(o.Units, None),
    "iteration": Row(o.Iteration),
    "check_masters": Row(o.CheckMasters, o.Check.SAMPLE),
    "check_source": Row(o.CheckSource, o.SourceCheck.ALL),
    "ignore_keys": Row(o.IgnoreKeys, None, lambda globs: tuple(globs or ())),
    "overwrite": Row(o.Overwrite, False),
    "resume": Row(o.Resume, False),
    "dry_run": Row(o.DryRun, False),
    "threads": Row(o.Threads, 2),
    "memory_bytes": Row(o.MaxMemory, "96MiB", o.parse_bytes),
    "fsync": Row(o.Fsync, False),
    "direct": Row(o.Direct, False),
    "quiet": Row(o.Quiet, False),
    "as_json": Row(o.AsJson, False),
    "report": Row(o.ReportFile),
    "trust_pickle": Row(TrustPickle, False),
    "enable_msc": Row(EnableMsc, False),
    "oom_traceback": Row(o.OomTraceback, False),
}

JOB = frozenset(o.JOB_SIZES)
FSDP_TARGET = frozenset({
    "swiglu", "swiglu_modules", "group_map", "strict_map", "state_prefix", "model_prefix", "rename_mtp", "dialect",
    "aliases", "layer_spec", "experts", "weights_only", "dtype", "vocab_size_padded", "vocab_size", "tp",
})  # fmt: skip
DCP_TARGET = frozenset({
    "group_map", "strict_map", "dialect", "layer_spec", "experts", "weights_only", "dtype", "vocab_size_padded",
    "vocab_size", "tp",
})  # fmt: skip
TORCH_DIST_TARGET = frozenset({
    "dialect", "layer_spec", "weights_only", "dtype", "extra_state", "stacked", "gpus", "tp", "ep", "etp",
})  # fmt: skip
RUNNING = frozenset({
    "check_source", "overwrite", "resume", "dry_run", "threads", "memory_bytes", "fsync", "direct", "quiet",
    "as_json", "report", "enable_msc",
})  # fmt: skip
READING = frozenset({"iteration", "ignore_keys", "trust_pickle"})


def with_options(
    function: Callable[..., None],
    names: Collection[str],
    changed: Mapping[str, Any] | None = None,
    fixed: Mapping[str, Any] | None = None,
) -> Callable[..., None]:
    """A function that Typer makes a command of: the parameters of `function`, and the options `names` as keywords.

    Args:
        function: takes its own parameters, and the values of the options (see `Given`) as `**given`.
        changed: annotations that stand for those of the table, by name.
        fixed: parameters of `function` that have this value and are not asked for.
    """
    signature = inspect.signature(function, eval_str=True)
    fixed = fixed or {}
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD and p.name not in fixed]
    annotations = {name: row.annotation for name, row in TABLE.items() if name in names} | dict(changed or {})
    made = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=TABLE[name].default, annotation=annotation
        )
        for name, annotation in annotations.items()
    ]

    def command(*args: Any, **given: Any) -> None:
        function(*args, **fixed, **{name: _read(name, value) for name, value in given.items()})

    command.__signature__ = signature.replace(parameters=[*own, *made])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in (*own, *made)}
    command.__doc__ = function.__doc__
    return command


def _read(name: str, value: Any) -> Any:
    row = TABLE.get(name)
    if row is not None and row.read is not None:
        return row.read(value)
    return value.value if isinstance(value, Enum) else value


def fill(options: type[AnyOptions], given: Given, **more: Any) -> AnyOptions:
    """Options of the library from the given values of the same names, and `more`."""
    names = {field.name for field in fields(options)} - more.keys()  # type: ignore[arg-type]
    return options(**{name: value for name, value in given.items() if name in names}, **more)
