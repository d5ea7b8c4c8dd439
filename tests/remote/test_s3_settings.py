"""fsspec's settings for S3 reach botocore's client; what is not read is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.errors import UsageError
from ckpt_tools.formats.s3 import S3Driver
from ckpt_tools.formats.s3_settings import Settings, read_settings

pytest.importorskip("botocore", reason="botocore is not installed")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """fsspec's configuration, empty."""
    monkeypatch.setenv("FSSPEC_CONFIG_DIR", str(tmp_path))
    return tmp_path


def _client(**environment: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return S3Driver("s3://box")._client(4)


def _credentials(client: Any) -> tuple[str | None, ...]:
    found = client._request_signer._credentials
    return (found.access_key, found.secret_key, found.token)


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    client = _client(
        FSSPEC_S3_KEY="123456",  # which fsspec reads as a number
        FSSPEC_S3_SECRET="hush",
        FSSPEC_S3_TOKEN="t",
        FSSPEC_S3_ENDPOINT_URL="http://store:9000",
        FSSPEC_S3_CLIENT_KWARGS='{"region_name": "eu-west-3", "endpoint_url": "http://other"}',
        FSSPEC_S3_CONFIG_KWARGS='{"read_timeout": 77, "s3": {"addressing_style": "path"}}',
        AWS_ENDPOINT_URL="http://not-this",
        AWS_ACCESS_KEY_ID="not-this",
    )
    assert _credentials(client) == ("123456", "hush", "t")
    assert client.meta.endpoint_url == "http://store:9000"
    assert client.meta.region_name == "eu-west-3"
    assert client.meta.config.read_timeout == 77
    assert client.meta.config.connect_timeout == 4
    assert client.meta.config.s3["addressing_style"] == "path"


def test_files_of_both_kinds(folder: Path) -> None:
    (folder / "a.ini").write_text(
        "[s3]\nanon = false\nusername = me\npassword = word\nuse_ssl = no\n[gs]\nx = 1\n"
    )
    (folder / "b.json").write_text(json.dumps({"s3a": {"requester_pays": True}}))
    assert read_settings() == Settings(
        client_options={"aws_access_key_id": "me", "aws_secret_access_key": "word", "use_ssl": False},
        extra={"RequestPayer": "requester"},
    )


def test_an_anonymous_client_has_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore import UNSIGNED

    client = _client(FSSPEC_S3='{"anon": true, "key": "k", "secret": "s"}')
    assert client.meta.config.signature_version is UNSIGNED


def test_additions_go_to_the_requests_that_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSSPEC_S3_S3_ADDITIONAL_KWARGS", '{"ServerSideEncryption": "aws:kms"}')
    monkeypatch.setenv("FSSPEC_S3_REQUESTER_PAYS", "1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    driver = S3Driver("s3://box")
    sent: list[tuple[str, dict[str, Any]]] = []

    def note(model: Any, params: dict[str, Any], **_: Any) -> Any:
        sent.append((model.name, {name.lower(): value for name, value in params["headers"].items()}))
        raise ConnectionError("sent")

    driver._client(4).meta.events.register("before-call.s3", note)
    for ask in (
        lambda: driver.put(4, "box/x", b""),
        lambda: driver.get(4, "box/x"),
        lambda: driver.remove(4, "box/x"),
    ):
        with pytest.raises(ConnectionError):
            ask()
    assert [(name, "x-amz-server-side-encryption" in headers) for name, headers in sent] == [
        ("PutObject", True),
        ("GetObject", False),
        ("DeleteObject", False),
    ]
    assert all(headers["x-amz-request-payer"] == "requester" for _, headers in sent)


def test_what_is_not_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSSPEC_S3_VERSION_AWARE", "true")
    monkeypatch.setenv("FSSPEC_S3_DEFAULT_BLOCK_SIZE", "5")
    with pytest.warns(UserWarning, match="sets default_block_size, version_aware for s3, which is not read"):
        read_settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [("FSSPEC_S3_ANON", "perhaps"), ("FSSPEC_S3_CLIENT_KWARGS", "region_name=x"), ("FSSPEC_S3_USE_SSL", "2")],
)
def test_what_makes_no_sense_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(
        UsageError, match=f"fsspec's setting {name.removeprefix('FSSPEC_S3_').lower()} for s3 is"
    ):
        read_settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CLIENT_KWARGS", {"no_such_option": 1}),
        ("CLIENT_KWARGS", {"service_name": "ec2"}),
        ("CLIENT_KWARGS", {"config": {}}),
        ("CLIENT_KWARGS", {"endpoint_url": 5}),
        ("CONFIG_KWARGS", {"no_such_option": 1}),
        ("CONFIG_KWARGS", {"s3": "path"}),
        ("CONFIG_KWARGS", {"retries": 3}),
    ],
)
def test_what_botocore_does_not_take_is_refused(name: str, value: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="does not take fsspec's settings for s3"):
        _client(**{f"FSSPEC_S3_{name}": json.dumps(value)})


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.json", '{"s3": [1]}'), ("a.json", "[1]"), ("a.json", "{"), ("a.ini", "anon = true")],
)
def test_a_configuration_that_cannot_be_read(name: str, text: str, folder: Path) -> None:
    """fsspec reads it when it is imported, so that a process of its own is asked."""
    (folder / name).write_text(text)
    for url in ("s3://box/run", "memory://run"):
        done = subprocess.run(
            [sys.executable, "-m", "ckpt_tools", "ls", url], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert done.stderr.startswith("error: fsspec cannot read its configuration")
        assert "Traceback" not in done.stderr


def test_a_user_without_a_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FSSPEC_CONFIG_DIR")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # whom /etc/passwd does not know
    assert read_settings() == Settings()


@pytest.mark.parametrize(
    ("path", "bucket", "key"),
    [
        ("box", "box", ""),
        ("box/a/b", "box", "a/b"),
        ("box//a", "box", "/a"),
        ("arn:aws:s3:us-west-2:1:accesspoint/point/a/b", "arn:aws:s3:us-west-2:1:accesspoint/point", "a/b"),
        ("arn:aws:s3:us-west-2:1:accesspoint:point/a", "arn:aws:s3:us-west-2:1:accesspoint:point", "a"),
        (
            "arn:aws:s3-outposts:us-west-2:1:outpost/op-1/accesspoint/point/a",
            "arn:aws:s3-outposts:us-west-2:1:outpost/op-1/accesspoint/point",
            "a",
        ),
    ],
)
def test_buckets_and_access_points(path: str, bucket: str, key: str) -> None:
    from ckpt_tools.formats.s3 import _object

    assert _object(path) == {"Bucket": bucket, "Key": key}


def test_what_fsspec_passes_over_is_told_of_once(folder: Path) -> None:
    """It reads its configuration when it is imported, and again for s3."""
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tools", "ls", "s3://box/run"],
        env=os.environ | {"FSSPEC_S3": "x", "AWS_ENDPOINT_URL": "http://127.0.0.1:1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7
    assert done.stderr.count("FSSPEC_S3") == 1 and "not being a dict" in done.stderr
