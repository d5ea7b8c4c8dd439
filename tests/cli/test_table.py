"""Options and the fields they fill: one name, one default, and nothing that does nothing."""

from __future__ import annotations

from dataclasses import MISSING, fields
from enum import Enum
from typing import Any

import pytest

from ckpt_tools.cli import table
from ckpt_tools.cli.job_sizes import JOB_SIZES
from ckpt_tools.commands.export_hf import ExportOptions
from ckpt_tools.commands.import_hf import ImportOptions
from ckpt_tools.commands.to_fsdp_dtensor import ConvertOptions
from ckpt_tools.commands.to_torch_dist import ToTorchDistOptions
from ckpt_tools.execute.run import WriteOptions
from ckpt_tools.megatron.fsdp_dtensor.write import TargetOptions
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions

CLASSES = (
    ConvertOptions, ToTorchDistOptions, ExportOptions, ImportOptions, TargetOptions, TorchDistOptions, WriteOptions
)  # fmt: skip
# Fields that mean something else than the option of their name, or are asked for in another way.
OTHERWISE = {
    ("TorchDistOptions", "extra_state"),  # a flag; the option may be a template's place
    ("TorchDistOptions", "ep"),  # None unless given; its row is for a layout
}


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


@pytest.mark.parametrize("options", CLASSES, ids=lambda options: options.__name__)
def test_an_option_that_is_not_given_is_the_fields_default(options: type) -> None:
    same = [
        f for f in fields(options) if f.name in table.TABLE and (options.__name__, f.name) not in OTHERWISE
    ]
    assert same
    for field in same:
        row = table.TABLE[field.name]
        value = row.default.value if isinstance(row.default, Enum) else row.default
        assert (row.read(value) if row.read else value) == _default(field), field.name


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (TargetOptions, table.FSDP_TARGET),
        (TorchDistOptions, table.TORCH_DIST_TARGET | {"extra_state_template"}),
        (WriteOptions, {"workers", "threads", "memory_bytes", "fsync", "direct", "check_source"}),
    ],
)
def test_every_field_can_be_given(options: type, names: set[str]) -> None:
    assert {field.name for field in fields(options)} == names


def test_every_row_is_used_by_a_class_or_by_the_command_line_itself() -> None:
    own = {"dry_run", "quiet", "as_json", "report", "enable_msc", "oom_traceback", *JOB_SIZES}
    filled = {field.name for options in CLASSES for field in fields(options)}
    assert not table.TABLE.keys() - filled - own


def test_fill_takes_what_the_class_has_and_more_wins() -> None:
    given = {"threads": 5, "swiglu": True, "fsync": True}
    assert table.fill(WriteOptions, given, fsync=False) == WriteOptions(threads=5)
