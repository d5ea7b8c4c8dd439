"""What users of s3:// have set for fsspec (`FSSPEC_S3_*`, `~/.config/fsspec`), as botocore's client takes it.

What botocore knows on its own (`AWS_*`, `~/.aws`) is not repeated here; where both say something, fsspec's counts.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.errors import UsageError
from ckpt_tools.formats.drivers import reading_configuration

_CREDENTIALS = {
    "key": "aws_access_key_id",
    "username": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "password": "aws_secret_access_key",
    "token": "aws_session_token",
}
_TEXTS = (*_CREDENTIALS, "endpoint_url", "profile")
_SWITCHES = ("anon", "use_ssl", "requester_pays")
_TABLES = ("client_kwargs", "config_kwargs", "s3_additional_kwargs")


@dataclass(frozen=True, slots=True)
class Settings:
    """How clients are made, and what their requests say beside what they are for."""

    profile: str | None = None
    client_options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    is_anonymous: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def client(self, session: Any, wait: float, connections: int) -> Any:
        """A new client of `session` whose sockets wait for `wait` seconds and which keeps so many connections.

        Raises:
            UsageError: botocore does not take what fsspec's settings say.
        """
        from botocore import UNSIGNED
        from botocore.config import Config

        signed = {"signature_version": UNSIGNED} if self.is_anonymous else {}
        config = {
            "connect_timeout": wait,  # also what a part may take to send on a connection of its own
            "read_timeout": wait,
            "max_pool_connections": connections,
            # `Store.call` repeats, with its own pauses: both would multiply.
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            **signed,
            **self.config,
        }
        try:
            return session.create_client("s3", config=Config(**config), **self.client_options)
        except (
            AttributeError,
            TypeError,
        ) as error:  # an option that it does not know, a value of another kind
            raise UsageError(
                f"botocore does not take fsspec's settings for s3 (client_kwargs, config_kwargs): {error}."
            ) from error


def read_settings() -> Settings:
    """The settings of this process's environment.

    Raises:
        UsageError: one of them is of the wrong kind.
    """
    found = _configured()
    unread = sorted(found.keys() - {*_TEXTS, *_SWITCHES, *_TABLES})
    if unread:
        warnings.warn(
            f"fsspec's configuration sets {', '.join(unread)} for s3, which is not read (FSSPEC_S3_*, "
            f"~/.config/fsspec); {', '.join((*_TEXTS, *_SWITCHES, *_TABLES))} are.",
            stacklevel=2,
        )
    texts = {name: str(found[name]) for name in _TEXTS if found.get(name) is not None}
    on = {name: _switch(name, found[name]) for name in _SWITCHES if name in found}
    tables = {name: _table(name, found.get(name)) for name in _TABLES}
    options = dict(tables["client_kwargs"])
    options |= {_CREDENTIALS[name]: text for name, text in texts.items() if name in _CREDENTIALS}
    options |= {"endpoint_url": texts["endpoint_url"]} if "endpoint_url" in texts else {}
    if "use_ssl" in on:
        options.setdefault("use_ssl", on["use_ssl"])
    if on.get("anon"):
        options = {name: value for name, value in options.items() if name not in _CREDENTIALS.values()}
    payer = {"RequestPayer": "requester"} if on.get("requester_pays") else {}
    return Settings(
        profile=texts.get("profile"),
        client_options=options,
        config=tables["config_kwargs"],
        is_anonymous=on.get("anon", False),
        extra=payer | tables["s3_additional_kwargs"],
    )


def _configured() -> dict[str, Any]:
    """What fsspec has read for s3 and s3a; fsspec is only imported where there is something to read."""
    # Not by Path, which fails where a user has no home, or may not look into it.
    folder = os.environ.get("FSSPEC_CONFIG_DIR") or os.path.expanduser("~/.config/fsspec")  # noqa: PTH111
    is_set = any(name.upper().startswith("FSSPEC_S3") for name in os.environ)
    if not is_set and not os.path.isdir(folder):  # noqa: PTH112
        return {}
    found: dict[str, dict[str, Any]] = {}
    with reading_configuration():
        from fsspec.config import set_conf_env, set_conf_files

        with warnings.catch_warnings():  # what fsspec passes over it has told of when it was imported
            warnings.simplefilter("ignore")
            set_conf_files(folder, found)
            set_conf_env(found)
    return {**found.get("s3", {}), **found.get("s3a", {})}


def _switch(name: str, value: Any) -> bool:
    """A setting that is on or off; files and variables may hold it as a word."""
    word = str(value).lower()
    if word not in ("true", "1", "yes", "on", "false", "0", "no", "off"):
        raise UsageError(f"fsspec's setting {name} for s3 is {value!r}: write true or false.")
    return word in ("true", "1", "yes", "on")


def _table(name: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise UsageError(
            f'fsspec\'s setting {name} for s3 is {value!r}: write a JSON object, {{"NAME": VALUE}}.'
        )
    return dict(value or {})
