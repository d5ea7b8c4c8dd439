"""Real `dp_reshardable` files, damaged one way at a time: each refused by the name of what is wrong."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from ckpt_tools.errors import VerificationError
from ckpt_tools.formats.torch_archive.item_reader import find_tensor
from ckpt_tools.model.views import Unflatten
from tests.conftest import fixture_dir

from .test_real_checkpoints import open_checkpoint

FC2 = "decoder.layers.mlp.linear_fc2.weight"


class Copy:
    """A copy of a real checkpoint whose masters can be rewritten in place."""

    def __init__(self, folder: Path) -> None:
        source = fixture_dir("v016_dense_dpr_tp2_dp2") / "checkpoint"
        self.folder = folder
        shutil.copytree(source, folder / "checkpoint", copy_function=shutil.copyfile)
        self._files, self._catalog, self._states = open_checkpoint(folder)

    def open(self) -> None:
        open_checkpoint(self.folder)

    def places(self, key: str, lead: tuple[int, ...], shard: int) -> list[tuple[Path, int]]:
        """File and byte offset of each master of one shard, in element order."""
        assert self._states is not None
        source = self._states.sources("master", key, lead)[shard]
        step = source.view[0]
        assert isinstance(step, Unflatten)
        found: dict[int, tuple[Path, int]] = {}
        for chunk in self._catalog.tensors[source.key].chunks:
            offset = find_tensor(self._files, chunk.item).payload_offset
            first = chunk.box.start[0]
            for i in range(first, chunk.box.stop[0]):
                found[i] = (self.folder / "checkpoint" / chunk.item.file, offset + 4 * (i - first))
        return [found[i] for i in range(step.start, step.start + math.prod(step.dims))]


def read(places: list[tuple[Path, int]]) -> list[bytes]:
    return [path.read_bytes()[offset : offset + 4] for path, offset in places]


def write(places: list[tuple[Path, int]], values: list[bytes]) -> None:
    for (path, offset), value in zip(places, values, strict=True):
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(value)


def test_the_copy_itself_is_accepted(tmp_path: Path) -> None:
    Copy(tmp_path).open()


@pytest.mark.parametrize("element", [0, 100, 479])
def test_one_flipped_element(tmp_path: Path, element: int) -> None:
    copy = Copy(tmp_path)
    place = copy.places(FC2, (1,), 1)[element]
    (value,) = read([place])
    write([place], [value[:2] + bytes([value[2] ^ 1]) + value[3:]])
    with pytest.raises(
        VerificationError, match=r"decoder\.layers\.1\.mlp\.linear_fc2\.weight \[0:24, 20:40\]"
    ):
        copy.open()


def test_two_exchanged_segments(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    one, other = copy.places(FC2, (0,), 0), copy.places(FC2, (2,), 0)
    first, second = read(one), read(other)
    write(one, second)
    write(other, first)
    with pytest.raises(VerificationError, match=r"layers\.\d\.mlp\.linear_fc2\.weight .*against the order"):
        copy.open()


def test_a_garbage_gap_inside_a_parameter(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    places = copy.places(FC2, (1,), 0)
    values = read(places)
    write(places, values[:200] + [b"\xff\xff\xff\xff"] * 32 + values[200:-32])
    with pytest.raises(
        VerificationError, match=r"decoder\.layers\.1\.mlp\.linear_fc2\.weight \[0:24, 0:20\]"
    ):
        copy.open()
