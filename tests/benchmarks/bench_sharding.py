"""Time and memory of placing DeepSeek-V3 (671 B parameters, 45,000 stored tensors). Run by hand:

python -m tests.benchmarks.bench_sharding [--ranks 2048]
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import TypeVar

from ckpt_tools.model.choices import LayoutName
from ckpt_tools.sharding.memory import rank_memory
from ckpt_tools.sharding.parameters import Parameter
from ckpt_tools.sharding.placement import Placement
from ckpt_tools.sharding.topology import Topology
from ckpt_tools.sharding.units import LiveTensor, describe

T = TypeVar("T")
HIDDEN, HEADS, Q_LORA, KV_LORA, ROPE, HEAD = 7168, 128, 1536, 512, 64, 128
DENSE_FFN, EXPERT_FFN, EXPERTS, DENSE_LAYERS, VOCAB = 18432, 2048, 256, 3, 129280


def deepseek_v3(layers: int = 61) -> list[LiveTensor]:
    """Live tensors of DeepSeek-V3 with one multi-token-prediction layer, from its public config.json."""
    tensors = [_t("embedding.word_embeddings.weight", VOCAB, HIDDEN)]
    for n in range(layers):
        tensors += _layer(f"decoder.layers.{n}", dense=n < DENSE_LAYERS)
    mtp = "mtp.layers.0"
    tensors += [_t(f"{mtp}.{norm}.weight", HIDDEN) for norm in ("enorm", "hnorm", "final_layernorm")]
    tensors += [
        _t(f"{mtp}.eh_proj.weight", HIDDEN, 2 * HIDDEN),
        *_layer(f"{mtp}.transformer_layer", dense=False),
    ]
    return [
        *tensors,
        _t("decoder.final_layernorm.weight", HIDDEN),
        _t("output_layer.weight", VOCAB, HIDDEN),
    ]


def _t(name: str, *shape: int, gated: bool = False) -> LiveTensor:
    return LiveTensor(name, shape, "bfloat16", gated)


def _layer(at: str, dense: bool) -> Iterator[LiveTensor]:
    yield _t(f"{at}.input_layernorm.weight", HIDDEN)
    yield _t(f"{at}.self_attention.linear_proj.weight", HIDDEN, HEADS * HEAD)
    yield _t(f"{at}.self_attention.linear_q_down_proj.weight", Q_LORA, HIDDEN)
    yield _t(f"{at}.self_attention.linear_q_up_proj.weight", HEADS * (HEAD + ROPE), Q_LORA)
    yield _t(f"{at}.self_attention.linear_kv_down_proj.weight", KV_LORA + ROPE, HIDDEN)
    yield _t(f"{at}.self_attention.linear_kv_up_proj.weight", HEADS * 2 * HEAD, KV_LORA)
    yield _t(f"{at}.self_attention.q_layernorm.weight", Q_LORA)
    yield _t(f"{at}.self_attention.kv_layernorm.weight", KV_LORA)
    yield _t(f"{at}.pre_mlp_layernorm.weight", HIDDEN)
    if dense:
        yield _t(f"{at}.mlp.linear_fc1.weight", 2 * DENSE_FFN, HIDDEN, gated=True)
        yield _t(f"{at}.mlp.linear_fc2.weight", HIDDEN, DENSE_FFN)
        return
    yield _t(f"{at}.mlp.router.weight", EXPERTS, HIDDEN)
    yield LiveTensor(f"{at}.mlp.router.expert_bias", (EXPERTS,), "float32", buffer=True)
    for e in range(EXPERTS):
        yield _t(f"{at}.mlp.experts.linear_fc1.weight{e}", 2 * EXPERT_FFN, HIDDEN, gated=True)
        yield _t(f"{at}.mlp.experts.linear_fc2.weight{e}", HIDDEN, EXPERT_FFN)
    yield _t(f"{at}.mlp.shared_experts.linear_fc1.weight", 2 * EXPERT_FFN, HIDDEN, gated=True)
    yield _t(f"{at}.mlp.shared_experts.linear_fc2.weight", HIDDEN, EXPERT_FFN)


def timed(what: str, work: Callable[[], T]) -> T:
    """What `work` returns, with the seconds it took printed."""
    start = time.perf_counter()
    result = work()
    print(f"  {what:<46} {time.perf_counter() - start:8.3f} s")
    return result


def run(tensors: list[LiveTensor], topology: Topology, layout: LayoutName) -> None:
    print(
        f"{layout}: {topology.world_size} ranks, ep {topology.ep}, tp {topology.tp}, {len(tensors)} live tensors"
    )
    down = {"*_down_proj.weight": None}
    parameters: list[Parameter] = timed("describe", lambda: describe(tensors, topology, tp_dims=down))
    middle = topology.world_size // 2
    timed(
        "Placement + one rank",
        lambda: list(Placement(parameters, topology, layout).boxes(middle)),
    )
    placement = Placement(parameters, topology, layout)
    boxes = timed(
        "all ranks, boxes to write",
        lambda: sum(1 for rank in range(topology.world_size) for _ in placement.written(rank)),
    )
    if layout != "even":
        gib = rank_memory(placement, 0).peak / 2**30
        print(f"  {boxes} boxes; rank 0 holds {gib:.2f} GiB at its peak")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2048)
    top = parser.parse_args().ranks
    tensors = deepseek_v3()
    ranks = 128
    while ranks <= top:
        run(tensors, Topology.of_world(ranks, ep=64), "mfsdp-v1")
        ranks *= 4
    for layout in ("mfsdp-v1", "mfsdp-v2", "fsdp2"):
        run(tensors, Topology.of_world(top, ep=64), layout)
    run(tensors, Topology.of_world(top, tp=2, ep=64, etp=1), "mfsdp-v1")
    run(tensors, Topology.of_world(top), "mfsdp-v1")
    for layers in (15, 30, 61):
        run(deepseek_v3(layers), Topology.of_world(256, ep=64), "mfsdp-v1")
    tracemalloc.start()
    topology = Topology.of_world(top, ep=64)
    placement = Placement(describe(tensors, topology), topology)
    for rank in range(0, top, 32):
        list(placement.boxes(rank))
    print(f"peak Python memory, 1 rank in 32: {tracemalloc.get_traced_memory()[1] / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
