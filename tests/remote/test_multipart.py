"""Parts of one file on their way at once: in order in the file, few at a time, and nothing left of one that fails."""

import threading
from typing import Any

import pytest

from ckpt_tools.formats.storage.drivers import IN_FLIGHT, Multipart


class Answers:
    """A store that answers about parts when it is asked to, and what it was asked."""

    def __init__(self, *, at_once: bool = False, fails: int | None = None) -> None:
        self.at_once, self.fails = at_once, fails
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.parts: dict[int, bytes] = {}
        self.may_answer = threading.Semaphore(0)
        self.came = threading.Semaphore(0)

    def ask(self, method: str, **given: Any) -> dict[str, Any]:
        self.asked.append((method, given))
        if method != "upload_part":
            return {"UploadId": "u"}
        number, body = given["PartNumber"], given["Body"]
        assert type(body) is bytes  # which can be sent twice
        self.came.release()
        if not self.at_once:
            assert self.may_answer.acquire(timeout=60)
        if number == self.fails:
            raise OSError("the disk of the store is full")
        self.parts[number] = body
        return {"ETag": f"tag {number}"}

    def named(self, method: str) -> list[dict[str, Any]]:
        return [given for name, given in self.asked if name == method]


def test_parts_are_of_one_size_and_in_order():
    store, content = Answers(at_once=True), bytes(range(250))
    file = Multipart(store.ask, 16)
    for start, stop in ((0, 5), (5, 5), (5, 90), (90, 250)):
        file.write(memoryview(content)[start:stop])
    file.close()
    assert [len(store.parts[number]) for number in sorted(store.parts)] == [16] * 15 + [10]
    assert b"".join(store.parts[number] for number in sorted(store.parts)) == content
    (done,) = store.named("complete_multipart_upload")
    assert done["MultipartUpload"]["Parts"] == [
        {"PartNumber": number, "ETag": f"tag {number}"} for number in range(1, 17)
    ]


def test_several_parts_are_on_their_way_but_not_more():
    store = Answers()
    file = Multipart(store.ask, 4)
    file.write(bytes(4 * IN_FLIGHT))  # waits for nobody
    assert all(store.came.acquire(timeout=60) for _ in range(IN_FLIGHT))
    writer = threading.Thread(target=file.write, args=(bytes(4),))
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()
    assert len(store.named("upload_part")) == IN_FLIGHT
    store.may_answer.release(IN_FLIGHT + 1)
    writer.join(60)
    file.close()
    assert len(store.parts) == IN_FLIGHT + 1


@pytest.mark.parametrize("length", [0, 3])
def test_a_small_file_is_one_request(length):
    store, before = Answers(), threading.active_count()
    file = Multipart(store.ask, 4)
    file.write(b"abc"[:length])
    file.close()
    ((method, given),) = store.asked
    assert (method, bytes(given["Body"])) == ("put_object", b"abc"[:length])
    assert threading.active_count() == before


def test_a_part_that_fails_is_told_and_nothing_is_completed():
    store = Answers(at_once=True, fails=2)
    file = Multipart(store.ask, 4)
    file.write(bytes(14))
    with pytest.raises(OSError, match="the disk of the store is full"):
        file.close()
    file.discard()
    assert store.named("abort_multipart_upload") == [{"UploadId": "u"}]
    assert not store.named("complete_multipart_upload")


@pytest.mark.parametrize("is_given_up", [False, True])
def test_no_thread_outlives_its_file(is_given_up):
    """A process can fork then, and what is given up is not on its way any more."""
    store, before = Answers(), threading.active_count()
    file = Multipart(store.ask, 4)
    file.write(bytes(12))
    assert threading.active_count() > before
    store.may_answer.release(3)
    file.discard() if is_given_up else file.close()
    assert threading.active_count() == before
    assert len(store.named("abort_multipart_upload")) == is_given_up
