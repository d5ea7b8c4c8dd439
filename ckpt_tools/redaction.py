"""Credentials are taken out of every text that is shown."""

from __future__ import annotations

import re
from collections.abc import Iterable

STARS = "***"
QUERY_SECRETS = (
    "x-(?:amz|goog)-(?:signature|credential|security-token)|awsaccesskeyid|signature|sig|se|sp|access_?token|token|"
    "api_?key|key|secret|password|passwd|pwd|auth"
)
_IN_TEXT = (
    (r"(\w://)[^/\s'\"<>]*@(?=\S)", rf"\1{STARS}@"),
    (rf"(?i)([?&;](?:{QUERY_SECRETS})=)[^&\s'\"<>]+", rf"\1{STARS}"),
)
_SHORTEST = 5  # characters; a shorter word would star innocent text
kept: dict[str, tuple[str, str]] = {}  # location as shown -> (login with its @, query with its ?)


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
    for login, query in kept.values():
        parts = [login[:-1], login[:-1].partition(":")[2], query[1:]]
        parts += [part.partition("=")[2] for part in re.split("[&;]", query)]
        words |= {word for part in parts for word in (part, unquote(part)) if len(word) >= _SHORTEST}
    return sorted(words, key=len, reverse=True)
