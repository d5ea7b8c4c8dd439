"""The start of ckpt_tools.pyz: it unpacks itself once, since compiled modules cannot be loaded from a zip file.

What is unpacked lies in a folder of the user's cache that is named after the content, and that nobody else may write.
Where there can be none, it lies in a temporary one for as long as the program runs.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path


def main() -> None:
    """Unpack if need be, and run."""
    with zipfile.ZipFile(Path(__file__).parent) as packed:
        needed, found = packed.read("built_for").decode().strip(), sysconfig.get_config_var("SOABI")
        if needed != found:
            sys.exit(
                f"error: {sys.argv[0]} was built for {needed}, and this Python is {found}: start it with the other"
            )
        folder = _unpacked(packed)
    sys.path[0] = str(folder)
    from ckpt_tools.cli.app import main as run

    run()


def _unpacked(packed: zipfile.ZipFile) -> Path:
    content = "".join(f"{one.filename} {one.CRC} {one.file_size}\n" for one in packed.infolist())
    digest = hashlib.sha256(content.encode()).hexdigest()[:32]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckpt_tools"
    folder = cache / digest
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (_is_own(cache) and (_is_own(folder) or _unpack(packed, folder))):
            raise PermissionError(f"{folder} is somebody else's")
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="ckpt_tools-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        packed.extractall(folder)
    return folder


def _unpack(packed: zipfile.ZipFile, folder: Path) -> bool:
    """Let the folder appear whole; whether it is ours then, since another process may have been faster."""
    made = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        packed.extractall(made)
        made.rename(folder)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not folder.is_dir():
            raise
    return _is_own(folder)


def _is_own(folder: Path) -> bool:
    """Whether it is a folder of this user's that others cannot write."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


if __name__ == "__main__":
    main()
