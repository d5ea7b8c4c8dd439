"""Copies of real checkpoints with other numbers, as another step of the same job would have them."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.formats.torch_archive.tensor_template import framed_tensor
from tests.commands import oracle
from tests.damage import copy_of

_MASTER = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(?:param|fp32_param)\.(?P<weight>.+)$")


def altered(name: str, place: Path, seed: int) -> Path:
    """A sound copy of a fixture's root, all of whose floating-point numbers are others; its optimizer's too.

    Weights are the rounding of their masters where the fixture names masters by their weights.
    """
    root = copy_of(name, place)
    folder = next(root.glob("iter_*"))
    generator = torch.Generator().manual_seed(seed)
    values = {
        key: value * (1 + 0.25 * torch.randn(value.shape, generator=generator)).to(value.dtype)
        for key, value in oracle.tensors(folder).items()
        if value.is_floating_point() and not key.endswith(".step")
    }
    masters = {match["weight"]: key for key in values if (match := _MASTER.match(key))}
    values |= {
        weight: values[key].reshape(values[weight].shape).to(values[weight].dtype)
        for weight, key in masters.items()
    }
    overwrite(folder, values)
    return root


def scaled(root: Path, place: Path, factor: float) -> Path:
    """A copy of a run's root whose numbers are all `factor`, a power of two, times what they were."""
    shutil.copytree(root, place)
    for path in place.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    folder = next(place.glob("iter_*"))
    overwrite(folder, {k: v * factor for k, v in oracle.tensors(folder).items() if v.is_floating_point()})
    return place


def without_numbers(root: Path, place: Path, key: str) -> Path:
    """A copy of a run's root in which the first row of the tensor `key` is NaN, with the right checksum."""
    shutil.copytree(root, place)
    for path in place.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    folder = next(place.glob("iter_*"))
    value = oracle.tensors(folder)[key]
    value[0] = float("nan")
    overwrite(folder, {key: value})
    return place


def overwrite(folder: Path, values: Mapping[str, torch.Tensor]) -> None:
    """Put other elements in the place of stored ones, in archives with the right checksums."""
    files = LocalFiles(str(folder))
    tensors = read_catalog(files).tensors
    files.close()
    for key, value in values.items():
        for box, item in tensors[key].chunks:
            part = value[tuple(map(slice, box.start, box.stop))].contiguous()
            raw = part.reshape(-1).view(torch.uint8).numpy().tobytes()
            archive = framed_tensor(tensors[key].dtype, box.size, raw)
            assert len(archive) == item.length, key
            with (folder / item.file).open("r+b") as file:
                file.seek(item.offset)
                file.write(archive)
