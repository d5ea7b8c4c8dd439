"""Conversions that several tests look at: each is made once a process, and nobody writes into it."""

import atexit
import shutil
import tempfile
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from ckpt_tools import (
    ConvertOptions,
    ExportOptions,
    ToTorchDistOptions,
    convert_to_dcp,
    convert_to_fsdp_dtensor,
    convert_to_torch_dist,
    strip_checkpoint,
)
from ckpt_tools import export_hf as export
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from ckpt_tools.megatron.torch_dist.write import TorchDistOptions
from tests.commands import oracle
from tests.folders import root_of

_ROOM = Path(tempfile.mkdtemp(prefix="made-"))
_NUMBERS = count()
atexit.register(shutil.rmtree, _ROOM, ignore_errors=True)


def place() -> Path:
    """A name in an empty folder, for what is kept as long as the process."""
    return _ROOM / str(next(_NUMBERS)) / "out"


def iteration_of(source: str | Path) -> Path:
    """The folder with the files of a real checkpoint of tests/data, or of a root."""
    return oracle.files_of(root_of(source) if isinstance(source, str) else source)


@cache
def fsdp(source: str | Path, **target: Any) -> Path:
    """The iteration as `fsdp_dtensor`; a real checkpoint is named."""
    out, options = place(), ConvertOptions(target=TargetOptions(**target), check_masters="all")
    convert_to_fsdp_dtensor(iteration_of(source), out, options)
    return oracle.files_of(out)


@cache
def torch_dist(source: str | Path, **target: Any) -> Path:
    """The iteration as `torch_dist`."""
    out = place()
    convert_to_torch_dist(iteration_of(source), out, ToTorchDistOptions(target=TorchDistOptions(**target)))
    return oracle.files_of(out)


@cache
def dcp(source: str | Path, **target: Any) -> Path:
    """The iteration as a plain state dict."""
    out = place()
    convert_to_dcp(iteration_of(source), out, ConvertOptions(target=TargetOptions(**target)))
    return oracle.files_of(out)


@cache
def hf(source: str | Path, **options: Any) -> Path:
    """The iteration as a Hugging Face model."""
    out = place()
    export(iteration_of(source), out, ExportOptions(**options))
    return out


@cache
def stripped(source: str | Path, dtype: str | None = None) -> Path:
    """The iteration's weights alone."""
    out = place()
    strip_checkpoint(iteration_of(source), out, dtype)
    return oracle.files_of(out)
