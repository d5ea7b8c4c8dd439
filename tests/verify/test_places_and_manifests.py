"""What stands beside the tensors: shards of objects, `metadata.json`, `integrity.json`, newer iterations."""

import hashlib
import json
import shutil

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.commands.job.opened import open_checkpoint
from ckpt_tools.commands.look.ls import list_run
from ckpt_tools.megatron.torch_dist.grids import object_grids
from tests.conftest import fixture_dir
from tests.damage import ITERATION, copy_of, drop_key, findings_of, flip_bit, infos_of, metadata_of

LLAMA = "core019_llama_tp2_fully_reshardable"
MOE = "core019_moe_ep2_fully_reshardable"


EXTRA = "decoder.layers.1.mlp.experts.experts.linear_fc1._extra_state"


@pytest.mark.parametrize(
    ("case", "where", "missing"),
    [
        ("rng_tp1_missing", "rng_state", "rng_state/shard_0.1_1.2"),
        ("expert_extra_state_missing", EXTRA, f"{EXTRA}/shard_2_4"),
    ],
)
def test_a_missing_shard_of_an_object(case, where, missing, cases, capsys):
    assert run(["verify", str(cases / "incomplete_objects" / case)]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error")]
    (line,) = lines
    assert line.startswith(f"error: shards: {where}: ")
    assert line.endswith(f"shards are missing: {missing}")


def test_rng_states_of_some_ranks_are_not_converted(cases, tmp_path, capsys):
    command = ["convert", str(cases / "incomplete_objects" / "rng_tp1_missing"), str(tmp_path / "out")]
    assert run(command) == 5
    said = capsys.readouterr().err
    assert "1 of 2 shards are missing: rng_state/shard_0.1_1.2" in said
    assert not (tmp_path / "out").exists()
    assert run([*command, "--weights-only"]) == 0  # which drops them anyway
    shutil.rmtree(tmp_path / "out")
    assert run([*command, "--ignore-keys", "rng_state/*"]) == 0
    said = capsys.readouterr().out
    assert "rng_state/shard_0.0_1.2: --ignore-keys" in said
    assert "resume with --no-load-rng" in said


def test_every_shard_that_is_missing_is_an_error(tmp_path):
    """Whatever object it is of, and in however many axes its grid is."""
    root = copy_of(MOE, tmp_path)
    path = root / ITERATION / ".metadata"
    data = path.read_bytes()
    with metadata_of(root) as metadata:
        keys = [k for k in metadata.state_dict_metadata if "/shard_" in k and not k.endswith(("_1", "_1.1"))]
    assert len(keys) > 5
    for key in keys:
        path.write_bytes(data)
        with metadata_of(root) as metadata:
            drop_key(metadata, key)
        found = [f for f in findings_of(root) if f[1] == "shards"]
        assert [(f[0], f[2]) for f in found] == [("error", key.partition("/shard_")[0])]
        assert key in found[0][3]


def test_grids_of_hostile_keys_cost_nothing():
    (grid,) = object_grids(["a/shard_0_999999999999999999"])
    assert "999999999999999998 of 999999999999999999 shards are missing: a/shard_1_" in (grid.problem or "")
    assert "and 999999999999999995 more" in (grid.problem or "")
    (grid,) = object_grids(["a/shard_0.0.0_2.1.2", "a/shard_1.0.1_2.1.2", "a/shard_0.0.1_2.1.2"])
    assert (grid.problem or "").endswith("1 of 4 shards are missing: a/shard_1.0.0_2.1.2")
    for key in ("a/shard_4_4", "a/shard_0.0_4", "a/shard_0_0"):
        (grid,) = object_grids([key])
        assert f"{key} is outside its grid" in (grid.problem or "")
    assert object_grids(["a/shard_x_4", "a/shard_0", "plain", "shard_0_4"]) == []


def test_shards_of_two_grids(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    with metadata_of(root) as metadata:
        key = next(k for k in metadata.state_dict_metadata if k.startswith("rng_state/shard_"))
        ((index, info),) = infos_of(metadata, key).values()
        other = "rng_state/shard_0.0.0_1.1.1"
        metadata.state_dict_metadata[other] = metadata.state_dict_metadata[key]
        metadata.storage_data[type(index)(other)] = info
    found = findings_of(root)
    assert ("shards", "rng_state") in [f[1:3] for f in found]
    assert any("of 2 grids" in f[3] for f in found)


def test_values_that_were_not_read_are_said(capsys):
    root = str(fixture_dir(LLAMA))
    said = "is valid; the values were not read (--content reads them)"
    for form in ("text", "github", "markdown"):
        assert run(["verify", root, "--format", form]) == 0
        assert said in capsys.readouterr().out, form
        assert run(["verify", root, "--content", "--format", form]) == 0
        assert "not read" not in capsys.readouterr().out, form
    for flags, read in (([], False), (["--content"], True)):
        assert run(["verify", root, "-q", "--json", *flags]) == 0
        assert json.loads(capsys.readouterr().out)["content_read"] is read


def test_a_newer_iteration_that_is_half_written_is_named(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    (root / "iter_0000003").mkdir()
    shutil.copy(root / ITERATION / "__0_0.distcp", root / "iter_0000003")
    (root / "iter_0000001").mkdir()  # older: no business of a loader

    def said():
        ((severity, _, where, message),) = (f for f in findings_of(root) if f[1] == "place")
        assert (severity, where) == ("warning", "iter_0000003")
        return message

    assert "half-written" in said()
    shutil.copy(root / ITERATION / ".metadata", root / "iter_0000003")
    assert "which was verified, and damaged: " in said()
    assert list_run(root).iterations[-1].why in said()  # as ls says
    shutil.copytree(root / ITERATION, root / "iter_0000003", dirs_exist_ok=True)
    assert said().endswith("which was verified; see --iteration 3")


def test_files_of_one_node(cases, capsys):
    assert run(["inspect", str(cases / "node_local")]) == 3
    said = capsys.readouterr().err
    assert "here are only the files of rank 1; those of rank 0 and .metadata" in said
    assert "interrupted" not in said
    assert run(["verify", str(cases / "node_local")]) == 1
    assert "files of rank 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"sharded_backend_version": 3}, "sharded_backend_version is 3"),
        ({"common_backend": "torcj"}, "common_backend is 'torcj'"),
        (
            {"common_backend": None, "common_bbckend": "torch"},
            "common_backend_version is there, but not common_backend",
        ),
    ],
)
def test_a_metadata_json_that_no_loader_takes(fields, part, tmp_path):
    root = copy_of(LLAMA, tmp_path)
    sound = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend_version": 1}
    text = {
        name: value
        for name, value in {**sound, "common_backend": "torch", **fields}.items()
        if value is not None
    }
    (root / ITERATION / "metadata.json").write_text(json.dumps(text))
    errors = [f for f in findings_of(root) if f[0] == "error"]
    assert [f[1:3] for f in errors] == [("metadata.json", "metadata.json")]
    assert part in errors[0][3]


@pytest.mark.parametrize("fields", [{}, {"sharded_backend_version": 1}, {"common_backend": "torch"}])
def test_versions_of_metadata_json_are_1_where_it_has_none(fields, tmp_path):
    """As in Megatron's `CheckpointingConfig`."""
    root = copy_of(LLAMA, tmp_path)
    (root / ITERATION / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", **fields}))
    assert not findings_of(root)
    open_checkpoint(str(root)).files.close()


def test_a_field_of_metadata_json_that_is_not_known(tmp_path):
    root = copy_of(LLAMA, tmp_path)
    path = root / ITERATION / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"new": 1}))
    assert [f[:3] for f in findings_of(root)] == [("warning", "metadata.json", "metadata.json")]


def with_integrity(tmp_path):
    """A copy with the file that Megatron writes (dist_checkpointing/integrity.py)."""
    root = copy_of(LLAMA, tmp_path)
    folder = root / ITERATION
    sums = {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir()) if p.is_file()
    }
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": sums}, indent=2))
    return root, sums


def test_megatrons_own_sums_are_checked(tmp_path):
    root, _ = with_integrity(tmp_path)
    assert findings_of(root) == findings_of(root, content=True) == []
    path = root / ITERATION / "__0_0.distcp"
    flip_bit(path, 52)  # padding of an archive, which no checksum of its own covers
    assert findings_of(root) == []
    ((severity, check, where, message),) = findings_of(root, content=True)
    assert (severity, check, where) == ("error", "integrity", path.name)
    assert hashlib.sha256(path.read_bytes()).hexdigest() in message


def test_a_file_that_the_sums_do_not_fit(tmp_path):
    root, sums = with_integrity(tmp_path)
    folder = root / ITERATION
    (folder / "integrity.json").write_text(json.dumps({"files": {**sums, "__7_0.distcp": "0" * 64}}))
    assert [f[:3] for f in findings_of(root)] == [("error", "integrity", "__7_0.distcp")]
    (folder / "__8_0.distcp").write_bytes(b"new")
    assert ("error", "integrity", "__8_0.distcp") in [f[:3] for f in findings_of(root)]


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"algorithm": "md5", "files": {}}', '{"algorithm": "sha256"}', '{"files": {"a": 1}}',
     '{"files": {"a": "XY"}}', "[" * 100_000],
)  # fmt: skip
def test_sums_that_are_not_sums(text, tmp_path):
    root, _ = with_integrity(tmp_path)
    (root / ITERATION / "integrity.json").write_text(text)
    assert [f[:3] for f in findings_of(root)] == [("error", "integrity", "integrity.json")]


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", ".."])
def test_sums_of_files_elsewhere_are_not_made(name, tmp_path):
    root, sums = with_integrity(tmp_path)
    (root / "secret").write_text("secret")
    text = json.dumps({"files": {**sums, name: "0" * 64}})
    (root / ITERATION / "integrity.json").write_text(text)
    ((severity, check, where, message),) = findings_of(root, content=True)
    assert (severity, check, where) == ("error", "integrity", "integrity.json")
    assert "not the name of a file of this folder" in message


def test_what_is_new_since_a_manifest_is_named(tmp_path, capsys):
    root, manifest = copy_of(LLAMA, tmp_path), tmp_path / "m.json"
    assert run(["verify", str(root), "--write-manifest", str(manifest)]) == 0
    (root / ITERATION / "__9_0.distcp").write_bytes(b"new")
    with metadata_of(root) as metadata:
        key = "decoder.final_layernorm.weight"
        ((index, info),) = infos_of(metadata, key).values()
        metadata.state_dict_metadata["new.weight"] = metadata.state_dict_metadata[key]
        metadata.storage_data[type(index)("new.weight", index.offset)] = info
    capsys.readouterr()
    assert run(["verify", str(root), "--manifest", str(manifest)]) == 1
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error: manifest")]
    assert [line.split(": ")[2] for line in found] == [".metadata", "__9_0.distcp", "new.weight"]
    assert all("it is new" in line for line in found[1:])
    drop = root / ITERATION / "__1_0.distcp"
    drop.unlink()
    assert run(["verify", str(root), "--manifest", str(manifest)]) == 1
    assert f"error: manifest: {drop.name}: " in capsys.readouterr().out
