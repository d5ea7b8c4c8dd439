"""The common state from its three places, the record of a conversion, and the kinds that values have."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from ckpt_tools.errors import CorruptCheckpointError, HostileCheckpointError, MappingError
from ckpt_tools.formats.dcp.metadata_read import read_catalog
from ckpt_tools.formats.locate.detect import RECORD_FILE
from ckpt_tools.formats.pickle.unpickle import stand_in
from ckpt_tools.formats.storage.files import LocalFiles
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.torch_archive.item_reader import StoredTensor
from ckpt_tools.megatron.huggingface.config.ledger import arguments
from ckpt_tools.megatron.run_state.common_state import CommonState, read_common_state
from ckpt_tools.megatron.run_state.record import (
    Size,
    TargetRecord,
    read_record,
    record_bytes,
    stored_tp,
)
from ckpt_tools.megatron.run_state.stored_values import FLAGS, TEXTS, check_settings
from ckpt_tools.megatron.torch_dist.optimizer_layouts.states import declared_layout, optimizer_layout
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.verify.readiness.job import VERSIONS, flags_named
from tests.conftest import LLAMA, all_checkpoints, fixture_dir


def read(folder: Path) -> tuple[Catalog, CommonState]:
    files = open_files(str(folder))
    catalog = read_catalog(files)
    return catalog, read_common_state(files, catalog)


@pytest.fixture
def iteration(tmp_path: Path) -> Path:
    shutil.copytree(fixture_dir(LLAMA) / "iter_0000002", tmp_path / "x", copy_function=shutil.copyfile)
    (tmp_path / "x").chmod(0o755)
    return tmp_path / "x"


@pytest.mark.parametrize(
    ("folder", "source", "iteration", "args"),
    [
        (f"{LLAMA}/iter_0000002", "common_state", 2, {"num_layers": 2, "swiglu": True}),
        ("core019_llama_tp2_native_fsdp_dtensor/iter_0000002", "items", 2, {"hidden_size": 32}),
        ("v011_dense_ms_tp2_dp1/checkpoint", "common.pt", 2, {"tensor_model_parallel_size": 2}),
        ("bridge_dense_fr_tp2_dp2/checkpoint", "common_state", 2, {"gated_linear_unit": True, "num_layers": 3}),
        (f"{LLAMA}/param_to_param_group_map", None, None, {}),
    ],
)  # fmt: skip
def test_where_it_is(folder, source, iteration, args):
    name, _, below = folder.partition("/")
    common = read(fixture_dir(name) / below)[1]
    assert (common.source, common.iteration) == (source, iteration)
    assert {name: common.arg(name) for name in args} == args
    assert common.arg("absent", 7) == 7
    assert bool(common.args) is (source is not None and "bridge" not in folder)


def test_common_pt_wins_over_the_object(iteration):
    torch.save({"iteration": 9}, iteration / "common.pt")
    common = read(iteration)[1]
    assert (common.source, common.iteration, common.args) == ("common.pt", 9, {})


@pytest.mark.parametrize(
    ("file", "content", "error", "message"),
    [
        ("common.pt", [1], CorruptCheckpointError, r"common\.pt: holds a list, expected a dict"),
        ("common.pt", {"f": shutil.copytree}, HostileCheckpointError, r"names shutil.'copytree'"),
        ("run_config.yaml", "model: [", CorruptCheckpointError, r"run_config\.yaml: not readable YAML"),
        (
            "run_config.yaml",
            "a: !!python/object/apply:os.system ['id']",
            CorruptCheckpointError,
            "constructor",
        ),
    ],
)
def test_damage_is_named(iteration, file, content, error, message):
    if isinstance(content, str):
        (iteration / file).write_text(content)
    else:
        torch.save(content, iteration / file)
    with pytest.raises(error, match=message):
        read(iteration)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("core016_llama_tp2_dp_reshardable/iter_0000002", "dp_reshardable"),
        (f"{LLAMA}/iter_0000002", "fully_reshardable"),
        ("v013_dense_dpzero_tp2_dp2/checkpoint", "dp_zero_gather_scatter"),
        ("v013_moe_ms_ep2/checkpoint", "fully_sharded_model_space"),
    ],
)
def test_layouts_agree_with_what_their_writer_declared(name, layout):
    root, _, folder = name.partition("/")
    catalog, common = read(fixture_dir(root) / folder)
    assert optimizer_layout(catalog, common) == declared_layout(common) == layout


def test_layout_that_nobody_declared():
    catalog, _ = read(fixture_dir("v016_dense_nodistopt_tp2") / "checkpoint")
    assert optimizer_layout(catalog, CommonState({}, None)) == "non_distributed"
    assert declared_layout(CommonState({"optimizer": {0: {"param_state_sharding_type": "x"}}}, None)) == "x"


RECORD = TargetRecord("core-0.16", tp=Size(2, "--tp"), ep=Size(4, "args"), tokens=201)


def recorded(folder: Path, content: bytes | None) -> TargetRecord | None:
    if content is not None:
        (folder / RECORD_FILE).write_bytes(content)
    return read_record(LocalFiles(str(folder)))


def test_what_is_written_is_read(tmp_path):
    assert recorded(tmp_path, None) is None
    assert recorded(tmp_path, record_bytes(RECORD)) == RECORD
    assert recorded(tmp_path, record_bytes(TargetRecord("main"))) == TargetRecord("main")
    assert json.loads(record_bytes(RECORD)) == {
        "schema_version": 1,
        "target": "core-0.16",
        "topology": {
            "tp": {"ranks": 2, "source": "--tp"},
            "ep": {"ranks": 4, "source": "args"},
            "etp": None,
            "dp": None,
            "cp": None,
        },
        "tokens": 201,
    }


def test_a_record_of_before_context_parallel_sizes_is_read(tmp_path):
    old = json.loads(record_bytes(RECORD))
    del old["topology"]["cp"]
    assert recorded(tmp_path, json.dumps(old).encode()) == RECORD


GOOD = json.loads(record_bytes(RECORD))


def with_tp(tp: object) -> dict[str, object]:
    return {"topology": GOOD["topology"] | {"tp": tp}}


CHANGED: list[dict[str, object]] = [
    {"schema_version": 2}, {"target": 3}, {"target": "mxin"}, {"tokens": True}, {"tokens": 0}, {"fprmat": "dcp"},
    {"topology": GOOD["topology"] | {"up": None}}, {"topology": []}, with_tp(2),
    with_tp({"ranks": 2.0, "source": ""}),
    with_tp({"ranks": -2, "source": ""}), with_tp({"ranks": 2, "source": None}),
]  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff\xfe", b"[]", b"null", b"[" * 100_000, b"{}", b" " * (2 << 20)),
        *(json.dumps(GOOD | changed).encode() for changed in CHANGED),
    ],
)
def test_what_is_no_record_is_refused_by_name(tmp_path, content):
    with pytest.raises(CorruptCheckpointError, match=RECORD_FILE):
        recorded(tmp_path, content)


NATIVE, CARRIED = (
    {"tensor_model_parallel_size": 8, "ckpt_format": kind} for kind in ("fsdp_dtensor", "torch_dist")
)
STATES = [(0, 0), (0, 1)]


@pytest.mark.parametrize(
    ("record", "rng", "args", "expected"),
    [
        (RECORD, STATES, NATIVE, Size(2, RECORD_FILE)),
        (RECORD, [], NATIVE, Size(2, RECORD_FILE)),
        (None, STATES, NATIVE, Size(2, "rng states")),
        (TargetRecord("main"), STATES, NATIVE, Size(2, "rng states")),
        (None, [], NATIVE, Size(8, "args")),
        (None, [], CARRIED, None),
        (None, [], {}, None),
        (None, [], {"ckpt_format": "fsdp_dtensor"}, None),
    ],
)
def test_for_how_many_ranks_a_checkpoint_is(record, rng, args, expected):
    assert stored_tp(record, rng, args) == expected


def test_a_record_of_another_checkpoint_is_refused():
    with pytest.raises(MappingError, match="2 tensor-parallel ranks, and it holds rng states of 1"):
        stored_tp(RECORD, [(0, 0)], {})


NUMPY_FALSE = stand_in("numpy._core.multiarray", "scalar")("dtype", b"\0")
TENSOR_FALSE = StoredTensor("bool", (), b"\0")
MEMBER = stand_in("megatron.core.enums", "Fp8Recipe")("delayed")
NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((flag, [NUMPY_FALSE, TENSOR_FALSE, "False", 0, 1.0, [], b""]) for flag in sorted(FLAGS)),
        *((text, [NUMPY_FALSE, TENSOR_FALSE, False, 1e308, b"x", []]) for text in sorted(TEXTS)),
        ("hidden_size", [None, NUMPY_FALSE, True, 1.0, "8", -1]),
        ("consumed_train_samples", ["x", -1, 1.5]),
        ("iteration", ["x", [], -1]),
        ("moe_layer_freq", [{}, 0, "[1]", [1, "x"]]),
        ("rotary_base", [0, -1, NAN, "x", [10000, 0], True]),
        ("layernorm_epsilon", [-1, NAN, "1e-5", NUMPY_FALSE]),
        ("rotary_percent", ["x", True, TENSOR_FALSE]),
        ("window_size", ["x", (1.0, 0), {}]),
        ("rope_scaling", [NUMPY_FALSE, 1]),
        ("checkpoint_version", [["a", None], "3"]),
        ("num_floating_point_operations_so_far", [[1], "x", 1e300, True]),
        ("transformer", [{"swiglu": "yes"}]),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(name, values):
    for value in values:
        with pytest.raises(CorruptCheckpointError, match=rf"^args\.{name}.* belongs there"):
            check_settings({name: value}, "args")


@pytest.mark.parametrize(
    "settings",
    [
        dict.fromkeys((*FLAGS, *TEXTS, "rotary_base", "moe_layer_freq", "window_size", "rope_scaling")),
        dict.fromkeys(FLAGS, False),
        {"fp8_recipe": MEMBER, "position_embedding_type": {"_target_": "x"}, "normalization": "RMSNorm"},
        {"rotary_base": [10000, 1000000.0], "window_size": 7, "rope_scaling": {"factor": 8}},
        {"window_size": (-1, 0), "interleaved_attn_pattern": [5, 1], "moe_layer_freq": [0, 1]},
        {"num_floating_point_operations_so_far": 10**25, "layernorm_epsilon": 0, "no_rope_freq": 0},
        {"a_setting_of_somebody": NUMPY_FALSE},
    ],
)
def test_what_megatron_stores_is_taken(settings):
    check_settings(settings, "args")


def test_every_switch_that_decides_an_export_is_a_flag():
    kinds: dict[str, set[str]] = {}
    for version in VERSIONS:
        for name, flags in flags_named(version).items():
            kinds.setdefault(name, set()).update(flag.kind for flag in flags)
    assert not {name for name in FLAGS if "store" in kinds.get(name, ())}
    read_names = {*arguments().carried, *arguments().changes}
    assert not {name for name in read_names if "store" not in kinds.get(name, {"store"})} - FLAGS


@pytest.mark.parametrize("folder", all_checkpoints().values(), ids=all_checkpoints())
def test_every_real_checkpoint_has_values_of_these_kinds(folder):
    for metadata in folder.rglob(".metadata"):
        read(metadata.parent)


def test_bridges_word_for_weight_decay_of_norms(iteration):
    (iteration / "run_config.yaml").write_text("scheduler: {no_weight_decay_cond_type: qwen3_next}")
    assert read(iteration)[1].optimizer_config == {"apply_wd_to_qk_layernorm": True}
