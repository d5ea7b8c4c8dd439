"""`--ignore-keys` leaves out what it matches, tensors too, in every command that has it, and says what it did."""

from pathlib import Path

import pytest

from ckpt_tools import (
    ConvertOptions,
    DiffOptions,
    ExportOptions,
    Layout,
    Topology,
    ToTorchDistOptions,
    convert_to_fsdp_dtensor,
    convert_to_torch_dist,
    diff_checkpoints,
    export_hf,
    modify_state_dict,
    plan_checkpoint,
)
from ckpt_tools.cli.app import run
from ckpt_tools.errors import MappingError
from tests.commands import oracle
from tests.commands.made import fsdp, hf, torch_dist

GLOB = "*quantizer*"


def converted(source: Path, output: Path, *globs: str) -> tuple[str, ...]:
    return convert_to_fsdp_dtensor(source, output, ConvertOptions(ignore_keys=globs)).dropped


@pytest.fixture(scope="module")
def without(cases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint that never had quantizers."""
    folder = tmp_path_factory.mktemp("without") / "plain"
    modify_state_dict(cases / "quantizer_keys", folder, ["remove quantizer"])
    assert not any("quantizer" in key for key in oracle.metadata(folder).state_dict_metadata)
    return folder


def test_to_fsdp_dtensor(cases, without, tmp_path):
    dropped = converted(cases / "quantizer_keys", tmp_path / "out", GLOB)
    assert sum(line.endswith("_amax: --ignore-keys") for line in dropped) == 4
    oracle.assert_same(tmp_path / "out", fsdp(without))


@pytest.mark.parametrize("swapped", [False, True])
def test_diff_with_an_export_leaves_out_what_the_export_did(swapped, cases, tmp_path):
    source, model = str(cases / "quantizer_keys"), str(tmp_path / "hf")
    export_hf(source, model, ExportOptions(ignore_keys=(GLOB,)))
    sides = (model, source) if swapped else (source, model)
    with pytest.raises(
        MappingError, match=r"quantizer[^$]*--ignore-keys GLOB leaves it out \(diff: --ignore\)$"
    ):
        diff_checkpoints(*sides)
    with pytest.raises(MappingError, match="quantizer"):  # a glob of the model's names is not one of keys
        diff_checkpoints(*sides, DiffOptions(ignore=("*norm*",)))
    report = diff_checkpoints(*sides, DiffOptions(ignore=(GLOB, "no.such.name")))
    assert report.is_equal and len(report.tensors) > 10
    assert [note for note in report.notes if note.startswith("--ignore")] == [
        "--ignore 'no.such.name' matches nothing"
    ]


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_export(dtype, cases, without, tmp_path):
    source = str(cases / "quantizer_keys")
    with pytest.raises(MappingError, match="quantizer"):
        export_hf(source, tmp_path / "out", ExportOptions(dtype=dtype))
    report = export_hf(source, tmp_path / "out", ExportOptions(ignore_keys=(GLOB,), dtype=dtype))
    reasons = [line.partition(": ")[2] for line in report.dropped]
    assert reasons.count("--ignore-keys") == 4
    assert len(reasons) == 5  # and the folder of ModelOpt's state
    oracle.assert_same(oracle.model(tmp_path / "out"), oracle.model(hf(without, dtype=dtype)))


def test_the_way_back_and_a_new_layout(cases, without, tmp_path):
    source = fsdp(cases / "quantizer_keys")
    assert any("quantizer" in key for key in oracle.tensors(source))
    options = ToTorchDistOptions(ignore_keys=(GLOB,))
    report = convert_to_torch_dist(source, tmp_path / "back", options)
    assert sum(line.endswith(": --ignore-keys") for line in report.dropped) == 8
    oracle.assert_same(tmp_path / "back", torch_dist(fsdp(without)))
    layout = Layout("mfsdp-v1", Topology(dp_shard=2))
    again = ConvertOptions(ignore_keys=(GLOB,), layout=layout)
    dropped = convert_to_fsdp_dtensor(source, tmp_path / "again", again).dropped
    assert sum(line.endswith(": --ignore-keys") for line in dropped) == 8
    convert_to_fsdp_dtensor(fsdp(without), tmp_path / "truth", ConvertOptions(layout=layout))
    oracle.assert_same(tmp_path / "again", tmp_path / "truth")


def test_a_plan_leaves_them_out(cases):
    options = ConvertOptions(ignore_keys=(GLOB,))
    report = plan_checkpoint(cases / "quantizer_keys", Layout("mfsdp-v1", Topology(dp_shard=2)), options)
    assert not any("quantizer" in item.key for item in report.items())


@pytest.mark.parametrize(
    "command", ["convert", "convert --to torch_dist", "convert --to dcp", "export-hf", "plan"]
)
def test_a_glob_that_matches_nothing_is_refused(command, cases, tmp_path, capsys):
    """What was meant would be in the output all the same."""
    output = [] if command == "plan" else [str(tmp_path / "out")]
    globs = ["--ignore-keys", GLOB, "--ignore-keys", "*output_layr*"]
    assert run([*command.split(), str(cases / "quantizer_keys"), *output, *globs]) == 2
    err = capsys.readouterr().err
    assert "--ignore-keys '*output_layr*' matches nothing; did you mean output_layer.weight" in err
    assert not list(tmp_path.iterdir())


def test_what_a_weight_still_needs_is_missed(cases, tmp_path):
    with pytest.raises(MappingError, match=r"there is no weight decoder\.layers\.mlp\.linear_fc2\.weight"):
        converted(cases / "quantizer_keys", tmp_path / "out", "decoder.layers.mlp.linear_fc2.weight")
