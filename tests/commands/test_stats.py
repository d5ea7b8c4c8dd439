"""`stats`: against torch on whole tensors, for every element type and format; what changed; pages that are whole."""

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

from ckpt_tools.cli.app import run
from ckpt_tools.commands.check.diff import DiffRequest, diff_checkpoints
from ckpt_tools.commands.check.verify import verify_checkpoint
from ckpt_tools.commands.convert.to_dtensors import convert_to_fsdp_dtensor
from ckpt_tools.commands.look.inspect import inspect_checkpoint
from ckpt_tools.commands.look.stats import (
    NamedTensor,
    NamedTensors,
    StatsOptions,
    _paired,
    checkpoint_change,
    checkpoint_statistics,
)
from ckpt_tools.commands.look.stats_page import change_html, change_svg, norms_html, norms_svg
from ckpt_tools.errors import UsageError
from ckpt_tools.megatron.keys import part_of
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.model.dtypes import ITEMSIZE
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.views import Source
from ckpt_tools.verify.content.values import Change, Statistics
from ckpt_tools.verify.report import VerifyOptions
from tests.altered import scaled
from tests.commands import oracle
from tests.conftest import DATA, MOE, REPO, fixture_dir
from tests.damage import ITERATION, copy_of, payload_of
from tests.pages import parse_page, parse_svg

RUN = "core019_llama_tp2_fully_reshardable"
FSDP = "core019_llama_tp2_native_fsdp_dtensor"


def random_bits(dtype: str, count: int) -> np.ndarray:
    """Any bits: NaNs, infinities, zeros and denormals among them; of bool 0 and 1."""
    raw = np.random.default_rng(1).integers(0, 256, count * ITEMSIZE[dtype], np.uint8)
    raw[: 4 * ITEMSIZE[dtype]] = 0
    return raw & 1 if dtype == "bool" else raw


def doubles(raw: np.ndarray, dtype: str) -> torch.Tensor:
    """The elements by torch, of complex numbers the parts."""
    tensor = torch.frombuffer(bytearray(raw.tobytes()), dtype=getattr(torch, dtype))
    tensor = torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor
    return (tensor.to(torch.float32) if dtype.startswith("float8") else tensor).to(torch.float64)


@pytest.mark.parametrize("histogram", [False, True])
@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_statistics_are_those_of_torch(dtype, histogram):
    """Long enough for the counting of codes and for several blocks, added in pieces of odd lengths."""
    count = 70_000
    raw = random_bits(dtype, count)
    values = doubles(raw, dtype)
    finite = values[values.isfinite()].numpy()
    bits = raw.view({1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}[ITEMSIZE[dtype]])
    parts = []
    for piece in (bits[:3], bits[3:69_000], bits[69_000:]):
        parts.append(Statistics(histogram))
        parts[-1].add(piece.reshape(1, -1), dtype)
    found = parts[0].empty()
    for part in parts:
        found.join(part)
    assert found.census.elements == values.numel()
    assert found.census.nans == int(values.isnan().sum())
    assert found.census.infinities == int(values.isinf().sum())
    assert found.finite == len(finite)
    assert found.zeros == int((finite == 0).sum())
    assert (found.smallest, found.largest) == (finite.min(), finite.max())
    with np.errstate(over="ignore", invalid="ignore"):
        assert found.squares == pytest.approx((finite * finite).sum(), rel=1e-9)
        if dtype not in ("float64", "complex128"):  # random doubles have no sum
            assert found.total == pytest.approx(finite.sum(), rel=1e-9, abs=1e-9 * np.abs(finite).max())
    sizes = np.abs(finite[finite != 0])
    sizes = sizes[sizes >= np.finfo(np.float64).tiny]
    expected = np.unique(np.frexp(sizes)[1] - 1, return_counts=True)
    assert found.histogram() == (
        list(zip(*map(np.ndarray.tolist, expected), strict=True)) if histogram else []
    )


def test_nothing_finite_has_no_mean():
    found = Statistics()
    found.add(np.full(5, 0x7FC0, np.uint16), "bfloat16")
    assert [name for name, value in found.summary().items() if value is not None] == [
        "elements",
        "nan",
        "inf",
        "zero",
    ]


def whole(values: torch.Tensor) -> Statistics:
    found = Statistics()
    found.add(
        values.contiguous().view(torch.uint8).numpy().view(f"u{values.element_size()}"), str(values.dtype)[6:]
    )
    return found


@pytest.mark.parametrize("name", [RUN, MOE])
def test_every_parameter_of_a_torch_dist_checkpoint(name):
    """Layers that are stacked in one tensor come one by one, in the order of layers."""
    stored = oracle.tensors(fixture_dir(name) / ITERATION)
    told: list[tuple[int, int]] = []
    found = checkpoint_statistics(str(fixture_dir(name)), progress=lambda *now: told.append(now))
    assert found.by == "parameters"
    held = [t.named.tensor for t in found.tensors]
    nbytes = sum(math.prod(tensor.shape) * ITEMSIZE[tensor.dtype] for tensor in held)
    assert told[-1] == (nbytes, nbytes)
    elements = 0
    for t in found.tensors:
        (key,) = t.named.keys
        layer, value = t.named.part.layer, stored[key]
        if layer is not None and f"layers.{layer}." not in key:
            value = value[layer]
        if t.named.expert is not None and "experts.experts.linear" in key:
            value = value[t.named.expert]
        assert t.found.summary() == whole(value).summary(), t.named.title
        elements += t.found.census.elements
    assert elements == sum(v.numel() for k, v in stored.items() if not k.startswith("rng_state"))
    layers = [t.named.part.layer for t in found.tensors if t.named.part.layer is not None]
    assert layers == sorted(layers)
    assert set(found.roles()) == {"weight", "master", "exp_avg", "exp_avg_sq"}
    total = sum(f.squares for (_, role), f in found.layers().items() if role == "master")
    assert math.sqrt(total) == pytest.approx(found.roles()["master"].norm)


@pytest.mark.parametrize(
    "name", ["core016_llama_tp2_dp_reshardable", "v013_dense_dpzero_tp2_dp2/checkpoint", MOE]
)
def test_any_optimizer_layout_is_measured_as_its_conversion(name, tmp_path):
    """Flat buckets and stored states alike: the same numbers as of the states that `convert` writes."""
    first, *rest = name.split("/")
    source = fixture_dir(first).joinpath(*rest)
    if rest and not source.is_dir():
        source = next(p.parent.parent for p in fixture_dir(first).rglob(".metadata"))
    convert_to_fsdp_dtensor(str(source), str(tmp_path / "out"))
    before, after = checkpoint_statistics(str(source)), checkpoint_statistics(str(tmp_path / "out"))
    states = {(t.named.title, t.named.role): t.found.summary() for t in before.tensors}
    seen = [(t, states[t.named.title, t.named.role]) for t in after.tensors if t.named.role != "weight"]
    assert len(seen) > 20
    for t, was in seen:
        assert t.found.summary() == pytest.approx(was, rel=1e-12), t.named.title
    moved = checkpoint_change(str(source), str(tmp_path / "out"))
    assert not (moved.only_in_a or moved.only_in_b or moved.reshaped)
    assert all(not t.found.changed and t.found.relative == 0 and t.found.cosine == 1 for t in moved.tensors)


def test_the_result_does_not_depend_on_threads_parts_and_workers():
    """In another process, because one with threads, as pytest's may be, is not forked."""
    script = f"""
from ckpt_tools.verify.content import values
from ckpt_tools.commands.look.stats import StatsOptions, checkpoint_change, checkpoint_statistics
run = {str(DATA / RUN)!r}
one, three = (StatsOptions(workers=n, histogram=True) for n in (1, 3))
told = []
shared = checkpoint_statistics(run, three, lambda *now: told.append(now))
assert checkpoint_statistics(run, one).as_json() == shared.as_json()
assert told and told == sorted(told)
assert checkpoint_change(run, run, one).as_json() == checkpoint_change(run, run, three).as_json()
values._TILE_ELEMS, values._PART_ELEMS = 64, 256
one, four = (StatsOptions(workers=1, threads=n, keys=("*layers.1*",)) for n in (1, 4))
assert checkpoint_statistics(run, one).as_json() == checkpoint_statistics(run, four).as_json()
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=REPO)


def test_nan_is_counted_as_verify_counts_it(tmp_path):
    weight = torch.randn(300, 200)
    weight[5, 7], weight[0, 0], weight[299, 199] = float("nan"), float("inf"), 0.0
    dcp.save({"model.layers.3.w": weight, "b": torch.zeros(4)}, checkpoint_id=tmp_path, no_dist=True)
    found = checkpoint_statistics(str(tmp_path))
    assert (found.kind, found.by) == ("dcp", "keys")
    (sick,) = found.nonfinite()
    census = sick.found.census
    assert (sick.named.part.label, census.nans, census.infinities) == ("model.layers.3", 1, 1)
    finite = weight[weight.isfinite()].double()
    assert sick.found.norm == pytest.approx(float(finite.norm()))
    (finding,) = verify_checkpoint(str(tmp_path), None, VerifyOptions(content=True)).findings
    assert finding.message == "1 NaN and 1 infinite of 60000 elements"
    assert (
        sum("1 NaN, 1 Inf" in text for text in red_cells(norms_svg(found))) == 2
    )  # the layer and the tensor


def red_cells(picture: str) -> list[str]:
    """What the cells say that are in the colour of NaN and infinity."""
    cells = parse_svg(picture).iter("{http://www.w3.org/2000/svg}rect")
    return ["".join(cell.itertext()) for cell in cells if cell.get("fill") == "#e00000"]


def saved(folder: Path, **tensors: torch.Tensor) -> str:
    """A folder with these tensors."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def test_changes_are_those_of_whole_tensors(tmp_path):
    a = {f"model.layers.{i}.w": torch.randn(50, 40) for i in range(3)} | {"norm": torch.ones(8)}
    b = {k: v + 0.01 * torch.randn(v.shape) for k, v in a.items()}
    b["model.layers.1.w"] = 3 * a["model.layers.1.w"]
    b["model.layers.2.w"] = a["model.layers.2.w"].clone()
    found = checkpoint_change(saved(tmp_path / "a", **a), saved(tmp_path / "b", **b, new=torch.ones(1)))
    assert (found.only_in_a, found.only_in_b) == ((), ("new, weight",))
    by_name = {t.named.name: t.found for t in found.tensors}
    assert by_name["model.layers.1.w"].relative == pytest.approx(2.0)
    assert by_name["model.layers.1.w"].cosine == pytest.approx(1.0)
    assert by_name["model.layers.2.w"].summary() == {
        "elements": 2000, "left_out": 0, "left_out_changed": 0, "changed": 0, "relative_change": 0.0, "cosine": 1.0,
        "max_abs": 0.0,
    }  # fmt: skip
    x, y = a["model.layers.0.w"].double().flatten(), b["model.layers.0.w"].double().flatten()
    zero = by_name["model.layers.0.w"]
    assert zero.relative == pytest.approx(float((y - x).norm() / x.norm()), rel=1e-12)
    assert zero.cosine == pytest.approx(float(torch.dot(x, y) / x.norm() / y.norm()), rel=1e-12)
    assert zero.largest == float((y - x).abs().max())
    for page in (change_svg(found), change_svg(found, "cosine")):
        parse_svg(page)
    text = "".join(parse_page(change_html(found)).text)
    numbers = text[text.index("Numbers") :]
    assert numbers.index("model.layers.1.w") < numbers.index("model.layers.0.w")


def test_changes_that_are_alike_have_one_colour_and_one_entry(tmp_path):
    half = scaled(DATA / RUN, tmp_path / "half", 0.5)
    drawing = parse_svg(change_svg(checkpoint_change(str(DATA / RUN), str(half))))
    texts = [t.text for t in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("0.5") == 1
    a = saved(tmp_path / "a", w=2 * torch.ones(8), v=2 * torch.ones(8))
    b = saved(tmp_path / "b", w=torch.ones(8), v=1.0001 * torch.ones(8))
    drawing = parse_svg(change_svg(checkpoint_change(a, b)))
    cells = [r for r in drawing.iter("{http://www.w3.org/2000/svg}rect") if len(r)]
    assert len(cells) == 3
    assert len({r.get("fill") for r in cells}) == 1


def test_a_change_from_nothing_and_of_what_is_not_finite():
    change = Change()
    bits = lambda *v: np.array(v, np.float32).view(np.uint32)  # noqa: E731
    change.add(bits(0, 0), bits(1, 2), "float32", "float32")
    assert (change.relative, change.cosine, change.changed) == (None, None, 2)
    change.add(bits(np.nan, 1, 3), bits(1, np.inf, 4), "float32", "float32")
    assert (change.elements, change.left_out, change.changed, change.largest) == (5, 2, 5, 2.0)


NAN, INF = float("nan"), float("inf")


def change_between(a: torch.Tensor, b: torch.Tensor) -> Change:
    """By raw bits, in two parts that are joined."""
    raw = [v.view(torch.uint8).numpy().view(f"u{v.element_size()}") for v in (a, b)]
    names = (str(a.dtype)[6:], str(b.dtype)[6:])
    parts = []
    for part in (slice(1), slice(1, None)):
        parts.append(Change())
        parts[-1].add(raw[0][part], raw[1][part], *names)
    found = parts[0].empty()
    for one in parts:
        found.join(one)
    return found


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float16", "float64"),
                                    ("float8_e5m2", "float32"), ("float64", "float64")])  # fmt: skip
@pytest.mark.parametrize(
    ("a", "b", "changed"),
    [(1, NAN, 1), (NAN, 1, 1), (1, INF, 1), (-INF, 1, 1), (INF, -INF, 1), (INF, NAN, 1), (NAN, -INF, 1),
     (NAN, NAN, 0), (INF, INF, 0), (-INF, -INF, 0)],
)  # fmt: skip
def test_what_is_not_finite_on_a_side_is_like_itself_alone(a, b, changed, dtypes):
    """Beside a number that stays and one that moves; on either side of where parts are joined."""
    for order in ((0, 1, 2), (1, 0, 2)):
        x, y = (
            torch.tensor([values[i] for i in order], dtype=torch.float64).to(getattr(torch, dtype))
            for values, dtype in zip(((a, 2.0, 3.0), (b, 2.0, 4.0)), dtypes, strict=True)
        )
        assert change_between(x, y).summary() == {
            "elements": 3, "left_out": 1, "left_out_changed": changed, "changed": 1 + changed,
            "relative_change": pytest.approx(1 / math.sqrt(13)), "cosine": pytest.approx(16 / math.sqrt(13 * 20)),
            "max_abs": 1.0,
        }  # fmt: skip


@pytest.mark.parametrize(("there", "changed"), [(NAN, 0), (0.5, 4)])
def test_all_nan_has_no_relative_change(there, changed):
    """Nothing is known of a change of which nothing was measured: no 0, and no 1 for a cosine."""
    for pair in ((NAN, there), (there, NAN)):
        found = change_between(*(torch.full((4,), value) for value in pair))
        assert found.summary() == {
            "elements": 4, "left_out": 4, "left_out_changed": changed, "changed": changed, "relative_change": None,
            "cosine": None, "max_abs": None,
        }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_integers_that_are_one_double_count_as_changed(dtype):
    a, b = torch.tensor([2**53, 5, 6]).to(dtype), torch.tensor([2**53 + 1, 5, 7]).to(dtype)
    assert change_between(a, b).changed == 2


def one_made_nan(root: Path, key: str) -> None:
    """One byte of one bfloat16 of a checkpoint flipped: the first that one byte makes a NaN."""
    file, at, data = payload_of(root, key, (0,) * 3)
    low = np.frombuffer(data, np.uint8)[::2]
    index = int(np.flatnonzero((low & 0x80 != 0) & (low & 0x7F != 0))[0])
    with open(file, "r+b") as stream:
        stream.seek(at + 2 * index + 1)
        stream.write(b"\x7f")


def test_one_flipped_byte_that_makes_a_nan_is_told_everywhere(tmp_path, capsys):
    bad = copy_of(RUN, tmp_path)
    key = "decoder.layers.mlp.linear_fc2.weight"
    one_made_nan(bad, key)
    found = checkpoint_change(str(DATA / RUN), str(bad))
    (sick,) = found.nonfinite()
    assert sick.named.keys == (key,)
    assert sick.found.summary() | {"elements": 0} == {
        "elements": 0, "left_out": 1, "left_out_changed": 1, "changed": 1, "relative_change": 0.0, "cosine": 1.0,
        "max_abs": 0.0,
    }  # fmt: skip
    (line,) = found.left_out()
    assert line.startswith("NaN or infinite in A or B: 1 of ") and line.endswith("count as changed: 1")
    as_json = found.as_json()
    assert as_json["notes"][0] == line
    for part in ("roles", "layers", "tensors"):
        counts = [(n["left_out"], n["changed"]) for n in as_json[part]]
        assert [pair for pair in counts if any(pair)] == [(1, 1)]
    for picture in (change_svg(found), change_svg(found, "cosine")):
        assert (
            sum("1 NaN or infinite in A or B, 1 of them changed" in text for text in red_cells(picture)) == 2
        )
        assert line in "".join(parse_svg(picture).itertext())
    text = "".join(parse_page(change_html(found)).text)
    assert line in text
    numbers = text[text.index("Numbers, NaN and Inf, then the largest change first") :]
    assert numbers.index(sick.named.title) < numbers.index("embedding.")
    for more in ([], ["--keys", key]):
        assert run(["stats", str(DATA / RUN), str(bad), *more]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "NaN, Inf" in out
        assert "count as changed: 1" in out
        assert f"{sick.named.title} weight 0 1.000000000 0 1 {sick.found.elements:,} 1" in out
    assert run(["stats", str(DATA / RUN), str(DATA / RUN), "--svg", str(tmp_path / "sound.svg")]) == 0
    assert "count as changed" not in capsys.readouterr().out
    assert "NaN or infinite in" not in (tmp_path / "sound.svg").read_text()


def test_masters_and_weights_alone_are_a_pair(tmp_path):
    """A run against its weights, and against a format that keeps masters: what is comparable is compared."""
    assert run(["strip", str(DATA / RUN), str(tmp_path / "weights"), "-q"]) == 0
    assert run(["strip", str(fixture_dir(FSDP)), str(tmp_path / "masters"), "-q"]) == 0
    alone = checkpoint_change(str(DATA / RUN), str(tmp_path / "weights"))
    assert {t.named.role for t in alone.tensors} == {"weight"}
    assert all(name.endswith((", master", ", exp_avg", ", exp_avg_sq")) for name in alone.only_in_a)
    assert alone.only_in_a
    crossed = checkpoint_change(str(tmp_path / "weights"), str(fixture_dir(FSDP)))
    assert {t.named.role for t in crossed.tensors} == {"weight"}
    assert len(crossed.tensors) == len(alone.tensors)


def test_globs_roles_and_kinds_of_names_that_fit_nothing(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    for source, options, said in (
        (
            DATA / RUN,
            StatsOptions(keys=("decoder.final_layernrom.weight",)),
            "did you mean decoder.final_layernorm",
        ),
        (
            DATA / RUN,
            StatsOptions(roles=("adam",)),
            "'adam': the checkpoint has weight, master, exp_avg, exp_avg_sq",
        ),
        (DATA / RUN, StatsOptions(layers=(7,)), "--layer 7: the checkpoint has 0, 1"),
        (tmp_path, StatsOptions(by="parameters"), "--by parameters"),
    ):
        with pytest.raises(UsageError) as refused:
            checkpoint_statistics(str(source), options)
        assert said in str(refused.value)
    dcp.save({"other": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(UsageError, match="no tensor of one name, role and shape"):
        checkpoint_change(str(tmp_path), str(tmp_path / "dcp"))


def test_a_hugging_face_model_against_any_format(tmp_path):
    """By export's rules; a state dict of transformers' names by these, behind a wrapper's prefix."""
    model = tmp_path / "hf"
    assert run(["export-hf", str(DATA / RUN), str(model), "-q"]) == 0
    for to in ("dcp", "fsdp_dtensor"):
        words = ["convert", str(DATA / RUN), str(tmp_path / to), "--to", to, "--gpus", "2", "-q"]
        assert run(words) == 0
    tensors = load_file(model / "model.safetensors")
    plain = {"model": {f"module.{key}": tensor + 1 for key, tensor in tensors.items()}}
    dcp.save(plain, checkpoint_id=tmp_path / "plain", no_dist=True)
    for other in (DATA / RUN, tmp_path / "dcp", tmp_path / "fsdp_dtensor", tmp_path / "plain"):
        for one, two in ((model, other), (other, model)):
            found = checkpoint_change(str(one), str(two))
            assert {t.named.title for t in found.tensors} == set(tensors)
            assert {bool(t.found.changed) for t in found.tensors} == {other == tmp_path / "plain"}


def test_a_checkpoint_without_a_model_is_measured_by_its_keys(tmp_path):
    """What `convert` refuses can still be looked at."""
    assert run(["modify-state-dict", str(fixture_dir(FSDP)), str(tmp_path / "out"), "-q", "--op",
                r"remove .*layers\.0\.mlp\.linear_fc1\.weight_w"]) == 0  # fmt: skip
    found = checkpoint_statistics(str(tmp_path / "out"))
    assert found.by == "keys"
    assert found.notes[0].startswith("tensors are those that are stored, not parameters: ")


@pytest.mark.parametrize("name", ["titan", "nested", FSDP, RUN, "tf2_dcp"])
def test_roles_are_those_that_inspect_tells(name, user_cases):
    case = user_cases / "stats_du_dcp_roles" / name
    source = str(case if case.is_dir() else fixture_dir(name))
    elements = Counter[str]()
    for (role, _), total in inspect_checkpoint(source).totals.items():
        elements[role] += total.elements
    found = checkpoint_statistics(source, StatsOptions(by="keys"))
    assert {role: sums.census.elements for role, sums in found.roles().items()} == elements
    assert {"weight", "exp_avg", "exp_avg_sq"} <= elements.keys()
    same = diff_checkpoints(source, source, request=DiffRequest(by="keys"))
    assert {t.name: t.role for t in same.tensors} == {t.named.name: t.named.role for t in found.tensors}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("decoder.layers.12.mlp.linear_fc1.weight", ("decoder.layers", 12, "mlp.linear_fc1.weight")),
        ("model.layers.3.mlp.experts.7.up_proj.weight", ("model.layers", 3, "mlp.experts.*.up_proj.weight")),
        ("x.layers.1.mlp.experts.linear_fc2.weight11", ("x.layers", 1, "mlp.experts.linear_fc2.weight*")),
        ("transformer.h.4.attn.c_attn.weight", ("transformer.h", 4, "attn.c_attn.weight")),
        ("h.0.ln_1.bias", ("h", 0, "ln_1.bias")),
        ("visual.blocks.2.norm1.weight", ("visual.blocks", 2, "norm1.weight")),
        ("embedding.word_embeddings.weight", ("", None, "embedding.word_embeddings.weight")),
    ],
)
def test_parts(name, part):
    assert part_of(name) == part


def test_a_quantized_model_is_measured_as_the_numbers_it_stands_for(tmp_path):
    codes = torch.randn(256, 128).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5], [2.0]])
    save_file({"m.weight": codes, "m.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {"torch_dtype": "bfloat16", "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (one,) = checkpoint_statistics(str(tmp_path)).tensors
    values = (codes.float() * scale.repeat_interleave(128, 0)).to(torch.bfloat16)
    assert one.found.summary() == pytest.approx(whole(values).summary())
    config["quantization_config"] = {"quant_method": "awq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = checkpoint_statistics(str(tmp_path))
    assert {t.named.name for t in found.tensors} == {"m.weight", "m.weight_scale_inv"}
    assert "as they are stored" in found.notes[0]


def test_pages_are_whole_and_names_harmless(tmp_path):
    evil = "<script>alert(1)</script>\u202e&.layers.0.x"
    save_file({evil: torch.randn(40), "h.1.x": torch.zeros(3)}, tmp_path / "model.safetensors")
    found = checkpoint_statistics(str(tmp_path), StatsOptions(histogram=True))
    page = norms_html(found)
    assert "<script" not in page
    assert "\u202e" not in page
    text = "".join(parse_page(page).text)
    assert "No NaN and no infinity in 2 tensors" in text
    assert "<script>alert(1)</script>" in text
    parse_svg(norms_svg(found))


def test_the_command(tmp_path, capsys):
    run_, fsdp = str(DATA / RUN), str(fixture_dir(FSDP))
    assert run(["stats", run_]) == 0
    out = capsys.readouterr().out
    assert "no NaN and no Inf in 60 tensors" in out
    assert "decoder.layers.1" in out
    assert run(["stats", run_, fsdp, "--html", str(tmp_path / "a.html")]) == 0
    assert "relative change" in capsys.readouterr().out
    parse_page((tmp_path / "a.html").read_text())
    assert run(["stats", run_, "--svg", "-"]) == 0
    parse_svg(capsys.readouterr().out)
    assert run(["stats", run_, "--html", str(tmp_path / "no" / "a.html")]) == 2


def test_one_layer(capsys):
    every = checkpoint_statistics(str(DATA / RUN)).tensors
    found = checkpoint_statistics(str(DATA / RUN), StatsOptions(layers=(1,))).tensors
    of_it = [t for t in every if t.named.part.layer == 1]
    assert [(t.named, t.found.summary()) for t in found] == [(t.named, t.found.summary()) for t in of_it]
    assert 0 < len(found) < len(every)
    assert run(["stats", str(DATA / RUN), "--layer", "1", "--role", "weight"]) == 0
    out = capsys.readouterr().out
    assert "decoder.layers.1.mlp.linear_fc2.weight" in out
    assert "layers.0" not in out


@pytest.mark.parametrize(
    ("a", "b", "pairs"),  # roles of one parameter -> (role, dtypes of both sides) of what is compared
    [
        ("w", "w", ["weight wb wb"]), ("w", "m", ["weight wb mf"]), ("m", "m", ["master mf mf"]),
        ("wm", "m", ["master mf mf"]), ("wm", "w", ["weight wb wb"]),
        ("wm", "wm", ["weight wb wb", "master mf mf"]), ("we", "me", ["weight wb mf", "exp_avg ef ef"]),
        ("we", "m", ["weight wb mf"]), ("e", "m", []), ("w", "e", []),
    ],
)  # fmt: skip
def test_weights_and_masters_of_two_sides(a, b, pairs):
    roles = {"w": ("weight", "bfloat16"), "m": ("master", "float32"), "e": ("exp_avg", "float32")}

    def side(letters: str, expert: int | None) -> Iterator[NamedTensor]:
        for letter in letters:
            role, dtype = roles[letter]
            target = TargetTensor(f"{letter}{dtype[0]}", dtype, (2,), (Source("x"),))
            yield NamedTensor("p", part_of("p"), cast(Any, role), target, expert)

    for first, second in ((a, b), (b, a)):
        sides = [
            NamedTensors(
                "parameters", Catalog(".", {}, {}), (*side(letters, None), *side(letters, 3), *alone)
            )
            for letters, alone in ((first, side("w", 1)), (second, side("m", 2)))  # experts alone are no pair
        ]
        here, there = _paired(*sides)
        for expert in (None, 3):
            found = [
                f"{role} {here[key].tensor.key} {there[key].tensor.key}"
                for key in here
                if key in there and key[1] == expert
                for role in [key[2]]
            ]
            turned = [" ".join([p.split()[0], *p.split()[:0:-1]]) for p in pairs] if first != a else pairs
            assert sorted(found) == sorted(turned)
        assert not [key for key in here if key in there and key[1] in (1, 2)]
