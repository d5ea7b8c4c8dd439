"""Checkpoints of Transformer Engine jobs convert both ways, int16 remainders too: against tensors joined by hand."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ckpt_tools import (
    ConvertOptions,
    TargetOptions,
    convert_to_fsdp_dtensor,
    convert_to_torch_dist,
    diff_checkpoints,
    slice_layers,
)
from ckpt_tools.cli.app import run
from ckpt_tools.errors import VerificationError
from ckpt_tools.model.choices import DialectName
from tests.commands import oracle
from tests.commands.made import fsdp, hf, iteration_of, torch_dist
from tests.folders import is_sound

NATURAL, BUCKETS = "te_remainder_tp2_fr", "te_remainder8_tp2_dpr"
STATE = "optimizer.state."
BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0."


def joined(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The whole master: 64-bit integers, so that nothing of the arithmetic is ours."""
    high = weight.view(torch.int16).to(torch.int64) & 0xFFFF
    bits = (high * 65536 + remainder.to(torch.int64)) % (1 << 32)
    return bits.to(torch.uint32).view(torch.float32)


def expected_of_natural(source: Path) -> dict[str, torch.Tensor]:
    stored = oracle.tensors(source)
    return {
        key: joined(stored[key.removeprefix(f"{STATE}param.")], value)
        if key.startswith(f"{STATE}param.")
        else value
        for key, value in stored.items()
    }


@pytest.mark.parametrize("name", [NATURAL, "te_prec_tp2_fr"])
def test_remainders_stored_as_numbers_become_the_masters_they_are_of(name):
    source = iteration_of(name)
    expected, stored = expected_of_natural(source), oracle.tensors(source)
    oracle.assert_same(torch_dist(name), expected)
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


def test_buckets_of_remainders_become_masters():
    oracle.assert_same(torch_dist("te_prec8_dp2_dpr"), expected_of_buckets(iteration_of("te_prec8_dp2_dpr")))


def test_two_layouts_of_one_run_convert_to_the_same():
    oracle.assert_same(fsdp(NATURAL), fsdp(BUCKETS))
    ours, theirs = map(oracle.objects, (fsdp(NATURAL), fsdp(BUCKETS)))
    assert {key for key in ours if ours[key] != theirs.get(key)} == {"args"}  # where they were saved
    assert ours.keys() == theirs.keys()
    oracle.assert_same(torch_dist(NATURAL), torch_dist(BUCKETS))
    report = diff_checkpoints(iteration_of(NATURAL), iteration_of(BUCKETS))
    assert {tensor.kind for tensor in report.tensors} == {"equal"}


def test_the_way_back_holds_plain_masters_and_says_how_to_load_them(tmp_path):
    source, there = iteration_of(NATURAL), fsdp(NATURAL)
    report = convert_to_torch_dist(there, tmp_path / "back")
    for said in ("load without --use-precision-aware-optimizer", "rounds these away from zero"):
        assert any(said in note for note in report.notes)
    oracle.assert_same(tmp_path / "back", expected_of_natural(source))
    # Read again, under the same args, they are the masters that they are.
    oracle.assert_same(there, fsdp(tmp_path / "back"))
    compared = diff_checkpoints(source, tmp_path / "back")
    assert {tensor.kind for tensor in compared.tensors} == {"equal"}


@pytest.mark.parametrize("name", [NATURAL, BUCKETS, "te_prec8_dp2_dpr"])
def test_content_is_verified_and_exported_as_masters(name):
    """te_prec8_dp2_dpr has two masters midway between two weights, of which the odd ones are stored."""
    source, back = iteration_of(name), torch_dist(name)
    assert is_sound(source) and is_sound(back)
    made, exported = oracle.tensors(back), oracle.model(hf(name, dtype="float32"))
    norm, proj = "post_attention_layernorm", "self_attn.o_proj"
    for theirs, ours in (
        (norm, "mlp.linear_fc1.layer_norm_weight"),
        (proj, "self_attention.linear_proj.weight"),
    ):
        for layer in (0, 1):
            whole = made[f"{STATE}param.decoder.layers.{ours}"][layer]
            assert oracle.same_bytes(exported[f"model.layers.{layer}.{theirs}.weight"], whole)


def test_slices_hold_what_is_needed(tmp_path):
    for number, name in enumerate((NATURAL, BUCKETS)):
        slice_layers(iteration_of(name), tmp_path / str(number), "1:2")
        assert is_sound(tmp_path / str(number))
    report = diff_checkpoints(tmp_path / "0", tmp_path / "1")
    assert {tensor.kind for tensor in report.tensors} == {"equal"}


def test_the_plan_says_what_is_computed_and_why(capsys):
    source = iteration_of(BUCKETS)
    assert run(["plan", str(source), "--dp-shard", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["bytes_by_strategy"]["computed"] == 100_672 * (2 + 2)
    assert any("masters are computed" in note and "16 bits" in note for note in plan["notes"])


def test_weights_alone_need_no_proof(tmp_path):
    """Files that no longer say which rank wrote them: the positions of buckets cannot be proven."""
    source = tmp_path / "source"
    shutil.copytree(iteration_of(BUCKETS), source)
    for path in (source, *source.iterdir()):
        path.chmod(0o755)
    metadata = (source / ".metadata").read_bytes()
    for rank in (0, 1):
        (source / f"__{rank}_0.distcp").rename(source / f"zz{rank}_0.distcp")
    (source / ".metadata").write_bytes(
        metadata.replace(b"__0_0.distcp", b"zz0_0.distcp").replace(b"__1_0.distcp", b"zz1_0.distcp")
    )
    with pytest.raises(VerificationError, match="do not say which rank wrote them"):
        convert_to_fsdp_dtensor(source, tmp_path / "out")
    options = ConvertOptions(target=TargetOptions(weights_only=True))
    report = convert_to_fsdp_dtensor(source, tmp_path / "out", options)
    assert report.tensors == 17
    assert any("masters" in note or "stored weights" in note for note in report.notes)


Tensors = dict[str, torch.Tensor]
LIVE_STATE = f"{STATE}module.module.module."
KINDS = ("param", "exp_avg", "exp_avg_sq")
FUSED = {
    "in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"),
    "conv1d.weight": ("query", "key", "value"),
}


# ---- torch_dist as one tensor for each weight and state


def as_stored(source: Path) -> Tensors:
    return oracle.tensors(source)


def of_expert_buckets(source: Path) -> Tensors:
    """Dense parameters in one bucket, the experts of each of two ranks in one of their own; each from a 64th on."""
    stored = oracle.tensors(source)
    layer0 = ["self_attention.linear_proj.weight", "self_attention.linear_qkv.layer_norm_weight",
              "self_attention.linear_qkv.weight", "mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight",
              "mlp.linear_fc2.weight"]  # fmt: skip
    layer1 = [*layer0[:3], "pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.shared_experts.linear_fc1.weight",
              "mlp.shared_experts.linear_fc2.weight"]  # fmt: skip
    dense = ["embedding.word_embeddings.weight", *(f"decoder.layers.0.{name}" for name in layer0),
             *(f"decoder.layers.1.{name}" for name in layer1), "decoder.final_layernorm.weight",
             "output_layer.weight"]  # fmt: skip
    fc = [f"decoder.layers.1.mlp.experts.experts.linear_fc{i}.weight" for i in (1, 2)]
    found = {key: value for key, value in stored.items() if "optimizer." not in key}
    for kind in KINDS:
        for key, value in cut(
            stored, "chained_0", 0, kind, [(name, stored[name].shape) for name in dense]
        ).items():
            found[f"{STATE}{kind}.{key}"] = value
        for rank in range(2):
            experts = [(f"{name}{i}", stored[name].shape[1:]) for name in fc for i in range(2)]
            for key, value in cut(stored, "chained_1", rank, kind, experts).items():
                name, expert = f"{STATE}{kind}.{key[:-1]}", 2 * rank + int(key[-1])
                found.setdefault(name, torch.zeros(stored[key[:-1]].shape))[expert] = value
    return found


def cut(stored: Tensors, chain: str, group: int, kind: str, order: list[tuple[str, torch.Size]]) -> Tensors:
    """The one bucket of an optimizer: the parameter that was registered last stands first."""
    dtypes = "dtype_(torch.bfloat16, torch.float32)"
    prefix = f"{chain}.optimizer.distributed.dp_group_idx_{group}.gbuf_idx_0.{dtypes}.bucket_idx_0"
    flat, at, found = stored[f"{prefix}.{kind}"], 0, {}
    for name, shape in reversed(order):
        count = shape.numel()
        found[name] = flat[at : at + count].reshape(shape)
        at = -(-(at + count) // 64) * 64
    assert at == flat.numel()
    return found


# ---- the running model's tensors, of one for each weight and state


def running(stored: Tensors, gated: bool) -> Tensors:
    """What a Megatron-FSDP job of one tensor-parallel rank holds: masters in the place of weights, and moments."""
    found: Tensors = {}
    for key, weight in stored.items():
        if key.startswith(STATE):
            continue
        master = stored.get(f"{STATE}param.{key}", weight)
        for name, value in parts(key, master, gated):
            found[f"model.module.{name}"] = value
        for kind in KINDS[1:]:
            if f"{STATE}{kind}.{key}" in stored:
                for name, value in parts(key, stored[f"{STATE}{kind}.{key}"], gated):
                    found[f"{LIVE_STATE}{name}|{kind}"] = value
    return {key.replace("|", "."): value for key, value in fused(found).items()}


def parts(key: str, value: torch.Tensor, gated: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Layers and experts one by one, gate and up apart."""
    if re.search(r"\blayers\.(?!\d)", key):
        for layer in range(value.shape[0]):
            yield from parts(re.sub(r"\blayers\.", f"layers.{layer}.", key), value[layer], gated)
    elif ".experts.experts." in key:
        for expert in range(value.shape[0]):
            yield from parts(f"{key.replace('.experts.experts.', '.experts.')}{expert}", value[expert], gated)
    elif gated and re.search(r"linear_fc1\.weight\d*$", key):
        yield f"{key}_w", value.chunk(2)[0]
        yield f"{key}_v", value.chunk(2)[1]
    else:
        yield key, value


def fused(found: Tensors) -> Tensors:
    """Parts of gated delta nets as one tensor each."""
    whole: Tensors = {}
    for key, value in found.items():
        match = re.fullmatch(r"(.+\.(in_proj\.weight|conv1d\.weight))\.(\w+)(\|\w+)?", key)
        if match is None:
            whole[key] = value
        elif match[3] == "query":
            names = FUSED[match[2]]
            whole[f"{match[1]}{match[4] or ''}"] = torch.cat(
                [found[f"{match[1]}.{name}{match[4] or ''}"] for name in names]
            )
    return whole


def of_the_model(folder: Path) -> Tensors:
    """Weights and moments, without rng states."""
    return {key: value for key, value in oracle.tensors(folder).items() if not key.startswith("rng_state")}


# ---- both directions

SOURCES: list[tuple[str, Callable[[Path], Tensors], DialectName | None]] = [
    ("te_moe_ep2_dpr", of_expert_buckets, None),
    ("te_mla_ep2_fr", as_stored, None),
    ("te_gdn_tp2_fr", as_stored, None),
    ("te_gpt_pp2_fr", as_stored, None),
    ("te_llama_dp2_buckets_fr", as_stored, None),
    ("te_fp8_tp2_fr", as_stored, None),
    ("te_fp8param_tp2_fr", as_stored, None),
    ("te_remainder_tp2_fr", expected_of_natural, None),
    ("te_prec_tp2_fr", expected_of_natural, None),
    ("te_prec8_dp2_dpr", expected_of_buckets, None),
    ("v16_moe_ep2_fr", as_stored, "core-0.16"),
]
NATIVE: list[tuple[str, DialectName | None]] = [
    ("n_llama_dp2", None),
    ("n_moe_ep2", None),
    ("n_hsdp2", None),
    ("n_mla_dp1", None),
    ("n_gdn_dp1", None),
    ("n_fp8p_dp2", None),
    ("v16n_moe_ep2", "core-0.16"),
]


@pytest.mark.parametrize(("name", "whole", "dialect"), SOURCES)
def test_a_3d_job_goes_to_megatron_fsdp_and_back(name, whole, dialect):
    there, expected = fsdp(name, tp=1, dialect=dialect), whole(iteration_of(name))
    oracle.assert_same(of_the_model(there), running(expected, gated="gpt" not in name))
    masters = {key: expected[f"{STATE}param.{key}"] for key in expected if f"{STATE}param.{key}" in expected}
    rounded = {key: master.bfloat16() for key, master in masters.items()}
    if "prec" in name:  # Transformer Engine rounds a master that lies halfway up, all others to even
        for key, weight in rounded.items():
            halfway = masters[key][weight != expected[key]]
            assert (halfway.view(torch.int32) & 0xFFFF == 1 << 15).all()
            assert halfway.numel() <= 1
    if "prec" in name or "fp8param" in name:  # the latter held E4M3
        expected |= rounded
    oracle.assert_same(torch_dist(there), expected)


@pytest.mark.parametrize(("name", "dialect"), NATIVE)
def test_a_native_checkpoint_goes_to_3d_and_back(name, dialect):
    there, native = torch_dist(name, dialect=dialect), of_the_model(iteration_of(name))
    stored = oracle.tensors(there)
    oracle.assert_same(running(stored, gated=True), native)
    masters = [key for key in stored if f"{STATE}param.{key}" in stored]
    assert masters
    for key in masters:
        assert oracle.same_bytes(stored[key], stored[f"{STATE}param.{key}"].bfloat16()), key
    oracle.assert_same(of_the_model(fsdp(there, tp=1, dialect=dialect)), native)
