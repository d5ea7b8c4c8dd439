"""The cache of the Hugging Face hub: `models--<owner>--<name>/{blobs,refs,snapshots/<revision>}`."""

from __future__ import annotations

import re
from contextlib import closing

from ckpt_tools.errors import UsageError
from ckpt_tools.formats.storage.files import refuse_location
from ckpt_tools.formats.storage.open_files import open_files

SNAPSHOTS, REFS, MAIN = "snapshots", "refs", "main"
_LONGEST_REVISION = 200


def snapshot_of(path: str) -> str:
    """The snapshot that the root of a cached model means, any other path as it is.

    That is the one `refs/main` names, or the only one.
    """
    refuse_location(path)
    path = path.rstrip("/") if len(path) > 1 else path
    if re.search(rf"/(?:models|datasets)--[^/]+/{SNAPSHOTS}$", f"/{path}"):  # the folder of all of them
        path = path.removesuffix(f"/{SNAPSHOTS}")
    revisions = _revisions(path)
    if revisions is None:
        return path
    chosen = _main(path)
    if chosen not in revisions:
        if len(revisions) != 1:
            raise UsageError(
                f"{path} is a model in a Hugging Face cache with {len(revisions)} snapshots, and refs/main names "
                f"none of them; give one: {', '.join(f'{path}/{SNAPSHOTS}/{name}' for name in revisions[:4])}"
            )
        chosen = revisions[0]
    return f"{path}/{SNAPSHOTS}/{chosen}"


def _revisions(path: str) -> list[str] | None:
    """Snapshots of a cached model, None for another folder."""
    if not path.rpartition("/")[2].startswith(("models--", "datasets--")):
        return None
    with closing(open_files(path)) as files:
        if not files.exists(SNAPSHOTS):
            return None
    with closing(open_files(f"{path}/{SNAPSHOTS}")) as files:
        return files.list()


def _main(path: str) -> str | None:
    with closing(open_files(f"{path}/{REFS}")) as files:
        if not files.exists(MAIN):
            return None
        return (
            files.read(MAIN, 0, min(files.size(MAIN), _LONGEST_REVISION)).decode("utf-8", "replace").strip()
        )
