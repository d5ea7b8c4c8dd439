"""`import-hf` and `export-hf` of a synthetic model against copying their output: time, memory.

    python -m tests.benchmarks.bench_hf FOLDER [--gib 4] [--runs 5] [--family llama] [--to torch_dist]

A Hugging Face directory of random weights is made in FOLDER and imported; each command is then run in turn with
`cp -r` of what it writes, so that a noisy machine disturbs both alike: columns as in `bench_convert`. FOLDER chooses
the file system and needs three times the size. That the export is the first directory again, byte for byte, is
checked once. Run by hand, not by CI.
"""

import argparse
import filecmp
import json
import shutil
import statistics
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_tools.commands.huggingface.folder import pack_shards, shard_index
from ckpt_tools.formats.safetensors import INDEX_FILE, safetensors_header
from ckpt_tools.megatron.huggingface.config.config import read_config
from ckpt_tools.megatron.huggingface.families.identify import family_of_config
from ckpt_tools.megatron.huggingface.mapping.rules import expand
from ckpt_tools.model.transfers import TensorInfo
from tests.benchmarks.bench_convert import Row, how, print_table, timed

BASE = {"vocab_size": 32000, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 8192, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16"}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "model_type": "llama"},
    "qwen3_moe": {**BASE, "model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 8,
                  "moe_intermediate_size": 768, "norm_topk_prob": True},
}  # fmt: skip
ITEM = 2  # bytes of a bfloat16


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a model, by the rules of its family."""
    family = family_of_config(config)
    model = read_config(family, {**config, "padded_vocab_size": config["vocab_size"]})
    found = {}
    for pair in expand(family, model):
        for key, shape in zip(pair.hf, pair.tensors, strict=True):
            rows = (config["vocab_size"], *shape.shape[1:]) if pair.rule.layout == "vocab" else shape.shape
            found[key] = rows
    return found


def sized(name: str, gib: float) -> dict[str, Any]:
    """The config of a family with as many layers as make up the size."""
    one, two = (
        sum(prod(shape) for shape in shapes_of({**FAMILIES[name], "num_hidden_layers": n}).values())
        for n in (1, 2)
    )
    layers = max(1, round((gib * 2**30 / ITEM - (2 * one - two)) / (two - one)))
    return {**FAMILIES[name], "num_hidden_layers": layers}


def make_model(folder: Path, config: Mapping[str, Any]) -> None:
    """A directory of random weights, none of them NaN or infinite."""
    folder.mkdir(parents=True)
    shapes = shapes_of(config)
    sizes = {key: prod(shape) * ITEM for key, shape in shapes.items()}
    shards, random = pack_shards(sizes.items()), np.random.default_rng(0)
    for shard in shards:
        with (folder / shard.file).open("wb") as file:
            file.write(safetensors_header({key: TensorInfo("bfloat16", shapes[key]) for key in shard.keys}))
            for key in shard.keys:
                left = prod(shapes[key])
                while left:  # a little at a time: what this process held at most counts as its children's
                    bits = random.integers(0, 1 << 16, min(left, 1 << 20), np.uint16)
                    file.write((bits & 0xBFFF).tobytes())
                    left -= len(bits)
    (folder / "config.json").write_text(json.dumps(config))
    if len(shards) > 1:
        (folder / INDEX_FILE).write_text(json.dumps(shard_index(shards, sizes)))


def main() -> None:
    """Print a table a command; the first row of each is the copy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--family", choices=FAMILIES, default="llama")
    parser.add_argument("--to", choices=("torch_dist", "fsdp_dtensor"), default="torch_dist")
    parser.add_argument("--options", nargs="*", default=[], help="of both commands, without their dashes")
    given = parser.parse_args()
    folder = given.folder / "bench_hf"
    hf, source, out, report = (folder / name for name in ("hf", "run", "out", "report.json"))
    shutil.rmtree(folder, ignore_errors=True)
    tool = [sys.executable, "-m", "ckpt_tools"]
    said = ["-q", "--report", str(report), *(f"--{word}" for word in given.options)]
    to = ["--to", given.to, *(["--no-fresh-optimizer"] if given.to == "fsdp_dtensor" else [])]
    try:
        make_model(hf, sized(given.family, given.gib))
        timed([*tool, "import-hf", str(hf), str(source), *to, *said])
        timed([*tool, "export-hf", str(source), str(out), *said])
        files = [path.name for path in hf.glob("*.safetensors")]
        assert filecmp.cmpfiles(hf, out, files, shallow=False)[0] == files
        shutil.rmtree(out)
        imported = [*tool, "import-hf", str(hf), str(out), *to, *said]
        for name, sample, command in (
            ("import-hf", source, imported),
            ("export-hf", hf, [*tool, "export-hf", str(source), str(out), *said]),
        ):
            print(f"## {name}, {given.family}, {given.to}, {given.folder}\n")
            compare(name, sample, command, out, report, given.runs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compare(name: str, sample: Path, command: list[str], out: Path, report: Path, runs: int) -> None:
    """Copy what a command writes, and run the command, in turn; as a table."""
    copy, own = Row(f"cp -r of what {name} writes"), Row(name)
    for _ in range(runs):
        for row, words in ((copy, ["cp", "-r", str(sample), str(out)]), (own, command)):
            seconds, anonymous, resident = timed(words)
            row.seconds.append(seconds)
            row.anonymous, row.resident = max(row.anonymous, anonymous), max(row.resident, resident)
            shutil.rmtree(out)
        written = json.loads(report.read_text())["written"]
        own.moving.append(written["seconds"])
        own.ways = how(written)
    size = sum(path.stat().st_size for path in sample.rglob("*") if path.is_file())
    print_table([copy, own], size, runs)
    moving = statistics.median(a / b for a, b in zip(own.moving, copy.seconds, strict=True))
    print(f"\nmoving / cp: {moving:.2f}; largest RSS {own.resident / 2**20:.0f} MiB\n", flush=True)


if __name__ == "__main__":
    main()
