"""The recipes for schedulers and CI systems: each is run as its system would, or held against its format."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ckpt_tools.cli.app import run
from tests.conftest import DATA, REPO
from tests.folders import content
from tests.ports import free_port

SCRIPTS = REPO / "example-scripts"
RUN = DATA / "core019_llama_tp2_fully_reshardable"
LATEST = "latest_checkpointed_iteration.txt"
NAMED = {
    "type": "object",
    "properties": {"name": {"pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}},
    "required": ["name"],
}
QUANTITY = {"type": "string", "pattern": r"^\d+(m|[KMGT]i)?$"}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with `checkpoint-inspector` of this checkout on PATH, and stand-ins for pip and scontrol."""
    folder = tmp_path_factory.mktemp("bin")
    inspector = f'PYTHONPATH={REPO}:$PYTHONPATH exec {sys.executable} -m ckpt_tools "$@"'
    for name, line in (
        ("checkpoint-inspector", inspector),
        ("pip", 'printf "%s\\n" "$@" >>"$PIP_CALLS"'),
        ("squeue", 'cat "$TRAINING"'),
        ("scontrol", 'printf "%s\\n" "$*" >>"$SCONTROL_CALLS"'),
    ):
        (folder / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (folder / name).chmod(0o755)
    calls = {"PIP_CALLS": str(folder / "pip-calls"), "SCONTROL_CALLS": str(folder / "scontrol-calls")}
    return {**os.environ, **calls, "PATH": f"{folder}:{os.environ['PATH']}"}


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


def _bash(line: str, environ: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", line],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_recipe_is_in_the_list() -> None:
    text = (SCRIPTS / "README.md").read_text()
    named = set(re.findall(r"\]\(([^)]+)\)", text))
    files = {
        str(p.relative_to(SCRIPTS))
        for p in SCRIPTS.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert named == {name for name in files if not name.startswith("library_") and name != "README.md"}


def test_actions_are_pinned_by_commit() -> None:
    used = [
        line.partition("uses:")[2].strip()
        for file in (SCRIPTS / "check-checkpoint" / "action.yml", SCRIPTS / "github-actions-inspect.yml")
        for line in file.read_text().splitlines()
        if "uses:" in line
    ]
    assert len(used) == 6
    for use in used:
        assert re.fullmatch(r"[\w/.-]+@[0-9a-f]{40}( # v\d+\.\d+\.\d+)?", use), use


def test_the_github_action(tools: dict[str, str], tmp_path: Path) -> None:
    action: dict[str, Any] = yaml.safe_load((SCRIPTS / "check-checkpoint" / "action.yml").read_text())
    assert action["runs"]["using"] == "composite"
    given = {"checkpoint": str(RUN), "baseline": str(RUN), "packages": "botocore gcsfs"}
    inputs = {name: given.get(name, spec.get("default")) for name, spec in action["inputs"].items()}
    assert all(spec.get("required") or "default" in spec for spec in action["inputs"].values())
    summary = tmp_path / "summary.md"
    environ = {
        **tools,
        "GITHUB_ACTION_PATH": str(SCRIPTS / "check-checkpoint"),
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    Path(tools["PIP_CALLS"]).unlink(missing_ok=True)
    for step in action["runs"]["steps"]:
        if "run" in step:
            assert step["shell"] == "bash"
            assert "${{" not in step["run"], "an input is never a part of a script"
            env = {
                name: inputs[value[len("${{ inputs.") : -len(" }}")]] for name, value in step["env"].items()
            }
            done = _bash(step["run"], environ | env, tmp_path)
            assert done.returncode == 0, done.stderr
    checkout, *packages = Path(tools["PIP_CALLS"]).read_text().splitlines()[2:]
    assert Path(checkout).resolve() == REPO
    assert packages == ["botocore", "gcsfs"]
    assert f"It equals `{RUN}`" in summary.read_text()
    assert json.loads((tmp_path / "checkpoint-check" / "verify.json").read_text())["valid"] is True


def test_the_gitlab_job(tools: dict[str, str], tmp_path: Path) -> None:
    (name, job), *others = yaml.safe_load((SCRIPTS / "gitlab-inspect.yml").read_text()).items()
    assert (name, others) == ("check checkpoint", [])
    assert job.keys() <= {"image", "rules", "variables", "timeout", "script", "artifacts"}
    assert re.fullmatch(r"python:3\.\d+\.\d+-[\w-]+", job["image"])
    (tmp_path / "example-scripts").symlink_to(SCRIPTS)
    environ = {**tools, **job["variables"], "CHECKPOINT": str(RUN), "CKPT_TOOLS": "wheel"}
    done = _bash("\n".join(job["script"]), environ, tmp_path)
    assert done.returncode == 0, done.stderr
    kept = [*job["artifacts"]["paths"], job["artifacts"]["reports"]["junit"]]
    assert all((tmp_path / path).exists() for path in kept)


def test_the_pre_commit_hook() -> None:
    (hook,) = yaml.safe_load((REPO / ".pre-commit-hooks.yaml").read_text())
    assert hook.keys() == {"id", "name", "description", "language", "entry", "files", "require_serial"}
    assert hook["language"] == "script"
    assert os.access(REPO / hook["entry"], os.X_OK)
    files = re.compile(hook["files"])
    assert (
        files.search("a/.metadata") and files.search("a/__0_0.distcp") and files.search("model.safetensors")
    )
    assert not files.search("a/metadata.json")


def test_cron_converts_what_is_new_and_only_that(
    several: Path, tools: dict[str, str], tmp_path: Path
) -> None:
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

    done = _bash(convert, environ, tmp_path)
    assert done.returncode == 0, done.stderr  # the job is writing it
    made = {path.name for path in out.glob("iter_*")}
    assert made == {"iter_0000002", "iter_0000010", "iter_0000100"}
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.distcp")}
    shutil.rmtree(several / "iter_0000200")
    shutil.copytree(several / "iter_0000002", several / "iter_0000200")
    assert _bash(convert, environ, tmp_path).returncode == 0
    assert {path.name for path in out.glob("iter_*")} - made == {"iter_0000200"}
    assert {path: path.stat().st_mtime_ns for path in before} == before
    (out / LATEST).write_text("2")
    done = _bash(verify, environ, tmp_path)
    assert (done.stdout, done.stderr) == ("", ""), "nothing to mail"
    shard = next((out / "iter_0000002").glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size // 2)
    assert shard.name in _bash(verify, environ, tmp_path).stderr

    lock = subprocess.Popen(["flock", f"{out}.lock", "sleep", "60"])
    try:
        while not (held := _bash(f"flock -n {out}.lock true", environ, tmp_path).returncode):
            assert lock.poll() is None
        assert held == 1
        assert _bash(convert.replace("checkpoint-inspector", "false"), environ, tmp_path).returncode == 0
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


@pytest.mark.parametrize("count", [1, 3])
def test_an_array_converts_what_one_command_does(
    count: int, several: Path, tools: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["convert", str(several), str(tmp_path / "one"), "--iteration", "all", "-q"]) == 0
    array = Array(tools, several, tmp_path / "many")
    tasks = [array.start(task, count) for task in range(count)]
    ends = [task.communicate(timeout=120) for task in tasks]
    assert max(task.returncode for task in tasks) == 3, ends  # the half-written one
    assert "iter_0000200" in "".join(stderr for _, stderr in ends)
    assert content(tmp_path / "many") == content(tmp_path / "one")
    shutil.rmtree(several / "iter_0000200")
    again = array.start(0, 1)
    out, err = again.communicate(timeout=120)
    assert (again.returncode, out.splitlines()[-1][-4:]) == (0, "done"), err
    assert content(tmp_path / "many") == content(tmp_path / "one")


def test_an_array_task_near_its_limit_is_requeued(
    several: Path, tools: dict[str, str], tmp_path: Path
) -> None:
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


def _closed(required: str, **properties: Any) -> dict[str, Any]:
    """An object of exactly these fields; those that `required` names must be there."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


# Of core/v1 Service and batch/v1 Job: the fields that a job of ours has use for.
COUNT, TEXT = {"type": "integer", "minimum": 1}, {"type": "string"}
AMOUNTS = _closed("memory", cpu=QUANTITY, memory=QUANTITY)
CONTAINER = _closed(
    "name image command", name=TEXT, image={"pattern": r"^[\w./-]+:[\w.-]+$"}, command=_list(TEXT),
    env=_list(_closed("name value", name=TEXT, value=TEXT)),
    resources=_closed("requests limits", requests=AMOUNTS, limits=AMOUNTS),
    volumeMounts=_list(_closed("name mountPath", name=TEXT, mountPath={"pattern": "^/"})),
)  # fmt: skip
POD = _closed(
    "restartPolicy containers", subdomain=TEXT, restartPolicy={"enum": ["Never", "OnFailure"]},
    terminationGracePeriodSeconds=COUNT, containers=_list(CONTAINER),
    volumes=_list(_closed("name persistentVolumeClaim", name=TEXT,
                          persistentVolumeClaim=_closed("claimName", claimName=TEXT))),
)  # fmt: skip
JOB = _closed(
    "apiVersion kind metadata spec", apiVersion={"const": "batch/v1"}, kind={"const": "Job"}, metadata=NAMED,
    spec=_closed("completionMode completions parallelism template", completionMode={"const": "Indexed"},
                 completions=COUNT, parallelism=COUNT, backoffLimit=COUNT, ttlSecondsAfterFinished=COUNT,
                 template=_closed("spec", spec=POD)),
)  # fmt: skip
SERVICE = _closed(
    "apiVersion kind metadata spec", apiVersion={"const": "v1"}, kind={"const": "Service"}, metadata=NAMED,
    spec=_closed("clusterIP selector ports", clusterIP={"const": "None"}, publishNotReadyAddresses={"const": True},
                 selector=_closed("job-name", **{"job-name": TEXT}),
                 ports=_list(_closed("port", name=TEXT, port=COUNT))),
)  # fmt: skip


def _kubernetes() -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all((SCRIPTS / "kubernetes-convert.yaml").read_text())
    return service, job


def test_the_kubernetes_job_fits_its_schema() -> None:
    service, job = _kubernetes()
    jsonschema.validate(service, SERVICE)
    jsonschema.validate(job, JOB)
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


def test_the_kubernetes_command_runs_on_two_pods(tmp_path: Path) -> None:
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


def test_the_containerfile_copies_what_the_wheel_is_built_of() -> None:
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
