"""The files of a folder, wherever it is."""

from __future__ import annotations

from ckpt_tools.formats.storage.files import Files, LocalFiles, refuse_location


def open_files(location: str) -> Files:
    """The files at `location`: a folder of a mounted file system, or the URL of one in an object store."""
    if location.startswith("file://"):
        location = location.removeprefix("file://")
    refuse_location(location)
    if "://" not in location:
        return LocalFiles(location)
    from ckpt_tools.formats.storage.remote import RemoteFiles  # fsspec is not needed for local paths

    return RemoteFiles(location)
