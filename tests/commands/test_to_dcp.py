"""Plain PyTorch state dicts: made from every source, laid out anew, taken for what they are, brought to Megatron."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Set
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import ckpt_tools
from ckpt_tools import ConvertOptions, Layout, Topology, convert_to_dcp, convert_to_fsdp_dtensor, slice_layers
from ckpt_tools.cli.app import run
from ckpt_tools.errors import UnsupportedCheckpointError
from ckpt_tools.formats.locate.detect import locate
from tests.commands import oracle
from tests.commands.made import dcp, fsdp, hf, iteration_of, torch_dist
from tests.conftest import DATA, REPO, fixture_dir

LLAMA, MOE = "core019_llama_tp2_fully_reshardable", "core019_moe_ep2_fully_reshardable"
SAVED = {"save", "ckpt_format", "dump_param_to_param_group_map"}  # the two runs differ in these arguments


def weights_of(folder: Path) -> list[str]:
    """The tensors that are no optimizer's, in the order of the metadata."""
    known = oracle.metadata(folder).state_dict_metadata
    return [k for k, e in known.items() if isinstance(e, TensorStorageMetadata) and "optim" not in k]


def chunks(folder: Path) -> dict[str, list[tuple[str, int, int]]]:
    """(file, first row, rows) of every piece of every tensor with rows."""
    known = oracle.metadata(folder)
    sizes = {
        (key, tuple(c.offsets)): tuple(c.sizes)
        for key, entry in known.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        for c in entry.chunks
        if entry.size
    }
    found: dict[str, list[tuple[str, int, int]]] = {}
    for index, info in known.storage_data.items():
        if index.offset is not None and (index.fqn, tuple(index.offset)) in sizes:
            rows = sizes[index.fqn, tuple(index.offset)][0]
            found.setdefault(index.fqn, []).append((info.relative_path, index.offset[0], rows))
    return {key: sorted(places, key=lambda p: p[1]) for key, places in found.items()}


def assert_same(a: Path, b: Path, apart: Set[str] = frozenset()) -> None:
    """Equal keys, tensors bit for bit, and objects byte for byte but for the keys in `apart`."""
    oracle.assert_same(a, b)
    first, second = oracle.objects(a), oracle.objects(b)
    assert first.keys() == second.keys()
    assert [key for key in first if first[key] != second[key] and key not in apart] == []


# ---- Megatron's torch_dcp: one run, saved in two formats


def test_one_run_saved_as_torch_dcp_and_as_torch_dist_gives_the_same():
    a, b = fsdp("tf2_dcp"), fsdp("tf2_dist")
    for other in (b, fsdp(dcp("tf2_dist"))):  # which keeps the keys of the one
        assert_same(a, other, {"args"})
        first, second = (vars(oracle.item(folder, "args")) for folder in (a, other))
        assert {name for name in first if first[name] != second[name]} == SAVED
    a, b = torch_dist("tf2_dcp"), torch_dist("tf2_dist", dialect="main")
    oracle.assert_same(a, b)
    first, second = (oracle.item(folder, "common_state/shard_0_1")[0]["optimizer"] for folder in (a, b))
    assert first == second


def test_weights_alone_are_the_masters_of_either():
    assert_same(fsdp("tf2_dcp", weights_only=True), fsdp("tf2_dist", weights_only=True), {"args"})
    stored = oracle.tensors(fsdp("tf2_dcp", weights_only=True))
    assert {t.dtype for k, t in stored.items() if k.startswith("model.")} == {torch.float32}


def test_masters_of_another_weight_are_found(tmp_path):
    """Two masters of one shape exchanged: order alone would believe it."""
    root = tmp_path / "run"
    shutil.copytree(fixture_dir("tf2_dcp"), root)
    for path in root.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    folder = oracle.files_of(root)
    fresh = pickle.loads((folder / ".metadata").read_bytes())
    a, b = "optimizer.fp32_from_fp16_params.0.1", "optimizer.fp32_from_fp16_params.0.5"
    data = {(i.fqn, tuple(i.offset or ())): (i, info) for i, info in fresh.storage_data.items()}
    for offset in ((0, 0), (32, 0)):
        (i, first), (j, second) = data[a, offset], data[b, offset]
        fresh.storage_data[i], fresh.storage_data[j] = second, first
    (folder / ".metadata").write_bytes(pickle.dumps(fresh))
    report = ckpt_tools.verify_checkpoint(root, options=ckpt_tools.VerifyOptions(content=True))
    assert {finding.check for finding in report.findings} == {"masters"}
    with pytest.raises(ckpt_tools.CkptError, match="do not round to the stored weights"):
        convert_to_fsdp_dtensor(root, tmp_path / "out")


# ---- to plain DCP


@pytest.mark.parametrize("source", [LLAMA, MOE])
def test_a_plain_state_dict_holds_what_fsdp_dtensor_does_in_whole_tensors(source):
    """Against the conversion to the other format, whose halves are joined here, by hand."""
    found, other = oracle.tensors(dcp(source)), oracle.tensors(fsdp(source))
    expected = {}
    for key, tensor in other.items():
        name = key.replace("model.module.", "model.").replace("state.module.module.module.", "state.")
        if "_v" in name.rpartition("linear_fc1.")[2] and "linear_fc1" in name:
            continue
        if "_w" in name.rpartition("linear_fc1.")[2] and "linear_fc1" in name:
            name = name.replace("_w", "")
            up = other[key.replace("_w", "_v")]
            expected[name] = torch.cat([tensor, up]) if tensor.dim() else tensor
        else:
            expected[name] = tensor
    oracle.assert_same(found, expected)


@pytest.mark.parametrize(
    "name",
    [LLAMA, MOE, "te_gdn_tp2_fr", "te_mla_ep2_fr", "te_moe_ep2_dpr", "te_remainder_tp2_fr", "n_moe_ep2"],
)
def test_every_layout_of_real_jobs_goes_there_and_back(name):
    """Fused and packed projections, prediction layers, experts, buckets, computed masters, native FSDP."""
    back = fsdp(dcp(name, tp=2), tp=2)
    if not name.startswith("n_"):
        assert_same(back, fsdp(name, tp=2))
        return
    tensors = [  # its rng states are of one rank
        {k: t for k, t in oracle.tensors(folder).items() if not k.startswith("rng_state.")}
        for folder in (back, iteration_of(name))
    ]
    oracle.assert_same(*tensors)


def test_a_hugging_face_model_keeps_its_names(tmp_path):
    report = convert_to_dcp(hf(LLAMA), tmp_path / "dcp", ConvertOptions(layout=Layout(world=2)))
    oracle.assert_same(tmp_path / "dcp", {f"model.{k}": t for k, t in oracle.model(hf(LLAMA)).items()})
    assert report.architecture == "LlamaForCausalLM"
    known = oracle.metadata(tmp_path / "dcp").planner_data
    assert known["model.lm_head.weight"] == ("model", "lm_head.weight")


# ---- laid out anew


@pytest.mark.parametrize("name", ["titan", "app", "numbered"])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_rows_are_where_fully_shard_has_them(sharded, tmp_path, name, size):
    """Against torch.chunk, for each parameter and each of its states."""
    options = ConvertOptions(layout=Layout("fsdp2", Topology(dp_shard=size)))
    convert_to_dcp(sharded / name, tmp_path / "out", options)
    assert_same(tmp_path / "out", sharded / name)
    assert weights_of(tmp_path / "out") == weights_of(
        sharded / name
    )  # an optimizer may number them by that order
    assert ckpt_tools.verify_checkpoint(tmp_path / "out").is_valid
    truth, cut = oracle.tensors(sharded / name), 0
    for key, places in chunks(tmp_path / "out").items():
        if key.endswith((".step", "ntokens_seen")):
            continue
        parts = [len(part) for part in torch.chunk(truth[key], size)]
        assert [rows for _, _, rows in places] == parts, key
        assert [file for file, _, _ in places] == [f"__{rank}_0.distcp" for rank in range(len(parts))], key
        cut += len(parts) > 1
    assert size == 1 or cut == 17 * 3 + 1


def test_replicas_write_once(sharded, tmp_path):
    options = ConvertOptions(layout=Layout("fsdp2", Topology(dp_shard=2, dp_outer=2)))
    convert_to_dcp(sharded / "titan", tmp_path / "out", options)
    assert_same(tmp_path / "out", sharded / "titan")
    assert {file for places in chunks(tmp_path / "out").values() for file, _, _ in places} == {
        "__0_0.distcp",
        "__1_0.distcp",
    }


def test_units_share_a_flat_buffer(sharded, tmp_path):
    """As a Megatron-FSDP job of this model has it: a rank's part of a buffer is not a part of every tensor."""
    out = str(tmp_path / "out")
    assert (
        run(["convert", str(sharded / "numbered"), out, "--dp-shard", "2", "--units", "layers.*", "-q"]) == 0
    )
    assert_same(tmp_path / "out", sharded / "numbered")
    held = chunks(tmp_path / "out")
    cut = {
        key: [rows for _, _, rows in places]
        for key, places in held.items()
        if key.startswith("model.layers.0.")
    }
    assert cut != {key: [len(p) for p in torch.chunk(torch.zeros(sum(rows)), 2)] for key, rows in cut.items()}
    assert run(["plan", str(sharded / "numbered"), "--dp-shard", "2", "--units", "layers.*"]) == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--layout", "mfsdp-v1", "--dp-shard", "2"], 2, "name those of the model with --units"),
        (["--units", "blocks.*", "--dp-shard", "2"], 2, "no module of the model has such a path"),
        (
            ["--units", "layers.*", "--layout", "fsdp2", "--dp-shard", "2"],
            2,
            "every tensor is cut on its own",
        ),
        (["--dp-shard", "2", "--tp", "2"], 2, "--tp 2"),
        ([], 2, "no other job is named"),
        (["--dp-shard", "2", "--weights-only"], 2, "is only re-sharded"),
        (["--to", "fsdp_dtensor"], 3, "do not have the names of a Megatron model"),
        (["--to", "torch_dist"], 3, "convert_to_hf.py"),
        (["--to", "hf"], 3, "import-hf"),
        (["--to", "dcp", "--swiglu", "--dp-shard", "2"], 2, "no meaning for a conversion to dcp"),
    ],
)
def test_what_cannot_be_done_with_a_model_that_is_not_megatrons(sharded, tmp_path, capsys, words, code, said):
    assert run(["convert", str(sharded / "titan"), str(tmp_path / "out"), *words]) == code
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_a_model_parallel_job_saved_one_ranks_part(tmp_path):
    from ckpt_tools.megatron.dcp.read import _refuse_parts
    from ckpt_tools.megatron.run_state.common_state import CommonState

    common = CommonState({}, "items", {"tensor_model_parallel_size": 2, "ckpt_format": "torch_dcp"})
    with pytest.raises(UnsupportedCheckpointError, match="tensor_model_parallel_size 2"):
        _refuse_parts("here", common)


def test_a_plan_prices_it(sharded, capsys):
    assert run(["plan", str(sharded / "titan"), "--dp-shard", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["format"], plan["layout"], plan["tensor_count"]) == ("dcp", "fsdp2", 72)


# ---- looked at


@pytest.mark.parametrize(
    ("name", "writer", "layout"),
    [
        ("titan", "torchtitan", "state_dict_flattened"),
        ("app", "PyTorch, weights under app.model.*", "state_dict_by_name"),
        ("numbered", "PyTorch, weights under model.*", "state_dict_by_number"),
    ],
)
def test_inspect_and_verify_say_what_it_is(sharded, name, writer, layout):
    found = ckpt_tools.inspect_checkpoint(str(sharded / name))
    assert (found.writer, found.layout) == (writer, layout)
    counts = {role: total.tensors for (role, dtype), total in found.totals.items() if dtype == "float32"}
    assert counts["weight"] == 18
    assert counts["exp_avg"] == counts["exp_avg_sq"] == 17
    report = ckpt_tools.verify_checkpoint(sharded / name, options=ckpt_tools.VerifyOptions(content=True))
    assert report.findings == []
    assert {"states", "groups"} <= {check.name for check in report.checks}


def without(source: Path, place: Path, *patterns: str, rename: str = "") -> str:
    """A copy without some keys, made by the tool's own editor."""
    operations = [f"remove {pattern}" for pattern in patterns] + ([f"rename {rename}"] if rename else [])
    ckpt_tools.modify_state_dict(source, place, operations)
    return str(place)


@pytest.mark.parametrize(
    ("name", "removed", "renamed", "said"),
    [
        ("titan", [r"layers\.1\.up\.weight\.exp_avg_sq$"], "", "states ['exp_avg_sq'] are missing"),
        ("app", [r"output\.weight\.exp_avg$"], "", "states ['exp_avg'] are missing"),
        ("numbered", [r"state\.3\.exp_avg$"], "", "states ['exp_avg'] are missing"),
        ("titan", [r"^layers\.2\.norm\.bias$"], "", "there is no weight layers.2.norm.bias"),
        ("numbered", [r"^model\.layers\.2\.norm\.bias$"], "", "they belong to another model"),
        ("titan", [r"param_groups\.output\.weight\.lr$"], "", "the field lr is missing"),
        ("titan", [r"param_groups\.output\.weight\."], "", "it is in none of the optimizer's groups"),
        ("app", [], r"state\.output\.weight\.(.*) state.nobody.weight.\1", "it is in none of the optimizer's groups"),
        ("titan", [r"layers\.1\.down\.weight\.(exp_avg|exp_avg_sq|step)$"], "", "it is in a group and has no state"),
    ],
)  # fmt: skip
def test_real_faults_are_found(sharded, tmp_path, name, removed, renamed, said):
    root = without(sharded / name, tmp_path / "x", *removed, rename=renamed)
    found = [finding.message for finding in ckpt_tools.verify_checkpoint(root).findings]
    assert any(said in message for message in found), found


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_a_parameter_in_two_groups_is_found(tmp_path):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"].append(state["param_groups"][0] | {"params": [1]})
    save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    found = [finding.message for finding in ckpt_tools.verify_checkpoint(tmp_path).findings]
    assert "parameter 1 is in two groups" in found


def test_a_state_dict_is_known_again_beside_weights_for_version_2(tmp_path):
    """Both have `model.<name>` beside a record: it says which of them is whose."""
    source = next(fixture_dir("core019_gpt3_tp2_fully_reshardable").glob("iter_*"))
    plain, two = tmp_path / "plain", tmp_path / "two"
    assert run(["convert", str(source), str(plain), "-q", "--to", "dcp", "--weights-only"]) == 0
    version_2 = ["--layout", "mfsdp-v2", "--gpus", "2", "--target", "main"]
    assert (
        run(["convert", str(plain), str(two), "-q", "--to", "fsdp_dtensor", *version_2, "--weights-only"])
        == 0
    )
    assert (
        run(["convert", str(plain), str(tmp_path / "other"), "-q", "--to", "dcp", "--world-size", "2"]) == 0
    )
    slice_layers(plain, tmp_path / "slice", "0:1")
    slice_layers(two, tmp_path / "slice of two", "0:1")
    kinds = {folder.name: locate(str(folder)).kind for folder in sorted(tmp_path.iterdir())}
    assert kinds == {
        "other": "dcp",
        "plain": "dcp",
        "slice": "dcp",
        "slice of two": "fsdp_dtensor",
        "two": "fsdp_dtensor",
    }


def test_a_slice_is_a_whole_state_dict(sharded, tmp_path):
    truth = torch.load(sharded / "truth.pt", weights_only=True)
    for name, root in (("titan", ""), ("app", "app.model."), ("numbered", "model.")):
        slice_layers(sharded / name, tmp_path / name, "1:2")
        assert ckpt_tools.verify_checkpoint(tmp_path / name).findings == []
        found = oracle.tensors(tmp_path / name)
        assert oracle.same_bytes(found[f"{root}layers.0.up.weight"], truth["layers.1.up.weight"])
        assert not any("layers.1." in key for key in found)
    numbers = oracle.item(tmp_path / "numbered", "optimizer.param_groups.1.params")
    found = oracle.tensors(tmp_path / "numbered")
    stored = {n: found[f"optimizer.state.{n}.exp_avg"] for n in range(7)}
    assert numbers == [4, 5, 6]
    assert oracle.same_bytes(stored[1], truth["state.layers.1.up.weight.exp_avg"])
    assert oracle.same_bytes(stored[6], truth["state.layers.1.up.bias.exp_avg"])
    assert oracle.item(tmp_path / "app", "app.optim.param_groups.1.params") == [
        f"layers.0.{leaf}" for leaf in ("norm.weight", "norm.bias", "up.bias")
    ]


def test_a_slice_of_torch_dcp_converts(tmp_path):
    for name in ("tf2_dcp", "tf2_dist"):
        slice_layers(fixture_dir(name), tmp_path / name, "1:2")
    oracle.assert_same(fsdp(tmp_path / "tf2_dcp"), fsdp(tmp_path / "tf2_dist"))


def test_diff_sees_one_model_in_three_formats():
    found = ckpt_tools.diff_checkpoints(fixture_dir("tf2_dcp"), fixture_dir("tf2_dist"))
    assert found.by == "parameters"
    assert {d.name for d in found.tensors if d.kind != "equal"} == set()
    assert ckpt_tools.diff_checkpoints(DATA / LLAMA, dcp(LLAMA)).is_equal


# ---- the real classes


def test_a_real_model_resumes_from_what_was_laid_out(sharded, tmp_path):
    """`fully_shard` on two processes loads the relayouts for three, one and two, all of its states equal."""
    for name, layout in (
        ("titan", Layout("fsdp2", Topology(dp_shard=3))),
        ("app", Layout(world=1)),
        ("numbered", Layout("mfsdp-v1", Topology(dp_shard=2), units=("layers.*",))),
    ):
        convert_to_dcp(sharded / name, tmp_path / name, ConvertOptions(layout=layout))
    shutil.copy(sharded / "truth.pt", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "-m", "tests.megatron.dcp.sharded_model", str(tmp_path), "resume"],
        check=False,
        cwd=REPO, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "resumed.json").read_text()) == {"titan": [], "app": [], "numbered": []}


@pytest.mark.parametrize("name", ["numbered", "weights"])
def test_a_wrapped_module_that_is_not_megatron_lms(sharded, tmp_path, name):
    """`model.module.` alone does not make `fsdp_dtensor`: Megatron-FSDP on its own, and DDP, write it too."""
    operations = [r"rename ^model\. model.module."] + ([r"remove ^optimizer\."] if name == "weights" else [])
    ckpt_tools.modify_state_dict(sharded / "numbered", tmp_path / "x", operations)
    found = ckpt_tools.inspect_checkpoint(str(tmp_path / "x"))
    assert (found.location.kind, found.writer) == ("dcp", "PyTorch, of a wrapped module (Megatron-FSDP, DDP)")
    report = ckpt_tools.verify_checkpoint(tmp_path / "x", options=ckpt_tools.VerifyOptions(content=True))
    assert report.findings == []


def test_a_wrapped_megatron_model_converts(tmp_path):
    ckpt_tools.modify_state_dict(fixture_dir("tf2_dcp"), tmp_path / "x", [r"rename ^model\. model.module."])
    assert_same(fsdp(tmp_path / "x"), fsdp("tf2_dcp"))
