"""What a value of a parameter is. A separate module: all that read keys need it, few of them compute."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

WEIGHT: Final = "weight"  # a parameter's value in the running model's element type
MASTER: Final = "master"  # its copy in fp32 that the optimizer updates

Role: TypeAlias = Literal["weight", "master", "exp_avg", "exp_avg_sq", "other"]
"""What a tensor is, in reports."""
