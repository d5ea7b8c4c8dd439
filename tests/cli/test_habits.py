"""Habits of people at a command line: sizes, globs, misspelt names and paths, NO_COLOR."""

import os
import re
import shlex

import pytest

from ckpt_tools.cli.app import run
from ckpt_tools.cli.options import parse_bytes
from ckpt_tools.errors import UsageError
from tests.cli.terminal import on_a_terminal
from tests.conftest import DATA, fixture_dir

RUN = DATA / "core019_llama_tp2_fully_reshardable"
FSDP = fixture_dir("core019_llama_tp2_native_fsdp_dtensor")


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
