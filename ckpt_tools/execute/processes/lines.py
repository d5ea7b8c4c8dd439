"""Connections between the processes of one conversion, and the signs of life that they carry.

A message is a byte 1, its length in 8 bytes, and its content; a byte 0 between messages is a sign of life. A process
sends one every two seconds, from a thread, on each line to another rank of the launcher. Silence is counted in its
own beats and not by the clock: when a whole job is suspended and resumed, no rank has missed a beat. Whether a forked
process is stopped can be seen.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import select
import signal
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpt_tools.formats.storage.io_pool import BYSTANDERS

BEAT_SECONDS = 2.0
SILENT_SECONDS = 60.0  # without a sign of life
LOOK_SECONDS = 0.1
STRANGER_BYTES = 64 << 10  # more than a hello
STOPPED_LOOKS = 600  # counted, so that a parent that was suspended too does not kill its workers


class Line:
    """One end of a connection to a process: to one that has forked this one, to one forked (`pid`), or to a rank.

    Forked processes get pickled messages, ranks JSON. Of a stranger no more than `STRANGER_BYTES` are read at a time,
    and no longer message is taken.
    """

    def __init__(self, end: socket.socket, *, is_local: bool = False, pid: int | None = None) -> None:
        end.setblocking(False)
        if not is_local:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end, self.is_local, self.pid = end, is_local, pid
        self.is_open = True
        self.is_stranger = False
        self.missed = 0  # beats since the last byte, or looks at a stopped process, in a row
        self.most_missed = STOPPED_LOOKS if is_local else math.ceil(SILENT_SECONDS / BEAT_SECONDS)
        self._received = bytearray()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self.is_open = False
        self._end.close()

    def end_sending(self) -> None:
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def is_lost(self) -> bool:
        """Whether nothing more comes; of a rank, ask after `receive`."""
        return not self.is_open or self.missed >= self.most_missed

    def receive(self) -> list[Any]:
        """The messages that have come."""
        self._read()
        messages = []
        while self._received:
            if self._received[0] == 0:
                self._received = self._received.lstrip(b"\0")
                continue
            if self._received[0] != 1:
                self.is_open = False  # this is another program's
                break
            end = 9 + int.from_bytes(self._received[1:9], "big")
            if len(self._received) < max(9, end):
                break
            content = bytes(self._received[9:end])
            del self._received[:end]
            try:
                messages.append(
                    pickle.loads(content)  # noqa: S301  a socket pair's other end is a copy of this process
                    if self.is_local
                    else json.loads(content)
                )
            except (ValueError, RecursionError):
                self.is_open = False
        return messages

    def _read(self) -> None:
        try:
            while data := self._end.recv(STRANGER_BYTES if self.is_stranger else 1 << 20):
                self._received += data
                self.missed = 0
                if self.is_stranger:
                    self.is_open = len(self._received) <= STRANGER_BYTES
                    return
        except BlockingIOError:
            return
        except OSError:
            pass
        self.is_open = False

    def send(self, framed: bytes) -> None:
        """All of it, however long the other end does not read: as long as it lives."""
        left = memoryview(framed)
        writable = select.poll()
        with self._sending, suppress(OSError):  # `receive` tells that it is gone
            writable.register(self._end, select.POLLOUT)
            while left and not self.is_lost():
                try:
                    left = left[self._end.send(left) :]
                except BlockingIOError:
                    writable.poll(1000 * LOOK_SECONDS)
                    self.look()
                    if self.pid is None:
                        self._read()

    def beat(self) -> None:
        """Give a sign of life, unless a message is being sent, which is one."""
        self.missed += 1
        if self._sending.acquire(blocking=False):
            with suppress(OSError):  # the other end reads nothing: it has enough signs
                self._end.send(b"\0")
            self._sending.release()

    def look(self) -> None:
        """Whether the forked process is stopped (SIGSTOP, Ctrl-Z, a debugger); it is killed in the end."""
        if self.pid is None:
            return
        self.missed = self.missed + 1 if _is_stopped(self.pid) else 0
        if self.missed == STOPPED_LOOKS:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def framed(self, message: object) -> bytes:
        data = pickle.dumps(message) if self.is_local else json.dumps(message).encode()
        return b"\1" + len(data).to_bytes(8, "big") + data


def send_to(lines: Iterable[Line], message: object) -> None:
    """The same to all, so it is encoded once."""
    framed: dict[bool, bytes] = {}
    for line in lines:
        if line.is_local not in framed:
            framed[line.is_local] = line.framed(message)
        line.send(framed[line.is_local])


def next_message(line: Line, seconds: float | None = None) -> Any:
    """The next message from a process that sends no more than one before it gets an answer; None if none comes."""
    readable = select.poll()
    readable.register(line, select.POLLIN)
    stop = math.inf if seconds is None else time.monotonic() + seconds
    while time.monotonic() < stop:
        readable.poll(1000 * LOOK_SECONDS)
        if messages := line.receive():
            return messages[0]
        if not line.is_open:
            break
    return None


def _is_stopped(pid: int) -> bool:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


class _Beats:
    """The thread that gives signs of life on all `lines` to other ranks. It ends before a fork, and goes on after it.

    A forked process has its parent speak for it.
    """

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._thread: threading.Thread | None = None
        self._end = threading.Event()
        self._due = 0.0  # which forks do not put off
        os.register_at_fork(before=self._rest, after_in_parent=self._begin, after_in_child=self._close_all)

    def add(self, line: Line) -> None:
        self._lines.append(line)
        self._begin()

    def _begin(self) -> None:
        if self._lines and self._thread is None:
            self._end.clear()
            self._thread = threading.Thread(target=self._run, name="ckpt-beats", daemon=True)
            self._thread.start()
            BYSTANDERS.add(self._thread)

    def _run(self) -> None:
        while not self._end.wait(max(0.0, self._due - time.monotonic())):
            for line in self._lines:
                line.beat()
            self._due = time.monotonic() + BEAT_SECONDS

    def _rest(self) -> None:
        if self._thread is not None:
            self._end.set()
            self._thread.join()
            BYSTANDERS.remove(self._thread)
            self._thread = None

    def _close_all(self) -> None:
        for line in self._lines:
            line.close()
        self._lines.clear()


BEATS = _Beats()
