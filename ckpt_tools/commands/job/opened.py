"""A checkpoint opened for reading: where it is, its files, what it holds, and its common state."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.locate.detect import Location, locate, refuse_metadata_json
from ckpt_tools.formats.safetensors import read_safetensors_catalog
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.megatron.format import FORMATS, Format
from ckpt_tools.megatron.run_state.common_state import CommonState, read_common_state
from ckpt_tools.megatron.run_state.record import read_record
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.roles import Role

NO_STATE = CommonState({}, None)


@dataclass(frozen=True, slots=True)
class Opened:
    """Close it when done, or use it in a `with`."""

    location: Location
    files: Files
    catalog: Catalog
    common: CommonState
    trust_pickle: bool = False

    @property
    def format(self) -> Format:
        """What its format answers."""
        return FORMATS[self.location.kind]

    def roles(self) -> Mapping[str, Role]:
        """What every tensor is, by key."""
        return self.format.roles(self.catalog)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()


def open_checkpoint(
    path: str,
    iteration: int | None = None,
    trust_pickle: bool = False,
    *,
    with_common: bool = True,
    of_run: bool = False,
) -> Opened:
    """The checkpoint that `path` means; `with_common=False` leaves its common state unread, and empty.
    `of_run` is that of `locate`.

    Warns of files that are not read, and if the folder's number is not the iteration in the common state.
    """
    location = locate(path, iteration, of_run)
    for line in location.left_out:
        warnings.warn(f"not read: {line}", stacklevel=2)
    files = open_files(location.path)
    with closed_on_error(files):
        if location.kind == "safetensors":
            return Opened(location, files, read_safetensors_catalog(location.path), NO_STATE)
        catalog = read_catalog(files, trust_pickle)
        common = read_common_state(files, catalog, trust_pickle) if with_common else NO_STATE
        read_record(files)  # a damaged one ends every command
        if location.has_metadata_json:
            refuse_metadata_json(files, catalog.tensors)
        warn_of_iteration(location, common)
        return Opened(location, files, catalog, common, trust_pickle)


@contextmanager
def closed_on_error(files: Files) -> Iterator[None]:
    """Closes files that what is made of them was to keep open."""
    try:
        yield
    except BaseException:
        files.close()
        raise


def warn_of_iteration(location: Location, common: CommonState) -> None:
    """Say which number is taken for what where a folder and the state in it do not agree."""
    named, stored = location.iteration, common.iteration
    if named is None or stored is None or named == stored:
        return
    # Who only reads needs nothing else of the verify room.
    from ckpt_tools.verify.checkpoint.place import number_fix

    fix = number_fix(location, stored)
    warnings.warn(
        f"{location.path}: the folder says iteration {named}, the state in it {stored}. An output made of it "
        f"gets the number {named} too, but a job that loads it resumes from iteration {stored}. Fix: {fix}.",
        stacklevel=3,
    )
