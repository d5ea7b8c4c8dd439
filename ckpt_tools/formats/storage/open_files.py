"""The files of a folder, wherever it is, and all files below it with their sizes."""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_tools.errors import StorageError, UnsupportedCheckpointError
from ckpt_tools.formats.storage.files import Files, LocalFiles, absent_folder, refuse_location


def open_files(location: str) -> Files:
    """The files at `location`: a folder of a mounted file system, or the URL of one in an object store."""
    if location.startswith("file://"):
        location = location.removeprefix("file://")
    refuse_location(location)
    if "://" not in location:
        return LocalFiles(location)
    from ckpt_tools.formats.storage.remote import RemoteFiles  # fsspec is not needed for local paths

    return RemoteFiles(location)


def files_below(location: str, odd: list[str] | None = None) -> dict[str, int]:
    """Size in bytes of every file at any depth, by its name relative to the folder, sorted.

    A link counts as the file that it leads to; linked folders are not entered.
    These, and links that lead nowhere, FIFOs, sockets and devices are added to `odd`.
    """
    location = location.removeprefix("file://")
    refuse_location(location)
    if "://" not in location:
        return dict(sorted(_local(Path(location), [] if odd is None else odd).items()))
    from ckpt_tools.formats.storage.object_store import Store  # fsspec is not needed for local paths

    store = Store(location)
    found: dict[str, int] = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        for name, size in store.sizes(folder).items():
            inner = f"{folder}/{name}" if folder else name
            if size is None:
                folders.append(inner)
            else:
                found[inner] = size
    if not found:
        raise UnsupportedCheckpointError(f"{location} does not exist or is empty.")
    return dict(sorted(found.items()))


def _local(root: Path, odd: list[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    elif entry.is_file():
                        found[os.path.relpath(entry.path, root)] = entry.stat().st_size
                    else:
                        odd.append(os.path.relpath(entry.path, root))
        except (FileNotFoundError, NotADirectoryError):
            if folder == root:
                raise UnsupportedCheckpointError(absent_folder(root)) from None
        except OSError as error:
            raise StorageError(f"{folder}: {error.strerror or error}") from error
    return found
