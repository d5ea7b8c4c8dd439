"""Several workers prove what one does, and commands that read flat buckets pass on how many prove them."""

import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.commands.edit import average
from ckpt_tools.commands.edit import slice as slicing
from ckpt_tools.commands.job import read_model
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.formats.torch_archive.tensor_template import usual_item
from ckpt_tools.megatron.torch_dist.optimizer_layouts.bucket_proof import Share, by_threads
from tests.conftest import REPO, fixture_dir
from tests.synthetic import write_llama

# In another process, because one with threads, as pytest's may be, is not forked.
SCRIPT = """
import os, sys
from ckpt_tools.commands.convert.to_dtensors import ConvertOptions, convert_to_fsdp_dtensor
from ckpt_tools.errors import CkptError
from ckpt_tools.execute.run import WriteOptions

forks, fork = [], os.fork
os.fork = lambda: (forks.append(0), fork())[1]
run, out, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
write = WriteOptions(workers=workers, check_source="none")
try:
    convert_to_fsdp_dtensor(run, out, ConvertOptions(write=write))
except CkptError as error:
    print(type(error).__name__, error)
print(len(forks))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("buckets") / "run"
    write_llama(folder / "iter_0000100", 0.003, layout="dp_reshardable")
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


def converted(source: Path, out: Path, workers: int) -> list[str]:
    words = [sys.executable, "-c", SCRIPT, str(source), str(out), str(workers)]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout.splitlines()


def test_workers_prove_what_one_process_does(source, tmp_path):
    assert converted(source, tmp_path / "one", 1) == ["0"]
    assert converted(source, tmp_path / "three", 3) == ["4"]  # two for the proof, two to write
    one, three = (
        {
            p.relative_to(tmp_path / n): p.read_bytes()
            for p in sorted((tmp_path / n).rglob("*"))
            if p.is_file()
        }
        for n in ("one", "three")
    )
    assert one == three and len(one) > 2


def test_what_one_worker_finds_is_refused_in_the_same_words(source, tmp_path):
    """Behind the samples, which every process looks at: so that the comparison of all elements finds it."""
    files = LocalFiles(str(source / "iter_0000100"))
    entry = next(e for key, e in read_catalog(files).tensors.items() if key.endswith("bucket_idx_0.param"))
    chunk = max(entry.chunks, key=lambda chunk: chunk.box.volume)
    usual = usual_item(files, chunk.item, entry.dtype, chunk.box.size)
    assert usual is not None
    path = source / "iter_0000100" / chunk.item.file
    content = bytearray(path.read_bytes())
    content[usual.start + 4 * (chunk.box.volume // 5) + 2] ^= 1  # one step of bf16
    path.write_bytes(content)
    one, three = (converted(source, tmp_path / str(n), n) for n in (1, 3))
    assert one[0].startswith("VerificationError") and "does not round to the stored weight" in "".join(one)
    assert (one[:-1], one[-1], three[-1]) == (three[:-1], "0", "2")


BUCKETS = "core019_llama_tp2_dp_reshardable"
COMMANDS = (
    "average RUN RUN OUT", "strip RUN OUT", "stats RUN --by parameters", "export-hf RUN OUT", "convert RUN OUT",
    "convert RUN OUT --to torch_dist", "slice RUN OUT --layers 0:1",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_workers_are_passed_on(command, tmp_path, monkeypatch):
    asked = set[int | None]()

    def shared_by(workers: int | None) -> Share:
        asked.add(workers)
        return by_threads

    for module in (read_model, average, slicing):
        monkeypatch.setattr(module, "shared_by", shared_by)
    words = command.replace("RUN", str(fixture_dir(BUCKETS))).replace("OUT", str(tmp_path / "out")).split()
    assert run([*words, "-q", "--workers", "3"]) == 0
    assert asked == {3}
