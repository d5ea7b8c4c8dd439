"""How the ranks of a launcher find each other: nobody else gets in, and who is missing or wrong is named."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import pytest

from ckpt_tools.errors import MappingError, StorageError, UsageError
from ckpt_tools.execute.processes import lines, meeting
from ckpt_tools.execute.processes.lines import Line
from ckpt_tools.execute.processes.meeting import _first_host, _ports, connect, shares_its_node
from ckpt_tools.execute.processes.ranks import PeerFailedError, Ranks
from tests.conftest import REPO
from tests.ports import free_port

# Forks a process for each environment; each says in its line what it agreed upon with the others.
MEET = """
import json, os, sys, time
from ckpt_tools.execute.processes import meeting
meeting.JOIN_SECONDS, pids = float(sys.argv[2]), []
for number, environ in enumerate(json.loads(sys.argv[1])):
    pids.append(os.fork())
    if pids[-1] == 0:
        meeting.__version__ = environ.pop("version", "1")
        time.sleep(float(environ.pop("late", "0")))
        try:
            said = meeting.connect(environ).together(lambda: number)
        except Exception as error:
            said = str(error)
        os.write(1, f"{json.dumps([number, said])}\\n".encode())
        os._exit(0)
for pid in pids:
    os.waitpid(pid, 0)
assert "torch" not in sys.modules
"""


def meet(*environs: dict[str, str], seconds: float = 30) -> list[object]:
    """What the process with each environment came to."""
    done = subprocess.run(
        [sys.executable, "-c", MEET, json.dumps(environs), str(seconds)],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [said for _, said in sorted(json.loads(line) for line in done.stdout.splitlines())]


def rank(number: int, world: int = 2, /, **more: str) -> dict[str, str]:
    return {"RANK": str(number), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", **more}


@pytest.mark.parametrize(
    "wrong",
    [{"rank": r} for r in ([1], 99, 0, -1, "1", True)]
    + [{"world": "2"}, {"job": 1}, {"ckpt_tools": None}, {"x": 1}],
)
def test_a_hello_is_proven(wrong):
    job = meeting._Job(0, 2, "localhost", (1,), "job")
    hello = meeting._hello(job) | {"rank": 1}
    assert meeting._answer(hello, job, {}) == "welcome"
    assert meeting._answer(hello | wrong, job, {}) == ["another program"]


@pytest.mark.parametrize("sent", [b"[" * 60_000, b"1" * 5000, b"\xff\xfe", b" " * (64 << 10)])
def test_of_a_stranger_little_is_read(ends, sent):
    here, there = ends
    here.is_stranger = True
    there.send(b"\1" + len(sent).to_bytes(8, "big") + sent)
    for _ in range(3):
        assert here.receive() == [] and len(here._received) <= 128 << 10
    assert not here.is_open


def test_strangers_do_not_keep_rank_0(monkeypatch):
    """They keep coming, one says nothing, and for a moment there is no descriptor."""
    monkeypatch.setattr(meeting, "JOIN_SECONDS", 1.5)
    monkeypatch.setattr(meeting, "_ANSWER_SECONDS", 0.5)
    accept, failures, idle, ended = (
        socket.socket.accept,
        [OSError(24, "")],
        list[socket.socket](),
        threading.Event(),
    )

    def scarce(server: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(server)

    def come() -> None:
        while not ended.wait(0.01):
            with suppress(OSError):
                idle.append(socket.create_connection(("localhost", port)))
                if len(idle) > 1:
                    idle.pop().close()

    monkeypatch.setattr(socket.socket, "accept", scarce)
    port = free_port()
    thread = threading.Thread(target=come)
    thread.start()
    started = time.monotonic()
    try:
        with pytest.raises(StorageError, match=r"rank 1 of 2 did not come .* was refused: another program"):
            connect(rank(0, MASTER_PORT=str(port)))
    finally:
        ended.set()
        thread.join()
    assert time.monotonic() - started < 6
    with idle.pop() as silent:
        assert silent.recv(100).endswith(b'["another program"]')


@contextmanager
def stranger(port: int) -> Iterator[None]:
    """Another program that listens at `port`, and answers what it does not understand."""

    def serve() -> None:
        while True:
            try:
                guest, _ = server.accept()
            except OSError:
                return
            with guest:
                guest.recv(100)
                guest.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("", port)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_ranks_of_torchrun_pass_strangers_and_other_jobs():
    """Of the ports that one job may use, another program has the first, and another job the second."""
    agent = {
        "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "a",
    }  # fmt: skip
    ports, _ = _ports(agent, is_slurm=False)
    assert len(ports) > 4 and str(ports[0]) != agent["MASTER_PORT"]
    other = {"CKPT_TOOLS_PORT": str(ports[1]), "TORCHELASTIC_RUN_ID": "b"}
    with stranger(ports[0]):
        ends = meet(
            rank(0, **other),
            rank(2, 3, **agent),
            rank(0, 3, late="1", **agent),
            rank(1, 3, **agent),
            rank(1, late="2", **other),
        )
    assert ends == [[0, 4], [2, 3, 1], [2, 3, 1], [2, 3, 1], [0, 4]]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (rank(1, 3), "rank 1 is one of 3 processes, rank 0 of 2 (WORLD_SIZE)"),
        (rank(1, version="2"), "rank 1 runs version 2 of ckpt_tools, rank 0 1"),
    ],
)
def test_ranks_that_do_not_fit_end_the_job(more, reason):
    port = {"MASTER_PORT": str(free_port())}
    first, second = meet(rank(0) | port, more | port)
    assert first == reason
    assert second == f"rank 1 was refused by rank 0 at localhost:{port['MASTER_PORT']}: {reason}"


def test_two_processes_of_one_rank_end_the_job():
    port = {"MASTER_PORT": str(free_port())}
    ends = meet(rank(0, 3) | port, rank(1, 3) | port, rank(1, 3) | port, seconds=3)
    assert ends[0] == "two processes are rank 1"
    assert "two processes are rank 1" in str(ends[1:]) and "lost the other ranks" in str(ends[1:])


def test_who_did_not_come_is_named_and_who_came_instead():
    port = free_port()
    slurm = {
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "3",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "localhost",
    }
    place = {"MASTER_PORT": str(port)}
    said, other = meet(
        slurm | place | {"SLURM_PROCID": "0"},
        slurm | place | {"SLURM_PROCID": "2", "SLURM_JOB_ID": "8"},
        seconds=1,
    )
    assert str(said).startswith(f"rank 1, 2 of 3 did not come to rank 0 at port {port} within 1 s. ")
    assert f"was refused: another job 7 0 {port}" in str(said)
    assert f"cannot reach rank 0 of this job (8 0 {port}) at localhost, port {port}" in str(other)
    assert "CKPT_TOOLS_PORT" in str(other)


def test_a_port_that_is_taken_is_named():
    port = free_port()
    with stranger(port):
        first, second = meet(rank(0, MASTER_PORT=str(port)), rank(1, MASTER_PORT=str(port)), seconds=1)
    assert f"rank 0 cannot listen at localhost, port {port} (Address already in use" in str(first)
    assert f"({port}: another program answers)" in str(second)


def test_who_am_i():
    for alone in (
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # a batch script, no step
    ):
        assert connect(alone).world == 1 and not shares_its_node(alone)
    for environ, says in (
        ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK=3 is not one of the ranks 0 to 1 of WORLD_SIZE=2"),
        ({"RANK": "x"}, "'x'"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}, "MASTER_ADDR"),
        (rank(0), "MASTER_PORT"),
        (rank(0, MASTER_PORT="x"), "'x', not a port"),
    ):
        with pytest.raises(UsageError, match=says):
            connect(environ)
    for nodes, first in (("gpu[07-09,12],login1", "gpu07"), ("a-1,b-2", "a-1"), ("n[3,5-9]", "n3")):
        assert _first_host(nodes) == first


@pytest.mark.parametrize(
    ("environ", "shared"),
    [
        (rank(0, LOCAL_WORLD_SIZE="1"), False),
        (rank(0, LOCAL_WORLD_SIZE="2"), True),
        (rank(0), True),  # nothing is known
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, False),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"}, True),
    ],
)
def test_the_launcher_says_whether_a_rank_has_its_node_alone(environ, shared):
    assert shares_its_node(environ) == shared


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Line, Line]]:
    """Both ends of a line between ranks, of which six beats may be missed."""
    monkeypatch.setattr(lines, "SILENT_SECONDS", 6 * lines.BEAT_SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = Line(socket.create_connection(server.getsockname()))
        second = Line(server.accept()[0])
    with closing(first), closing(second):
        yield first, second


def test_silence_is_counted_in_own_beats(ends):
    here, there = ends
    for _ in range(100):
        here.beat()  # which nobody reads
    assert here.is_lost()
    there.beat()
    assert (here.receive(), here.is_lost()) == ([], False)
    for beats in range(6):
        assert not here.is_lost(), beats
        here.beat()
    assert here.is_lost()


def test_a_stop_that_follows_an_answer_is_of_the_next_step(ends):
    here, there = ends
    there.send(there.framed([{"result": 0}, {"result": 1}]) + there.framed("stop"))
    ranks = Ranks(1, 2, here, None, (0, 1))
    assert ranks.together(lambda: 1) == [0, 1]
    with pytest.raises(PeerFailedError):
        ranks.check()


def test_ranks_at_different_steps_are_a_defect(ends):
    here, there = ends
    first, second = Ranks(0, 2, None, {there: range(1, 2)}, (0, 1)), Ranks(1, 2, here, None, (0, 1))
    with ThreadPoolExecutor() as pool:
        one, two = pool.submit(first.together, lambda: 1), pool.submit(second.everywhere, lambda: {1})
    assert "lost step" in str(one.exception()) and "lost step" in str(two.exception())


@pytest.mark.parametrize(
    ("errors", "kind", "says"),
    [
        ([None, MappingError("b")], MappingError, "rank 1: b"),
        ([UsageError("a"), MappingError("b")], UsageError, "rank 0: a\nrank 1: b"),
        ([UsageError("a"), UsageError("a")], UsageError, "a"),
        ([None, OSError(5, "gone")], StorageError, "rank 1: [Errno 5] gone"),
        ([ZeroDivisionError("c"), None], RuntimeError, "in a worker:\nrank 0: Traceback"),
    ],
)
def test_an_error_between_steps_is_that_of_all(ends, errors, kind, says):
    here, there = ends

    def block(ranks: Ranks, error: BaseException | None) -> None:
        with ranks.ending_together(), ranks.ending_together():
            ranks.together(lambda: 1)
            if error is not None:
                raise error
            ranks.together(lambda: 2)

    first, second = Ranks(0, 2, None, {there: range(1, 2)}, (0, 1)), Ranks(1, 2, here, None, (0, 1))
    with ThreadPoolExecutor() as pool:
        ended = [pool.submit(block, ranks, own) for ranks, own in zip((first, second), errors, strict=True)]
    for end, own in zip(ended, errors, strict=True):
        error = end.exception()
        if isinstance(own, ZeroDivisionError):
            assert error is own
        else:
            assert type(error) is kind and str(error).startswith(says)


def test_an_error_that_nobody_is_left_to_hear_is_raised(ends):
    here, there = ends
    there.close()
    with pytest.raises(MappingError, match=r"^b$"), Ranks(1, 2, here, None, (0, 1)).ending_together():
        raise MappingError("b")


def test_a_message_waits_for_who_reads_late_and_not_for_who_is_silent(ends):
    here, there = ends
    text = "x" * (32 << 20)
    sender = threading.Thread(target=here.send, args=(here.framed(text),))
    sender.start()
    received: list[object] = []
    while not received:
        there.beat()
        here.missed = min(here.missed, 5)
        received = there.receive()
    assert received == [text]
    sender.join()
    for _ in range(7):
        here.beat()
    here.send(here.framed(text))  # returns
    assert here.is_lost()


# Two ranks and a worker of each are suspended for longer than silence may last; rank 0 ends after rank 1.
SUSPENDED = """
import os, signal, sys, time
from ckpt_tools.execute.processes import lines, meeting, team
from ckpt_tools.formats.storage import io_pool
lines.BEAT_SECONDS, lines.SILENT_SECONDS, lines.STOPPED_LOOKS = 0.1, 0.8, 8
os.setpgid(0, 0)
pids = []
for rank in (1, 0):
    pids.append(os.fork())
    if pids[-1] == 0:
        os.setpgid(0, 0)
        place = dict(MASTER_ADDR="localhost", MASTER_PORT=sys.argv[1])
        ranks = meeting.connect(dict(RANK=str(rank), WORLD_SIZE="2", **place))
        io_pool.pool().submit(int).result()
        assert team.can_fork(), "the store's threads have ended, those that beat count for nothing"
        with team.forked(2, ranks) as (ranks, here):
            ranks.together(lambda: os.write(1, b"."))
            for _ in range(20):
                time.sleep(0.1)
                ranks.check()
            assert ranks.together(lambda: ranks.rank) == [0, 1, 2, 3] and here == 2
        time.sleep(rank)
        sys.exit()
time.sleep(1)
for number in (signal.SIGSTOP, signal.SIGCONT):
    for pid in pids:
        os.killpg(pid, number)
    time.sleep(1.5)
assert [os.wait() for _ in pids] == [(pid, 0) for pid in pids]
"""


def test_a_suspended_job_goes_on_and_rank_0_leaves_last():
    done = subprocess.run(
        [sys.executable, "-c", SUSPENDED, str(free_port())],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("....", "", 0)
