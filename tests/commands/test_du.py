"""`du` and `ls`: sums are those of the files to the byte, for every format; what is whole; what is there twice."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from ckpt_tools.cli.app import run
from ckpt_tools.commands.du import AXES, BUCKETS, Usage, disk_usage
from ckpt_tools.commands.du_page import Rectangle, squarified, usage_html, usage_svg
from ckpt_tools.commands.ls import list_run
from ckpt_tools.errors import UnsupportedCheckpointError
from ckpt_tools.formats.tree import files_below
from tests.conftest import DATA, fixture_dir
from tests.damage import ITERATION, flip_bit, payload_of
from tests.pages import parse_page, parse_svg

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

RUN = "core019_llama_tp2_fully_reshardable"
MOE = "core019_moe_ep2_fully_reshardable"
FSDP = "core019_llama_tp2_native_fsdp_dtensor"


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def assert_adds_up(found: Usage, folder: Path) -> None:
    assert found.total == bytes_below(folder)
    inside = found.total - sum(found.others.values())
    for axis in AXES:
        assert sum(found.by(axis).values()) == inside, axis
    assert not any(nbytes < 0 for nbytes in found.shares.values())


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A run of three iterations: the second is the first, the third was interrupted; and something beside them."""
    root = shutil.copytree(DATA / RUN, tmp_path / "run")
    for name in ("iter_0000004", "iter_0000006"):
        shutil.copytree(root / ITERATION, root / name)
    (root / "iter_0000006" / ".metadata").unlink()
    (root / "logs").mkdir()
    (root / "logs" / "events").write_bytes(bytes(1234))
    return root


@pytest.mark.parametrize(
    "name", [RUN, MOE, FSDP, "core016_llama_tp2_dp_reshardable", "te_llama_dp2_buckets_dpr"]
)
def test_bytes_add_up_to_the_files(name: str) -> None:
    place = fixture_dir(name)
    found = disk_usage(str(place))
    assert_adds_up(found, place)
    assert not found.unread
    if "dp_reshardable" in name:
        assert found.by("layer")[BUCKETS] > 100_000


def test_layers_that_lie_in_one_tensor_share_its_bytes() -> None:
    found = disk_usage(str(DATA / RUN))
    layers = {name: n for name, n in found.by("layer").items() if name.startswith("decoder.")}
    assert list(layers) == ["decoder.layers.0", "decoder.layers.1"]
    assert abs(layers["decoder.layers.0"] - layers["decoder.layers.1"]) <= len(found.shares)
    assert set(found.by("rank")) == {"0", "1", ""}


def test_other_formats(tmp_path: Path) -> None:
    dcp.save({"model.layers.0.w": torch.ones(64), "n": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_adds_up(disk_usage(str(tmp_path / "dcp")), tmp_path / "dcp")
    (tmp_path / "hf").mkdir()
    save_file({"h.0.w": torch.ones(8)}, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text("{}")
    found = disk_usage(str(tmp_path / "hf"))
    assert_adds_up(found, tmp_path / "hf")
    assert found.by("role")["weight"] == 32
    assert found.by("role")["metadata and other files"] == 2


def test_a_run_with_duplicates_and_an_interrupted_save(three: Path) -> None:
    found = disk_usage(str(three))
    assert_adds_up(found, three)
    assert found.others["logs"] == 1234
    assert list(found.unread) == ["iter_0000006"]
    assert found.by("iteration")["iter_0000006"] == bytes_below(three / "iter_0000006")
    tensors = sum(n for share, n in found.shares.items() if share.iteration == "iter_0000002" and share.dtype)
    assert found.spare == tensors
    assert {one.iterations for one in found.duplicates} == {("iter_0000002", "iter_0000004")}
    assert not disk_usage(str(three), duplicates=False).duplicates
    assert disk_usage(str(three), 4).total == bytes_below(three / "iter_0000004")


def test_a_changed_checksum_is_no_duplicate(three: Path) -> None:
    """What the writer stored is compared: another value under the same key is not there twice."""
    before = disk_usage(str(three))
    key = "decoder.final_layernorm.weight"
    other = shutil.copytree(fixture_dir(MOE) / ITERATION, three / "iter_0000008")
    found = disk_usage(str(three))
    assert found.spare == before.spare + sum(
        one.nbytes for one in found.duplicates if "iter_0000008" in one.iterations
    )
    assert all("iter_0000008" not in one.iterations for one in found.duplicates if one.key == key)
    assert other.is_dir()


def test_payloads_are_not_read(three: Path) -> None:
    """A flipped bit of a payload changes nothing: `du` tells stored checksums, `verify --content` proves them."""
    before = disk_usage(str(three)).spare
    file, at, _ = payload_of(three, "decoder.final_layernorm.weight", (0,))
    flip_bit(file, at)
    assert disk_usage(str(three)).spare == before


def test_a_truncated_file_makes_its_iteration_damaged(three: Path) -> None:
    data = three / "iter_0000004" / "__1_0.distcp"
    data.write_bytes(data.read_bytes()[:1000])
    found = disk_usage(str(three))
    assert_adds_up(found, three)
    assert "absent or shorter than its items" in found.unread["iter_0000004"]
    rows = {row.name: row for row in list_run(str(three)).iterations}
    assert rows["iter_0000004"].state == "damaged"
    assert "__1_0.distcp: the file has 1000 bytes" in rows["iter_0000004"].why


def test_listing(three: Path) -> None:
    found = list_run(str(three))
    assert [(r.name, r.state, r.is_latest) for r in found.iterations] == [
        ("iter_0000002", "complete", True),
        ("iter_0000004", "complete", False),
        ("iter_0000006", "incomplete", False),
    ]
    first = found.iterations[0]
    assert (first.kind, first.nbytes) == ("torch_dist", bytes_below(three / ITERATION))
    assert first.topology == {"tp": 2, "pp": 1, "cp": 1, "ep": 1, "etp": 2, "world": 2}
    assert "no .metadata" in found.iterations[2].why
    assert found.others["logs"] == 1234
    (three / "latest_checkpointed_iteration.txt").write_text("9")
    broken = list_run(str(three))
    assert broken.latest is None
    assert "iter_0000009" in broken.note


def test_what_is_there_but_not_read_is_told_from_what_is_not_whole(three: Path) -> None:
    legacy = three / "iter_0000008" / "mp_rank_00"
    legacy.mkdir(parents=True)
    (legacy / "model_optim_rng.pt").write_bytes(bytes(100))
    (three / "iter_0000009").mkdir()
    rows = {row.name: row for row in list_run(str(three)).iterations}
    assert [rows[f"iter_000000{n}"].state for n in (6, 8, 9)] == ["incomplete", "not read", "not read"]
    assert "legacy 'torch' checkpoint" in rows["iter_0000008"].why
    found = disk_usage(str(three))
    assert_adds_up(found, three)
    assert found.by("iteration")["iter_0000008"] == 100


def test_a_common_state_that_is_not_read_hides_no_bytes(three: Path) -> None:
    """Of an unknown class, or damaged: the tensors lie where `.metadata` says."""

    torch.save({"iteration": 2, "x": Fraction(1, 2)}, three / ITERATION / "common.pt")
    (three / "iter_0000004" / "common.pt").write_bytes(b"no archive")
    found = disk_usage(str(three))
    assert list(found.unread) == ["iter_0000006"]
    rows = list_run(str(three)).iterations
    assert [row.state for row in rows] == ["complete", "complete", "incomplete"]
    assert rows[1].topology == {}


def test_a_conversion_tells_the_topology_that_it_is_for(tmp_path: Path) -> None:
    assert run(["convert", str(DATA / RUN), str(tmp_path / "out"), "-q", "--dp-shard", "2", "--tp", "2"]) == 0
    (row,) = list_run(str(tmp_path / "out")).iterations
    assert row.kind == "fsdp_dtensor"
    assert row.topology is not None
    assert row.topology["tp"] == 2


def test_nothing_there(tmp_path: Path) -> None:
    for function in (list_run, disk_usage):
        with pytest.raises(UnsupportedCheckpointError, match="does not exist"):
            function(str(tmp_path / "absent"))
        with pytest.raises(UnsupportedCheckpointError, match="is empty"):
            function(str(tmp_path))


def test_files_below_enters_no_linked_folder(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_bytes(b"123")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "a" / "file").symlink_to(tmp_path / "a" / "b" / "c")
    assert files_below(str(tmp_path)) == {"a/b/c": 3, "a/file": 3}
    assert files_below(f"file://{tmp_path}") == {"a/b/c": 3, "a/file": 3}


@pytest.mark.parametrize("sizes", [[1], [5, 3, 2], [100, *[1] * 50], [7] * 9, [3, 0, 0]])
def test_a_tree_map_fills_its_room_in_proportion(sizes: list[float]) -> None:
    room = Rectangle(10, 20, 300, 200)
    places = squarified(sizes, room)
    assert len(places) == len(sizes)
    for n, place in zip(sizes, places, strict=True):
        assert place.width * place.height == pytest.approx(n / sum(sizes) * 60_000, abs=1e-6)
        assert place.x >= 10 - 1e-6
        assert place.y >= 20 - 1e-6
        assert place.x + place.width <= 310 + 1e-6
        assert place.y + place.height <= 220 + 1e-6
    area = sum(p.width * p.height for p in places)
    assert area == pytest.approx(60_000)


def test_pages(three: Path) -> None:
    evil = "<b>&\u202e"
    (three / evil).write_bytes(bytes(10))
    found = disk_usage(str(three))
    page = usage_html(found)
    text = "".join(parse_page(page).text)
    assert "iter_0000006" in text
    assert "\u202e" not in page
    areas = Counter[str]()
    for r in parse_svg(usage_svg(found)).iter("{http://www.w3.org/2000/svg}rect"):
        areas[r.get("fill", "")] += float(r.get("width", "")) * float(r.get("height", ""))  # type: ignore[assignment]
    assert len(areas) == len(found.by("role")) + 1


def test_titles_of_the_map_stay_in_their_boxes() -> None:
    """A bold character takes no more than three fifths of its 13 pixels' height and a bit."""
    found = disk_usage(str(DATA / "core019_llama_tp2_fully_reshardable"))
    drawing = parse_svg(usage_svg(found))
    boxes = {r[0].text: r for r in drawing.iter("{http://www.w3.org/2000/svg}rect")}
    heads = [t for t in drawing.iter("{http://www.w3.org/2000/svg}text") if t.get("class") == "head"]
    assert len(heads) == 7
    for head in heads:
        role = (
            (head.text or "")
            .rpartition(" ")[0]
            .partition("\u2026")[0]
            .removesuffix(" KiB")
            .rstrip("0123456789. ")
        )
        box = next(box for text, box in boxes.items() if (text or "").startswith(role))
        assert 5 + 8.6 * len(head.text or "") <= float(box.get("width", "")), head.text


def test_the_page_of_one_iteration_tells_nothing_of_earlier_ones(three: Path) -> None:
    alone = usage_html(disk_usage(str(DATA / "core019_llama_tp2_fully_reshardable")))
    assert "an earlier iteration holds" not in alone
    assert "an earlier iteration holds" in usage_html(disk_usage(str(three)))


def test_the_commands(three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ls", str(three)]) == 0
    out = capsys.readouterr().out
    assert "iter_0000002 *" in out
    assert "incomplete" in out
    assert run(["du", str(three), "--by", "rank", "--html", str(tmp_path / "du.html")]) == 0
    out = capsys.readouterr().out
    assert "116 items that an earlier iteration holds with the same checksum" in out
    assert "iter_0000006 is not a whole checkpoint" in out
    parse_page((tmp_path / "du.html").read_text())
    assert run(["du", str(three), "--svg", "-"]) == 0
    parse_svg(capsys.readouterr().out)


def test_a_folder_of_runs_is_listed_a_run_a_line(three: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = three.parent
    shutil.copytree(fixture_dir(FSDP) / ITERATION, folder / "alone")
    (folder / "notes").mkdir()
    (folder / "todo.txt").touch()
    assert run(["ls", str(folder)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert [row[:4] for row in rows] == [
        ["alone", "0", "-", "fsdp_dtensor"],
        ["run", "3", ITERATION, "torch_dist"],
    ]
    found = list_run(folder)
    assert [row.nbytes for row in found.runs] == [bytes_below(folder / "alone"), bytes_below(three)]
    assert found.iterations == ()


def test_a_folder_without_runs_is_refused_as_before(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with pytest.raises(UnsupportedCheckpointError, match="holds no checkpoint"):
        list_run(tmp_path)


@pytest.mark.parametrize("look", [disk_usage, list_run])
def test_what_is_not_a_run_is_not_walked_through(
    look: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`du /` would go through all of a disk before it said that there is no checkpoint."""
    (tmp_path / "usr" / "lib").mkdir(parents=True)
    entered: list[str] = []
    monkeypatch.setattr(os, "scandir", entered.append)
    with pytest.raises(UnsupportedCheckpointError):
        look(str(tmp_path))
    assert not entered


@pytest.mark.parametrize("command", ["ls", "du"])
def test_damage_is_named_and_not_judged(
    command: str, three: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(three / "iter_0000004" / "__0_0.distcp", 1000)
    assert run([command, str(three)]) == 0
    out = capsys.readouterr().out
    assert "iter_0000006" in out
    assert "save was interrupted" in out
    assert run([command, str(three / "iter_0000006")]) == 3, "it alone is not a checkpoint"


@pytest.mark.parametrize("stray", [(), ("stray.safetensors",)])
def test_of_a_folder_of_runs_it_is_said_how_to_count_them(
    stray: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        shutil.copytree(DATA / RUN, tmp_path / name)
    for name in stray:
        (tmp_path / name).write_bytes(b"")
    assert run(["du", str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert f"`ls {tmp_path}` lists; `du` counts one of them: {tmp_path}/a, {tmp_path}/b" in said
    assert run(["inspect", str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert not stray or f"model's, and 2 checkpoints: {tmp_path}/a, {tmp_path}/b. Give the folder" in said
    assert run(["du", str(tmp_path / "a")]) == 0
