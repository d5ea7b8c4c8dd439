"""Habits of people at a command line: sizes, globs, misspelt names and paths, NO_COLOR, bars and closed streams.

`--quiet` is one thing in every command: errors on stderr, what programs are to read on stdout, nothing else.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_tools.cli import progress
from ckpt_tools.cli.app import run
from ckpt_tools.cli.commands import MEANT, MODULES, REMOVED
from ckpt_tools.cli.findings import grouped
from ckpt_tools.cli.options import model_folder, parse_bytes
from ckpt_tools.cli.reports import _by_reason
from ckpt_tools.cli.verbs.check import two_values
from ckpt_tools.errors import UsageError, list_problems
from ckpt_tools.execute.run import _Run
from ckpt_tools.human import human_bytes
from ckpt_tools.verify.report import Finding
from tests.altered import without_numbers
from tests.cli.options import OPTIONS
from tests.cli.terminal import on_a_terminal
from tests.conftest import DATA, FSDP, REPO, RUN, fixture_dir
from tests.typed import PLACES, places


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("1.5mb", 1_500_000),
        ("300", 300),
        (" 2 KB ", 2000),
        ("1TB", 10**12),
        ("96MiB", 96 << 20),
        ("0.5gib", 1 << 29),
        ("64k", 64_000),
        ("1Ki", 1024),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "0.1", "five", "5 PB", "1e9", "5GBs"])
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match="not a size; write for example"):
        parse_bytes(text)


@pytest.mark.parametrize("option", ["--max-memory", "--max-shard-size"])
def test_both_options_read_sizes_alike(option, tmp_path, capsys):
    words = ["export-hf", str(RUN), str(tmp_path / "out"), "-q", "--dry-run"]
    assert run([*words, option, "1.5GiB"]) == 0
    assert run([*words, option, "much"]) == 2
    assert "'much' is not a size" in capsys.readouterr().err


def test_inspect_names_globs_that_match_nothing(capsys):
    assert (
        run(["inspect", str(RUN), "--keys", "*final_layernorm*", "--keys", "decoder.final_layernrom.weight"])
        == 0
    )
    out, err = capsys.readouterr()
    assert "decoder.final_layernorm.weight" in out
    assert err.startswith(
        "note: --keys 'decoder.final_layernrom.weight' matches nothing. "
        "Did you mean decoder.final_layernorm.weight, "
    )


@pytest.mark.parametrize("form", [[], ["--json"], ["--tree"], ["-q"], ["--html", "-"]])
def test_inspect_of_nothing_is_refused_with_the_nearest_names(form, capsys):
    """Also of a glob without its stars; what is listed of one glob alone is no listing of nothing."""
    for keys, near in (
        (
            ["linear_fc2"],
            ["--keys 'linear_fc2' matches nothing; did you mean decoder.layers.mlp.linear_fc2."],
        ),
        (
            ["linear_fc2", "zzz*", "linear_fc2"],
            ["--keys 'linear_fc2' matches", "--keys 'zzz*' matches nothing"],
        ),
    ):
        words = [word for glob in keys for word in ("--keys", glob)]
        assert run(["inspect", str(RUN), *words, *form]) == 2
        out, err = capsys.readouterr()
        assert out == "" and all(line in err for line in near)
        assert run(["inspect", str(RUN), *words, "--keys", "decoder*", *form]) == 0
        capsys.readouterr()


def test_a_misspelt_key_makes_nothing_equal(capsys):
    assert run(["diff", str(RUN), str(RUN), "--keys", "decoder.*", "--keys", "encoder.*"]) == 2
    err = capsys.readouterr().err
    assert "--keys 'encoder.*' matches nothing" in err
    assert "'decoder.*'" not in err
    assert run(["diff", str(FSDP), str(FSDP), "--keys", "args.tp*"]) == 0
    assert run(["diff", str(RUN), str(RUN), "--ignore", "nothing*"]) == 0
    assert "note: --ignore 'nothing*' matches nothing" in capsys.readouterr().out


def test_print_tensor_knows_what_was_meant(capsys):
    assert run(["print-tensor", str(RUN), "final_layernorm"]) == 5
    assert "Did you mean decoder.final_layernorm.weight, " in capsys.readouterr().err


COMMANDS_WITH_SOURCES = [
    "inspect BAD",
    "print-tensor BAD key",
    "print-torch-dcp-in-json BAD",
    "plan BAD",
    "convert BAD OUT",
    "build-param-group-map BAD",
    "export-hf BAD OUT",
    "import-hf BAD OUT",
    "verify BAD",
    "diff RUN BAD",
    "diff BAD RUN",
    "preflight BAD",
    "modify-state-dict BAD OUT --op 'remove x'",
    "slice BAD OUT --layers 0:1",
]


@pytest.mark.parametrize("to", ["fsdp_dtensor", "torch_dist"])
def test_convert_says_how_a_hugging_face_model_is_imported(to, tmp_path, monkeypatch, capsys):
    """The line that is named does it, names that a shell would take apart too."""
    monkeypatch.chdir(tmp_path)
    assert run(["export-hf", str(RUN), "a model", "-q"]) == 0
    assert run(["convert", "a model", "made of it", "--to", to]) == 3
    said = capsys.readouterr().err
    assert said.startswith("error: a model is a Hugging Face model. `import-hf 'a model' 'made of it' --to ")
    words = shlex.split(re.findall("`(.*)`", said)[0])
    rates = ["--lr", "1e-5", "--min-lr", "1e-6", "--weight-decay", "0.1"] if to == "fsdp_dtensor" else []
    assert run([*words, *rates]) == 0
    assert run(["import-hf", "a model", "other", "--to", "fsdp_dtensor"]) == 2
    assert "strip" not in capsys.readouterr().err


@pytest.mark.parametrize("words", COMMANDS_WITH_SOURCES)
def test_every_command_knows_which_path_was_meant(words, tmp_path, capsys):
    (tmp_path / "run_llama").mkdir()
    places = {"BAD": tmp_path / "run_lama", "RUN": RUN, "OUT": tmp_path / "out"}
    argv = [str(places.get(word, word)) for word in words.replace("'remove x'", "remove_x").split()]
    assert run(["remove x" if word == "remove_x" else word for word in argv]) == 3
    assert f"Did you mean {tmp_path / 'run_llama'}?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


OUTPUT_FILES = [
    "convert RUN OUT --report FILE",
    "export-hf RUN OUT --report FILE",
    "build-param-group-map RUN -o FILE",
    "print-torch-dcp-in-json RUN/iter_0000002 -o FILE",
    "plan RUN --svg FILE",
    "plan RUN --html FILE",
    "verify RUN --junit FILE",
    "verify RUN --write-manifest FILE",
    "preflight FSDP --junit FILE",
]


@pytest.mark.parametrize("words", OUTPUT_FILES)
def test_files_that_cannot_be_made_are_refused_before_the_work(words, tmp_path, capsys):
    (tmp_path / "reports").mkdir()
    file = tmp_path / "report" / "file"
    text = words.replace("RUN", str(RUN)).replace("FSDP", str(FSDP)).replace("FILE", str(file))
    assert run(text.replace("OUT", str(tmp_path / "out")).split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"error: {file} cannot be written: {file.parent} does not exist. Did you mean {tmp_path / 'reports'}?\n"
    )
    assert os.listdir(tmp_path) == ["reports"]

    text = text.replace(str(file), str(tmp_path / "reports"))
    assert run(text.replace("OUT", str(tmp_path / "out")).split()) == 2
    assert "reports cannot be written: it is a folder" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["reports"]


def test_tables_say_the_same_on_a_terminal_and_in_a_file(capsys):
    assert run(["inspect", str(RUN)]) == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", on_a_terminal(["inspect", str(RUN)], COLUMNS="300"))
    words = [
        [word for word in text.split() if word.strip("\u2500")] for text in (capsys.readouterr().out, shown)
    ]
    assert words[0] == words[1]


def test_no_color(tmp_path):
    colour = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")
    convert = ["convert", str(RUN), str(tmp_path / "a")]
    assert colour.search(on_a_terminal(convert, NO_COLOR=""))  # the bar; an empty NO_COLOR asks for nothing
    convert[-1] = str(tmp_path / "b")
    assert not colour.search(on_a_terminal(convert, NO_COLOR="1"))
    assert not colour.search(on_a_terminal(["inspect", str(RUN)], NO_COLOR="1"))


MOE = fixture_dir("core019_moe_ep2_fully_reshardable")


@pytest.mark.parametrize("verb", MEANT)
def test_verbs_that_people_try(verb, capsys):
    assert run([verb, str(RUN)]) == 2
    err = capsys.readouterr().err
    assert f"error: No such command '{verb}'. Try " in err
    assert MEANT[verb].partition(" ")[0] in {*MODULES, "--version", "--help"}
    assert f" {MEANT[verb]}'" in err


def test_what_was_removed(capsys, monkeypatch):
    monkeypatch.setitem(REMOVED, "ls --gone", "Use --new.")
    monkeypatch.setitem(REMOVED, "gone", "Use new.")
    for words, sentence in REMOVED.items():
        command, _, option = words.partition(" ")
        assert run([command, str(RUN), *([option, "x"] if option else [])]) == 2
        assert capsys.readouterr().err.splitlines()[0].endswith(f" {sentence}"), words
    assert run(["stats", str(RUN), "--gone"]) == 2
    assert "Use " not in capsys.readouterr().err


@pytest.mark.parametrize("name", MODULES)
def test_a_command_without_arguments_prints_its_usage(name, capsys):
    assert run([name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(rf"Usage: .* {name} \[OPTIONS\] \S", " ".join(err.split()))
    assert f"{name} --help'" in err


def test_the_program_without_a_command(capsys):
    assert run([]) == 2
    assert "Usage: " in capsys.readouterr().err


@pytest.mark.parametrize("words", [["ls", str(RUN)], ["verify", str(RUN)]], ids=lambda w: w[0])
def test_a_closed_stdout_takes_nothing(words, tmp_path):
    """No file that is opened gets the number of stdout: a checkpoint is only read."""
    before = {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()}
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m ckpt_tools {' '.join(words)} >&-"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()} == before


def test_quiet_does_not_hide_errors(tmp_path, capsys):
    root = shutil.copytree(RUN, tmp_path / "run")
    os.truncate(root / "iter_0000002" / "__0_0.distcp", 1000)
    for command in ("convert", "copy"):
        assert run([command, str(root), str(tmp_path / "out"), "--iteration", "all", "-q"]) == 4
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: iteration 2")


def test_a_bar_ends_at_one_hundred_percent_and_is_named():
    text = on_a_terminal(["stats", str(RUN)])
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    last = [line for line in re.split(r"[\r\n]", plain) if "stats" in line and "%" in line][-1]
    assert "100 %" in last
    assert re.search(r"KiB of [\d.]+ KiB", last)
    assert "kB" not in plain


def test_lines_of_progress_end_at_one_hundred_percent(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    progress.name_work("copy")
    with progress.progress_bar(False) as update:
        update(3 << 20, 6 << 30)
        update(5 << 30, 6 << 30)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("copy: 3.0 MiB of 6.0 GiB (0 %), ")
    assert lines[-1].startswith("copy: 6.0 GiB of 6.0 GiB (100 %), done in ")
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 10.0)
    with progress.progress_bar(False) as update:  # work that was soon done says nothing
        update(6 << 30, 6 << 30)
    assert capsys.readouterr().err == ""


def test_progress_of_work_that_failed_does_not_claim_to_be_done(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    with pytest.raises(OSError, match="full"), progress.progress_bar(False) as update:
        update(1, 2)
        raise OSError("full")
    assert "done in" not in capsys.readouterr().err


def test_several_checkpoints(tmp_path, capsys):
    report = tmp_path / "junit.xml"
    assert run(["verify", str(RUN), str(MOE), str(FSDP), "--junit", str(report)]) == 0
    assert capsys.readouterr().out.count(" is valid") == 3
    assert report.read_text().count("<testsuite ") == 3
    assert run(["verify", str(RUN), str(tmp_path / "absent")]) == 1
    out = capsys.readouterr().out
    assert "does not exist" in out
    assert f"{RUN}/iter_0000002 (torch_dist) is valid" in out
    assert run(["verify", str(RUN), str(MOE), "--write-manifest", str(tmp_path / "m.json")]) == 2
    assert not (tmp_path / "m.json").exists()


def test_problems_that_differ_in_numbers_are_grouped():
    lines = [f"layers.{i}.{kind}: absent" for i in range(30) for kind in ("a", "b")]
    text = list_problems(lines)
    assert text.splitlines() == [
        "  - layers.0.a: absent", "  - layers.1.a: absent", "  - layers.2.a: absent", "  ... and 27 more like these",
        "  - layers.0.b: absent", "  - layers.1.b: absent", "  - layers.2.b: absent", "  ... and 27 more like these",
    ]  # fmt: skip
    assert list_problems(lines[:20]).count("\n") == 19  # few are listed as they are
    words = [f"{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(40)]
    assert list_problems(words).splitlines()[-1] == "  ... and 20 more"
    findings = [Finding("tiling", "error", f"layers.{i}", "hole") for i in range(6)]
    assert list(grouped(findings))[3:] == ["... and 3 more like these (--json lists all)"]
    assert len(list(grouped(findings[:4]))) == 4


def test_a_missing_file_is_told_of_once(tmp_path, capsys):
    """And what is the same of many keys is grouped; with the way out that a run with another iteration has."""
    root = shutil.copytree(RUN, tmp_path / "run")
    shutil.copytree(root / "iter_0000002", root / "iter_0000004")
    (root / "latest_checkpointed_iteration.txt").write_text("4")
    (root / "iter_0000004" / "__1_0.distcp").unlink()
    assert run(["verify", str(root)]) == 1
    out = capsys.readouterr().out
    told = [line for line in out.splitlines() if "__1_0.distcp does not exist" in line]
    assert len(told) == 1
    assert told[0].endswith(". Fix: another copy of the file, or an earlier iteration (--iteration 2)")
    assert ".." not in told[0]
    assert run(["verify", str(root), "--content"]) == 1
    out = capsys.readouterr().out
    assert sum("error: checksums: " in line for line in out.splitlines()) == 3
    assert "... and 47 more like these (--json lists all)" in out
    (root / "iter_0000002" / "__1_0.distcp").unlink()
    assert run(["verify", str(root), "--iteration", "2"]) == 1
    assert "earlier iteration" not in capsys.readouterr().out, "there is none"


def test_a_hostile_common_state_is_there(tmp_path, capsys):
    root = shutil.copytree(RUN, tmp_path / "run")
    shutil.copy(DATA / "hostile" / "global_system.pt", root / "iter_0000002" / "common.pt")
    assert run(["verify", str(root)]) == 4
    out = capsys.readouterr().out
    assert "error: common state: " in out
    assert "neither common.pt nor common_state" not in out
    assert run(["ls", str(root)]) == 0
    assert " damaged " in capsys.readouterr().out


def test_a_resumed_conversion_that_is_finished_is_compared(tmp_path, capsys):
    for verb in ("convert", "strip"):
        words = [verb, str(RUN), str(tmp_path / verb)]
        assert run(words) == 0
        assert "compared" not in capsys.readouterr().out.replace("compared with", "")
        assert run([*words, "--resume"]) == 0
        assert "compared" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["inspect nope", "convert nope x", "verify ./nope"])
def test_what_is_not_there(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(words.split()) == 3
    assert "nope does not exist. No file next to it has a similar name." in capsys.readouterr().err


def test_one_iteration_is_not_compared_with_itself(capsys):
    assert run(["diff", str(RUN), f"{RUN}/", "--iteration", "2"]) == 2
    assert "`diff RUN/iter_0000002 RUN/iter_0000004`" in capsys.readouterr().err
    assert run(["diff", str(RUN), str(RUN), "-q"]) == 0, "whoever writes it so knows it"


def test_the_config_of_a_model_may_be_given(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(tmp_path / "config.json") == model_folder(tmp_path) == str(tmp_path)
    assert model_folder(tmp_path / "no" / "config.json") == str(tmp_path / "no" / "config.json")
    assert model_folder(None) is None


def test_what_was_dropped_is_named():
    dropped = [f"k{i}: of a run" for i in range(5)]
    assert _by_reason((*dropped, "x: alone", "y: two", "z: two")) == [
        "k0, k1, k2 and 2 more: of a run",
        "x: alone",
        "y, z: two",
    ]


def test_two_values_are_shown_so_that_they_differ():
    assert two_values(1.0, 1.5) == ("1", "1.5")
    assert two_values(0.1, 0.1 + 1e-8) == ("0.1", "0.10000001")
    a, b = two_values(1.0, 1.0 + 2**-52)
    assert a != b
    assert two_values(1, 2) == ("1", "2")


def test_one_unit_everywhere():
    """Sizes are binary wherever something prints them: no other function makes text of bytes."""
    assert human_bytes(5 << 30) == "5.0 GiB"
    for file in (REPO / "ckpt_tools" / "cli").glob("*.py"):
        assert "DownloadColumn" not in file.read_text()
        assert "TransferSpeedColumn" not in file.read_text()


# A line of every command, and its exit code.
LINES = {
    "inspect": ("inspect RUN --keys nothing --keys 'decoder*'", 0),
    "convert": ("convert RUN OUT", 0),
    "convert-torch-dist-to-fsdp-dtensor": ("convert-torch-dist-to-fsdp-dtensor RUN OUT --dry-run", 0),
    "convert-fsdp-dtensor-to-torch-dist": ("convert-fsdp-dtensor-to-torch-dist FSDP OUT --iteration all", 0),
    "ls": ("ls RUN", 0),
    "stats": ("stats RUN", 0),
    "plan": ("plan RUN --gpus 4", 0),
    "export-hf": ("export-hf RUN OUT", 0),
    "import-hf": ("import-hf HF OUT", 0),
    "verify": ("verify RUN FSDP", 0),
    "diff": ("diff RUN LATER", 1),
    "compare-two-checkpoint": ("compare-two-checkpoint RUN FSDP", 0),
    "preflight": ("preflight FSDP", 0),
    "modify-state-dict": ("modify-state-dict RUN OUT --op 'remove rng.*'", 0),
    "slice": ("slice RUN OUT --layers 0:1", 0),
    "copy": ("copy RUN OUT --iteration all", 0),
    "average": ("average RUN LATER OUT", 0),
    "merge-adapter": ("merge-adapter RUN LORA OUT", 0),
    "strip": ("strip FSDP OUT", 0),
    "repair": ("repair FSDP OUT", 1),
    "print-tensor": ("print-tensor RUN decoder.final_layernorm.weight", 0),
}
# Whose output is a document for programs, asked for or not.
DOCUMENTS = ("print-torch-dcp-in-json RUN/iter_0000002 --no-write", "build-param-group-map RUN --explain")


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return places(tmp_path_factory.mktemp("quiet") / "places")


@pytest.fixture
def typing(ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PLACES:
        (tmp_path / name).symlink_to(ready / name)
    monkeypatch.chdir(tmp_path)


def test_every_command_that_has_it_is_in_the_lists():
    listed = {*LINES, *(line.partition(" ")[0] for line in DOCUMENTS)}
    assert listed == {name for name in MODULES if "-q" in OPTIONS[name].split()}


@pytest.mark.usefixtures("typing")
@pytest.mark.parametrize("name", LINES)
def test_nothing_is_printed_but_json(name, capsys):
    line, code = LINES[name]
    words = [word.replace("OUT", "loud") for word in shlex.split(line)]
    assert run(words) == code
    assert "".join(capsys.readouterr()), "there is nothing to keep back"
    assert run([word.replace("OUT", "out") for word in [*shlex.split(line), "-q"]]) == code
    assert capsys.readouterr() == ("", "")
    assert run([word.replace("OUT", "json") for word in [*shlex.split(line), "--json", "-q"]]) == code
    out, err = capsys.readouterr()
    assert (isinstance(json.loads(out), dict), err) == (True, "")


@pytest.mark.usefixtures("typing")
@pytest.mark.parametrize("line", DOCUMENTS)
def test_a_document_is_printed_whole(line, capsys):
    assert run(shlex.split(line)) == 0
    loud = capsys.readouterr().out
    assert run([*shlex.split(line), "-q"]) == 0
    assert capsys.readouterr() == (loud, "")
    json.loads(loud)


@pytest.mark.usefixtures("typing")
def test_what_verify_and_preflight_find_wrong_is_an_error(capsys):
    assert run(["verify", "BAD", "RUN", "--content", "-q"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    verdict, *found = err.splitlines()
    assert verdict == "BAD/iter_0000002 (torch_dist) is not valid: 2 errors"
    assert all(line.startswith("error: ") for line in found)
    assert run(["preflight", "RUN", "-q"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[1].startswith("error: checkpoint-format")) == ("", True)


@pytest.mark.usefixtures("typing")
def test_another_format_is_for_programs_too(capsys):
    assert run(["verify", "RUN", "-q", "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("`RUN/iter_0000002` (torch_dist) is valid")


FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of iterations 2, 4, 10, and one that is still being written."""
    root = tmp_path_factory.mktemp("long")
    for number in (2, 4, 10, 12):
        shutil.copytree(RUN / "iter_0000002", root / f"iter_{number:07d}")
    (root / "iter_0000012" / ".metadata").unlink()
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return root


def test_the_mean_of_the_last_iterations(long, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert run(["average", str(long), out, "--last", "2", "-v"]) == 0
    text = capsys.readouterr().out
    assert f"0.5 of {long}/iter_0000004" in text and f"0.5 of {long}/iter_0000010" in text
    for words in (
        [str(long), out, "--last", "4"],
        [str(RUN), str(RUN), out, "--last", "1"],
        [str(RUN), out, "--last", "0"],
    ):
        assert run(["average", *words]) == 2
    assert "--last 4: " in capsys.readouterr().err


def test_nan_can_fail_a_script(tmp_path, capsys):
    bad = str(without_numbers(RUN, tmp_path / "bad", "output_layer.weight"))
    for words in (["stats", bad], ["stats", str(RUN), "--fail-on-nan"]):
        assert run(words) == 0
        assert "no NaN and no Inf in " in capsys.readouterr().out.splitlines()[0] or words[1] == bad
    assert run(["stats", bad, "--fail-on-nan"]) == run(["stats", bad, str(RUN), "--fail-on-nan", "-q"]) == 1
    assert "NaN or Inf in 1 of 60 tensors" in "".join(capsys.readouterr())


def test_an_output_is_read_back_before_it_is_published(tmp_path, monkeypatch, capsys):
    work = _Run._work

    def and_then_a_disk_that_forgets(self: _Run, files: object) -> object:
        done = work(self, files)  # type: ignore[arg-type]
        data = self.output.data
        assert data is not None
        file = data / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[:-3000] + bytes(3000))
        return done

    assert run(["convert", str(RUN), str(tmp_path / "good"), "--verify", "--workers", "1"]) == 0
    assert "what it wrote was read back and is equal" in capsys.readouterr().out
    assert run(["convert", str(RUN), "memory://first/out", "--verify"]) == 2
    monkeypatch.setattr(_Run, "_work", and_then_a_disk_that_forgets)
    assert run(["convert", str(RUN), str(tmp_path / "bad"), "--verify", "--workers", "1"]) == 6
    assert "is not what was written. Nothing was published" in capsys.readouterr().err
    assert not list((tmp_path / "bad").glob("iter_*"))


@pytest.mark.parametrize("source", [RUN, FSDP], ids=["torch_dist", "fsdp_dtensor"])
def test_a_parameter_is_printed_by_its_name(source, capsys):
    for words, shown in (
        ([], "(master): float32 [128, 32]"),
        (["--role", "exp_avg"], "(exp_avg): float32 [128, 32]"),
    ):
        assert run(["print-tensor", str(source), FC1, *words]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"{FC1} {shown}") and len(out.splitlines()) < 15
    assert run(["print-tensor", str(source), FC1, "--role", "momentum"]) == 5
    assert "has no momentum, only master, exp_avg, exp_avg_sq" in capsys.readouterr().err or source == RUN
    assert run(["print-tensor", str(source), FC1, "--slice", "0, :2"]) == 0
    assert len(capsys.readouterr().out.splitlines()[1].split(",")) == 2
    assert run(["print-tensor", str(source), FC1, "--slice", "0, :2", "--stats"]) == 0
    assert "\n  elements 2\n" in capsys.readouterr().out


def test_options_of_megatron_fsdp_choose_its_format(tmp_path, capsys):
    hf = str(tmp_path / "hf")
    assert run(["export-hf", str(RUN), hf, "-q"]) == 0
    rates = ["--lr", "1e-5", "--min-lr", "1e-6", "--weight-decay", "0.1"]
    for words, made in (
        ([], "torch_dist"),
        (rates, "fsdp_dtensor"),
        ([*rates, "--gpus", "8"], "fsdp_dtensor"),
    ):
        assert run(["import-hf", hf, str(tmp_path / "out"), "--dry-run", *words]) == 0
        assert f" -> {made} for main" in capsys.readouterr().out
    assert run(["import-hf", hf, str(tmp_path / "out"), *rates, "--to", "torch_dist"]) == 2
    assert "--to fsdp_dtensor" in capsys.readouterr().err
