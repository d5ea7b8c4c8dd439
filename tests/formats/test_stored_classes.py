"""What may stand in a `.metadata` besides names and numbers, value by value."""

import pytest

from ckpt_tools.formats.pickle.machine import Name, Object
from ckpt_tools.formats.pickle.stored_classes import check_memory_format

MODULE = "torch.distributed.checkpoint.metadata"


def memory_format(*args: object, kind: str = "_MEM_FORMAT_ENCODING") -> Object:
    return Object(Name(MODULE, kind), args)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_torchs_three_memory_formats(number):
    check_memory_format(memory_format(number))


@pytest.mark.parametrize(
    "value",
    [
        *(memory_format(*args) for args in ((3,), (-1,), (True,), (False,), (1.0,), (), (0, 1), ("0",))),
        memory_format(0, kind="TensorProperties"),
        0,
        None,
    ],
)
def test_nothing_else_is_a_memory_format(value):
    with pytest.raises(TypeError, match="where a memory format belongs"):
        check_memory_format(value)


def test_a_memory_format_has_no_state():
    value = memory_format(0)
    value.state = {}
    with pytest.raises(TypeError, match="where a memory format belongs"):
        check_memory_format(value)
