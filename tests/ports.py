"""Ports for servers that another process starts a moment later."""

import random
import socket

# Below every range the kernel takes the ports of outgoing connections from (net.ipv4.ip_local_port_range is
# 32768 to 60999): a port that the kernel chose may be some connection's before its server listens.
BELOW_EPHEMERAL = range(12_000, 32_000)
_CHOICE = (
    random.SystemRandom()
)  # not the seeded generator: two test runs at once must not draw the same ports


def free_port() -> int:
    """A port of loopback that nobody listens at and no connection is given."""
    while True:
        port = _CHOICE.choice(BELOW_EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
