"""What a store answers is told in plain words, with the exit code of what it means, and not asked for again."""

from collections.abc import Iterator

import pytest

from ckpt_tools.cli.app import run
from tests.conftest import RUN
from tests.remote.s3 import NONE, Objects, error_of, s3_server

pytest.importorskip("botocore", reason="botocore is not installed")
pytest.importorskip("moto.server", reason="moto's server is not installed")


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    with s3_server() as address:
        Objects("http://{}:{}".format(*address)).make("box")
        yield address


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = run(list(words))
    return code, capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "ls", "verify"])
def test_a_bucket_that_is_not_there_is_not_an_empty_folder(command, proxy, capsys):
    code, told = said(capsys, command, "s3://nowhere/run")
    assert code == 3 and "s3://nowhere/run: there is no such bucket (NoSuchBucket" in told
    code, told = said(capsys, command, "s3://box/run")
    assert code == 3 and "s3://box/run does not exist or is empty" in told


@pytest.mark.parametrize("words", [("convert", "--dry-run"), ("convert",), ("copy",)])
def test_an_output_needs_its_bucket(words, proxy, capsys):
    code, told = said(capsys, words[0], str(RUN), "s3://nowhere/out", *words[1:])
    assert code == 7 and "there is no such bucket" in told and "Make the bucket first" in told


@pytest.mark.parametrize(("url", "what"), [
    ("s3://", "names no place"), ("gs://", "names no place"), ("https://", "names no place"),
    ("memory://", "names no place"), ("s3:///run", "s3:///run names no bucket"),
    ("gs:///run", "names no bucket"), ("https://host/run", "on web servers"), ("s3a:///run", "names no bucket"),
    ("s3://Bad_bucket!/run", "'Bad_bucket!' is not a name that a bucket can have"),
])  # fmt: skip
@pytest.mark.parametrize("command", ["inspect", "ls"])
def test_an_address_that_names_nothing_is_a_matter_of_usage(command, url, what, proxy, capsys):
    code, told = said(capsys, command, url)
    assert code == 2 and what in told and told.count("\n") == 1 and "regex" not in told
    assert proxy.requests == []


REFUSALS = [
    (403, "AccessDenied", "the credentials do not allow it (AccessDenied: no)"),
    (403, "InvalidAccessKeyId", "the store does not know this access key (InvalidAccessKeyId: no)"),
    (403, "SignatureDoesNotMatch", "the secret key is not that of the access key"),
    (403, "RequestTimeTooSkewed", "the clock of this machine is wrong"),
    (400, "ExpiredToken", "the credentials have expired"),
    (400, "AuthorizationHeaderMalformed", "the bucket lies in another region: set AWS_DEFAULT_REGION"),
    (301, "PermanentRedirect", "the bucket lies in another region: set AWS_DEFAULT_REGION"),
    (400, "IllegalLocationConstraintException", "the bucket lies in another region"),
]


@pytest.mark.parametrize(("status", "code", "told"), REFUSALS)
def test_a_refusal_is_told_at_once(status, code, told, proxy, capsys):
    proxy.refusals["refused"] = (
        status,
        error_of(code),
        {"x-amz-bucket-region": "eu-west-1"} if status == 301 else {},
    )
    proxy.choose = lambda number, method, path: "refused"
    exit_code, shown = said(capsys, "inspect", "s3://box/run")
    assert exit_code == 7 and f"s3://box/run: listing: {told}" in shown and shown.count("\n") == 1
    assert len(proxy.requests) <= 3, "botocore may look for the bucket's region"


def test_a_refusal_of_writing_leaves_a_sentence_too(proxy, capsys):
    proxy.refusals["refused"] = 403, error_of("AccessDenied"), {}
    proxy.choose = lambda number, method, path: "refused" if method == "PUT" else NONE
    exit_code, shown = said(capsys, "copy", str(RUN), "s3://box/out")
    assert exit_code == 7 and "writing: the credentials do not allow it (AccessDenied: no)" in shown


def test_no_such_place_on_a_disk_is_still_one(tmp_path, capsys):
    assert said(capsys, "inspect", str(tmp_path / "none"))[0] == 3
