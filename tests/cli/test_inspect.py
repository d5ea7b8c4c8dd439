"""`inspect` and `print-torch-dcp-in-json` on recorded checkpoints, with golden values."""

import json
import math
import shutil
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_tools.cli.app import run
from ckpt_tools.commands.look.dcp_json import json_value
from ckpt_tools.human import human_bytes
from tests.conftest import LLAMA, all_checkpoints, fixture_dir


def path_of(name: str) -> str:
    folder = fixture_dir(name)
    return str(folder / "checkpoint" if (folder / "checkpoint").is_dir() else folder)


def inspected(capsys: pytest.CaptureFixture[str], name: str, *options: str) -> dict[str, Any]:
    assert run(["inspect", path_of(name), "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


OLD, NEW, FILE, OBJECT = "0.13 to 0.15", "0.19 or later", "common.pt", "common_state"
# writer, common state, mcore_data, optimizer layout
GOLDEN = {
    "core016_llama_tp2_dp_reshardable": ("0.16 to 0.18", FILE, False, "dp_reshardable"),
    "core016_llama_tp2_fully_reshardable": ("0.16 to 0.18", FILE, False, "fully_reshardable"),
    "core019_llama_tp2_fully_reshardable": (NEW, OBJECT, False, "fully_reshardable"),
    "core019_gpt3_tp2_fully_reshardable": (NEW, OBJECT, False, "fully_reshardable"),
    "core019_moe_ep2_fully_reshardable": (NEW, OBJECT, False, "fully_reshardable"),
    "core019_llama_tp2_native_fsdp_dtensor": ("Megatron-FSDP", "items", False, "fsdp_dtensor"),
    "bridge_dense_fr_tp2_dp2": ("by Megatron-Bridge", OBJECT, False, "fully_reshardable"),
    "bridge_hfimport": ("by Megatron-Bridge", OBJECT, False, "none"),
    "main_dense_dpr_pp2_vpp2_tied": (NEW, OBJECT, False, "dp_reshardable"),
    "v011_dense_ms_tp2_dp1": ("0.8 to 0.12", FILE, True, "fully_sharded_model_space"),
    "v013_moe_ms_ep2": (OLD, FILE, True, "fully_sharded_model_space"),
    "v013_dense_dpzero_tp2_dp2": (OLD, FILE, True, "dp_zero_gather_scatter"),
    "v014_moe_dpzero_ep2": (OLD, FILE, True, "dp_zero_gather_scatter"),
    "v015_moe_ms_etp2_shared": ("0.15 (", FILE, True, "fully_sharded_model_space"),
    "v016_dense_nodistopt_tp2": ("0.16 to 0.18", FILE, False, "non_distributed"),
    "v016_dense_weightsonly_tp2": ("0.16 to 0.18", FILE, False, "none"),
    "v016_dense_dpr_tp2_dp2": ("0.16 to 0.18", FILE, False, "dp_reshardable"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_facts(name, capsys):
    writer, *facts = GOLDEN[name]
    found = inspected(capsys, name)
    assert writer in found["writer"]
    assert [found["common_state"], found["has_mcore_data"], found["optimizer_layout"]] == facts
    assert found["format"] == ("fsdp_dtensor" if "native" in name else "torch_dist")
    weights = sum(t["bytes"] for t in found["tensors"] if t["role"] == "weight")
    assert weights == sum(t["bytes"] for t in found["totals"] if t["role"] == "weight")
    assert found["tensor_count"] == len(found["tensors"])


@pytest.mark.parametrize(
    "name", [*GOLDEN, "te_llama_dp2_buckets_dpr", "core019_moe_dp1_native_fsdp_dtensor", "tf2_dcp"]
)
def test_sums_are_those_of_all_tensors(name, capsys):
    axes = ("role", "layer", "rank", "dtype", "file")
    found = inspected(capsys, name, *(word for axis in axes for word in ("--by", axis)))
    for axis in axes:
        for what in ("elements", "bytes"):
            assert sum(row[what] for row in found["by"][axis]) == sum(row[what] for row in found["totals"]), (
                axis
            )
    roles = {row["role"]: row["tensors"] for row in found["by"]["role"]}
    assert roles == Counter(tensor["role"] for tensor in found["tensors"])
    layers = {row["layer"]: row["elements"] for row in found["by"]["layer"]}
    assert any(str(label).startswith("decoder.layers.") for label in layers)
    assert ("flat buffers" in layers) == (found["optimizer_layout"] in ("dp_reshardable",))
    parts = [row["file"] for row in found["by"]["file"]]
    assert {row["rank"] for row in found["by"]["rank"]} == {file.split("_")[2] for file in parts}


def test_layers_in_one_tensor_share_its_bytes(capsys):
    found = inspected(capsys, LLAMA, "--by", "layer", "--keys", "*.layers.*", "--keys", "*embedding*")
    rows = {row["layer"]: row for row in found["by"]["layer"]}
    assert list(rows) == ["decoder.layers.0", "decoder.layers.1", None]
    assert rows["decoder.layers.0"]["bytes"] == rows["decoder.layers.1"]["bytes"] > 0
    assert run(["inspect", path_of(LLAMA), "--by", "layer"]) == 0
    out = capsys.readouterr().out
    assert "decoder.layers.1" in out
    assert "linear_qkv" not in out


TRUTHS = [
    pytest.param(file, id=name)
    for name, run in all_checkpoints("cpu").items()
    for file in run.glob("truth.safetensors")
]


@pytest.mark.parametrize("truth", TRUTHS)
def test_parameter_counts_equal_the_unsharded_truth(truth, capsys):
    with truth.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    expected = sum(math.prod(info["shape"]) for key, info in header.items() if key.startswith("model/"))
    assert inspected(capsys, truth.parent.name)["parameters"] == expected


def test_golden_json(capsys):
    found = inspected(capsys, LLAMA)
    assert found["iteration"] == 2
    assert found["root"] == path_of(LLAMA)
    assert found["parallel_sizes"]["tensor_model_parallel_size"] == 2
    assert (found["format"], found["schema_version"], found["parameters"]) == ("torch_dist", 1, 32928)
    assert found["parallel_sizes"]["world_size"] == 2
    assert (found["arguments"]["num_layers"], found["arguments"]["swiglu"]) == (2, True)
    assert found["totals"] == [
        {"role": "weight", "dtype": "bfloat16", "tensors": 9, "elements": 32928, "bytes": 65856},
        {"role": "master", "dtype": "float32", "tensors": 9, "elements": 32928, "bytes": 131712},
        {"role": "exp_avg", "dtype": "float32", "tensors": 9, "elements": 32928, "bytes": 131712},
        {"role": "exp_avg_sq", "dtype": "float32", "tensors": 9, "elements": 32928, "bytes": 131712},
    ]
    assert found["tensors"][0] == {
        "key": "embedding.word_embeddings.weight",
        "dtype": "bfloat16",
        "shape": [224, 32],
        "chunks": 2,
        "bytes": 14336,
        "role": "weight",
    }
    assert found["objects"][-1] == {"key": "rng_state/shard_0.1_1.2", "bytes": 15449}


def test_roles_of_every_layout(capsys):
    for name in (
        "core019_llama_tp2_native_fsdp_dtensor",
        "core016_llama_tp2_dp_reshardable",
        "v013_moe_ms_ep2",
    ):
        found = inspected(capsys, name)
        sums = {t["role"]: t["elements"] for t in found["totals"]}
        assert sums["exp_avg"] == sums["exp_avg_sq"] >= sums["weight"], name
        assert ("master" in sums) == (found["format"] == "torch_dist")


def test_keys_choose_what_is_listed(capsys):
    found = inspected(capsys, LLAMA, "--keys", "*linear_fc2.weight", "--keys", "rng_state/*")
    assert {t["key"].rpartition("decoder.")[2] for t in found["tensors"]} == {"layers.mlp.linear_fc2.weight"}
    assert [o["key"] for o in found["objects"]] == ["rng_state/shard_0.0_1.2", "rng_state/shard_0.1_1.2"]
    assert found["tensor_count"] == 36


def test_group_meta_is_counted_or_listed(capsys):
    name = "core019_llama_tp2_native_fsdp_dtensor"
    assert run(["inspect", path_of(name)]) == 0
    out = capsys.readouterr().out
    assert "and 270 param_to_group_meta objects" in out
    assert "optimizer.param_to_group_meta." not in out
    found = inspected(capsys, name, "--not-ignore-param-to-group-meta", "--enable-msc")
    assert sum(o["key"].startswith("optimizer.param_to_group_meta.") for o in found["objects"]) == 270


def test_tables_for_people(capsys):
    assert run(["inspect", path_of(LLAMA)]) == 0
    captured = capsys.readouterr()
    lines = [" ".join(line.split()) for line in captured.out.splitlines()]
    assert "optimizer layout fully_reshardable" in lines
    assert "weight bfloat16 9 32,928 64.3 KiB" in lines
    assert "decoder.layers.mlp.linear_fc1.weight bfloat16 [2, 128, 32] 8 16.0 KiB" in lines
    assert "common_state/shard_0_1 32,429" in lines
    assert captured.err == ""
    assert "\x1b" not in captured.out


def test_tree(capsys):
    assert run(["inspect", path_of(LLAMA), "--tree", "--keys", "decoder.layers.mlp.*weight"]) == 0
    out = capsys.readouterr().out
    tree = out[out.rindex("fully_reshardable/iter_0000002") :].splitlines()[1:]
    assert [line.rstrip() for line in tree if line.strip()] == [
        "└── decoder",
        "    └── layers",
        "        └── mlp",
        "            ├── linear_fc1",
        "            │   ├── layer_norm_weight  bfloat16 [2, 32]",
        "            │   └── weight  bfloat16 [2, 128, 32]",
        "            └── linear_fc2",
        "                └── weight  bfloat16 [2, 32, 64]",
    ]


def test_escaping_and_units():
    assert [human_bytes(n) for n in (0, 1023, 1024, 1536, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "5.0 TiB",
    ]


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert run(["print-torch-dcp-in-json", *argv]) == 0
    return json.loads(capsys.readouterr().out)


def test_dcp_json_of_tensors_and_values(capsys, tmp_path):
    values = {
        "bf16": torch.tensor(1.5).bfloat16(),
        "list": [1, (2, float("inf"))],
        "big": torch.zeros(5),
        "n": 3,
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(values, checkpoint_id=tmp_path, no_dist=True)
    found = printed(capsys, str(tmp_path))
    assert found["schema_version"] == 1
    assert set(found["tensors"]["big"]) == {"dtype", "shape", "chunks"}
    chunk = found["tensors"]["big"]["chunks"][0]
    assert (chunk["start"], chunk["size"], chunk["file"]) == ([0], [5], "__0_0.distcp")
    assert set(found["objects"]["n"]) == {"bytes"}
    found = printed(capsys, str(tmp_path), "--values")
    assert found["tensors"]["bf16"]["value"] == 1.5
    assert "value" not in found["tensors"]["big"]
    assert found["objects"]["list"]["value"] == [1, [2, "inf"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".metadata", "__0_0.distcp"]


def test_dcp_json_of_a_real_checkpoint(capsys, tmp_path):
    out = tmp_path / "out.json"
    folder = fixture_dir(LLAMA) / "iter_0000002"
    assert run(["print-torch-dcp-in-json", str(folder), "--values", "-o", str(out)]) == 0
    assert capsys.readouterr().out == ""
    common = json.loads(out.read_text())["objects"]["common_state/shard_0_1"]["value"][0]
    assert common["iteration"] == 2
    assert common["args"]["class"] == "argparse.Namespace"
    assert common["args"]["state"]["params_dtype"] == "torch.bfloat16"
    assert common["optimizer"]["optimizer"]["param_groups"][0]["betas"] == [0.9, 0.999]


MAPS = [
    pytest.param(file, id=file.parts[-3])
    for run in all_checkpoints("two_gpus").values()
    for file in run.glob("*/param_to_param_group_map.json")
]


@pytest.mark.parametrize("recorded", MAPS)
def test_map_file_equals_nvidias(recorded, tmp_path, capsys):
    for file in recorded.parent.iterdir():
        if file.suffix != ".json":
            shutil.copyfile(file, tmp_path / file.name)
    before = {file.name for file in tmp_path.iterdir()}
    printed(capsys, str(tmp_path), "--no-write")
    assert {file.name for file in tmp_path.iterdir()} == before
    assert run(["print-torch-dcp-in-json", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"wrote {tmp_path}/param_to_param_group_map.json\n"
    assert (tmp_path / recorded.name).read_bytes() == recorded.read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == before | {recorded.name}


def test_values_that_print_forever_are_cut():
    """A value whose parts are shared is small as a pickle and endless as text; so is one that holds itself."""
    value: list[Any] = []
    for _ in range(50):
        value = [value, value]
    assert len(json.dumps(json_value(value))) < 400_000
    endless: list[Any] = []
    endless.append(endless)
    assert json.dumps(json_value(endless)).count("[") == 65
