"""What the tests of this folder share."""

from tests.megatron.dcp.sharded_cases import sharded as sharded  # noqa: PLC0414  a fixture
