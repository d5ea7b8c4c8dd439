"""Counters that are no 64-bit numbers are none, and end no command."""

from __future__ import annotations

import pytest

from ckpt_tools.verify.checkpoint.counters import _contradictions, _is_count, _of_optimizer


@pytest.mark.parametrize("value", [10**400, -(10**400), 1 << 63, float("inf"), float("nan"), "2", None])
def test_no_count(value: object) -> None:
    assert not _is_count(value)


def test_samples_that_no_float_holds() -> None:
    args = {"consumed_train_samples": 10**400, "global_batch_size": 1}
    assert list(_contradictions(5, None, _of_optimizer({"step": 4}, has_groups=True), args)) == []
