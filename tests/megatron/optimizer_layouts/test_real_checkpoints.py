"""Every optimizer state of every real checkpoint, bit for bit against the unsharded truth beside it."""

import re
from pathlib import Path

import numpy as np
import pytest

from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.megatron.run_state.common_state import read_common_state
from ckpt_tools.megatron.torch_dist.optimizer_layouts import bucket_proof
from ckpt_tools.megatron.torch_dist.optimizer_layouts.reader import read_optimizer_states
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import OptimizerStates
from ckpt_tools.megatron.torch_dist.stacking import Slice, sort_keys
from ckpt_tools.model.catalog import Catalog
from tests.conftest import fixture_dir

from .materialise import Bits, read_sources, read_weight

LAYOUTS = {
    "bridge_dense_fr_tp2_dp2": "fully_reshardable",
    "main_dense_dpr_pp2_vpp2_tied": "dp_reshardable",
    "main_gdn_fr_tp2": "fully_reshardable",
    "main_llava_fr_tp2": "fully_reshardable",
    "main_mla_mtp_moe_fr_tp2": "fully_reshardable",
    "main_moe_fr_ep2": "fully_reshardable",
    "v011_dense_ms_tp2_dp1": "fully_sharded_model_space",
    "v013_dense_dpzero_tp2_dp2": "dp_zero_gather_scatter",
    "v013_dense_ms_tp2_dp2": "fully_sharded_model_space",
    "v013_moe_ms_ep2": "fully_sharded_model_space",
    "v014_dense_ms_tp2_dp2": "fully_sharded_model_space",
    "v014_dense_ms_tp2_dp2_te": "fully_sharded_model_space",
    "v014_moe_dpzero_ep2": "dp_zero_gather_scatter",
    "v015_dense_ms_tp2_dp1_torchadam": "fully_sharded_model_space",
    "v015_dense_ms_tp2_dp2": "fully_sharded_model_space",
    "v015_moe_ms_etp2_shared": "fully_sharded_model_space",
    "v016_dense_dpr_tp2_dp2": "dp_reshardable",
    "v016_dense_fr_tp2_dp2_te": "fully_reshardable",
    "v016_dense_nodistopt_tp2": "non_distributed",
    "v016_dense_weightsonly_tp2": "none",
    "bridge_hfimport": "none",
}
# Parts of a fused projection, in the order in which the truth of main_gdn_fr_tp2 has them (its README).
FUSED = ("query", "key", "value", "z", "beta", "alpha")

Opened = tuple[Files, Catalog, OptimizerStates | None]


def open_checkpoint(folder: Path, *, sample_only: bool = False) -> Opened:
    iteration = next(iter(folder.glob("iter_*")), folder / "checkpoint")
    files = open_files(str(iteration))
    catalog = read_catalog(files)
    common = read_common_state(files, catalog)
    return files, catalog, read_optimizer_states(files, catalog, common, sample_only=sample_only)


def live_names(parameter: Slice) -> list[str]:
    """Names that a slice can have in the truth: experts numbered, norms fused or of their own."""
    name = parameter.name
    if parameter.expert is not None:
        name = name.replace(".experts.experts.", f".experts.local_experts.{parameter.expert}.")
    local = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    local = local.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    return [n.replace(".transformer_layer.", ".mtp_model_layer.") for n in (name, local)]


def collect(opened: Opened) -> dict[str, list[tuple[Slice, Bits]]]:
    """`<kind>/<candidate live names joined by |>` -> slices; parts of a fused parameter come together."""
    files, catalog, states = opened
    out: dict[str, list[tuple[Slice, Bits]]] = {}
    for parameter in sort_keys(catalog).parameters:
        names = "|".join(
            re.sub(rf"\.(weight|bias)\.({'|'.join(FUSED)})$", r".\1", n) for n in live_names(parameter)
        )
        out.setdefault(f"model/{names}", []).append((parameter, read_weight(files, catalog, parameter)))
        for kind in states.kinds if states is not None else ():
            if states is not None and (kind, parameter.key) in states.states:
                sources = states.sources(kind, parameter.key, parameter.lead)
                value = read_sources(files, catalog, states, sources)
                out.setdefault(f"{kind}/{names}", []).append((parameter, value))
    return out


def assert_equal_to_truth(folder: Path, opened: Opened) -> None:
    truth = _load_bits(folder / "truth.safetensors")
    seen = set()
    for joined, parts in collect(opened).items():
        kind, names = joined.split("/")
        key = next(f"{kind}/{name}" for name in names.split("|") if f"{kind}/{name}" in truth)
        ordered = sorted(parts, key=lambda part: _fused_index(part[0].name))
        value = np.concatenate([bits for _, bits in ordered]) if len(parts) > 1 else parts[0][1]
        assert value.shape == truth[key].shape and value.tobytes() == truth[key].tobytes(), key
        seen.add(key)
    assert seen == set(truth)


def _fused_index(name: str) -> int:
    part = name.rsplit(".", 1)[-1]
    return FUSED.index(part) if part in FUSED else 0


def _load_bits(path: Path) -> dict[str, Bits]:
    import torch
    from safetensors.torch import load_file

    integers = {4: torch.int32, 2: torch.int16}
    return {
        k: t.view(integers[t.itemsize]).numpy().view(f"u{t.itemsize}") for k, t in load_file(path).items()
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_states_equal_the_truth(name):
    folder = fixture_dir(name)
    opened = open_checkpoint(folder)
    states = opened[2]
    assert (states.layout if states is not None else "none") == LAYOUTS[name]
    if states is not None:
        assert states.kinds == ("master", "exp_avg", "exp_avg_sq")
    assert_equal_to_truth(folder, opened)


def test_archives_of_another_writer_than_today_s_are_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_proof, "usual_item", lambda *_: None)
    folder = fixture_dir("v016_dense_dpr_tp2_dp2")
    assert_equal_to_truth(folder, open_checkpoint(folder))
