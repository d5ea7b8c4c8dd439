"""`env`: what it tells, what it keeps to itself, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os

import pytest

from ckpt_tools import __version__
from ckpt_tools.cli.app import run


def test_versions_settings_and_file_system(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-show")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://me:do-not-show@store:9000/x@y")
    monkeypatch.setenv("SLURM_NTASKS", "16")
    assert run(["env", str(tmp_path), "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert (found["schema_version"], found["versions"]["ckpt_tools"]) == (1, __version__)
    assert found["variables"]["SLURM_NTASKS"] == "16"
    assert found["variables"]["AWS_ENDPOINT_URL"] == "https://***@store:9000/x@y"
    assert "do-not-show" not in out
    assert found["crc32"] in ("isal.isal_zlib", "zlib")
    assert found["processors"] >= 1
    assert found["file_system"]["is_writable"]
    assert found["file_system"]["free_bytes"] == pytest.approx(
        os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize, rel=0.1
    )
    assert os.listdir(tmp_path) == []


def test_the_kind_is_the_kernels(capsys):
    assert run(["env", "/proc", "--json"]) == 0
    disk = json.loads(capsys.readouterr().out)["file_system"]
    assert (disk["kind"], disk["is_writable"], disk["copies_in_kernel"]) == ("proc", False, False)


def test_as_a_table(tmp_path, capsys):
    assert run(["env", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "ckpt_tools" in out and __version__ in out
    assert "file system" in out and "writable" in out


def test_a_file_is_no_directory(tmp_path, capsys):
    assert run(["env", str(tmp_path / "absent")]) == 2
    assert "is not a directory" in capsys.readouterr().err
