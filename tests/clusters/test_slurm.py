"""The batch script on a real Slurm: two nodes convert, something stops them half way, the requeued job finishes."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clusters import slurm
from tests.clusters.slurm import Cluster
from tests.conftest import REPO, fixture_dir
from tests.folders import content

pytestmark = pytest.mark.skipif(slurm.missing() is not None, reason=f"no Slurm: {slurm.missing()}")

SOURCE = "core019_llama_tp2_fully_reshardable"
SCRIPT = REPO / "example-scripts" / "sbatch_checkpoint_convert.sh"
SLOW_DISK = Path(__file__).parent / "slow_disk"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, slurm.cluster(Path(folder)) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The output of one process."""
    output = tmp_path_factory.mktemp("one") / "out"
    words = ["convert", str(fixture_dir(SOURCE)), str(output), "--world-size", "2", "--quiet"]
    subprocess.run([sys.executable, "-m", "ckpt_tools", *words], check=True, capture_output=True)
    return content(output)


def test_ranks_come_from_slurm_alone(cluster, tmp_path, undisturbed):
    words = [
        "convert",
        str(fixture_dir(SOURCE)),
        str(tmp_path / "out"),
        "--world-size",
        "2",
        "--quiet",
        "--json",
    ]
    stdout = cluster.command(
        "srun", "-N2", "-n2", sys.executable, "-m", "ckpt_tools", *words, environ={"PYTHONPATH": str(REPO)}
    )
    assert json.loads(stdout)["written"]["ranks"] == 2, "one report, of both ranks"
    assert content(tmp_path / "out") == undisturbed


class Job:
    """A submitted conversion of the fixture, its first start on a slow disk."""

    def __init__(self, cluster: Cluster, folder: Path, converting: str = "") -> None:
        self.cluster, self.output = cluster, folder / "out"
        self.log, self.report = folder / "job.log", folder / "report.json"
        settings = {
            "INPUT": str(fixture_dir(SOURCE)),
            "OUTPUT": str(self.output),
            "REPORT": str(self.report),
            "CONVERT_ARGS": f"--world-size 2 --quiet {converting}",
            "PYTHON": sys.executable,
            "PYTHONPATH": f"{SLOW_DISK}:{REPO}",
        }
        words = ("sbatch", "--parsable", f"--output={self.log}", str(SCRIPT))
        self.number = cluster.command(*words, environ=settings)

    def wait_until_half_done(self) -> None:
        journals = self.output / ".iter_0000002.ckpt_tools-partial" / "journal"
        for rank in (0, 1):
            file = journals / f"{rank}.jsonl"

            def has_written(journal: Path = file) -> bool:
                return journal.exists() and journal.read_text().count("\n") >= 4

            self._wait(f"rank {rank} to write", has_written)

    def wait_until_done(self) -> None:
        def ended() -> bool:
            state = self.cluster.job(self.number)["JobState"]
            assert state not in ("FAILED", "CANCELLED", "TIMEOUT"), self._log()
            return state == "COMPLETED"

        self._wait("the requeued job to finish", ended)

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        try:
            self.cluster.wait(what, ready, 120)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._log()}") from None

    def _log(self) -> str:
        return self.log.read_text() if self.log.exists() else "no log yet"


def _check_end(job: Job, undisturbed: dict[str, bytes], ranks: int) -> str:
    assert job.cluster.job(job.number)["Restarts"] == "1"
    assert content(job.output) == undisturbed
    report = json.loads(job.report.read_text())
    assert report["written"]["ranks"] == ranks
    assert 0 < report["written"]["items_resumed"] < report["written"]["items"]
    log = job.log.read_text()
    assert "is valid" in log
    return log


def test_a_node_dies_and_the_requeued_job_finishes_identical(cluster, tmp_path, undisturbed):
    job = Job(cluster, tmp_path)
    job.wait_until_half_done()
    cluster.kill_node(slurm.NODES[1])
    assert not (job.output / "iter_0000002").exists()
    cluster.start_node(slurm.NODES[1])
    job.wait_until_done()
    assert "NODE FAILURE" in _check_end(job, undisturbed, 2)


def test_ranks_stop_before_the_time_limit_and_go_on_after_the_requeue(cluster, tmp_path, undisturbed):
    """With two workers on each node."""
    job = Job(cluster, tmp_path, "--workers 2")
    job.wait_until_half_done()
    cluster.command(
        "scancel", "--batch", "--signal=USR1", job.number
    )  # what --signal=B:USR1@180 makes Slurm send
    job.wait_until_done()
    log = _check_end(job, undisturbed, 4)
    assert "time is nearly up" in log
    assert "terminated: nothing was published" in log


def test_an_array_shares_the_iterations_of_a_run(cluster, tmp_path):
    """Two tasks, each with an iteration on a slow disk; one is stopped as before its time limit, and requeued."""
    source = shutil.copytree(fixture_dir(SOURCE), tmp_path / "run")
    shutil.copytree(source / "iter_0000002", source / "iter_0000010")
    words = ["convert", str(source), str(tmp_path / "one"), "--iteration", "all", "--quiet"]
    subprocess.run([sys.executable, "-m", "ckpt_tools", *words], check=True, capture_output=True)
    output = tmp_path / "out"
    settings = {
        "INPUT": str(source),
        "OUTPUT": str(output),
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(SLOW_DISK), str(REPO), os.environ.get("PYTHONPATH")])
        ),
    }
    log = f"--output={tmp_path}/%a.log"
    script = str(SCRIPT.with_name("sbatch_convert_iterations.sh"))
    number = cluster.command(
        "sbatch", "--parsable", "--array=0-1", "--cpus-per-task=1", log, script, environ=settings
    )

    def logs() -> str:
        return "\n".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))

    journal = output / ".iter_0000010.ckpt_tools-partial" / "journal" / "0.jsonl"
    cluster.wait("task 1 to write", lambda: journal.exists() and journal.read_text().count("\n") >= 4, 120)
    cluster.command("scancel", "--batch", "--signal=USR1", f"{number}_1")

    def ended() -> bool:
        states = re.findall(r"JobState=(\w+)", cluster.command("scontrol", "-o", "show", "job", number))
        assert not {"FAILED", "CANCELLED", "TIMEOUT"} & set(states), logs()
        return states == ["COMPLETED"] * 2

    cluster.wait("the array to finish", ended, 120)
    assert cluster.job(f"{number}_1")["Restarts"] == "1", logs()
    assert "requeued" in (tmp_path / "1.log").read_text()
    assert content(output) == content(tmp_path / "one")
