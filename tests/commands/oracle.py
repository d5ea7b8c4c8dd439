"""Reads checkpoints with stock torch, so that nothing of ours vouches for itself."""

import io
import pickle
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

Tensors = dict[str, torch.Tensor]


class _AnyClass(pickle.Unpickler):
    """torch's classes as they are, Megatron's as bare shells: it is not installed here."""

    def find_class(self, module: str, name: str) -> Any:
        if not module.startswith(("megatron", "__main__")):
            return super().find_class(module, name)
        return type(name, (), {"__module__": module, "__init__": _keep_args, "__eq__": _same})


def _keep_args(self: Any, *args: Any) -> None:
    self.args = args


def _same(self: Any, other: Any) -> bool:
    return type(self).__name__ == type(other).__name__ and self.__dict__ == other.__dict__


class PickleModule:
    """What `torch.load(pickle_module=...)` takes."""

    Unpickler = _AnyClass


def files_of(path: Path) -> Path:
    """The folder with the files: `path`, or the iteration in it."""
    return path if (path / ".metadata").exists() else next(path.glob("iter_*"), path / "release")


@cache
def metadata(folder: Path) -> Metadata:
    """The stock metadata object; read once, as tests do not change a checkpoint they have looked at."""
    return _AnyClass(io.BytesIO((files_of(folder) / ".metadata").read_bytes())).load()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, through `torch.distributed.checkpoint.load`."""
    known = metadata(folder).state_dict_metadata
    state = {
        key: torch.full(tuple(m.size), 77).to(m.properties.dtype)
        for key, m in known.items()
        if isinstance(m, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # what no_dist asks for
        load(state, storage_reader=_Reader(files_of(folder)), no_dist=True)
    return state


class _Reader(FileSystemReader):
    """Stock, except that Megatron's own metadata classes need not be importable."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return metadata(Path(self.path))


def item(folder: Path, key: str) -> Any:
    """One object of a checkpoint."""
    info = metadata(folder).storage_data[MetadataIndex(key)]
    with (files_of(folder) / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        data = file.read(info.length)
    return torch.load(io.BytesIO(data), weights_only=False, pickle_module=PickleModule)


def model(folder: Path, files: str = "*.safetensors") -> Tensors:
    """Every tensor of a Hugging Face directory."""
    return {key: t for file in sorted(folder.glob(files)) for key, t in load_file(file).items()}


def objects(folder: Path) -> dict[str, bytes]:
    """The archive of every object, as stored."""
    known, found = metadata(folder), {}
    for index, info in known.storage_data.items():
        if not isinstance(known.state_dict_metadata[index.fqn], TensorStorageMetadata):
            with (files_of(folder) / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                found[index.fqn] = file.read(info.length)
    return found


def assert_same(a: Path | Tensors, b: Path | Tensors) -> None:
    """The same keys, and tensors bit for bit."""
    left, right = (tensors(one) if isinstance(one, Path) else one for one in (a, b))
    assert left.keys() == right.keys()
    assert [key for key in left if not same_bytes(left[key], right[key])] == []


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal type, shape and bits: NaN equals itself and 0.0 is not -0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*flat)
