"""`env`: what a bug report needs to know about the machine, told without importing torch."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ckpt_tools import __version__
from ckpt_tools.credentials import redacted
from ckpt_tools.errors import UsageError

LIBRARIES = ("torch", "numpy", "typer", "rich", "orjson", "safetensors", "isal", "fsspec", "pyyaml")
OPTIONAL_LIBRARIES = ("botocore", "gcsfs", "multi-storage-client", "megatron-core", "transformers")
# By name, never by prefix alone: what is printed here is pasted into public issues.
VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS",
    "SLURM_LOCALID", "SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT", "NO_COLOR", "TERM", "COLUMNS", "TMPDIR",
    "OMP_NUM_THREADS", "PYTHONPATH", "PYTHONOPTIMIZE", "LD_PRELOAD", "AWS_REGION", "AWS_PROFILE",
    "AWS_ENDPOINT_URL", "MSC_CONFIG",
)  # fmt: skip
_PROBE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class FileSystem:
    """What the file system of `directory` is and can do; bytes."""

    directory: str
    kind: str
    free_bytes: int
    is_writable: bool
    shares_extents: bool  # copies cost nothing
    copies_in_kernel: bool


@dataclass(frozen=True, slots=True)
class Environment:
    """Versions (None: not installed), machine and settings of this process."""

    versions: dict[str, str | None]
    platform: str
    processors: int  # that this process may use
    memory_bytes: int
    crc32: str  # the module that computes it
    variables: dict[str, str]
    file_system: FileSystem | None

    def as_json(self) -> dict[str, Any]:
        """As plain data, with its schema version."""
        return {"schema_version": 1, **asdict(self)}


def library_versions() -> dict[str, str | None]:
    """Versions of this package, Python and the libraries by name; None for a library that is not installed.

    Optional libraries are named only when they are there.
    """
    found = {"ckpt_tools": __version__, "python": platform.python_version()}
    optional = {name: _installed(name) for name in OPTIONAL_LIBRARIES}
    return {
        **found,
        **{name: _installed(name) for name in LIBRARIES},
        **{name: number for name, number in optional.items() if number is not None},
    }


def describe_environment(directory: str | None = None) -> Environment:
    """This process's surroundings; with `directory`, also what its file system can do.

    The file system is tried with two unnamed temporary files of 64 KiB.

    Raises:
        UsageError: `directory` is not a directory.
    """
    from ckpt_tools.formats.crc import crc32

    return Environment(
        versions=library_versions(),
        platform=platform.platform(),
        processors=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        crc32=crc32.__module__,
        variables={name: redacted(os.environ[name]) for name in VARIABLES if name in os.environ},
        file_system=None if directory is None else describe_file_system(directory),
    )


def describe_file_system(directory: str) -> FileSystem:
    """What the file system under `directory` is and can do.

    Raises:
        UsageError: `directory` is not a directory.
    """
    from ckpt_tools.execute.fileio import At, CopyCount, copy_range

    if not Path(directory).is_dir():
        raise UsageError(f"{directory} is not a directory; its file system cannot be tried")
    count, is_writable = CopyCount(), False
    with (
        suppress(OSError),
        tempfile.TemporaryFile(dir=directory) as a,
        tempfile.TemporaryFile(dir=directory) as b,
    ):
        a.write(bytes(_PROBE_BYTES))
        a.flush()
        copy_range(At(a.fileno(), 0), At(b.fileno(), 0), _PROBE_BYTES, count)
        is_writable = True
    return FileSystem(
        directory=directory,
        kind=_file_system_kind(Path(directory).resolve()),
        free_bytes=shutil.disk_usage(directory).free,
        is_writable=is_writable,
        shares_extents=count.cloned > 0,
        copies_in_kernel=count.kernel > 0 or count.cloned > 0,
    )


def _file_system_kind(path: Path) -> str:
    """The type that the kernel names for the mount `path` lies on; the last mount of a point covers the others."""
    best, kind = -1, "unknown"
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, point, found, *_ = line.split(" ")
            mount = Path(point.encode().decode("unicode_escape"))  # a space is written as \040
            if path.is_relative_to(mount) and len(mount.parts) >= best:
                best, kind = len(mount.parts), found
    return kind


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
