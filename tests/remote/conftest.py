"""What the tests of stores share: an environment that points at a module's own server."""

from collections.abc import Iterator

import pytest

from tests.remote.s3 import FaultProxy, fault_proxy, s3_environment


@pytest.fixture
def proxy(server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before the module's `server` that a user's environment points at."""
    with fault_proxy(server) as found:
        for name, value in s3_environment(found.url).items():
            monkeypatch.setenv(name, value)
        yield found
