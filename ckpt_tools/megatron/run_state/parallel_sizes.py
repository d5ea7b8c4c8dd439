"""Which tensor-parallel sizes a model has: what must divide, beside the tensors that are cut.

Heads and groups do not show in a tensor's shape: `linear_qkv` of 4 heads has rows enough for 8 ranks, and a job of 8
stops before it loads anything (transformer_config.py `__post_init__`; of mixers, ssm/mamba_mixer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ckpt_tools.errors import UsageError, list_problems

Setting = Callable[[str], Any]
_DELTA_NET, _MIXER = "self_attention.A_log", "mixer.A_log"
_COUNTED = {  # by the tensor that a layer of the kind has: of what each rank gets as many
    _DELTA_NET: (("linear_num_key_heads", "key heads of a gated delta net"),
                 ("linear_num_value_heads", "value heads of a gated delta net")),
    _MIXER: (("mamba_num_heads", "heads of a Mamba mixer"), ("mamba_num_groups", "groups of a Mamba mixer")),
}  # fmt: skip


def tensor_parallel_problems(tp: int, setting: Setting, names: Iterable[str]) -> Iterator[str]:
    """Why a job of `tp` tensor-parallel ranks cannot be: by its settings, and the names of the model's weights."""
    heads, groups = count_of(setting("num_attention_heads")), count_of(setting("num_query_groups"))
    if setting("group_query_attention") is False:
        groups = heads
    if heads and heads % tp:
        yield f"{heads} attention heads are not a multiple of tensor parallel size {tp}"
    if groups and groups != heads and groups % tp and tp % groups:
        yield f"{groups} query groups are neither a multiple nor a divisor of tensor parallel size {tp}"
    kinds = {kind for name in names for kind in _COUNTED if name.endswith(kind)}
    for kind in sorted(kinds):
        for counted, what in _COUNTED[kind]:
            number = count_of(setting(counted))
            if number and number % tp:
                yield f"{number} {what} are not a multiple of tensor parallel size {tp}"


def refuse_tensor_parallel(tp: int, setting: Setting, names: Iterable[str]) -> None:
    """Raise UsageError if the model does not run on `tp` tensor-parallel ranks."""
    problems = list(tensor_parallel_problems(tp, setting, names))
    if problems:
        raise UsageError(
            f"no job of tensor parallel size {tp} can load this model:\n{list_problems(problems)}\nGive the size of "
            "one that can with --tp",
            problems,
        )


def count_of(value: object) -> int | None:
    """A setting that counts something; None where it is not a whole number above 0."""
    return value if type(value) is int and value > 0 else None
