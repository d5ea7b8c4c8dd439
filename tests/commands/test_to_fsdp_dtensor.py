"""The main job on real checkpoints, judged by stock torch and by native Megatron-FSDP checkpoints."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckpt_tools import TargetOptions, build_group_map
from tests.commands import oracle
from tests.commands.made import fsdp, iteration_of
from tests.conftest import all_checkpoints, fixture_dir

OPTIMIZER = "optimizer.state.module.module.module."
PAIRS = [
    ("core019_llama_tp2_fully_reshardable", "core019_llama_tp2_native_fsdp_dtensor"),
    ("core019_llama_tp2_dp_reshardable", "core019_llama_tp2_native_fsdp_dtensor"),
    ("core019_gpt3_tp2_fully_reshardable", "core019_gpt3_tp2_native_fsdp_dtensor"),
    ("core019_moe_ep2_fully_reshardable", "core019_moe_dp1_native_fsdp_dtensor"),
]


def cases() -> list[Path]:
    """Folders of source checkpoints: ours but Transformer Engine's (`test_te_fixtures`), CKPT_TOOLS_FIXTURES' too."""
    found = all_checkpoints("cpu", "two_gpus")
    for parent in filter(None, os.environ.get("CKPT_TOOLS_FIXTURES", "").split(":")):
        found = {folder.name: folder for folder in Path(parent).iterdir()} | found
    return [
        folder
        for _, folder in sorted(found.items())
        if (folder / "checkpoint").is_dir() or list(folder.glob("iter_*/metadata.json"))
    ]


def source_of(case: Path) -> Path:
    return case / "checkpoint" if (case / "checkpoint").is_dir() else next(case.glob("iter_*"))


def options_of(case: Path) -> TargetOptions:
    file = case / "convert.args"
    words = shlex.split(file.read_text()) if file.exists() else []
    given: dict[str, Any] = dict(zip(words[::2], words[1::2], strict=True))
    return TargetOptions(
        layer_spec=given.get("--layer-spec"), tp=int(given["--tp"]) if "--tp" in given else None
    )


def made_of(case: Path, **options: Any) -> Path:
    """The conversion of a case, with the options that it needs."""
    asked = options_of(case)
    return fsdp(source_of(case), layer_spec=asked.layer_spec, tp=asked.tp, **options)


def shapes(folder: Path) -> dict[str, object]:
    return {
        key: (m.properties.dtype, tuple(m.size)) if isinstance(m, TensorStorageMetadata) else "BYTES"
        for key, m in oracle.metadata(folder).state_dict_metadata.items()
    }


@pytest.mark.parametrize(("source", "native"), PAIRS)
def test_keys_shapes_types_and_values_are_those_of_the_native_checkpoint(source, native):
    """Group fields, scheduler and progress too."""
    native_dir, out = iteration_of(native), made_of(fixture_dir(source))
    ours, theirs = shapes(out), shapes(native_dir)
    assert ours == theirs
    assert oracle.metadata(out).planner_data == oracle.metadata(native_dir).planner_data
    assert not (out / "metadata.json").exists()
    compared = 0
    for key, shape in theirs.items():
        if shape == "BYTES" and not key.startswith(("rng_state", "args")):
            assert oracle.item(out, key) == oracle.item(native_dir, key), key
            compared += 1
    assert compared > 200


def expected_values(truth: Path, optimizer: bool) -> dict[str, torch.Tensor]:
    """The truth of a case under the keys a conversion must give: fc1 split, masters as the model's values."""
    with safe_open(truth, "pt") as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  not a dict
    gated = {
        re.sub(r"linear_fc2\.weight(\d*)$", r"linear_fc1.weight\1", key.partition("/")[2]): t.shape[1]
        for key, t in stored.items()
        if re.search(r"linear_fc2\.weight\d*$", key)
    }
    expected: dict[str, torch.Tensor] = {}
    for key, tensor in stored.items():
        state, _, name = key.partition("/")
        if state == "model" and f"master/{name}" in stored:
            continue
        prefix, suffix = ("model.module.", "") if state in ("model", "master") else (OPTIMIZER, f".{state}")
        if tensor.shape and 2 * gated.get(name, -1) == tensor.shape[0]:
            for half, part in zip("wv", tensor.chunk(2), strict=True):
                expected[f"{prefix}{name}_{half}{suffix}"] = part
        else:
            expected[f"{prefix}{name}{suffix}"] = tensor
    return expected


def spelled_for_main(name: str) -> str:
    """Main writes MTP inner layers under their disk name; the truth has live names."""
    return name.replace(".mtp_model_layer.", ".transformer_layer.")


@pytest.mark.parametrize(
    "case", [c for c in cases() if (c / "truth.safetensors").exists()], ids=lambda c: c.name
)
def test_every_value_equals_the_truth_bit_for_bit(case):
    ours = oracle.tensors(made_of(case, dialect="main" if case.name.startswith("bridge_") else None))
    expected = {
        spelled_for_main(key): t for key, t in expected_values(case / "truth.safetensors", True).items()
    }
    stored = {key for key in ours if not key.startswith("rng_state") and not key.endswith(".step")}
    assert stored == set(expected)
    different = [key for key, tensor in expected.items() if not oracle.same_bytes(ours[key], tensor)]
    assert different == []


@pytest.mark.parametrize(
    "case", [c for c in cases() if (c / "param_groups.json").exists()], ids=lambda c: c.name
)
def test_derived_groups_equal_the_recorded_ones(case):
    recorded = json.loads((case / "param_groups.json").read_text())["param_to_group"]
    derived = build_group_map(source_of(case), options_of(case)).groups
    ours = {key.removeprefix("model.module."): group for key, group in derived.items()}
    tied = "output_layer.weight" not in ours  # the record of a tied model lists the shared matrix twice
    assert ours == {
        key: group for key, group in recorded.items() if not (tied and key == "output_layer.weight")
    }


DUMPED = [c for c in cases() if (c / "param_to_param_group_map" / "param_to_param_group_map.json").exists()]


@pytest.mark.parametrize("case", DUMPED, ids=lambda c: c.name)
def test_derived_maps_equal_the_dumped_ones(case):
    dumped = json.loads((case / "param_to_param_group_map" / "param_to_param_group_map.json").read_text())
    assert dict(build_group_map(case, options_of(case)).groups) == dumped
    assert dict(build_group_map(case / "param_to_param_group_map").groups) == dumped
