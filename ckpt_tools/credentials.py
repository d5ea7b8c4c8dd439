"""Credentials in URLs: taken out where a location enters, given to the driver alone, and never shown.

`hidden` is what all other code passes on and prints. `revealed` is for the one place that opens a URL.
"""

from __future__ import annotations

import re

from ckpt_tools import redaction
from ckpt_tools.errors import UsageError

# Patterns are compiled when a URL is met: every start of the program passes here.
_URL = r"(?s)(?P<scheme>[A-Za-z][\w+.-]*)://(?P<host>[^/?#]*)(?P<path>[^?]*)(?P<query>\?.*)?"
_NO_LOGIN = {"s3", "s3a", "gs", "gcs"}  # their drivers take none from a URL
_WEB = ("http", "https")
_HOST = r"(\[[0-9A-Fa-f:.]+\]|[^:]*)(:\d+)?"


def hidden(location: str) -> str:
    """`location` without login and query token, which `revealed` gives back; anything but a URL is unchanged."""
    found = re.fullmatch(_URL, location) if "://" in location else None
    if found is None:
        return location
    scheme, query = found["scheme"].lower(), found["query"] or ""
    login, _, host = found["host"].rpartition("@")
    if scheme not in _WEB and ":" not in login:  # a user's or a container's name, and a key may hold a ?
        login, host = "", found["host"]
    query = query if scheme in _WEB else ""
    clean = f"{found['scheme']}://{host}{found['path']}" + (found["query"] or "" if not query else "")
    _refuse(scheme, bool(login), host, clean)
    if login or query:
        secret = (login + "@" if login else "", query)
        if redaction.kept.setdefault(clean.rstrip("/"), secret) != secret:
            raise UsageError(
                f"{clean} is given with two different credentials; one run takes one for each place"
            )
    return clean


def revealed(location: str) -> str:
    """The location as its driver needs it, with its login.

    A folder inside one that was given with credentials has them too, and so has the folder around it.
    """
    place = location.rstrip("/")
    near = [kept for kept in redaction.kept if _holds(kept, place) or _holds(place, kept)]
    if not near:
        return location
    login, _ = redaction.kept[max(near, key=len)]
    return location.replace("://", f"://{login}", 1)


def _holds(folder: str, place: str) -> bool:
    return place == folder or place.startswith(folder + "/")


def _refuse(scheme: str, has_login: bool, host: str, clean: str) -> None:
    """Refuse what the driver would misread, and print on its way."""
    odd = ":" in host and not host.startswith("arn:")
    if scheme in _NO_LOGIN and (has_login or odd):
        raise UsageError(
            f"keys are not taken from {scheme}:// URLs. Give them in the environment (AWS_ACCESS_KEY_ID and "
            f"AWS_SECRET_ACCESS_KEY, or a profile), and the URL as {scheme}://BUCKET/FOLDER."
        )
    if scheme not in (*_NO_LOGIN, "memory", "file") and not _is_host(host):
        raise UsageError(
            f"a {scheme}:// URL begins with HOST or HOST:PORT, this one does not; in a user name or a password "
            "the characters / : @ ? # are written as %2F %3A %40 %3F %23."
        )
    if scheme not in _WEB and re.search(rf"\?(.*&)?({redaction.QUERY_SECRETS})=", clean, re.IGNORECASE):
        raise UsageError(f"{redaction.redacted(clean)}: {scheme}:// URLs take no query.")


def _is_host(host: str) -> bool:
    """Whether it is HOST or HOST:PORT, of a port that there is and in brackets an address of IPv6."""
    from urllib.parse import urlsplit  # for URLs only

    try:
        urlsplit(f"//{host}").port  # noqa: B018  # proves it
    except ValueError:
        return False
    return re.fullmatch(_HOST, host) is not None
