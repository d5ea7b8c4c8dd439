"""`StorageReader` against stock `dcp.load` of our own conversion, on real processes, for every format and layout."""

import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import ckpt_tools
from ckpt_tools.commands.convert.to_dtensors import convert_to_dcp, convert_to_fsdp_dtensor
from ckpt_tools.commands.huggingface.import_hf import ImportOptions, import_hf
from ckpt_tools.commands.job.conversion import ConvertOptions
from ckpt_tools.commands.job.placements import Layout
from ckpt_tools.errors import UsageError
from ckpt_tools.execute.move.read_box import BoxReader
from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions
from tests.commands import oracle
from tests.commands.launched import torchrun
from tests.conftest import DATA, fixture_dir

LLAMA = DATA / "core019_llama_tp2_fully_reshardable"
MOE = fixture_dir("core019_moe_ep2_fully_reshardable")
NATIVE = fixture_dir("core019_llama_tp2_native_fsdp_dtensor")
WHOLE = Layout(world=2)
FORMS = ("titan", "app", "numbered")

# Each optimizer layout, computed masters, Megatron's torch_dcp.
LAYOUTS = (
    "te_llama_dp2_buckets_dpr",
    "te_remainder_tp2_fr",
    "tf2_dist",
    "tf2_dcp",
    "main_gdn_fr_tp2",
    "main_mla_mtp_moe_fr_tp2",
    "v013_dense_ms_tp2_dp2",
    "v013_dense_dpzero_tp2_dp2",
    "v015_moe_ms_etp2_shared",
    "v016_dense_nodistopt_tp2",
)


def iteration(root: Path) -> Path:
    return next(root.rglob(".metadata")).parent


def case(source: Path, to: str, tmp_path: Path, **target: Any) -> dict[str, Any]:
    """A source, and its conversion that stock torch loads."""
    name = f"{source.name}-{to}-{'-'.join(target)}"
    source = source / "checkpoint" if (source / "checkpoint").is_dir() else source
    out = tmp_path / name
    convert = convert_to_dcp if to == "dcp" else convert_to_fsdp_dtensor
    kind = ckpt_tools.inspect_checkpoint(str(source)).location.kind
    layout = WHOLE if kind in (to, "dcp") else None
    convert(str(source), str(out), ConvertOptions(target=TargetOptions(**target), layout=layout))
    return {
        "name": name, "source": str(source), "to": to, "converted": str(iteration(out)), "target": target,
        "objects": ["iteration"] if kind != "dcp" else [],
    }  # fmt: skip


def run_job(cases: list[dict[str, Any]], ranks: int, tmp_path: Path) -> None:
    """Every rank of a torchrun job finds the bytes that stock torch reads from the conversion."""
    for rank, results in enumerate(torchrun("storage_reader_worker", cases, ranks, tmp_path)):
        assert results.keys() == {c["name"] for c in cases}
        for name, result in results.items():
            assert result["wrong"] == [], (rank, name)
            assert result["same_keys"], name
            assert 0 < result["sharded"] < result["tensors"], name
            assert result["straight"] == (17 * 3 + 1 if name.split("-")[0] in FORMS else 0), name


def test_two_ranks_find_the_bytes_of_every_conversion(tmp_path, sharded):
    """Every format and optimizer layout that is there, into rows, columns and whole tensors."""
    ckpt_tools.export_hf(str(LLAMA), str(tmp_path / "hf"))
    cases = [case(root, to, tmp_path) for root in (LLAMA, MOE, NATIVE) for to in ("dcp", "fsdp_dtensor")]
    cases += [case(sharded / name, "dcp", tmp_path) for name in FORMS]
    cases += [case(LLAMA, "dcp", tmp_path, weights_only=True, dtype="bfloat16")]
    hf = case(tmp_path / "hf", "dcp", tmp_path) | {"objects": []}
    options = ImportOptions(to="fsdp_dtensor", fsdp=TargetOptions(fresh_optimizer=False))
    import_hf(str(tmp_path / "hf"), str(tmp_path / "imported"), options)
    folder = str(iteration(tmp_path / "imported"))
    imported = hf | {"name": "imported", "to": "fsdp_dtensor", "converted": folder}
    for number, name in enumerate(LAYOUTS):
        tp = {"tp": 2} if "gdn" in name else {}
        cases += [case(fixture_dir(name), ("dcp", "fsdp_dtensor")[number % 2], tmp_path, **tp)]
    run_job([*cases, hf, imported], 2, tmp_path)


def test_rows_that_are_replicated_over_two_ranks(tmp_path):
    run_job([case(LLAMA, "dcp", tmp_path), case(MOE, "fsdp_dtensor", tmp_path)], 4, tmp_path)


def whole(tmp_path: Path) -> tuple[dict[str, torch.Tensor], Path]:
    out = tmp_path / "dcp"
    convert_to_dcp(str(LLAMA), str(out))
    return oracle.tensors(iteration(out)), iteration(out)


def test_nested_state_dicts_and_objects_in_one_process(tmp_path):
    """As a trainer writes it: dicts in a dict, numbers among tensors, no process group."""
    truth, folder = whole(tmp_path)
    weights = {
        k.removeprefix("model."): torch.zeros_like(t) for k, t in truth.items() if k.startswith("model.")
    }
    names = [k.removeprefix("optimizer.") for k in truth if k.startswith("optimizer.state.")]
    optimizer: dict[str, Any] = {name: torch.zeros_like(truth[f"optimizer.{name}"]) for name in names}
    fields = [
        k for k in oracle.metadata(folder).state_dict_metadata if k.startswith("optimizer.param_groups.")
    ]
    optimizer |= {key.removeprefix("optimizer."): None for key in fields}
    state: dict[str, Any] = {"model": weights, "optimizer": optimizer, "iteration": 0}
    dcp.load(state, storage_reader=ckpt_tools.StorageReader(str(LLAMA)), no_dist=True)
    assert state["iteration"] == 2
    assert all(oracle.same_bytes(tensor, truth[f"model.{name}"]) for name, tensor in weights.items())
    assert all(oracle.same_bytes(optimizer[name], truth[f"optimizer.{name}"]) for name in names)
    assert all(optimizer[k.removeprefix("optimizer.")] == oracle.item(folder, k) for k in fields)


def running_module(names: dict[str, torch.Size]) -> torch.nn.Module:
    """A module whose parameters have these names and shapes."""
    top = torch.nn.Module()
    for name, shape in names.items():
        *path, leaf = name.split(".")
        inner = top
        for step in path:
            if not hasattr(inner, step):
                inner.add_module(step, torch.nn.Module())
            inner = getattr(inner, step)
        inner.register_parameter(leaf, torch.nn.Parameter(torch.zeros(shape)))
    return top


@pytest.mark.parametrize("name", [LLAMA.name, "tf2_dist"])
def test_a_torch_program_resumes_a_megatron_run(name, tmp_path):
    """torch's own AdamW, by `set_state_dict`: nothing that it asks for is missing, fused Adam's runs included."""
    convert_to_dcp(str(fixture_dir(name)), str(tmp_path / "dcp"))
    truth = oracle.tensors(iteration(tmp_path / "dcp"))
    reader = ckpt_tools.StorageReader(str(fixture_dir(name)))
    model = running_module(
        {k.removeprefix("model."): t.shape for k, t in truth.items() if k.startswith("model.")}
    )
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others}])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, states = get_state_dict(model, optimizer, options=flat)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, storage_reader=reader, no_dist=True)
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"], options=flat
    )
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]  # torch has 0.01
    assert optimizer.param_groups[0]["initial_lr"] > 0
    for parameter_name, parameter in model.named_parameters():
        assert oracle.same_bytes(parameter.data, truth[f"model.{parameter_name}"])
        for kind, value in optimizer.state[parameter].items():
            assert oracle.same_bytes(value, truth[f"optimizer.state.{parameter_name}.{kind}"])


def test_another_type_in_the_template_is_cast_as_stock_torch_does(tmp_path):
    truth, folder = whole(tmp_path)
    key = "model.decoder.layers.0.mlp.linear_fc1.weight"
    ours, stock = ({key: torch.zeros(truth[key].shape, dtype=torch.bfloat16)} for _ in range(2))
    dcp.load(ours, storage_reader=ckpt_tools.StorageReader(str(LLAMA)), no_dist=True)
    dcp.load(stock, storage_reader=FileSystemReader(str(folder)), no_dist=True)
    assert oracle.same_bytes(ours[key], stock[key])


def test_only_what_is_asked_for_is_read(monkeypatch):
    read: list[tuple[str, int]] = []
    own = BoxReader.read

    def watched(self, target, box):
        read.append((target.key, box.volume))
        return own(self, target, box)

    monkeypatch.setattr(BoxReader, "read", watched)
    options = ConvertOptions(check_masters="none")
    reader = ckpt_tools.StorageReader(str(LLAMA), options=options)
    shape = reader.read_metadata().state_dict_metadata["model.output_layer.weight"].size
    state = {"model.output_layer.weight": torch.zeros(shape)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert read == [("model.output_layer.weight", shape.numel())]


def test_a_key_that_is_not_there_is_told_with_those_that_were_meant():
    state = {"model.decoder.layers.0.mlp.linear_fc1.weight_w": torch.zeros(2)}
    reader = ckpt_tools.StorageReader(str(LLAMA))
    with (
        pytest.warns(
            UserWarning, match=r"gives as dcp; did the program mean model\.decoder\.layers\.0\.mlp\."
        ),
        pytest.raises(CheckpointException, match="Missing key"),
    ):
        dcp.load(state, storage_reader=reader, no_dist=True)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    with pytest.warns(UserWarning, match="StorageReader"):
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    assert not state.popitem()[1].any()


def test_another_shape_is_refused_with_both():
    state = {"model.decoder.final_layernorm.weight": torch.zeros(3)}
    with pytest.raises(
        CheckpointException, match=r"torch.Size\(\[32\]\) and current: torch.Size\(\[3\]\) for model"
    ):
        dcp.load(state, storage_reader=ckpt_tools.StorageReader(str(LLAMA)), no_dist=True)


def test_masters_that_are_not_the_weights_stop_a_load(tmp_path):
    from tests.altered import altered, overwrite

    root = altered(LLAMA.name, tmp_path, 3)
    key = "optimizer.state.param.decoder.final_layernorm.weight"
    overwrite(iteration(root), {key: torch.full((32,), 5.0)})
    state = {"model.decoder.final_layernorm.weight": torch.zeros(32)}
    with pytest.raises(CheckpointException, match="do not round to the stored weights"):
        dcp.load(state, storage_reader=ckpt_tools.StorageReader(str(root)), no_dist=True)


def test_what_is_no_checkpoint_or_no_format(tmp_path):
    reader = ckpt_tools.StorageReader
    assert reader.validate_checkpoint_id(str(LLAMA))
    assert not reader.validate_checkpoint_id(str(tmp_path))
    with pytest.raises(UsageError, match="to='torch_dist'"):
        reader(str(LLAMA), cast("Any", "torch_dist"))
    with pytest.raises(ckpt_tools.CkptError, match="is empty"):
        reader(str(tmp_path))
    moved = reader(str(MOE))
    moved.reset(str(LLAMA))
    assert not any("experts" in key for key in moved.keys())  # noqa: SIM118  it is no dict
    assert "model.decoder.final_layernorm.weight" in set(moved.keys())


def test_a_partial_load_of_thousands_tells_of_a_few():
    """And none of it is slow: names are compared for these alone."""
    state = {f"model.nobody.{i}": torch.zeros(1) for i in range(2000)}
    with pytest.warns(UserWarning) as told:
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(state, storage_reader=ckpt_tools.StorageReader(str(LLAMA)), planner=planner, no_dist=True)
    assert sum("is not among the keys" in str(w.message) for w in told) == 3


def test_a_model_that_cannot_be_had_is_refused_before_a_load(sharded):
    with pytest.raises(ckpt_tools.CkptError, match="do not have the names of a Megatron model"):
        ckpt_tools.StorageReader(str(sharded / "titan"), "fsdp_dtensor")


def test_the_format_decides_the_names():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keys = ckpt_tools.StorageReader(str(LLAMA), "fsdp_dtensor").keys()
    assert "model.module.decoder.layers.0.mlp.linear_fc1.weight_w" in keys
