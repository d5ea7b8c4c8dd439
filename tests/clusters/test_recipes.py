"""The recipes for schedulers and CI systems: each is run as its system would, or held against its format."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckpt_tools.cli.app import run
from tests.clusters.conftest import bash
from tests.conftest import DATA, REPO
from tests.folders import content
from tests.ports import free_port

SCRIPTS = REPO / "example-scripts"
RUN = DATA / "core019_llama_tp2_fully_reshardable"
LATEST = "latest_checkpointed_iteration.txt"


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """A run with three iterations, the tracker on the second, and one that is half written."""
    root = shutil.copytree(RUN, tmp_path / "run")
    for number in (10, 100):
        shutil.copytree(root / "iter_0000002", root / f"iter_{number:07d}")
    (root / LATEST).write_text("10")
    half = root / "iter_0000200"
    half.mkdir()
    for file in (root / "iter_0000002" / "metadata.json", next((root / "iter_0000002").glob("*.distcp"))):
        shutil.copy(file, half)
    return root


def test_every_recipe_is_in_the_list():
    text = (SCRIPTS / "README.md").read_text()
    named = set(re.findall(r"\]\(([^)]+)\)", text))
    files = {
        str(p.relative_to(SCRIPTS))
        for p in SCRIPTS.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert named == {name for name in files if not name.startswith("library_") and name != "README.md"}


def test_cron_converts_what_is_new_and_only_that(several, tools, tmp_path):
    lines = [line for line in (SCRIPTS / "crontab").read_text().splitlines() if line and line[0] != "#"]
    settings = dict(line.split("=", 1) for line in lines if re.match(r"[A-Z]+=", line))
    jobs = [line.split(" ", 5) for line in lines if not re.match(r"[A-Z]+=", line)]
    assert settings.keys() == {"SHELL", "PATH", "RUN", "OUT"}
    for *times, command in jobs:
        assert all(re.fullmatch(r"\*|\d+", time) for time in times)
        assert "%" not in command, "cron takes it for the end of the line"
    out = tmp_path / "out"
    environ = {**tools, "RUN": str(several), "OUT": str(out)}
    convert, verify = (job[5] for job in jobs)

    done = bash(convert, environ, tmp_path)
    assert done.returncode == 0, done.stderr  # the job is writing it
    made = {path.name for path in out.glob("iter_*")}
    assert made == {"iter_0000002", "iter_0000010", "iter_0000100"}
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.distcp")}
    shutil.rmtree(several / "iter_0000200")
    shutil.copytree(several / "iter_0000002", several / "iter_0000200")
    assert bash(convert, environ, tmp_path).returncode == 0
    assert {path.name for path in out.glob("iter_*")} - made == {"iter_0000200"}
    assert {path: path.stat().st_mtime_ns for path in before} == before
    (out / LATEST).write_text("2")
    done = bash(verify, environ, tmp_path)
    assert (done.stdout, done.stderr) == ("", ""), "nothing to mail"
    shard = next((out / "iter_0000002").glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size // 2)
    assert shard.name in bash(verify, environ, tmp_path).stderr

    lock = subprocess.Popen(["flock", f"{out}.lock", "sleep", "60"])
    try:
        while not (held := bash(f"flock -n {out}.lock true", environ, tmp_path).returncode):
            assert lock.poll() is None
        assert held == 1
        assert bash(convert.replace("checkpoint-inspector", "false"), environ, tmp_path).returncode == 0
    finally:
        lock.terminate()
        lock.wait()


class Array:
    """The tasks of a job array, run in this process's place."""

    def __init__(self, tools: dict[str, str], source: Path, output: Path) -> None:
        self.environ = {
            **tools,
            "INPUT": str(source),
            "OUTPUT": str(output),
            "PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")])),
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_MIN": "5",
        }

    def start(self, task: int, count: int, **more: str) -> subprocess.Popen[str]:
        ids = {"SLURM_ARRAY_TASK_ID": str(5 + task), "SLURM_ARRAY_TASK_COUNT": str(count)}
        return subprocess.Popen(
            ["bash", str(SCRIPTS / "sbatch_convert_iterations.sh")],
            env=self.environ | ids | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def test_an_array_converts_what_one_command_does(several, tools, tmp_path, capfd):
    assert run(["convert", str(several), str(tmp_path / "one"), "--iteration", "all", "-q"]) == 0
    array = Array(tools, several, tmp_path / "many")
    tasks = [array.start(task, 3) for task in range(3)]
    ends = [task.communicate(timeout=120) for task in tasks]
    assert max(task.returncode for task in tasks) == 3, ends  # the half-written one
    assert "iter_0000200" in "".join(stderr for _, stderr in ends)
    assert content(tmp_path / "many") == content(tmp_path / "one")
    shutil.rmtree(several / "iter_0000200")
    again = array.start(0, 1)
    out, err = again.communicate(timeout=120)
    assert (again.returncode, out.splitlines()[-1][-4:]) == (0, "done"), err
    assert content(tmp_path / "many") == content(tmp_path / "one")


def test_an_array_task_near_its_limit_is_requeued(several, tools, tmp_path):
    program = tmp_path / "python"
    program.write_text(
        f"#!/usr/bin/env bash\ntrap 'exit 143' TERM\ntouch {tmp_path}/started\nwhile :; do sleep 0.05; done\n"
    )
    program.chmod(0o755)
    Path(tools["SCONTROL_CALLS"]).unlink(missing_ok=True)
    task = Array(tools, several, tmp_path / "out").start(0, 1, PYTHON=str(program))
    while not (tmp_path / "started").exists():
        assert task.poll() is None
    task.send_signal(10)  # USR1
    _, err = task.communicate(timeout=20)
    assert task.returncode == 143
    assert "requeued" in err
    assert Path(tools["SCONTROL_CALLS"]).read_text() == "requeue 7_5\n"


# The fields of core/v1 Service and batch/v1 Job that a job of ours has use for.
FIELDS = """
apiVersion kind metadata name spec clusterIP selector job-name ports port publishNotReadyAddresses completionMode
completions parallelism backoffLimit ttlSecondsAfterFinished template subdomain restartPolicy containers volumes image
terminationGracePeriodSeconds command env value resources requests limits cpu memory volumeMounts mountPath claimName
persistentVolumeClaim
"""


def _fields(value: Any) -> set[str]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set(value if isinstance(value, dict) else ()).union(*map(_fields, inner))


def _kubernetes() -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all((SCRIPTS / "kubernetes-convert.yaml").read_text())
    return service, job


def test_the_kubernetes_job_is_of_one_piece():
    service, job = _kubernetes()
    assert _fields([service, job]) <= set(FIELDS.split())
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert job["spec"]["completionMode"] == "Indexed" and service["spec"]["clusterIP"] == "None"
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"], "all pods of a rendezvous run at once"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"]["job-name"] == name
    port = service["spec"]["ports"][0]["port"]
    words = container["command"]
    assert f"--nnodes={job['spec']['completions']}" in words
    assert f"--rdzv-endpoint={name}-0.{pod['subdomain']}:{port}" in words
    assert "--resume" in words
    assert [m["name"] for m in container["volumeMounts"]] == [v["name"] for v in pod["volumes"]]


def test_the_kubernetes_command_runs_on_two_pods(tmp_path):
    words = _kubernetes()[1]["spec"]["template"]["spec"]["containers"][0]["command"]
    meeting = f"127.0.0.1:{free_port()}"
    places = {
        "torchrun": f"{sys.executable} -m torch.distributed.run",
        "--nnodes=4": "--nnodes=2",
        "--rdzv-endpoint=ckpt-convert-0.ckpt-convert:29400": f"--rdzv-endpoint={meeting}",
        "/checkpoints/run1": str(RUN),
        "/checkpoints/run1_fsdp": str(tmp_path / "out"),
    }
    assert places.keys() <= set(words)
    command = [part for word in words for part in shlex.split(places.get(word, word))]
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    pods = [
        subprocess.Popen(
            [*command, "--json"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    ends = [pod.communicate(timeout=200) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], ends
    assert json.loads("".join(out for out, _ in ends))["written"]["ranks"] == 2
    assert run(["diff", str(RUN), str(tmp_path / "out")]) == 0


def test_the_containerfile_copies_what_the_wheel_is_built_of():
    text = (SCRIPTS / "Containerfile").read_text()
    lines = [line for line in text.splitlines() if line and line[0] != "#"]
    assert {line.split()[0] for line in lines} == {
        *("FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT")
    }
    copied = [
        word
        for line in lines
        if line.startswith("COPY") and "--from" not in line
        for word in line.split()[1:-1]
    ]
    assert all((REPO / word).exists() for word in copied)
    project = (REPO / "pyproject.toml").read_text()
    assert {"pyproject.toml", "README.md", "ckpt_tools"} <= set(copied)
    for extra in re.findall(r"EXTRAS: (\w+) for .*, (\w+) for", text)[0]:
        assert f"\n{extra} = [" in project
