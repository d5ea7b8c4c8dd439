"""Jobs with a precision-aware optimizer: masters joined from weights and remainders, against whole torch tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpt_tools.cli.app import run
from ckpt_tools.commands.check.diff import diff_checkpoints
from ckpt_tools.commands.convert.to_fsdp_dtensor import convert_to_fsdp_dtensor
from ckpt_tools.commands.convert.to_torch_dist import convert_to_torch_dist
from ckpt_tools.commands.job.conversion import ConvertOptions
from ckpt_tools.errors import VerificationError
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from tests.commands import oracle
from tests.commands.test_to_fsdp_dtensor import source_of
from tests.commands.test_to_torch_dist import archives, assert_same_tensors
from tests.conftest import fixture_dir

NATURAL, BUCKETS = "te_remainder_tp2_fr", "te_remainder8_tp2_dpr"
STATE = "optimizer.state."
BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0."


def joined(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The whole master: 64-bit integers, so that nothing of the arithmetic is ours."""
    high = weight.view(torch.int16).to(torch.int64) & 0xFFFF
    bits = (high * 65536 + remainder.to(torch.int64)) % (1 << 32)
    return bits.to(torch.uint32).view(torch.float32)


def to_torch_dist(source: Path, output: Path) -> dict[str, torch.Tensor]:
    convert_to_torch_dist(str(source), str(output))
    return oracle.tensors(output)


def expected_of_natural(source: Path) -> dict[str, torch.Tensor]:
    stored = oracle.tensors(source)
    return {
        key: joined(stored[key.removeprefix(f"{STATE}param.")], value)
        if key.startswith(f"{STATE}param.")
        else value
        for key, value in stored.items()
    }


@pytest.mark.parametrize("name", [NATURAL, "te_prec_tp2_fr"])
def test_remainders_stored_as_numbers_become_the_masters_they_are_of(name: str, tmp_path: Path) -> None:
    source = source_of(fixture_dir(name))
    expected, stored = expected_of_natural(source), oracle.tensors(source)
    assert_same_tensors(to_torch_dist(source, tmp_path / "out"), expected)
    changed = [key for key, value in expected.items() if not oracle.same_bytes(value, stored[key])]
    assert len(changed) == 9  # every master
    assert all(key.startswith(f"{STATE}param.") for key in changed)


def expected_of_buckets(source: Path) -> dict[str, torch.Tensor]:
    """The one bucket of a job without tensor parallelism, cut by hand: last registered first, each from a 64th on."""
    stored = oracle.tensors(source)
    order: list[tuple[str, int | None]] = [
        ("output_layer.weight", None),
        ("decoder.final_layernorm.weight", None),
    ]
    for layer in (1, 0):
        for name in ("mlp.linear_fc2.weight", "mlp.linear_fc1.weight", "mlp.linear_fc1.layer_norm_weight",
                     "self_attention.linear_qkv.weight", "self_attention.linear_qkv.layer_norm_weight",
                     "self_attention.linear_proj.weight"):  # fmt: skip
            order.append((f"decoder.layers.{name}", layer))
    order.append(("embedding.word_embeddings.weight", None))
    expected = {key: value for key, value in stored.items() if not key.startswith("optimizer.")}
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        flat, at = stored[f"{BUCKET}{kind}"], 0
        for name, index in order:
            weight = stored[name] if index is None else stored[name][index]
            part, at = (
                flat[at : at + weight.numel()].reshape(weight.shape),
                at + -(-weight.numel() // 64) * 64,
            )
            value = joined(weight, part) if kind == "param" else part
            if index is None:
                expected[f"{STATE}{kind}.{name}"] = value
            else:
                whole = expected.setdefault(f"{STATE}{kind}.{name}", torch.zeros(stored[name].shape))
                whole[index] = value
        assert at == flat.numel()
    return expected


def test_buckets_of_remainders_become_masters(tmp_path: Path) -> None:
    source = source_of(fixture_dir("te_prec8_dp2_dpr"))
    assert_same_tensors(to_torch_dist(source, tmp_path / "out"), expected_of_buckets(source))


def test_two_layouts_of_one_run_convert_to_the_same(tmp_path: Path) -> None:
    sources = [source_of(fixture_dir(name)) for name in (NATURAL, BUCKETS)]
    for number, source in enumerate(sources):
        convert_to_fsdp_dtensor(str(source), str(tmp_path / f"fsdp{number}"))
    fsdp = [next((tmp_path / f"fsdp{number}").glob("iter_*")) for number in range(2)]
    assert_same_tensors(*map(oracle.tensors, fsdp))
    ours, theirs = map(archives, fsdp)
    assert {key for key in ours if ours[key] != theirs.get(key)} == {"args"}  # where they were saved
    assert ours.keys() == theirs.keys()
    assert_same_tensors(*(to_torch_dist(source, tmp_path / f"dist{i}") for i, source in enumerate(sources)))
    report = diff_checkpoints(str(sources[0]), str(sources[1]))
    assert {tensor.kind for tensor in report.tensors} == {"equal"}


def test_the_way_back_holds_plain_masters_and_says_how_to_load_them(tmp_path: Path) -> None:
    source = source_of(fixture_dir(NATURAL))
    convert_to_fsdp_dtensor(str(source), str(tmp_path / "there"))
    report = convert_to_torch_dist(str(tmp_path / "there"), str(tmp_path / "back"))
    for said in ("load without --use-precision-aware-optimizer", "rounds these away from zero"):
        assert any(said in note for note in report.notes)
    assert_same_tensors(oracle.tensors(tmp_path / "back"), expected_of_natural(source))
    # Read again, under the same args, they are the masters that they are.
    convert_to_fsdp_dtensor(str(tmp_path / "back"), str(tmp_path / "again"))
    assert_same_tensors(oracle.tensors(tmp_path / "there"), oracle.tensors(tmp_path / "again"))
    compared = diff_checkpoints(str(source), str(tmp_path / "back"))
    assert {tensor.kind for tensor in compared.tensors} == {"equal"}


@pytest.mark.parametrize("name", [NATURAL, BUCKETS, "te_prec8_dp2_dpr"])
def test_content_is_verified_and_exported_as_masters(name: str, tmp_path: Path) -> None:
    """te_prec8_dp2_dpr has two masters midway between two weights, of which the odd ones are stored."""
    source = source_of(fixture_dir(name))
    assert run(["verify", str(source), "--content"]) == 0
    made = to_torch_dist(source, tmp_path / "made")
    assert run(["verify", str(tmp_path / "made"), "--content"]) == 0
    assert run(["export-hf", str(source), str(tmp_path / "hf"), "--dtype", "float32"]) == 0
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    norm, proj = "post_attention_layernorm", "self_attn.o_proj"
    for theirs, ours in (
        (norm, "mlp.linear_fc1.layer_norm_weight"),
        (proj, "self_attention.linear_proj.weight"),
    ):
        for layer in (0, 1):
            whole = made[f"{STATE}param.decoder.layers.{ours}"][layer]
            assert oracle.same_bytes(exported[f"model.layers.{layer}.{theirs}.weight"], whole)


def test_slices_hold_what_is_needed(tmp_path: Path) -> None:
    made = [source_of(fixture_dir(name)) for name in (NATURAL, BUCKETS)]
    for number, source in enumerate(made):
        assert run(["slice", str(source), str(tmp_path / str(number)), "--layers", "1:2"]) == 0
        assert run(["verify", str(tmp_path / str(number)), "--content"]) == 0
    report = diff_checkpoints(str(tmp_path / "0"), str(tmp_path / "1"))
    assert {tensor.kind for tensor in report.tensors} == {"equal"}


def test_the_plan_says_what_is_computed_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    source = source_of(fixture_dir(BUCKETS))
    assert run(["plan", str(source), "--dp-shard", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["bytes_by_strategy"]["computed"] == 100_672 * (2 + 2)
    assert any("masters are computed" in note and "16 bits" in note for note in plan["notes"])


def test_weights_alone_need_no_proof(tmp_path: Path) -> None:
    """Files that no longer say which rank wrote them: the positions of buckets cannot be proven."""
    source = tmp_path / "source"
    shutil.copytree(source_of(fixture_dir(BUCKETS)), source)
    for path in (source, *source.iterdir()):
        path.chmod(0o755)
    metadata = (source / ".metadata").read_bytes()
    for rank in (0, 1):
        (source / f"__{rank}_0.distcp").rename(source / f"zz{rank}_0.distcp")
    (source / ".metadata").write_bytes(
        metadata.replace(b"__0_0.distcp", b"zz0_0.distcp").replace(b"__1_0.distcp", b"zz1_0.distcp")
    )
    with pytest.raises(VerificationError, match="do not say which rank wrote them"):
        convert_to_fsdp_dtensor(str(source), str(tmp_path / "out"))
    options = ConvertOptions(target=TargetOptions(weights_only=True))
    report = convert_to_fsdp_dtensor(str(source), str(tmp_path / "out"), options)
    assert report.tensors == 17
    assert any("masters" in note or "stored weights" in note for note in report.notes)
