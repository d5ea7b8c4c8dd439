"""Replays of whole models: sharded over real processes, and Megatron-Core's behind its real adapter."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tools.errors import UsageError
from ckpt_tools.model.box import Box
from ckpt_tools.model.choices import LayoutName
from ckpt_tools.sharding.memory import rank_memory
from ckpt_tools.sharding.parameters import Parameter, Part
from ckpt_tools.sharding.placement import Placement
from ckpt_tools.sharding.topology import Topology
from ckpt_tools.sharding.units import LiveTensor, describe
from tests.sharding.replay import (
    DTYPES,
    Comparison,
    Json,
    bare,
    items_of,
    names_of,
    numel,
    parameters_of,
    refuses,
    replay_v1_grouped,
    replay_v1_index,
    replay_v1_memory,
    replay_v2_layout,
)


def replay_whole_model(record: Json, c: Comparison) -> None:
    """One model sharded for real over processes."""
    given, kind = record["input"], record["kind"]
    listed, topo = given["model"]["params"], given["topo"]
    ep, etp, tp = topo.get("ep", 1), topo.get("etp", topo.get("tp", 1)), topo.get("tp", 1)
    strategy, outer_strategy = (
        given.get("strategy") or "optim_grads_params",
        given.get("outer_strategy") or "no_shard",
    )
    if kind == "v2":
        strategy, outer_strategy = _v2_strategies(given["placements"])
    topology = Topology(topo["shard"], topo.get("outer", 1), tp, 1, ep, etp, 1, strategy, outer_strategy)
    order = _traversal(listed, given["model"]["units"])
    params = parameters_of(listed, order, given["model"]["units"], ep, innermost=kind == "v2")
    layouts: dict[str, LayoutName] = {"v1": "mfsdp-v1", "v2": "mfsdp-v2", "fsdp2": "fsdp2"}

    def make() -> Placement:
        return Placement(params, topology, layouts[kind], given.get("bucket_size"))

    if "error" in record:
        _replay_error(record, make, c)
        return
    if any(not p.shape for p in params):  # v1 builds them as if they were 1-D, and cannot save them
        c.equal("a scalar is refused", refuses(make), True)
        params = [replace(p, shape=p.shape or (1,)) for p in params]
        for group in record["groups"]:
            group["local_shapes"] = [shape or [1] for shape in group["local_shapes"]]
    placement = make()
    if "groups" in record:
        _replay_groups(record, placement, c)
    for expected in record["ranks"]:
        _replay_rank(record, expected, placement, c)
    if "dcp_writers" in record:
        _replay_writers(record, placement, c)


def _replay_error(record: Json, make: Callable[[], Placement], c: Comparison) -> None:
    """Layouts that upstream cannot build or save are refused; its other failures do not concern the layout."""
    text = " ".join(record["error"])
    if "scalar" in record["id"] or "0D" in text or "ZeroDivision" in text:
        c.equal("refused", refuses(make), True)
    elif "is invalid for input of size" in text:
        try:
            make()
            c.equal("refused", False, True)
        except UsageError as error:
            c.equal("refused", "cuts inside rows" in str(error), True)
            for rank, line in enumerate(record["error"]):
                if "is invalid" in line:  # a rank that crashed is one of those named
                    c.equal("rank named", f"rank {rank}" in str(error), True)
    elif "v1_zero_dp" in record["id"]:  # a tensor without rows is never saved
        saved = {name for rank in range(record["world"]) for name, _ in make().boxes(rank)}
        c.equal("no box", "u.p1" in saved, False)
    else:  # DTensor inputs and the optimizer's state dict: the placement itself is sound
        c.equal("placed", _tiles(make()), True)


def _tiles(placement: Placement) -> bool:
    written: Counter[str] = Counter()
    for rank in range(placement.topology.world_size):
        for name, box in placement.written(rank):
            written[name] += box.volume
    return all(written[p.name] == p.numel for p in placement.parameters)


def _v2_strategies(placements: Json) -> tuple[str, str]:
    optimizer, gradient, parameter = (placements[k] for k in ("optimizer", "gradient", "parameter"))
    if optimizer == "R":
        return "no_shard", "no_shard"
    if len(optimizer) == 1:
        sharded = {"P": "optim", "S": "optim_grads"}[gradient]
        return sharded if parameter == "R" else "optim_grads_params", "no_shard"
    return "optim_grads_params", "no_shard" if optimizer == "RS" else "optim"


def _traversal(listed: Json, units: Sequence[str]) -> list[str]:
    """named_parameters() of the recorded module tree: own parameters first, then children as first named."""
    tree: dict[str, Any] = {}
    for p in listed:
        node = tree
        *path, leaf = p["name"].split(".")
        for step in path:
            node = node.setdefault(step, {})
        node[leaf] = p["name"]

    def walk(node: dict[str, Any]) -> Iterator[str]:
        yield from (v for v in node.values() if isinstance(v, str))
        for v in node.values():
            if not isinstance(v, str):
                yield from walk(v)

    return list(walk(tree))


def _replay_groups(record: Json, placement: Placement, c: Comparison) -> None:
    buckets = placement.buckets(0)
    c.equal("number of groups", len(buckets), len(record["groups"]))
    for bucket, expected in zip(buckets, record["groups"], strict=True):
        group, packing = bucket.group, bucket.packing
        c.equal("dtype", f"torch.{group.dtype}", expected["dtype"])
        c.equal("requires_grad", group.trainable, expected["requires_grad"])
        if record["kind"] == "v2":
            prefix = expected["module"] + "." if expected["module"] else ""
            c.equal("names", names_of(placement, bucket), [prefix + names[0] for names in expected["fqns"]])
            c.equal("shapes", packing.shapes, expected["shapes"])
            c.equal("offsets", packing.offsets, expected["offsets"])
            c.equal("size", bucket.size, expected["size"])
            continue
        names = names_of(placement, bucket)
        found = {"params": names, "cell": packing.cell, "unit": group.unit, "expert": group.is_expert}
        c.all_equal("group", found | {"local_shapes": packing.shapes}, expected)
        if "size" in expected:  # absent: no buffer at all (frozen, no_shard)
            c.equal("size", bucket.size, expected["size"])
            c.equal("parts", bucket.parts, expected["parts"])
            c.equal("items", items_of(packing), expected["items"])


def _replay_rank(record: Json, expected: Json, placement: Placement, c: Comparison) -> None:
    rank, topology = expected["rank"], placement.topology
    at = topology.coordinates(rank)
    has_outer = "outer" in record["input"]["topo"]
    coord = [at.outer] * has_outer + [at.shard] + [at.tp] * (record["kind"] != "v2")
    c.equal("coord", coord, expected["coord"])
    boxes = {bare(p.name): box for p, box in placement.shards(rank)}
    c.equal("names", sorted(boxes), sorted(expected["box"]))
    for name, box in expected["box"].items():
        c.equal(f"rank {rank} {name}", boxes[name], box)
    held = [(bare(name), box) for name, box in placement.boxes(rank)]
    full = [(name, Box(tuple(a), tuple(b))) for name, (a, b) in expected["box"].items() if 0 not in b]
    c.equal(f"rank {rank} non-empty", sorted(held), sorted(full))
    if "part" in expected:
        for bucket, part in zip(placement.buckets(rank), expected["part"], strict=True):
            if part is not None:
                c.equal("part", placement.part(bucket, rank), part)
    _replay_bytes(record, expected, placement, c)


def _sums(listed: Json) -> Counter[str]:
    total: Counter[str] = Counter()
    for sizes in listed:
        for name, size in sizes.items():
            total[name] += size
    return total


def _replay_bytes(record: Json, expected: Json, placement: Placement, c: Comparison) -> None:
    kind, given, rank = record["kind"], record["input"], expected["rank"]
    mp = given.get("mp") or {"main_params": "fp32"}
    m = rank_memory(placement, rank, DTYPES[mp["main_params"]], DTYPES[mp.get("main_grads")])
    listed = expected["bytes"]
    if kind == "fsdp2":
        c.equal("bytes", m.weights, sum(map(sum, listed)))
        return
    total = _sums(listed)
    if kind == "v1":
        helper = "hfsdp_helper_wbuf" in total
        weights = total["hfsdp_helper_wbuf" if helper else "model_weight_buffer"]
        if given["strategy"] == "no_shard":
            weights = sum(
                p.numel * (2 if p.dtype == "bfloat16" else 4) // p.tp_size(placement.topology)
                for p, _ in placement.shards(rank)
            )
        c.equal("weights", m.weights, weights)
        c.equal("main", m.main_weights, total["main_weight_buffer"])
        c.equal("grads", m.gradients, total["hfsdp_helper_gbuf" if helper else "main_grad_buffer"])
        if "adam_bytes" in expected:
            c.equal("adam", m.adam, expected["adam_bytes"])
        return
    of_groups = zip(listed, record["groups"], strict=True)
    same = sum(sizes["model_weight"] for sizes, group in of_groups if group["dtype"] == "torch.float32")
    c.equal("weights", m.weights, total["model_weight"])
    c.equal("main", m.main_weights, total["main_weight"] - same)
    # gradients cut over both axes are no strategy of Megatron's names
    copies = placement.topology.dp_outer if given["placements"]["gradient"] == "SS" else 1
    c.equal("grads", m.gradients, total["main_grad"] * copies)


def _replay_writers(record: Json, placement: Placement, c: Comparison) -> None:
    """torch's save planner: a box offered by several ranks goes to the one with the fewest planned bytes.

    What it adds to a rank is the size of the whole tensor, whatever the box holds.
    """
    topology = placement.topology
    numels = {bare(p.name): p.numel for p in placement.parameters}
    prefix = "model.module." if record["kind"] == "v1" else "model."
    offered: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank in range(record["world"]):
        for name, box in placement.boxes(rank):
            offered.setdefault((bare(name), box.start), []).append(rank)
    planned = [0] * record["world"]
    found = []
    for (name, start), ranks in offered.items():
        rank = min(ranks, key=lambda r: (planned[r], r))
        planned[rank] += numels[name]  # all of one dtype
        found.append([prefix + name, list(start), f"__{rank}_0.distcp"])
    c.equal("writers", sorted(found), sorted(record["dcp_writers"]))
    collides = topology.ep > 1  # equal names of other ranks' experts, which ours are not
    scalar = any(not p["shape"] for p in record["input"]["model"]["params"])
    c.equal("reload", _tiles(placement) and not collides and not scalar, record["dcp_reload_ok"])


def replay_mcore(record: Json, c: Comparison) -> None:
    """A real Megatron-Core model behind the real adapter and its checkpoint key handlers."""
    case = record["case"]
    tp, ep = case["tp"], case.get("ep", 1)
    etp, outer = case.get("etp", 1 if ep > 1 else tp), case.get("outer", 1)
    shard = len(record["ranks"]) // (outer * tp)
    topology = Topology(
        shard, outer, tp, 1, ep, etp, 1, case["strategy"], case.get("outer_strategy", "no_shard")
    )
    params = _mcore_parameters(record, topology)
    placement = Placement(params, topology, bucket_size=case.get("bucket_size"))
    for expected in record["ranks"]:
        rank = expected["rank"]
        at, expert = topology.coordinates(rank), topology.coordinates(rank, expert=True)
        c.equal("dense", [at.tp], [expected["tp_rank"]])
        c.equal(
            "expert",
            [expert.ep, expert.shard, expert.tp],
            [expected[k] for k in ("ep_rank", "edp_rank", "etp_rank")],
        )
        c.equal("dp_rank", at.outer * shard + at.shard, expected["dp_rank"])
        local = {p.name: _local_name(p, topology) for p in params}
        shards = {local[p.name]: (p, box) for p, box in placement.shards(rank)}
        shapes = {local[placement.parameters[i].name]: s for i, s in enumerate(placement.local_shapes)}
        c.equal(
            "named_parameters",
            [[n, shapes[n], f"torch.{p.dtype}", p.trainable] for n, (p, _) in shards.items()],
            [e[:4] for e in expected["named_parameters"]],
        )
        _replay_mcore_groups(expected, placement, local, c)
        for name, e in expected["params"].items():
            p, box = shards[name]
            c.equal(f"rank {rank} {name}", box, e["chunk"])
            c.equal("global_shape", p.shape, e["global_shape"])
            axes = placement.mesh(p)
            c.equal("tp_mode", _TP_MODES[p.tp_dim], e["tp_mode"] or "replicated")
            found = {
                "mesh": [_MCORE_AXES[axis.name] for axis in axes],
                "mesh_shape": [axis.size for axis in axes],
                "placements": ["Replicate()" if a.dim is None else f"Shard(dim={a.dim})" for a in axes],
                "partition_dim": p.tp_dim,
                "local_shape": box.size,
            }
            c.all_equal(name, found, e)
            row = numel(p.local_shape(topology)[1:])
            shift = 0 if p.tp_dim != 0 else (expert if p.is_expert else at).tp * p.local_shape(topology)[0]
            start = (box.start[0] - shift) * row
            if box.is_empty:  # an empty slice says nothing about where
                c.equal("empty slice", e["slice"][0], e["slice"][1])
            else:
                c.equal("slice", [start, start + box.size[0] * row], e["slice"])
        _replay_mcore_checkpoint(expected, placement, c)
        held = placement.boxes(rank)
        saved = [
            [n.removeprefix("module."), e["chunk"]] for n, e in expected["checkpoint"].items() if e["items"]
        ]
        c.equal(f"rank {rank} order and boxes", [[n, b] for n, b in held], saved)


def _replay_mcore_groups(expected: Json, placement: Placement, local: dict[str, str], c: Comparison) -> None:
    rank = expected["rank"]
    topology = placement.topology
    buckets = placement.buckets(rank)
    c.equal("number of groups", len(buckets), len(expected["groups"]))
    total = _sums([e["bytes"] for e in expected["groups"]])
    for bucket, e in zip(buckets, expected["groups"], strict=True):
        group, packing = bucket.group, bucket.packing
        c.equal("params", [local[placement.parameters[i].name] for i in group.members], e["params"])
        c.equal(
            "class",
            [f"torch.{group.dtype}", group.is_expert, group.trainable, group.unit],
            [e["dtype"], e["is_expert"], e["requires_grad"], e["fsdp_unit_id"]],
        )
        c.equal("cell", packing.cell, e["chunk_size_factor"])
        c.equal("items", items_of(packing), e["items"])
        c.equal("bucket_size", bucket.size, e["bucket_size"])
        start, stop = bucket.part_range(placement.part(bucket, rank))
        c.equal("shard", [start, stop - start], e["shard"])
        c.equal("part", [placement.part(bucket, rank), bucket.parts], [e["dp_rank"], e["dp_world"]])
    m = rank_memory(placement, rank)
    helper = topology.shards_outer
    c.equal("weights", m.weights, total["hfsdp_helper_wbuf" if helper else "model_weight_buffer"])
    c.equal("main", m.main_weights, total["main_weight_buffer"])
    c.equal("grads", m.gradients, total["hfsdp_helper_gbuf" if helper else "main_grad_buffer"])


def _replay_mcore_checkpoint(expected: Json, placement: Placement, c: Comparison) -> None:
    shapes = {}
    for p, _ in placement.shards(expected["rank"]):
        for name, rows in p.parts or (Part(p.name, p.shape[0]),):
            shapes[f"module.{name}"] = [rows, *p.shape[1:]]
    c.equal("names", sorted(shapes), sorted(expected["checkpoint"]))
    for name, e in expected["checkpoint"].items():
        c.equal(f"shape of {name}", shapes[name], e["shape"])
        c.equal(f"items of {name}", e["items"], int(0 not in e["chunk"][1]))


def _local_name(p: Parameter, topology: Topology) -> str:
    """The name on the expert-parallel rank that owns it: experts are counted from 0 on each."""
    if p.expert is None:
        return p.name
    here = p.expert.total // topology.ep
    return p.name.replace(f"local_experts.{p.expert.number}.", f"local_experts.{p.expert.number % here}.")


def _mcore_parameters(record: Json, topology: Topology) -> list[Parameter]:
    """What `describe` makes of the global names and shapes of all ranks, given in alphabetical order."""
    tensors = {}
    for rank in record["ranks"]:
        here = topology.coordinates(rank["rank"], expert=True).ep
        for name, _shape, dtype, trainable, *_ in rank["named_parameters"]:
            global_name = _global_name(name, here, record["case"].get("experts", 0) // topology.ep)
            full = tuple(rank["params"][name]["global_shape"])
            gated = f"module.{global_name}_w" in rank["checkpoint"]
            tensors[global_name] = LiveTensor(
                global_name, full, dtype.removeprefix("torch."), gated, trainable=trainable
            )
    return describe([tensors[name] for name in sorted(tensors)], topology)


def _global_name(name: str, ep_rank: int, local_experts: int) -> str:
    return re.sub(r"(?<=local_experts\.)\d+", lambda m: str(int(m[0]) + ep_rank * local_experts), name)


_MCORE_AXES = {"dp_outer": "outer_fsdp_dp", "dp_shard": "dp_cp", "tp": "tp"}
_TP_MODES = {None: "replicated", 0: "column", 1: "row"}


REPLAYS: dict[str, Callable[[Json, Comparison], None]] = {
    "v1_index": replay_v1_index,
    "v1_grouped": replay_v1_grouped,
    "v1_memory": replay_v1_memory,
    "v2_layout": replay_v2_layout,
    "e2e": replay_whole_model,
    "mcore": replay_mcore,
}
