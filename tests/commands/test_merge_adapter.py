"""`merge-adapter`: bit-equal to whole tensors in torch, for every way that adapters are stored; what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt_tools import ExportOptions, MergeOptions, export_hf, merge_adapter
from ckpt_tools.cli.app import run
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.errors import CorruptCheckpointError, MappingError, UnsupportedCheckpointError, UsageError
from ckpt_tools.execute.run import WriteOptions
from ckpt_tools.model.box import Box
from tests.commands import oracle
from tests.commands.made import fsdp, hf, stripped, torch_dist
from tests.conftest import RUN, fixture_dir
from tests.damage import ITERATION
from tests.folders import is_sound
from tests.megatron.adapter_checkpoints import FC1, FC2, PROJ, QKV, AdapterFolder, canonical, lora
from tests.synthetic import DcpFolder

HEADS, GROUPS, DIM = 4, 2, 8


def whole_delta(made: AdapterFolder, module: str) -> torch.Tensor:
    """What is added to the weight of a module, its parts put together head by head."""
    if module in made.matrices:
        return made.delta(module)
    if module == FC1:
        return torch.cat([made.delta(f"{FC1}.adapter_{part}") for part in ("gate", "up")], 1)
    q, k, v = (made.delta(f"{QKV}.adapter_{part}") for part in "qkv")
    rows = []
    for group in range(GROUPS):
        for head in range(HEADS // GROUPS):
            rows.append(q[:, (group * (HEADS // GROUPS) + head) * DIM :][:, :DIM])
        rows += [k[:, group * DIM :][:, :DIM], v[:, group * DIM :][:, :DIM]]
    return torch.cat(rows, 1)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("make", [lora, canonical])
def test_parts_are_added_to_masters_and_weights_are_their_rounding(make, tp, tmp_path):
    made = make(tp=tp)
    report = merge_adapter(str(RUN), str(made.save(tmp_path / "adapter")), str(tmp_path / "out"))
    before, after = oracle.tensors(RUN / ITERATION), oracle.tensors(tmp_path / "out" / ITERATION)
    weights = {key for key in before if not key.startswith("optimizer.")}
    assert after.keys() == weights
    adapted = {f"{module.removesuffix('.adapter')}.weight": module for module in (QKV, PROJ, FC1, FC2)}
    for key in weights:
        expected = before[key]
        if key in adapted:
            master = before[f"optimizer.state.param.{key}"].reshape(expected.shape)
            expected = (master.double() + whole_delta(made, adapted[key])).float().to(expected.dtype)
            assert not torch.equal(expected, before[key])
        assert oracle.same_bytes(after[key], expected), key
    assert (report.masters.use, report.masters.found.tensors) == ("merged", 8)
    assert is_sound(tmp_path / "out")
    assert any("scale 2 (alpha 6, by run_config.yaml)" in note for note in report.notes)


def bfloat16_sum(weight: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The exact sum in bfloat16: a double that float32 does not hold is halfway to no bfloat16."""
    exact = weight.double() + delta
    near = exact.float()
    up = torch.nextafter(near, torch.full_like(near, torch.inf))
    down = torch.nextafter(near, torch.full_like(near, -torch.inf))
    halfway = near.view(torch.int32) & 0xFFFF == 0x8000
    above, below = halfway & (exact > near.double()), halfway & (exact < near.double())
    return torch.where(above, up, torch.where(below, down, near)).bfloat16()


def weights_only() -> Path:
    return stripped(RUN.name).parent


@pytest.mark.parametrize("memory", [1 << 20, 96 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_without_masters_the_sum_is_rounded_once(dtype, memory, tmp_path):
    made, base = lora(dtype=dtype, alpha=0.7), weights_only()
    options = MergeOptions(write=WriteOptions(memory_bytes=memory))
    report = merge_adapter(str(base), str(made.save(tmp_path / "adapter")), str(tmp_path / "out"), options)
    before, after = oracle.tensors(base / ITERATION), oracle.tensors(tmp_path / "out" / ITERATION)
    for module in made.matrices:
        key = f"{module.removesuffix('.adapter')}.weight"
        assert oracle.same_bytes(after[key], bfloat16_sum(before[key], made.delta(module))), key
    assert report.masters.use == "none"


def wrapped(base: Path, made: AdapterFolder, place: Path, to_wrap: bool) -> Path:
    """Base and adapter in one checkpoint, with the optimizer of the adapter."""
    folder = DcpFolder(place)
    for key, tensor in oracle.tensors(base / ITERATION).items():
        name = key.replace(".weight", ".to_wrap.weight") if to_wrap and "linear" in key else key
        folder.tensor(name, "bfloat16", tensor.view(torch.uint16).numpy())
    made.fill(folder)
    for module, (a, _) in made.matrices.items():
        key = f"optimizer.state.exp_avg.{module}.linear_in.weight"
        folder.tensor(key, "float32", a.float().numpy())
    with open_checkpoint(str(base)) as opened:
        folder.object("common_state/shard_0_1", [opened.common.values])
    folder.finish()
    made.finish(place)
    return place


@pytest.mark.parametrize("to_wrap", [True, False])
def test_a_wrapped_checkpoint_merges_by_itself(to_wrap, tmp_path):
    made, base = lora(tp=2), weights_only()
    apart, together = tmp_path / "apart", tmp_path / "together"
    merge_adapter(str(base), str(made.save(tmp_path / "adapter")), str(apart))
    merge_adapter(str(wrapped(base, made, tmp_path / "wrapped", to_wrap)), None, str(together))
    found, expected = oracle.tensors(together), oracle.tensors(apart / ITERATION)
    oracle.assert_same(found, expected)


def test_masters_in_the_place_of_weights_are_merged_as_such(tmp_path):
    """fsdp_dtensor from fsdp_dtensor: fp32 sums. Converted back it is what a torch_dist base gives."""
    made = canonical(tp=2)
    adapter = str(made.save(tmp_path / "adapter"))
    base = fsdp(RUN.name)
    report = merge_adapter(str(base.parent), adapter, str(tmp_path / "merged"))
    assert report.masters.use == "merged" and is_sound(tmp_path / "merged")
    merge_adapter(str(RUN), adapter, str(tmp_path / "out"))
    before = oracle.tensors(base)
    after = oracle.tensors(tmp_path / "merged" / ITERATION)
    key = "model.module.decoder.layers.1.self_attention.linear_proj.weight"
    expected = (before[key].double() + made.delta(PROJ)[1]).float()
    assert oracle.same_bytes(after[key], expected)
    assert not [key for key in after if key.startswith("optimizer.")]
    oracle.assert_same(torch_dist(tmp_path / "merged", weights_only=True), tmp_path / "out")


MOE = fixture_dir("core019_moe_ep2_fully_reshardable")
EXPERTS = "decoder.layers.1.mlp.experts.experts.linear_fc1"
LAYER = "decoder.layers.1."


def test_adapters_of_experts_router_and_shared_expert(tmp_path):
    made = AdapterFolder(tp=2)
    made.add(f"{EXPERTS}.adapter", (), 96, 32)  # one for all experts
    made.add(f"{EXPERTS.replace('fc1', 'fc2')}.adapter", (4,), 32, 48)  # one each
    made.add(f"{LAYER}mlp.router.adapter", (), 4, 32)
    made.add(f"{LAYER}mlp.shared_experts.linear_fc1.adapter", (), 48, 32)
    made.add(f"{LAYER}self_attention.linear_proj", (), 32, 32)  # of torch's own linear: no `.adapter`
    merge_adapter(str(MOE), str(made.save(tmp_path / "adapter")), str(tmp_path / "out"))
    before, after = oracle.tensors(MOE / ITERATION), oracle.tensors(tmp_path / "out" / ITERATION)
    for module in made.matrices:
        key = f"{module.removesuffix('.adapter')}.weight"
        master = before[f"optimizer.state.param.{key}"].reshape(before[key].shape)
        expected = (master.double() + made.delta(module)).float().bfloat16()
        assert oracle.same_bytes(after[key], expected), key
    same = [k for k in after if f"{k.removesuffix('.weight')}.adapter" not in made.matrices]
    assert sum(oracle.same_bytes(after[key], before[key]) for key in same) == len(same) - 1


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_halves_of_an_fc1_without_a_gate_belong_together_again(tp, tmp_path):
    """Bridge cuts B of every fc1 as if it had a gate; what a rank held is put together again."""
    made = AdapterFolder(tp=tp, gated=False)
    made.add(FC1, (2,), 128, 32)
    adapter = str(made.save(tmp_path / "adapter"))
    base = weights_only()
    merge_adapter(str(base), adapter, str(tmp_path / "out"))
    before, after = oracle.tensors(base / ITERATION), oracle.tensors(tmp_path / "out" / ITERATION)
    key = "decoder.layers.mlp.linear_fc1.weight"
    assert oracle.same_bytes(after[key], bfloat16_sum(before[key], made.delta(FC1)))


@pytest.mark.parametrize("form", ["fsdp_dtensor", "nemo"])
def test_other_writers_names_are_understood(form, tmp_path):
    """Megatron-FSDP names layers one by one behind wrappers and cuts rows; NeMo 2 has `module.` and `weights/`."""
    made, base = canonical(rank=4), weights_only()
    folder = DcpFolder(tmp_path / "adapter" / ("weights" if form == "nemo" else ""))
    for module, pair in made.matrices.items():
        for side, whole in zip(("in", "out"), pair, strict=True):
            if form == "nemo":
                folder.tensor(
                    f"module.{module}.linear_{side}.weight", "bfloat16", whole.view(torch.uint16).numpy()
                )
                continue
            for layer, part in enumerate(whole):
                name = module.replace("layers.", f"layers.{layer}.")
                step = part.shape[0] // 4
                cut = [Box((row * step, 0), (step, part.shape[1])) for row in range(4)]
                values = part.contiguous().view(torch.uint16).numpy()
                folder.tensor(f"model.module.{name}.linear_{side}.weight", "bfloat16", values, cut)
    if form == "fsdp_dtensor":
        folder.tensor("rng_state.(0, 0).0.torch_rng_state", "uint8", np.zeros(8, np.uint8))
    folder.finish()
    merge_adapter(str(base), str(tmp_path / "adapter"), str(tmp_path / "out"), MergeOptions(alpha=made.alpha))
    merge_adapter(str(base), str(made.save(tmp_path / "same")), str(tmp_path / "expected"))
    found, expected = (oracle.tensors(tmp_path / name / ITERATION) for name in ("out", "expected"))
    for key, tensor in expected.items():
        assert oracle.same_bytes(found[key], tensor), key


def test_weights_that_the_adapter_holds_whole_are_taken(tmp_path):
    made, base = lora(), weights_only()
    folder = DcpFolder(tmp_path / "adapter")
    made.fill(folder)
    head = torch.randn((224, 32), generator=torch.Generator().manual_seed(4)).bfloat16()
    folder.tensor("output_layer.weight", "bfloat16", head.view(torch.uint16).numpy())
    folder.finish()
    made.finish(tmp_path / "adapter")
    report = merge_adapter(str(base), str(tmp_path / "adapter"), str(tmp_path / "out"))
    after = oracle.tensors(tmp_path / "out" / ITERATION)
    assert oracle.same_bytes(after["output_layer.weight"], head)
    assert "taken from the adapter, which holds them whole: output_layer.weight" in report.notes


def without_config(made: AdapterFolder, tmp_path: Path) -> str:
    place = made.save(tmp_path / "adapter")
    (place / "run_config.yaml").unlink()
    return str(place)


def test_alpha_is_asked_for_where_nothing_tells_it(tmp_path):
    adapter, out = without_config(lora(), tmp_path), tmp_path / "out"
    with pytest.raises(UsageError, match="give that of the training job with --alpha"):
        merge_adapter(str(RUN), adapter, str(out))
    report = merge_adapter(str(RUN), adapter, str(out), MergeOptions(alpha=6))
    assert any("(alpha 6, by --alpha)" in note for note in report.notes)
    told = merge_adapter(str(RUN), str(lora().save(tmp_path / "told")), str(tmp_path / "same"))
    found, expected = (oracle.tensors(place / ITERATION) for place in (out, tmp_path / "same"))
    assert all(oracle.same_bytes(found[key], expected[key]) for key in expected)
    assert told.tensors == report.tensors


def refused(error: type[Exception], base: Path, adapter: object, tmp_path: Path, **options: object) -> str:
    out = tmp_path / "refused"
    place = None if adapter is None else str(adapter)
    with pytest.raises(error) as caught:
        merge_adapter(str(base), place, str(out), MergeOptions(**options))  # type: ignore[arg-type]
    assert not out.exists()
    return str(caught.value)


def test_what_contradicts_itself_is_refused(tmp_path):
    adapter = lora().save(tmp_path / "a")
    assert "run_config.yaml of" in refused(UsageError, RUN, adapter, tmp_path, alpha=5)
    config = adapter / "run_config.yaml"
    text = config.read_text()
    config.write_text(text.replace("dim: 3", "dim: 4"))
    assert "have dim 4" in refused(MappingError, RUN, adapter, tmp_path)
    config.write_text(text.replace("lora.LoRA", "dora.DoRA"))
    assert "says that the adapter is DoRA" in refused(UnsupportedCheckpointError, RUN, adapter, tmp_path)
    config.write_text("peft: [")
    assert "not readable YAML" in refused(CorruptCheckpointError, RUN, adapter, tmp_path)


@pytest.mark.parametrize(
    ("module", "out", "into", "message"),
    [
        ("decoder.layers.self_attention.linear_qkv.adapter", 63, 32, "its adapter makes (63, 32), where the"),
        ("decoder.layers.self_attention.linear_qkv.adapter", 64, 31, "its adapter makes (64, 31)"),
        ("decoder.layers.self_attention.linear_qkv.adapter.adapter_q", 16, 32, "its adapter (q) makes (16, 32)"),
        ("decoder.layers.mlp.linear_fc1.adapter.adapter_up", 32, 32, "its adapter (up) makes (32, 32)"),
        ("decoder.layers.mlp.linear_fc9.adapter", 32, 32, "0.mlp.linear_fc9.weight: the base has no such weight"),
    ],
)  # fmt: skip
def test_adapters_that_do_not_fit_are_named(module, out, into, message, tmp_path):
    made = AdapterFolder()
    made.add(module, (2,), out, into)
    text = refused(MappingError, RUN, made.save(tmp_path / "a"), tmp_path)
    assert text.startswith("the adapter does not fit the base:") and message in text
    assert "decoder.layers.1." in text


@pytest.mark.parametrize(
    "shapes", [((8,), (8,)), ((), ()), ((2, 3, 32), (64, 3)), ((2, 0, 32), (2, 64, 0)), ((3, 32), (64, 3))]
)
def test_shapes_that_are_those_of_no_adapter_are_named(shapes, tmp_path):
    folder = DcpFolder(tmp_path / "a")
    for side, shape in zip(("in", "out"), shapes, strict=True):
        folder.tensor(f"{QKV}.linear_{side}.weight", "float32", np.ones(shape, np.float32))
    folder.finish()
    text = refused(MappingError, RUN, tmp_path / "a", tmp_path, alpha=2)
    assert "are not A and B of one adapter" in text or "does not fit its name" in text


@pytest.mark.parametrize("alpha", [float("nan"), float("inf")])
def test_alpha_is_a_number(alpha, tmp_path):
    adapter = without_config(lora(), tmp_path)
    assert "a number is expected" in refused(UsageError, RUN, adapter, tmp_path, alpha=alpha)


def test_half_an_adapter_and_other_kinds_are_named(tmp_path):
    def with_tensor(key: str, without: str = "") -> Path:
        made, place = lora(), tmp_path / key
        folder = DcpFolder(place)
        made.matrices = {m: v for m, v in made.matrices.items() if m != without}
        made.fill(folder)
        folder.tensor(key, "float32", np.ones((2, 4, 4), np.float32))
        folder.finish()
        made.finish(place)
        return place

    half = with_tensor(f"{FC2}.linear_in.weight", FC2)
    assert (
        "linear_in.weight of" in (text := refused(MappingError, RUN, half, tmp_path))
        and "linear_out is missing" in text
    )
    half = with_tensor(f"{FC2}.linear_out.weight", FC2)
    assert "its linear_in is missing" in refused(MappingError, RUN, half, tmp_path)
    for key, why in (
        (f"{FC2}.weight_magnitude", "DoRA: its merged weight is scaled row by row"),
        ("decoder.layers.mlp.linear_fc2.lora_A.default.weight", "(ms-swift)"),
        ("model.adapter_layer.kqv_adapter.linear_in.weight", "an adapter of NeMo 1"),
    ):
        text = refused(UnsupportedCheckpointError, RUN, with_tensor(key), tmp_path)
        assert key in text and why in text


@pytest.mark.parametrize("ep", [2, 8])
def test_adapters_of_experts_that_were_not_all_saved_are_refused(ep, tmp_path):
    made = AdapterFolder(ep=ep)
    made.add(f"{EXPERTS}.adapter", (), 96, 32)
    text = refused(UnsupportedCheckpointError, MOE, made.save(tmp_path / "a"), tmp_path)
    assert f"kept that of one rank only (there were {ep})" in text


def test_other_pairs_are_refused_with_the_way_that_works(tmp_path):
    adapter = lora().save(tmp_path / "lora")
    model, peft = hf(RUN.name), tmp_path / "peft"
    export_hf(adapter, peft, ExportOptions(peft=True, hf_config=str(model)))
    for base, given in ((RUN, peft), (model, peft), (model, adapter), (model, None)):
        text = refused(UnsupportedCheckpointError, base, given, tmp_path)
        assert "import-hf HF OUT --adapter" in text and "merge_and_unload" in text
    assert "name its adapter behind it" in refused(UnsupportedCheckpointError, RUN, None, tmp_path)
    assert "holds no low-rank adapter" in refused(UnsupportedCheckpointError, RUN, RUN, tmp_path)
    assert "is a Hugging Face model, not an adapter" in refused(
        UnsupportedCheckpointError, RUN, model, tmp_path
    )
    with pytest.raises(UsageError, match="overlap"):
        merge_adapter(str(RUN), str(adapter), str(adapter / "out"))


@pytest.mark.parametrize("command", ["convert", "merge-adapter", "export-hf"])
def test_an_adapter_of_ms_swift_is_sent_to_ms_swift(command, user_cases, tmp_path, capsys):
    assert run([command, str(user_cases / "swift_mcore_lora" / "run"), str(tmp_path / "out")]) in (3, 5)
    error = capsys.readouterr().err
    assert "swift export --mcore_adapters" in error and "merge-adapter" not in error


def test_a_damaged_adapter_is_found_by_its_checksum(tmp_path):
    adapter = lora().save(tmp_path / "a")
    file = adapter / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    at = data.index(lora().matrices[PROJ][0][0].contiguous().view(torch.uint8).numpy().tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"linear_proj\.adapter\.linear_in\.weight"):
        merge_adapter(str(RUN), str(adapter), str(tmp_path / "out"))


def test_a_sum_that_is_too_large_is_refused(tmp_path):
    made = AdapterFolder(dtype=torch.float32)
    made.add(PROJ, (2,), 32, 32)
    made.matrices[PROJ] = tuple(matrix * 1e20 for matrix in made.matrices[PROJ])
    with pytest.raises(
        CorruptCheckpointError, match=r"with the adapter's part a weight is \S+, too large for float32"
    ):
        merge_adapter(str(RUN), str(made.save(tmp_path / "a")), str(tmp_path / "out"))


@pytest.mark.parametrize("side", [0, 1])
def test_an_adapter_that_is_not_finite_is_refused(side, tmp_path):
    made = lora()
    made.matrices[PROJ][side][0, 1, 2] = torch.nan
    adapter, name = made.save(tmp_path / "a"), ("in", "out")[side]
    with pytest.raises(CorruptCheckpointError) as caught:
        merge_adapter(str(RUN), str(adapter), str(tmp_path / "out"))
    assert not (tmp_path / "out" / ITERATION).exists()
    text = str(caught.value)
    assert text.startswith(
        f"{PROJ.removesuffix('.adapter').replace('layers.', 'layers.0.')}.weight with its adapter"
    )
    assert f"the adapter's {PROJ}.linear_{name}.weight of {adapter}" in text and "holds nan" in text
