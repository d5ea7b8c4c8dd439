"""Credentials in URLs: taken out where a location enters, given to the driver alone, and never shown.

`hidden` is what all other code passes on and prints. `revealed` is for the one place that opens a URL. `redacted` is
for texts that others wrote (a driver's error, an environment variable), in which a credential may stand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

STARS = "***"
# Patterns are compiled when a URL is met: every start of the program passes here.
_URL = r"(?s)(?P<scheme>[A-Za-z][\w+.-]*)://(?P<host>[^/?#]*)(?P<path>[^?]*)(?P<query>\?.*)?"
_QUERY_SECRETS = (
    "x-(?:amz|goog)-(?:signature|credential|security-token)|awsaccesskeyid|signature|sig|se|sp|access_?token|token|"
    "api_?key|key|secret|password|passwd|pwd|auth"
)
_IN_TEXT = (
    (r"(\w://)[^/\s'\"<>]*@(?=\S)", rf"\1{STARS}@"),
    (rf"(?i)([?&;](?:{_QUERY_SECRETS})=)[^&\s'\"<>]+", rf"\1{STARS}"),
)
_SHORTEST = 5  # characters; a shorter word would star innocent text
_NO_LOGIN = {"s3", "s3a", "gs", "gcs"}  # their drivers take none from a URL
_WEB = ("http", "https")
_HOST = r"(\[[0-9A-Fa-f:.]+\]|[^:]*)(:\d+)?"

_kept: dict[str, tuple[str, str]] = {}  # location as shown -> (login with its @, query with its ?)


def hidden(location: str) -> str:
    """`location` without login and query token, which `revealed` gives back; anything but a URL stays as it is.

    Raises:
        UsageError: credentials where the store's driver takes none, or two different ones for one place.
    """
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
        if _kept.setdefault(clean.rstrip("/"), secret) != secret:
            raise _usage(f"{clean} is given with two different credentials; one run takes one for each place")
    return clean


def revealed(location: str) -> str:
    """The location as its driver needs it, with its login.

    A folder inside one that was given with credentials has them too, and so has the folder around it.
    """
    place = location.rstrip("/")
    near = [kept for kept in _kept if _holds(kept, place) or _holds(place, kept)]
    if not near:
        return location
    login, _ = _kept[max(near, key=len)]
    return location.replace("://", f"://{login}", 1)


def redacted(text: str) -> str:
    """`text` with stars for every credential: those that were hidden, and whatever looks like one in a URL."""
    for secret in _secrets():
        text = text.replace(secret, STARS)
    if "://" not in text and "?" not in text:
        return text
    for pattern, stars in _IN_TEXT:
        text = re.sub(pattern, stars, text)
    return text


def _secrets() -> Iterable[str]:
    """Every hidden login, password, query and value in it, the longest first."""
    from urllib.parse import unquote  # for URLs with credentials only

    words: set[str] = set()
    for login, query in _kept.values():
        parts = [login[:-1], login[:-1].partition(":")[2], query[1:]]
        parts += [part.partition("=")[2] for part in re.split("[&;]", query)]
        words |= {word for part in parts for word in (part, unquote(part)) if len(word) >= _SHORTEST}
    return sorted(words, key=len, reverse=True)


def _holds(folder: str, place: str) -> bool:
    return place == folder or place.startswith(folder + "/")


def _refuse(scheme: str, has_login: bool, host: str, clean: str) -> None:
    """Refuse what the driver would misread, and print on its way."""
    odd = ":" in host and not host.startswith("arn:")
    if scheme in _NO_LOGIN and (has_login or odd):
        raise _usage(
            f"keys are not taken from {scheme}:// URLs. Give them in the environment (AWS_ACCESS_KEY_ID and "
            f"AWS_SECRET_ACCESS_KEY, or a profile), and the URL as {scheme}://BUCKET/FOLDER."
        )
    if scheme not in (*_NO_LOGIN, "memory", "file") and not _is_host(host):
        raise _usage(
            f"a {scheme}:// URL begins with HOST or HOST:PORT, this one does not; in a user name or a password "
            "the characters / : @ ? # are written as %2F %3A %40 %3F %23."
        )
    if scheme not in _WEB and re.search(rf"\?(.*&)?({_QUERY_SECRETS})=", clean, re.IGNORECASE):
        raise _usage(f"{redacted(clean)}: {scheme}:// URLs take no query.")


def _is_host(host: str) -> bool:
    """Whether it is HOST or HOST:PORT, of a port that there is and in brackets an address of IPv6."""
    from urllib.parse import urlsplit  # for URLs only

    try:
        urlsplit(f"//{host}").port  # noqa: B018  # proves it
    except ValueError:
        return False
    return re.fullmatch(_HOST, host) is not None


def _usage(text: str) -> Exception:
    from ckpt_tools.errors import UsageError  # whose texts are redacted here

    return UsageError(text)
