"""Opening a catalog of many chunks: time and memory against the C unpickler with bare stand-ins, gc off.

    python -m tests.benchmarks.bench_metadata [chunks]

Prints one line a reader: CPU seconds to open (median and range of 5 processes), peak memory above the start as a
multiple of the file's size, and the seconds to look at every chunk afterwards. Run by hand; CI does not.
"""

import gc
import json
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RUNS = 5


def write_metadata(folder: Path, tensors: int, chunks: int) -> None:
    """`.metadata` of `tensors` tensors of `chunks` chunks each, pickled from torch's own classes."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for number in range(tensors):
        key = f"optimizer.state.exp_avg.decoder.layers.{number}.mlp.experts.experts.linear_fc1.weight"
        offsets = [torch.Size((16 * c, 0)) for c in range(chunks)]
        parts = [ChunkStorageMetadata(offset, torch.Size((16, 4096))) for offset in offsets]
        size = torch.Size((16 * chunks, 4096))
        described[key] = TensorStorageMetadata(TensorProperties(torch.float32), size, parts)
        for c, offset in enumerate(offsets):
            info = _StorageInfo(f"__{c}_0.distcp", number * 262144, 262144 + 1577)
            storage[MetadataIndex(key, offset, c)] = info
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(Metadata(described, {}, storage, StorageMeta(), "1.0.0"), file)


class _Bare(pickle.Unpickler):
    """The fastest that the C unpickler can be: classes that do nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "Size":
            return tuple
        if name in ("_get_layout", "_MEM_FORMAT_ENCODING"):
            return lambda *args: None
        body = {"__setstate__": lambda self, state: None} if name == "TensorProperties" else {}
        return type(name, (), body)


def peak_bytes() -> int:
    """Largest resident size so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measure(reader: str, folder: str) -> dict[str, float]:
    """One opening in this process."""
    from ckpt_tools.formats.dcp.metadata_read import read_catalog
    from ckpt_tools.formats.storage.open_files import open_files

    gc.disable()
    before, start = peak_bytes(), time.process_time()
    if reader == "bare":
        with Path(folder, ".metadata").open("rb") as file:
            _Bare(file).load()
        return {"open": time.process_time() - start, "memory": peak_bytes() - before, "look": 0.0}
    catalog = read_catalog(open_files(folder))
    opened = time.process_time()
    memory = peak_bytes() - before
    chunks = sum(len(entry.chunks) for entry in catalog.tensors.values())
    assert chunks
    return {"open": opened - start, "memory": memory, "look": time.process_time() - opened}


def main(chunks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_metadata(Path(folder), max(1, chunks // 500), 500)
        size = Path(folder, ".metadata").stat().st_size
        print(f"{chunks} chunks, {size / 1e6:.1f} MB of metadata")
        medians = {}
        for reader in ("bare", "ours"):
            command = [sys.executable, "-m", "tests.benchmarks.bench_metadata", "--measure", reader, folder]
            outputs = [subprocess.run(command, capture_output=True, check=True).stdout for _ in range(RUNS)]
            runs = [json.loads(output) for output in outputs]
            opens = sorted(run["open"] for run in runs)
            medians[reader] = statistics.median(opens)
            print(
                f"{reader}: open {medians[reader]:.2f} s ({opens[0]:.2f} to {opens[-1]:.2f}), memory "
                f"{runs[0]['memory'] / size:.1f} x the file, look at all {runs[0]['look']:.2f} s"
            )
        print(f"ratio of open: {medians['ours'] / medians['bare']:.2f} (at most 1.3)")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3])))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 1_000_000)
