"""Bytes per rank by part: worked examples by hand (the recorded buffer sizes are replayed in test_vectors)."""

from itertools import product

import pytest

from ckpt_tools.errors import UsageError
from ckpt_tools.model.choices import LayoutName
from ckpt_tools.sharding.memory import Memory, rank_memory
from ckpt_tools.sharding.parameters import Parameter
from ckpt_tools.sharding.placement import Placement
from ckpt_tools.sharding.topology import STRATEGIES, Topology

# c 4, a 30, d 2, b 28 elements; one bucket of 72 = 64 + 8 padding for 3 ranks, whose parts hold 24, 24, 16.
PARAMETERS = [
    Parameter(name, shape, "bfloat16", unit=0)
    for name, shape in {"c": (4,), "a": (5, 6), "d": (2,), "b": (7, 4)}.items()
]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        # padding: 8 elements on rank 2 alone where parts are held, on each rank where the whole bucket is
        ("optim_grads_params", Memory(48, 96, 48, 8 * 16, 8 * 8, 144 + 144 + 24 * 4)),
        ("optim_grads", Memory(144, 96, 48, 8 * 16, 8 * 8, 144 + 24 * 4)),
        ("optim", Memory(144, 96, 144, 8 * 16, 8 * 8, 24 * 4)),
        ("no_shard", Memory(128, 64 * 4, 128, 8 * 64, 0, 64 * 4)),
    ],
)
def test_each_strategy_by_hand(strategy, expected):
    memory = rank_memory(Placement(PARAMETERS, Topology(3, strategy=strategy)), 2)
    assert memory == expected
    assert memory.persistent == sum((memory.weights, memory.main_weights, memory.gradients, memory.adam))
    assert memory.peak == memory.persistent + memory.communication


def test_two_units_and_the_root_are_gathered_at_a_time():
    parameters = [
        Parameter(name, (2 * size, 1), "bfloat16", unit=unit)
        for name, size, unit in [("root", 5, None), ("small", 1, 0), ("big", 9, 1), ("middle", 6, 2)]
    ]
    memory = rank_memory(Placement(parameters, Topology(2)), 0, grad_dtype="float32")
    gathered, reduced = 2 * (10 + 18 + 12), 4 * 18
    assert memory.communication == gathered + reduced


def test_types_of_main_weights_and_gradients():
    placement = Placement(PARAMETERS, Topology(3))
    assert rank_memory(placement, 0, main_dtype=None) == Memory(48, 0, 48, 2 * 2 * 24, 0, 144 + 144)
    fp32 = rank_memory(placement, 0, grad_dtype="float32")
    assert (fp32.gradients, fp32.communication) == (96, 144 + 288)  # no cast copy


def test_frozen_parameters_have_weights_only():
    frozen = [Parameter("w", (4, 2), "bfloat16", trainable=False, unit=0)]
    layouts: tuple[LayoutName, ...] = ("mfsdp-v1", "fsdp2")
    for layout in layouts:
        topology = Topology(2, strategy="optim_grads_params")
        memory = rank_memory(Placement(frozen, topology, layout), 0)
        assert (memory.weights, memory.main_weights, memory.gradients, memory.adam) == (8, 0, 0, 0)


def test_fsdp2_allocates_full_chunks_everywhere():
    placement = Placement([Parameter("w", (9, 2), "float32")], Topology(8), "fsdp2")
    assert [rank_memory(placement, rank) for rank in (0, 4, 7)] == [
        Memory(16, 0, 16, 32, 0),
        Memory(16, 0, 16, 16, 16),
        Memory(16, 0, 16, 0, 32),
    ]


def test_module_buffers_are_whole_everywhere_and_even_is_no_job():
    bias = [Parameter("bias", (4,), "float32", buffer=True)]
    for layout in ("mfsdp-v1", "fsdp2"):
        assert rank_memory(Placement(bias, Topology(2), layout), 1) == Memory(weights=16)
    with pytest.raises(UsageError, match="even says how files are cut"):
        rank_memory(Placement(bias, Topology(2), "even"), 0)


def test_sums_over_ranks_account_for_every_element():
    """Over the ranks of one replica: elements held + padding = buffers, whatever the strategy and the sizes."""
    parameters = [Parameter(f"p{i}", (n, 3), "bfloat16", unit=i % 2) for i, n in enumerate((5, 7, 11, 2))]
    elements = sum(p.numel for p in parameters)
    for dp, strategy in product((1, 2, 5), STRATEGIES):
        placement = Placement(parameters, Topology(dp, strategy=strategy))
        ranks = [rank_memory(placement, rank) for rank in range(dp)]
        copies = dp if strategy == "no_shard" else 1
        assert sum(m.adam for m in ranks) == 8 * elements * copies
        real = {
            "no_shard": (2 + 4 + 2) * dp,
            "optim": (2 + 2) * dp + 4,
            "optim_grads": 2 * dp + 4 + 2,
            "optim_grads_params": 2 + 4 + 2,
        }[strategy]
        assert sum(m.persistent - m.adam - m.padding for m in ranks) == elements * real
