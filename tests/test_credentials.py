"""Credentials in URLs reach the driver and nothing else."""

import json
import pickle
from collections.abc import Iterator

import pytest

from ckpt_tools import redaction
from ckpt_tools.cli.app import run
from ckpt_tools.credentials import hidden, revealed
from ckpt_tools.errors import CkptError, StorageError, UsageError
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.redaction import redacted

SECRET = "Tr0ub4dor"


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(redaction, "kept", {})
    yield


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (f"https://me:{SECRET}@host/run", "https://host/run"),
        (f"https://{SECRET}@host:8443/run/", "https://host:8443/run/"),
        (f"https://me:p@{SECRET}@host/run", "https://host/run"),
        (f"https://host/run?X-Amz-Signature={SECRET}&X-Amz-Credential=a", "https://host/run"),
        (f"https://me:{SECRET}@host/run?x=1", "https://host/run"),
        (f"sftp://me:{SECRET}@host/run", "sftp://host/run"),
        (f"http://me:{SECRET}@[::1]:80/run", "http://[::1]:80/run"),
    ],
)
def test_what_is_hidden_comes_back_for_the_driver(given, shown):
    password = f"p@{SECRET}" if "p@" in given else SECRET
    assert hidden(given) == shown
    assert hidden(shown) == shown
    place = revealed(shown)
    assert place == given.partition("?")[0]
    assert revealed(f"{shown.rstrip('/')}/iter_0000001").startswith(place.rstrip("/"))
    assert revealed(shown.rstrip("/").rpartition("/")[0]).startswith(given[:12])
    assert SECRET not in redacted(f"failed at {given} with {password!r}")


@pytest.mark.parametrize(
    "plain",
    ["/a/b@c", "a:b@c", "s3://bucket/a@b:c?d", "abfs://box@account.dfs.core.windows.net/x", "sftp://me@host/x",
     "memory://a::b", "s3://arn:aws:s3:us-west-2:1:accesspoint/p/x", "--flag=x", "iter_*", "hdfs://node:9000/x"],
)  # fmt: skip
def test_what_holds_no_secret_stays(plain):
    assert hidden(plain) == plain
    assert revealed(plain) == plain


@pytest.mark.parametrize(
    "wrong",
    [
        f"s3://key:{SECRET}@bucket/run",
        f"s3://key:{SECRET}/x@bucket/run",  # keys of AWS have slashes
        f"gs://key:{SECRET}@bucket/run",
        f"https://me:{SECRET}/x@host/run",
        f"ftp://me:{SECRET}/x@host/run",
        f"s3://bucket/run?X-Amz-Signature={SECRET}",
        f"s3://bucket/run?x=1&token={SECRET}",
    ],
)
@pytest.mark.parametrize(
    "command", ["inspect", "verify", "diff", "convert", "plan", "export-hf", "preflight"]
)
def test_what_no_driver_takes_is_refused_without_being_shown(wrong, command, capsys):
    for words in ([command, wrong], [command, "memory://nothing", wrong], [command, wrong, "more", "words"]):
        assert run(words) == 2
        shown = capsys.readouterr()
        assert SECRET not in shown.out + shown.err
    with pytest.raises(UsageError) as caught:
        open_files(hidden(wrong))
    assert SECRET not in str(caught.value)


def test_two_credentials_for_one_place():
    hidden("https://a:11111@host/x")
    with pytest.raises(UsageError, match="two different credentials"):
        hidden("https://a:22222@host/x")


@pytest.mark.parametrize(
    "text",
    [
        f"GET https://u:{SECRET}@host/x failed",
        f"url='http://host/x?a=1&X-Amz-Signature={SECRET}&b=2', status=403",
        f"https://host/x?sv=1&sig={SECRET}",
        f"https://host/?X-Goog-Signature={SECRET}",
        f"proxy socks5://:{SECRET}@proxy:1080",
    ],
)
def test_texts_of_others_and_every_error_of_ours(text):
    assert SECRET not in redacted(text)
    for error in (StorageError(text), UsageError(f"{text}: x"), pickle.loads(pickle.dumps(CkptError(text)))):
        assert SECRET not in str(error)
        assert SECRET not in repr(json.dumps([str(error)]))


def test_innocent_texts_stay():
    for text in (
        "a?key",
        "s3://b/x: reading bytes 0..3",
        "mail me@host",
        "what? se=3",
        "https://host/x?page=3",
    ):
        assert redacted(text) == text


def test_a_crash_shows_none(monkeypatch, capsys):
    from ckpt_tools.formats.storage import object_store as store

    def crash(*_args: object) -> None:
        raise RuntimeError(f"https://u:{SECRET}@host")

    monkeypatch.setattr(store, "_driver", crash)
    assert run(["inspect", "s3://bucket/x"]) == 70
    assert SECRET not in capsys.readouterr().err
