"""Parts of one file on their way at once: in order in the file, few at a time, and nothing left of one that fails."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from ckpt_tools.formats.multipart import IN_FLIGHT, Multipart


class Answers:
    """A store that answers when it is asked to, and what it was asked."""

    def __init__(self, *, at_once: bool = False, fails: int | None = None) -> None:
        self.at_once, self.fails = at_once, fails
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.open: list[Callable[[], None]] = []
        self.parts: dict[int, bytes] = {}

    def begin(self, method: str, **given: Any) -> Future[Any]:
        self.asked.append((method, given))
        future: Future[Any] = Future()
        if method != "upload_part":
            future.set_result({"UploadId": "u"})
            return future
        number, body = given["PartNumber"], given["Body"]
        assert type(body) is bytes  # which can be sent twice

        def answer() -> None:
            if number == self.fails:
                future.set_exception(OSError("the disk of the store is full"))
            elif not future.cancelled():
                self.parts[number] = body
                future.set_result({"ETag": f"tag {number}"})

        if self.at_once:
            answer()
        else:
            self.open.append(answer)
        return future

    def named(self, method: str) -> list[dict[str, Any]]:
        return [given for name, given in self.asked if name == method]


def test_parts_are_of_one_size_and_in_order() -> None:
    store, content = Answers(at_once=True), bytes(range(250))
    file = Multipart(store.begin, "box", "run/file", 16)
    for start, stop in ((0, 5), (5, 5), (5, 90), (90, 250)):
        file.write(memoryview(content)[start:stop])
    file.close()
    assert [len(store.parts[number]) for number in sorted(store.parts)] == [16] * 15 + [10]
    assert b"".join(store.parts[number] for number in sorted(store.parts)) == content
    (done,) = store.named("complete_multipart_upload")
    assert done["MultipartUpload"]["Parts"] == [
        {"PartNumber": number, "ETag": f"tag {number}"} for number in range(1, 17)
    ]
    assert all(given["Bucket"] == "box" and given["Key"] == "run/file" for _, given in store.asked)


def test_several_parts_are_on_their_way_but_not_more() -> None:
    store = Answers()
    file = Multipart(store.begin, "box", "file", 4)
    file.write(bytes(4 * IN_FLIGHT))
    assert len(store.open) == IN_FLIGHT  # none of them answered
    store.open[0]()
    file.write(bytes(4))  # waits for the first alone
    assert len(store.open) == IN_FLIGHT + 1


@pytest.mark.parametrize("length", [0, 3])
def test_a_small_file_is_one_request(length: int) -> None:
    store = Answers()
    file = Multipart(store.begin, "box", "file", 4)
    file.write(b"abc"[:length])
    file.close()
    ((method, given),) = store.asked
    assert (method, bytes(given["Body"])) == ("put_object", b"abc"[:length])


def test_a_part_that_fails_is_told_and_nothing_is_completed() -> None:
    store = Answers(at_once=True, fails=2)
    file = Multipart(store.begin, "box", "file", 4)
    file.write(bytes(14))
    with pytest.raises(OSError, match="the disk of the store is full"):
        file.close()
    file.discard()
    assert store.named("abort_multipart_upload") == [{"Bucket": "box", "Key": "file", "UploadId": "u"}]
    assert not store.named("complete_multipart_upload")


def test_what_is_given_up_is_called_off() -> None:
    store = Answers()
    file = Multipart(store.begin, "box", "file", 4)
    file.write(bytes(12))
    file.discard()
    for answer in store.open:
        answer()
    assert not store.parts
    assert len(store.named("abort_multipart_upload")) == 1
