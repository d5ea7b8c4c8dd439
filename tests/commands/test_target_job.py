"""The job that loads an output: asked for where something is packed for it, told, recorded, and gone by."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from ckpt_tools.cli.app import run
from ckpt_tools.formats.locate.detect import RECORD_FILE
from tests.commands import oracle
from tests.commands.made import fsdp, hf, torch_dist
from tests.commands.test_to_fsdp_dtensor import source_of
from tests.conftest import DATA, fixture_dir

LLAMA = DATA / "core019_llama_tp2_fully_reshardable"
GDN = ("te_gdn_tp2_fr", "main_gdn_fr_tp2")
MODEL, STATE = "model.module.", "optimizer.state.module.module.module."


def convert(*words: object) -> int:
    return run(["convert", *map(str, words)])


def gdn(name: str) -> Path:
    return source_of(fixture_dir(name))


def stored_archives(folder: Path) -> dict[str, list[tuple[object, bytes]]]:
    """(offset in the tensor, bytes as stored) of everything in a checkpoint, by key."""
    found: dict[str, list[tuple[object, bytes]]] = {}
    folder = oracle.files_of(folder)
    for index, info in oracle.metadata(folder).storage_data.items():
        data = (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        found.setdefault(index.fqn, []).append((tuple(index.offset or ()), data))
    return {key: sorted(items) for key, items in found.items()}


def tp_of(folder: Path) -> object:
    return json.loads((oracle.files_of(folder) / RECORD_FILE).read_text())["topology"]["tp"]


@pytest.mark.parametrize("name", GDN)
@pytest.mark.parametrize(
    "words", [(), ("--dp-shard", 2), ("--gpus", 2, "--layout", "fsdp2"), ("--world-size", 3)]
)
def test_packed_projections_need_a_size_that_somebody_chose(name, words, tmp_path, capsys):
    assert convert(gdn(name), tmp_path / "out", *words) == 2
    told = capsys.readouterr().err
    assert "--tp is needed" in told
    assert re.search(r"in_proj and conv1d of \d layers?\b", told)
    assert "the source is of TP 2" in told
    assert run(["plan", str(gdn(name)), *map(str, words)]) == 2
    assert capsys.readouterr().err == told
    assert not (tmp_path / "out").exists()


def test_what_has_nothing_packed_needs_none(tmp_path, capsys):
    assert convert(LLAMA, tmp_path / "a", "--json") == 0
    job = json.loads(capsys.readouterr().out)["job"]
    assert job["topology"]["tp"] == {"ranks": 2, "source": "the source's rng states"}
    assert job["tp_dependent"] == []
    assert job["vocabulary"] == {"rows": 224, "multiple": 16, "fits_tp": [2], "is_exact": True}
    assert convert(LLAMA, tmp_path / "b", "--gpus", 3, "--json") == 0
    assert json.loads(capsys.readouterr().out)["job"]["topology"]["tp"] == {
        "ranks": 1,
        "source": "the layout",
    }
    assert convert(gdn(GDN[1]), tmp_path / "c", "--target", "bridge", "-v") == 0  # keeps the parts apart
    shown = capsys.readouterr().out
    assert "TP 2 (the source's rng states); loads at any TP" in shown
    assert run(["build-param-group-map", str(gdn(GDN[0])), "-o", str(tmp_path / "map.json")]) == 0


@pytest.mark.parametrize("name", GDN)
@pytest.mark.parametrize("tp", [1, 2])
def test_packed_rows_equal_whole_tensors_put_together_by_torch(name, tp, tmp_path, capsys):
    """The stored parts of the source, cut and joined as every rank of the target job holds them."""
    source = gdn(name)
    assert convert(source, tmp_path / "out", "--tp", tp) == 0
    assert f"TP {tp} (--tp); for TP {tp} only: in_proj and conv1d of" in capsys.readouterr().out
    parts, found = oracle.tensors(source), oracle.tensors(tmp_path / "out")
    checked = 0
    for kind, prefix, suffix in (
        ("param", MODEL, ""), ("exp_avg", STATE, ".exp_avg"), ("exp_avg_sq", STATE, ".exp_avg_sq"),
    ):  # fmt: skip
        for projection, order in (
            ("in_proj.weight", ("query", "key", "value", "z", "beta", "alpha")),
            ("conv1d.weight", ("query", "key", "value")),
        ):
            base = f"decoder.layers.0.self_attention.{projection}"
            stored = [parts[f"optimizer.state.{kind}.{base}.{part}"] for part in order]
            expected = torch.cat([torch.cat([p.chunk(tp)[rank] for p in stored]) for rank in range(tp)])
            assert oracle.same_bytes(found[f"{prefix}{base}{suffix}"], expected)
            checked += 1
    assert checked == 6
    assert tp_of(tmp_path / "out") == {"ranks": tp, "source": "--tp"}


@pytest.mark.parametrize("name", GDN)
def test_laid_out_for_another_size_is_converted_for_it(name, tmp_path, capsys):
    """To the byte: TP 2 and then TP 1 is TP 1 at once, and the way back is TP 2 but for rng states that are gone."""
    source = gdn(name)
    for tp in (1, 2):
        assert convert(source, tmp_path / f"tp{tp}", "--tp", tp) == 0
    assert convert(tmp_path / "tp2", tmp_path / "again1", "--tp", 1) == 0
    assert stored_archives(tmp_path / "again1") == stored_archives(tmp_path / "tp1")
    assert convert(tmp_path / "again1", tmp_path / "again2", "--tp", 2) == 0
    assert tp_of(tmp_path / "again2") == {"ranks": 2, "source": "--tp"}
    again, straight = stored_archives(tmp_path / "again2"), stored_archives(tmp_path / "tp2")
    assert again.keys() == straight.keys()
    assert {k for k in again if again[k] != straight[k]} <= {
        k for k in again if k.startswith("rng_state.(0, 1)")
    }
    states = {k.replace("(0, 1)", "(0, 0)"): v for k, v in again.items() if k.startswith("rng_state.(0, 1)")}
    assert states
    assert states == {k: again[k] for k in states}
    capsys.readouterr()
    assert convert(tmp_path / "tp2", tmp_path / "no", "--gpus", 2) == 2
    assert "the source is of TP 2, by ckpt_tools.json" in capsys.readouterr().err
    assert (
        convert(tmp_path / "tp2", tmp_path / "kept", "--world-size", 3) == 0
    )  # the same content in other files
    assert tp_of(tmp_path / "kept") == {"ranks": 2, "source": RECORD_FILE}
    assert oracle.tensors(tmp_path / "kept").keys() == oracle.tensors(tmp_path / "tp2").keys()


@pytest.mark.parametrize("name", GDN)
@pytest.mark.parametrize("sizes", [(2,), (1, 2, 1)])
def test_the_way_back_gives_the_parts_whatever_the_sizes_on_the_way(name, sizes):
    at = gdn(name)
    for tp in sizes:
        at = fsdp(at, tp=tp, layer_spec="te")
    oracle.assert_same(torch_dist(at, layer_spec="te"), gdn(name))


@pytest.mark.parametrize("tp", [1, 2])
def test_without_rng_states_the_record_tells(tp, tmp_path, capsys):
    """Weights alone hold no rng states, and their args are those of the TP 2 job before."""
    source = gdn(GDN[0])
    assert convert(source, tmp_path / "there", "--tp", tp, "--weights-only") == 0
    assert convert(tmp_path / "there", tmp_path / "back", "--to", "torch_dist", "--weights-only") == 0
    before, after = oracle.tensors(source), oracle.tensors(tmp_path / "back")
    assert len(after) > 20
    oracle.assert_same(after, {key: before[key] for key in after})
    assert convert(tmp_path / "there", tmp_path / "other", "--tp", 3 - tp) == 0
    assert convert(source, tmp_path / "straight", "--tp", 3 - tp, "--weights-only") == 0
    assert stored_archives(tmp_path / "other") == stored_archives(tmp_path / "straight")
    capsys.readouterr()
    assert run(["diff", str(source), str(tmp_path / "there"), "--keys", "model.*"]) == 0
    (oracle.files_of(tmp_path / "there") / RECORD_FILE).unlink()
    for words in (("--to", "torch_dist"), ("--tp", 1)):
        assert convert(tmp_path / "there", tmp_path / "no", *words) == 2
    assert "as the size they are for is unknown" in capsys.readouterr().err


def test_a_native_checkpoint_has_the_keys_and_shapes_of_the_conversion_for_its_size(tmp_path):
    native = next(fixture_dir("n_gdn_dp1").glob("iter_*"))
    assert convert(gdn(GDN[0]), tmp_path / "out", "--tp", 1) == 0
    ours, theirs = oracle.tensors(tmp_path / "out"), oracle.tensors(native)
    assert {k: (t.shape, t.dtype) for k, t in ours.items()} == {
        k: (t.shape, t.dtype) for k, t in theirs.items()
    }
    assert convert(native, tmp_path / "two", "--tp", 2) == 0  # by its own rng states
    assert convert(tmp_path / "two", tmp_path / "one", "--tp", 1) == 0
    again = oracle.tensors(tmp_path / "one")
    assert [k for k in theirs if not oracle.same_bytes(theirs[k], again[k])] == []


def test_a_record_that_is_not_the_checkpoints_own_is_refused(tmp_path, capsys):
    first = tmp_path / "first"
    assert convert(LLAMA, first) == 0
    (folder,) = first.glob("iter_*")
    record = json.loads((folder / RECORD_FILE).read_text())
    record["topology"]["tp"]["ranks"] = 4
    (folder / RECORD_FILE).write_text(json.dumps(record))
    assert convert(first, tmp_path / "out", "--to", "torch_dist") == 5
    assert "4 tensor-parallel ranks, and it holds rng states of 2" in capsys.readouterr().err
    (folder / RECORD_FILE).write_text("{")
    assert convert(first, tmp_path / "out", "--gpus", 2) == 4
    assert f"{RECORD_FILE} is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_verify_looks_at_the_packing(tmp_path, capsys):
    folder = tmp_path / "out"
    assert convert(gdn(GDN[0]), folder, "--tp", 2, "--weights-only") == 0
    assert run(["verify", str(folder)]) == 0
    file = oracle.files_of(folder) / RECORD_FILE
    record = json.loads(file.read_text())
    record["topology"]["tp"]["ranks"] = 7
    file.write_text(json.dumps(record))
    capsys.readouterr()
    assert run(["verify", str(folder)]) == 1
    assert "rows are not those of 7 tensor-parallel ranks (by ckpt_tools.json)" in capsys.readouterr().out
    file.write_text("[]")
    assert run(["verify", str(folder)]) == 1
    assert f"{RECORD_FILE} is damaged" in capsys.readouterr().out
    file.unlink()
    assert run(["verify", str(folder)]) == 0
    assert "the tensor parallel size of its row order is not recorded" in capsys.readouterr().out


def test_edited_copies_keep_the_record(tmp_path):
    assert convert(LLAMA / "iter_0000002", tmp_path / "first") == 0
    for words in (["slice", "--layers", "0:1"], ["modify-state-dict", "--op", "remove rng_state"], ["strip"]):
        command, *rest = words
        assert run([command, str(tmp_path / "first"), str(tmp_path / command), *rest]) == 0
        records = [oracle.files_of(tmp_path / name) / RECORD_FILE for name in (command, "first")]
        assert records[0].read_bytes() == records[1].read_bytes()


def test_nothing_to_convert_is_said(tmp_path, capsys):
    native = fixture_dir("core019_llama_tp2_native_fsdp_dtensor")
    for words in ((), ("--overwrite",), ("--layer-spec", "local"), ("--dry-run",), ("--ignore-keys", "x*")):
        assert convert(native, tmp_path / "out", *words) == 2
        assert "nothing to convert" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_ranks_are_no_job(tmp_path, capsys):
    for source in (LLAMA, fixture_dir("core019_llama_tp2_native_fsdp_dtensor")):
        assert convert(source, tmp_path / "out", "--tp", 0) == 2
        assert "--tp 0: at least one rank is needed" in capsys.readouterr().err


def rng_keys(folder: Path) -> list[str]:
    return sorted(k for k in oracle.metadata(folder).state_dict_metadata if k.startswith("rng_state/"))


def test_core_0_16_has_rng_states_of_every_data_parallel_rank(tmp_path, capsys):
    """There and back the grid is that of the job that was never converted; every rank has rank 0's states."""
    source = source_of(fixture_dir("v16_moe_ep2_fr"))
    grid = ["rng_state/shard_0.0.0_1.1.2", "rng_state/shard_0.0.1_1.1.2"]
    assert rng_keys(source) == grid
    assert convert(source, tmp_path / "there", "--target", "core-0.16") == 0
    assert "1 keys" not in (shown := capsys.readouterr().out)
    assert "rng_state/shard_0.0.1_1.1.2: fsdp_dtensor keeps the rng states of one data-parallel rank" in shown
    assert (
        convert(tmp_path / "there", tmp_path / "back", "--to", "torch_dist", "--json") == 0
    )  # as it was made for
    job = json.loads(capsys.readouterr().out)["job"]
    assert job["target"] == "core-0.16"
    assert job["topology"]["dp"] == {"ranks": 2, "source": "args"}
    assert job["topology"]["ep"] == {"ranks": 2, "source": "args"}
    assert rng_keys(tmp_path / "back") == grid
    before, after = stored_archives(source), stored_archives(tmp_path / "back")
    states = [torch.load(_bytes(after[key]), weights_only=False) for key in grid]
    first = torch.load(_bytes(before[grid[0]]), weights_only=False)
    for state in states:
        assert oracle.same_bytes(state[0][0]["torch_rng_state"], first[0][0]["torch_rng_state"])
        assert state[0][0].keys() == first[0][0].keys()
    for words, expected in (
        (("--target", "main"), ["rng_state/shard_0.0_1.1"]),
        (("--target", "core-0.19"), ["rng_state/shard_0.0_1.1"]),
        (("--target", "core-0.16", "--gpus", 4), [f"rng_state/shard_0.0.{d}_1.1.4" for d in range(4)]),
        (("--target", "core-0.16", "--ep", 1), ["rng_state/shard_0.0_1.1"]),
    ):
        shutil.rmtree(tmp_path / "other", ignore_errors=True)
        oracle.metadata.cache_clear()
        assert convert(tmp_path / "there", tmp_path / "other", "--to", "torch_dist", *words) == 0
        assert rng_keys(tmp_path / "other") == expected


def _bytes(items: list[tuple[object, bytes]]) -> object:
    import io

    return io.BytesIO(items[0][1])


def test_a_pipeline_of_the_args_gets_states_for_every_stage(tmp_path):
    """A job of the args' sizes asks for them: without the second stage's it would not start."""
    source = source_of(fixture_dir("te_gpt_pp2_fr"))
    assert convert(source, tmp_path / "there") == 0
    assert convert(tmp_path / "there", tmp_path / "back", "--to", "torch_dist") == 0
    assert rng_keys(tmp_path / "back") == rng_keys(source)


@pytest.mark.parametrize("to", ["torch_dist", "fsdp_dtensor"])
def test_an_import_tells_the_vocabularys_sizes(to, tmp_path, capsys):
    words = [
        "import-hf",
        str(hf(LLAMA.name)),
        str(tmp_path / "run"),
        "--to",
        to,
        "--vocab-size-padded",
        "224",
    ]
    words += ["--no-fresh-optimizer"] * (to == "fsdp_dtensor")
    assert run([*words, "-q", "--json"]) == 0
    job = json.loads(capsys.readouterr().out)["job"]
    assert job["tokens"] == 201
    assert job["vocabulary"] == {"rows": 224, "multiple": 32, "fits_tp": [1], "is_exact": True}
    record = json.loads((tmp_path / "run" / "release" / RECORD_FILE).read_text())
    assert record["tokens"] == 201


def test_an_import_is_padded_as_its_job_pads(tmp_path, capsys):
    words = ["import-hf", str(hf(LLAMA.name)), str(tmp_path / "run"), "--to", "fsdp_dtensor", "--tp", "4"]
    assert run([*words, "--no-fresh-optimizer", "-q", "--json"]) == 0
    job = json.loads(capsys.readouterr().out)["job"]
    assert job["vocabulary"] == {"rows": 512, "multiple": 128, "fits_tp": [4], "is_exact": True}
    assert run([*words, "--no-fresh-optimizer", "-q", "--overwrite", "--vocab-size-padded", "200"]) == 2
    assert "--vocab-size-padded 200 is less than the 201 tokens" in capsys.readouterr().err
