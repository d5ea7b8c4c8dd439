"""The start of `ckpt_tools.pyz`: unpacked once, whole, into a place of the user. `.ci/zipapp` builds the real one."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.conftest import REPO

APP = """
import sys
from pathlib import Path
def main():
    (Path(__file__).parent / "ran").open("a").write("x")
    print(Path(__file__).parent.parent.parent, *sys.argv[1:])
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A program in the form that `.ci/zipapp` builds."""
    made = tmp_path / "ckpt_tools.pyz"
    with zipfile.ZipFile(made, "w") as packed:
        packed.write(REPO / ".ci" / "zipapp_main.py", "__main__.py")
        packed.writestr("built_for", f"{sysconfig.get_config_var('SOABI')}\n")
        packed.writestr("ckpt_tools/__init__.py", "")
        packed.writestr("ckpt_tools/cli/__init__.py", "")
        packed.writestr("ckpt_tools/cli/app.py", APP)
    return made


def start(file: Path, cache: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", str(file), *words],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str], code: int = 0) -> tuple[Path, str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    return Path((out.split() or [""])[0]), out + err


def test_it_is_unpacked_once(file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    several = [start(file, cache, "ls", "RUN") for _ in range(3)]
    folders = {end(one)[0] for one in several}
    (folder,) = folders
    assert folder.parent == cache / "ckpt_tools"
    assert os.listdir(folder.parent) == [folder.name], "nothing half is left"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert end(start(file, cache))[0] == folder
    assert (folder / "ckpt_tools" / "cli" / "ran").read_text() == "xxxx"


def test_another_build_has_another_place(file: Path, tmp_path: Path) -> None:
    first = end(start(file, tmp_path / "cache"))[0]
    with zipfile.ZipFile(file, "a") as packed:
        packed.writestr("more", "x")
    assert end(start(file, tmp_path / "cache"))[0] != first


def test_what_others_can_write_is_not_run(file: Path, tmp_path: Path) -> None:
    folder = end(start(file, tmp_path / "cache"))[0]
    folder.chmod(0o777)
    elsewhere, _ = end(start(file, tmp_path / "cache"))
    assert elsewhere != folder
    assert not elsewhere.exists(), "it was for this run alone"
    (tmp_path / "file").touch()
    assert not end(start(file, tmp_path / "file"))[0].exists(), "no cache at all"


def test_another_python_is_told(file: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(file, "w") as packed:
        packed.write(REPO / ".ci" / "zipapp_main.py", "__main__.py")
        packed.writestr("built_for", "cpython-27\n")
    _, said = end(start(file, tmp_path), 1)
    assert "was built for cpython-27, and this Python is cpython-3" in said


def test_ci_builds_it_and_the_container() -> None:
    steps = (REPO / ".ci" / "run").read_text()
    for script in ("zipapp", "container", "wheel", "recipes"):
        assert f"\n.ci/{script}" in steps
        assert os.access(REPO / ".ci" / script, os.X_OK)
