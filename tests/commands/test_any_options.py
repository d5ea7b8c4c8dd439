"""The same tensors whatever the options, the topology and the way the bytes move: options drawn by seeds.

`CKPT_TOOLS_SEEDS=2000` tries so many. The oracle is the plainest conversion, read with stock torch (which
`test_to_fsdp_dtensor` holds against the truth); what options change is computed from it with torch.
"""

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch

from ckpt_tools import (
    ConvertOptions,
    Layout,
    TargetOptions,
    Topology,
    convert_to_fsdp_dtensor,
    convert_to_torch_dist,
)
from ckpt_tools.errors import UsageError
from ckpt_tools.execute.move import stream
from ckpt_tools.execute.run import WriteOptions
from ckpt_tools.execute.write_job import ThreadMemory
from ckpt_tools.megatron.vocab import VOCAB_NAMES
from ckpt_tools.plan import byte_runs
from tests.commands import oracle
from tests.conftest import DATA, fixture_dir

SOURCES = [
    DATA / "core019_llama_tp2_fully_reshardable" / "iter_0000002",
    fixture_dir("core019_moe_ep2_fully_reshardable") / "iter_0000002",
]
Tensors = dict[str, torch.Tensor]


@cache
def plain(source: Path, folder: Path) -> Tensors:
    convert_to_fsdp_dtensor(source, folder, ConvertOptions(check_masters="all"))
    return oracle.tensors(folder)


@pytest.mark.parametrize("seed", range(int(os.environ.get("CKPT_TOOLS_SEEDS", "10"))))
def test_any_options_give_the_same_tensors(seed, tmp_path, tmp_path_factory):
    draw = random.Random(seed)
    source = draw.choice(SOURCES)
    reference = plain(source, tmp_path_factory.getbasetemp() / "plain" / source.parent.name)
    options, layout = draw_options(draw), draw_layout(draw)
    wanted = expected(reference, options)
    with any_way(draw) as write:
        convert_to_fsdp_dtensor(source, tmp_path / "out", ConvertOptions(options, layout, write=write))
        assert_equal(parameters(tmp_path / "out"), wanted)
        other = ConvertOptions(layout=draw_layout(draw), write=write)
        convert_to_fsdp_dtensor(tmp_path / "out", tmp_path / "other", other)
        assert_equal(parameters(tmp_path / "other"), wanted)
        if options == TargetOptions():
            convert_to_torch_dist(tmp_path / "other", tmp_path / "back")
            assert_equal(oracle.tensors(tmp_path / "back"), oracle.tensors(source))


def draw_options(draw: random.Random) -> TargetOptions:
    """A third leave everything as it is."""
    if draw.random() < 1 / 3:
        return TargetOptions()
    weights_only = draw.random() < 0.5
    rows = draw.choice([None, 48, 200])
    return TargetOptions(
        weights_only=weights_only,
        dtype=draw.choice([None, "float16", "bfloat16", "float32", "float64"]) if weights_only else None,
        vocab_size_padded=rows,
        vocab_size=None if rows is None else 32,
    )


def draw_layout(draw: random.Random) -> Layout:
    while draw.random() < 0.5:
        sizes = {name: draw.choice([1, 1, 2, 3]) for name in ("dp_shard", "dp_outer", "cp")}
        sizes |= {name: draw.choice([1, 2]) for name in ("tp", "ep", "etp")}
        try:
            return Layout(
                "mfsdp-v1", Topology(**sizes, strategy=draw.choice(["optim_grads_params", "optim"]))
            )
        except UsageError:
            continue  # sizes that do not go together
    return Layout(world=draw.choice([1, 1, 2, 5]))


@contextmanager
def any_way(draw: random.Random) -> Iterator[WriteOptions]:
    """Kernel copies, batches of small items and tiles of any size: none of it changes a byte."""
    tile = draw.choice([None, None, 3000, 30_000])
    with ExitStack() as stack:
        for module, name, values in (
            (stream, "KERNEL_COPY_BYTES", [1, 1000, 1 << 60]),
            (byte_runs, "SMALL_BYTES", [64 << 10] if tile is None else [0]),
            (byte_runs, "MAX_GAP_BYTES", [0, 64 << 10]),
        ):
            stack.enter_context(mock.patch.object(module, name, draw.choice(values)))
        if tile is not None:
            stack.enter_context(
                mock.patch.object(WriteOptions, "thread_memory", lambda *_, **__: ThreadMemory(tile, 0, 0))
            )
        yield WriteOptions(threads=draw.choice([1, 2, 4]), memory_bytes=draw.choice([1 << 20, 96 << 20]))


def expected(reference: Tensors, options: TargetOptions) -> Tensors:
    """The plain conversion's parameters as the options ask for them."""
    wanted = {
        key: resized(key, tensor, options.vocab_size_padded)
        for key, tensor in reference.items()
        if not key.startswith("rng_state") and (key.startswith("model.") or not options.weights_only)
    }
    if options.dtype is None:
        return wanted
    dtype = getattr(torch, options.dtype)
    return {key: t if key.endswith(".expert_bias") else t.to(dtype) for key, t in wanted.items()}


def resized(key: str, tensor: torch.Tensor, rows: int | None) -> torch.Tensor:
    if rows is None or not key.removesuffix(".exp_avg").removesuffix(".exp_avg_sq").endswith(VOCAB_NAMES):
        return tensor
    more = torch.zeros(max(0, rows - tensor.shape[0]), *tensor.shape[1:], dtype=tensor.dtype)
    return torch.cat([tensor[:rows], more])


def parameters(folder: Path) -> Tensors:
    return {key: t for key, t in oracle.tensors(folder).items() if not key.startswith("rng_state")}


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    assert [key for key, tensor in wanted.items() if not oracle.same_bytes(found[key], tensor)] == []
