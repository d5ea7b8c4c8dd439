"""Debian's Slurm with two nodes on this machine, as root, in one folder: own keys, sockets, ports, nothing installed.

The nodes are named 127.0.0.1 and 127.0.0.2, so that a node's name is an address that jobs can connect to.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.ports import free_port

NODES = ("127.0.0.1", "127.0.0.2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")

_CONF = """
ClusterName=ckpt
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=sched_interval=1,sched_min_interval=1
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
ReturnToService=2
KillWait=2
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.2 Port={ports[2]} CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Running daemons. `environ` makes Slurm's commands talk to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def command(self, *words: str, environ: Mapping[str, str] | None = None) -> str:
        """What a command of Slurm's prints; its environment is ours and `environ`."""
        done = subprocess.run(
            words,
            env={**self.environ, **(environ or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def start(self, name: str, *words: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                words, env=self.environ, stdout=out, stderr=out, start_new_session=True
            )

    def start_node(self, node: str) -> None:
        self.start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """SIGKILL to a node's daemon and to every process of its jobs, as if the machine lost its power."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        for pid in self._processes(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.command("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")

    def _processes(self, node: str) -> list[int]:
        """Processes that the node's daemon started, and theirs: they carry its name or its spool folder."""
        marks = (f"SLURMD_NODENAME={node}\0".encode(), f"spool-{node}".encode())
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                text = (folder / "environ").read_bytes() + b"\0" + (folder / "cmdline").read_bytes()
                conf = f"SLURM_CONF={self.folder}/slurm.conf\0".encode()
                if conf in text and any(mark in text for mark in marks):
                    found.append(int(folder.name))
        return found

    def wait(self, what: str, ready: Callable[[], bool], seconds: float = 60) -> None:
        """Return when `ready()`; fail with the daemons' logs when it takes longer than `seconds`."""
        stop = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < stop, f"{what}: not within {seconds} s\n{self.logs()}"
            time.sleep(0.2)

    def job(self, number: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        words = self.command("scontrol", "-o", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def logs(self) -> str:
        """The last lines of every daemon's log."""
        parts = []
        for path in sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")]):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            parts.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(parts)

    def stop(self) -> None:
        for node in NODES:
            for pid in self._processes(node):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for daemon in reversed(list(self._daemons.values())):
            daemon.kill()
            daemon.wait()


def missing() -> str | None:
    """Why Slurm cannot run here, or None."""
    absent = [name for name in PROGRAMS if _program(name) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install slurm-wlm munge"
    if os.getuid() != 0:
        return "Slurm's daemons need root to start jobs"
    return None


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin")


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Two idle nodes, in `folder`, which must have a short path (sockets lie in it)."""
    found = Cluster(folder)
    found.environ["PATH"] += ":/usr/sbin"
    ports = [free_port() for _ in range(3)]
    (folder / "slurm.conf").write_text(_CONF.format(host=socket.gethostname(), folder=folder, ports=ports))
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = [
        f"--{name}={folder}/munge.{name.split('-')[0]}"
        for name in ("socket", "pid-file", "log-file", "seed-file")
    ]
    try:
        found.start("munged", "munged", "--foreground", "--force", f"--key-file={key}", *files)
        found.wait("munge", (folder / "munge.socket").exists)
        found.start("slurmctld", "slurmctld", "-D", "-i")
        for node in NODES:
            found.start_node(node)
        found.wait("idle nodes", lambda: _idle(found) == len(NODES))
        yield found
    finally:
        found.stop()


def _idle(found: Cluster) -> int:
    states = subprocess.run(
        ["sinfo", "-h", "-N", "-o", "%T"], env=found.environ, capture_output=True, text=True, check=False
    )
    return states.stdout.split().count("idle")
