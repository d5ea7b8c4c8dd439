"""Ranges that are fetched before they are read: the file's bytes whatever was told, few requests, bounded memory."""

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import CorruptCheckpointError, StorageError
from ckpt_tools.formats.storage import io_pool as requests
from ckpt_tools.formats.storage import prefetch as module
from ckpt_tools.formats.storage.prefetch import REQUEST_BYTES, Range, ReadAhead, read_ahead, reading_ahead

KIB = 1 << 10
DATA = random.Random(2).randbytes(3 << 20)


class Store:
    """A folder with the file `data`; requests are recorded, those that begin at `broken` fail."""

    def __init__(self, data: bytes = DATA, broken: int = -1) -> None:
        self.data, self.broken = data, broken
        self.requests: list[tuple[int, int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def size(self, name: str) -> int:
        if name != "data":
            raise CorruptCheckpointError(f"{name} does not exist")
        return len(self.data)

    def fetch_into(self, name: str, start: int, buffer: memoryview) -> None:
        assert name == "data"
        self.requests.append((start, start + len(buffer)))
        assert self.gate.wait(60)
        if start == self.broken:
            raise StorageError("the store is down")
        buffer[:] = self.data[start : start + len(buffer)]

    def read(self, start: int, stop: int) -> bytes:
        """As `RemoteFiles.read_into`: what was not fetched ahead is fetched now."""
        buffer = memoryview(bytearray(stop - start))
        done = read_ahead(self, "data", start, buffer)
        if done < len(buffer):
            self.fetch_into("data", start + done, buffer[done:])
        return bytes(buffer)


Job = Sequence[tuple[int, int]]
job = st.lists(st.tuples(st.integers(0, len(DATA) - 1), st.integers(1, 300 * KIB)), max_size=4).map(
    lambda parts: [(start, min(start + length, len(DATA))) for start, length in parts]
)


@given(st.lists(st.tuples(job, job), max_size=8), st.sampled_from([0, 50 * KIB, 1 << 20, 32 << 20]))
def test_any_reads_give_the_bytes_of_the_file_whatever_was_foretold(jobs, memory):
    """Each job tells of some ranges and reads others: all of these, in any order, or none."""
    store = Store()

    def reads(told: tuple[Job, Job]) -> Iterator[Range]:
        return (Range(store, "data", *part) for part in told[0])

    seen = []
    with reading_ahead(iter(jobs), reads, memory) as mine:
        for one in mine:
            seen.append(one)
            for start, stop in (*one[1], *reversed(one[0])):
                assert store.read(start, stop) == DATA[start:stop]
    assert seen == jobs


def test_neighbours_are_one_request_and_nothing_is_asked_for_twice():
    store = Store(bytes(40 << 20))
    jobs = [(start, start + (1 << 20)) for start in range(0, 40 << 20, 1 << 20)]
    with reading_ahead(jobs, lambda one: [Range(store, "data", *one)], 3 * REQUEST_BYTES) as mine:
        for start, stop in mine:
            assert len(store.read(start, stop)) == stop - start
    assert sorted(store.requests) == [(at, at + REQUEST_BYTES) for at in range(0, 40 << 20, REQUEST_BYTES)]


def test_streams_that_are_read_in_turn_are_joined_each():
    """Tiles of two chunks side by side: every other range goes on where the one before the last ended."""
    store, half = Store(bytes(32 << 20)), 16 << 20
    jobs = [(at + side, at + side + (1 << 20)) for at in range(0, half, 1 << 20) for side in (0, half)]
    with reading_ahead(jobs, lambda one: [Range(store, "data", *one)], 48 << 20) as mine:
        for start, stop in mine:
            store.read(start, stop)
    assert sorted(store.requests) == [(at, at + REQUEST_BYTES) for at in range(0, 32 << 20, REQUEST_BYTES)]


def test_a_gap_is_fetched_and_a_longer_one_is_not():
    store = Store()
    near, far = 64 * KIB, 64 * KIB + 1
    ranges = [(0, 100), (100 + near, 200 + near), (200 + near + far, 300 + near + far)]
    with reading_ahead(ranges, lambda one: [Range(store, "data", *one)], 1 << 20) as mine:
        for start, stop in mine:
            store.read(start, stop)
    assert sorted(store.requests) == [(0, 200 + near), (200 + near + far, 300 + near + far)]


def test_what_is_on_its_way_or_here_keeps_to_the_memory(monkeypatch):
    most, memory = [0], 1 << 20
    ask_for = ReadAhead._ask_for

    def watched(self: ReadAhead[object], nbytes: int) -> bool:
        found = ask_for(self, nbytes)
        assert self._held == sum(request.range.nbytes for request in self._requests)
        most.append(self._held)
        return found

    monkeypatch.setattr(ReadAhead, "_ask_for", watched)
    store, jobs = Store(), [(start, start + 70 * KIB) for start in range(0, 2 << 20, 70 * KIB)]
    with reading_ahead(jobs, lambda one: [Range(store, "data", *one)], memory) as mine:
        for number, (start, stop) in enumerate(mine):
            if number % 3:  # of the others nothing is read: it goes with its job
                store.read(start, stop)
    assert memory // 2 < max(most) <= memory


def test_ranges_that_a_job_did_not_read_cost_no_requests_after_it():
    store, jobs = Store(), [(start, start + 300 * KIB) for start in range(0, 3000 * KIB, 300 * KIB)]
    with reading_ahead(jobs, lambda one: [Range(store, "data", *one)], 50 * KIB) as mine:
        assert list(mine) == jobs
    assert 0 < len(store.requests) <= 3 * len(jobs)


def test_requests_are_made_before_they_are_waited_for():
    store = Store()
    store.gate.clear()
    jobs = [(at, at + 100 * KIB) for at in range(0, 2 << 20, 400 * KIB)]
    with reading_ahead(jobs, lambda one: [Range(store, "data", *one)], 3 << 20) as mine:
        assert next(mine) == jobs[0]
        assert requests.pool().submit(lambda: True).result(60)  # behind them
        assert len(store.requests) == len(jobs)
        store.gate.set()
        assert store.read(*jobs[0]) == DATA[slice(*jobs[0])]


def test_a_failure_is_told_to_who_reads_and_not_to_others():
    store = Store(broken=1 << 20)
    jobs = [(0, 100), (1 << 20, (1 << 20) + 100), (2 << 20, (2 << 20) + 100)]
    with reading_ahead(jobs, lambda one: [Range(store, "data", *one)], 1 << 20) as mine:
        assert store.read(*next(mine)) == DATA[:100]
        failing = next(mine)
        with pytest.raises(StorageError, match="the store is down"):
            store.read(*failing)
        start, stop = next(mine)
        assert store.read(start, stop) == DATA[start:stop]


def test_what_cannot_be_foretold_is_left_to_who_reads():
    store = Store()

    def reads(one: int) -> Iterator[Range]:
        if one == 1:
            yield Range(store, "absent", 0, 5)
        yield Range(store, "data", 0, 2 * len(DATA))  # longer than the file
        if one == 2:
            raise CorruptCheckpointError("the plan does not add up")

    with reading_ahead(range(4), reads, 1 << 20) as mine:
        assert list(mine) == [0, 1, 2, 3]
    assert store.requests == []


def test_threads_share_jobs_and_each_is_done_once():
    store, lock, left = Store(), threading.Lock(), iter(range(64))

    def taken() -> Iterator[int]:
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                return
            yield number

    def work() -> list[int]:
        done = []
        with reading_ahead(
            taken(), lambda n: [Range(store, "data", n * KIB, (n + 1) * KIB)], 1 << 20
        ) as mine:
            for number in mine:
                assert store.read(number * KIB, (number + 1) * KIB) == DATA[number * KIB :][:KIB]
                done.append(number)
        return done

    with ThreadPoolExecutor(4) as pool:
        found = [number for future in [pool.submit(work) for _ in range(4)] for number in future.result()]
    assert sorted(found) == list(range(64))


def test_the_threads_of_requests_end_for_a_fork_and_come_again():
    requests.rest()  # those of earlier tests
    before = threading.active_count()
    assert requests.pool().submit(lambda: 1).result() == 1
    assert threading.active_count() > before
    with requests.connections_of(16):
        assert threading.active_count() == before
        assert requests.pool()._max_workers == 4
    assert threading.active_count() == before
    assert requests.pool()._max_workers == requests.CONNECTIONS
    other = threading.Thread(target=(stop := threading.Event()).wait)
    other.start()
    kept = requests.pool()
    kept.submit(lambda: 1).result()
    requests.rest()  # it may need them
    assert requests.pool() is kept
    stop.set()
    other.join()
    requests.rest()
    assert threading.active_count() == before
    assert module._of_thread.__dict__.get("ahead") is None
