"""Options and the fields they fill: one name, one default, the same words, and nothing that does nothing."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from ckpt_tools.cli.options import Row, option
from ckpt_tools.cli.table import FSDP_TARGET, TABLE, TORCH_DIST_TARGET, fill, with_options
from ckpt_tools.cli.verbs import check, convert, edit, look
from ckpt_tools.cli.verbs.convert import JOB_SIZES
from ckpt_tools.commands.check.diff import DiffRequest
from ckpt_tools.commands.convert.plan import plan_checkpoint
from ckpt_tools.commands.convert.to_torch_dist import ToTorchDistOptions
from ckpt_tools.commands.edit.average import AverageOptions
from ckpt_tools.commands.edit.copy import CopyOptions
from ckpt_tools.commands.edit.merge_adapter import MergeOptions
from ckpt_tools.commands.edit.slice import slice_layers
from ckpt_tools.commands.edit.strip import strip_checkpoint
from ckpt_tools.commands.huggingface.export_source import ExportOptions
from ckpt_tools.commands.huggingface.import_hf import ImportOptions
from ckpt_tools.commands.job.conversion import ConvertOptions, EditOptions
from ckpt_tools.commands.look.checkpoint import print_tensor
from ckpt_tools.commands.look.dcp_json import dcp_as_json
from ckpt_tools.commands.look.inspect import Inspection, inspect_checkpoint
from ckpt_tools.commands.look.stats import StatsOptions
from ckpt_tools.execute.run import WriteOptions
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions
from ckpt_tools.verify.compare.arrays import Tolerance
from ckpt_tools.verify.compare.differences import DiffOptions
from ckpt_tools.verify.report import VerifyOptions

# What is filled by a command's options, and the rows that the command has of its own.
FILLED: tuple[tuple[Callable[..., Any], Mapping[str, Row]], ...] = (
    (ConvertOptions, {"iteration": TABLE["iteration"]}),  # `all` or a number, taken apart by the command
    (ToTorchDistOptions, {"iteration": TABLE["iteration"]}),
    (TargetOptions, {}),
    (TorchDistOptions, {}),
    (WriteOptions, {}),
    (ExportOptions, convert._EXPORTED),
    (ImportOptions, convert._IMPORTED),
    (AverageOptions, edit._AVERAGE),
    (EditOptions, {}),
    (strip_checkpoint, edit._STRIP),
    (MergeOptions, {}),
    (slice_layers, edit._SLICE),
    (VerifyOptions, check._VERIFY),
    (DiffOptions, check._DIFF),
    (DiffRequest, check._DIFF),
    (Tolerance, check._DIFF),
    (inspect_checkpoint, look._INSPECT),
    (dcp_as_json, look._DCP_JSON),
    (print_tensor, look._PRINT),
    (plan_checkpoint, convert._PLAN),
    (StatsOptions, look._STATS),
    (CopyOptions, edit._COPY | {"iteration": TABLE["iteration"]}),  # `all` or a number, as for ConvertOptions
    (Inspection.by, {"axis": look._INSPECT["by"]}),
)
NAMES = [filled.__name__ for filled, _ in FILLED]
# Fields that mean something else than the option of their name, or are asked for in another way.
OTHERWISE = {
    ("TorchDistOptions", "extra_state"),  # a flag; the option may be a template's place
    ("TorchDistOptions", "ep"),  # None unless given; its row is for a layout
    ("Tolerance", "nan"),  # follows from the others unless given
    ("ImportOptions", "to"),  # the same
}


def _defaults(filled: Callable[..., Any]) -> dict[str, Any]:
    """What each field, or parameter of a function, is when it is not given."""
    if isinstance(filled, type):
        return {
            f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(filled)
        }
    return {name: p.default for name, p in inspect.signature(filled).parameters.items()}


@pytest.mark.parametrize(("filled", "own"), FILLED, ids=NAMES)
def test_an_option_that_is_not_given_is_the_fields_default(filled, own):
    defaults = _defaults(filled)
    rows = {**TABLE, **own}
    same = {
        name: default
        for name, default in defaults.items()
        if name in rows and (filled.__name__, name) not in OTHERWISE
    }
    assert same
    for name, default in same.items():
        if default is inspect.Parameter.empty:  # it has to be given, in both
            assert rows[name].default in (..., None), name
        else:
            assert rows[name].value(rows[name].default) == default, name


@pytest.mark.parametrize(("filled", "own"), FILLED, ids=NAMES)
def test_a_choice_has_the_words_of_its_field(filled, own):
    rows = {**TABLE, **own}
    for name, hint in get_type_hints(filled).items():
        words = next((get_args(h) for h in (hint, *get_args(hint)) if get_origin(h) is Literal), None)
        if words is None or name not in rows:
            continue
        kind = rows[name].kind
        assert get_args(get_args(kind)[0] if get_origin(kind) is list else kind) == words, name


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (TargetOptions, FSDP_TARGET),
        (TorchDistOptions, TORCH_DIST_TARGET | {"extra_state_template"}),
        (
            WriteOptions,
            {
                "workers",
                "threads",
                "memory_bytes",
                "fsync",
                "direct",
                "check_source",
                "verify_output",
                "tiles",
            },
        ),
        (
            VerifyOptions,
            check._VERIFY.keys() - {"as_json", "iteration", "verbose"}
            | {"every_iteration"}
            | {"workers", "threads", "trust_pickle"},
        ),
        (DiffOptions, {"tolerance", "keys", "ignore", "headers", "workers", "threads"}),
        (Tolerance, {"rtol", "atol", "ulp", "nan"}),
        (
            StatsOptions,
            {"keys", "roles", "layers", "by", "iteration", "histogram", "workers", "threads", "trust_pickle"},
        ),
        (
            CopyOptions,
            {
                "every_iteration",
                "read_back",
                "iteration",
                "trust_pickle",
                "overwrite",
                "resume",
                "hard_link",
                "write",
            }
            | {"tracker", "dry_run"},
        ),
        (
            AverageOptions,
            edit._AVERAGE.keys() - {"last"}
            | {"iteration", "trust_pickle", "overwrite", "resume", "hard_link", "write"}
            | {"tracker", "dry_run"},
        ),
    ],
)
def test_every_field_can_be_given(options, names):
    assert {field.name for field in fields(options)} == names


def test_every_row_is_used_by_the_library_or_by_the_command_line_itself():
    own = {
        "dry_run", "quiet", "as_json", "report", "report_format", "junit", "enable_msc", "follow_links",
        "oom_traceback", "verbose", *JOB_SIZES,
    }  # fmt: skip
    filled = {name for fills, _ in FILLED for name in _defaults(fills)}
    assert not TABLE.keys() - filled - own


def test_fill_takes_what_the_class_has_and_more_wins():
    given = {"threads": 5, "swiglu": True, "fsync": True}
    assert fill(WriteOptions, given, fsync=False) == WriteOptions(threads=5)


def test_fill_goes_into_options_that_options_hold():
    given = {
        "threads": 5,
        "swiglu": True,
        "weights_only": True,
        "overwrite": True,
        "rtol": 0.5,
        "keys": ("a",),
    }
    assert fill(ConvertOptions, given) == ConvertOptions(
        overwrite=True, write=WriteOptions(threads=5), target=TargetOptions(swiglu=True, weights_only=True)
    )
    assert fill(DiffOptions, given) == DiffOptions(Tolerance(rtol=0.5), ("a",), threads=5)


def test_a_command_gets_values_as_the_library_takes_them():
    found: dict[str, Any] = {}

    def command(place: str, **given: Any) -> None:
        """What it does."""
        found.update(given, place=place)

    own = {"kind": option(Literal["a", "b"], "--kind", default="a", help="Which.")}
    made = with_options(command, {"threads", "memory_bytes"}, own)
    parameters = inspect.signature(made).parameters
    assert list(parameters) == ["place", "kind", "threads", "memory_bytes"]
    assert made.__doc__ == "What it does."
    made("here", kind=parameters["kind"].default, threads=3, memory_bytes="1MiB")
    assert found == {"place": "here", "kind": "a", "threads": 3, "memory_bytes": 1 << 20}
    assert type(found["kind"]) is str


def test_a_choice_that_can_be_repeated():
    row = option(list[Literal["a", "b"]], "--kind", help="Which.")
    (kind, _) = get_args(get_args(row.parameter("kind").annotation)[0])
    (words,) = get_args(kind)
    assert row.value([words("b"), words("a")]) == ["b", "a"]
    assert row.value(None) is None


def test_an_option_that_is_in_no_row_is_a_defect():
    with pytest.raises(AssertionError):
        with_options(lambda **_: None, {"no_such_row"})
