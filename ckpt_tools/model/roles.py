"""What a value of a parameter is. It stands apart since all that read keys ask for it, and few of them compute."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

WEIGHT: Final = "weight"  # a parameter's value in the running model's element type
MASTER: Final = "master"  # its copy in fp32 that the optimizer updates

Role: TypeAlias = Literal["weight", "master", "exp_avg", "exp_avg_sq", "other"]
"""What a tensor is, in reports."""
