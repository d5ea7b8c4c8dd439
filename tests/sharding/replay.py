"""Replays recorded outputs of the real packages against the sharding core and counts what was compared."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod as numel
from typing import Any
from unittest import mock

from ckpt_tools.errors import UsageError
from ckpt_tools.sharding.memory import rank_memory
from ckpt_tools.sharding.parameters import Expert, Parameter
from ckpt_tools.sharding.placement import Placement, group_v1, pack_v1, pack_v2, v1_cell
from ckpt_tools.sharding.topology import Topology
from ckpt_tools.sharding.units import number_units

Json = Any
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", None: None}


class Comparison:
    """Counts equal values; the first differences are kept for the report."""

    def __init__(self) -> None:
        self.values = 0
        self.differences: list[str] = []

    def equal(self, what: str, found: object, expected: object) -> None:
        found, expected = _plain(found), _plain(expected)
        self.values += _count(expected)
        if found != expected and len(self.differences) < 10:
            self.differences.append(f"{what}: found {str(found)[:300]}, expected {str(expected)[:300]}")

    def all_equal(self, what: str, found: Mapping[str, object], expected: Json) -> None:
        for name, value in found.items():
            self.equal(f"{what} {name}", value, expected[name])


def _plain(value: object) -> object:
    """Tuples as lists, so that values compare with JSON."""
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _count(value: object) -> int:
    return sum(map(_count, value)) if isinstance(value, list) else 1


def _pieces(packing: Any, size: int, parts: int, with_local: bool) -> Iterator[list[int]]:
    length = size // parts
    for part in range(parts):
        for item, a, b in packing.pieces(part * length, (part + 1) * length):
            row = [part, item, a, b]
            at = packing.offsets[item] - part * length
            yield [*row, a + at, b + at] if with_local else row


def _cut_items(packing: Any, size: int, parts: int) -> list[int]:
    """Items of which some piece begins or ends inside a row, from the pieces themselves."""
    cut = set()
    for _, item, a, b in _pieces(packing, size, parts, False):
        row = max(1, numel(packing.shapes[item][1:]))
        if a % row or b % row:
            cut.add(item)
    return sorted(cut)


def items_of(packing: Any) -> list[list[int]]:
    """Offset and number of elements of every tensor of a buffer."""
    return [[o, numel(s)] for o, s in zip(packing.offsets, packing.shapes, strict=True)]


def cut_rows(packing: Any, parts: int) -> list[int]:
    return sorted({item for item, _, _ in packing.cuts_inside_rows(parts)})


def _shapes(listed: Json) -> list[tuple[int, ...]]:
    return [tuple(shape) for shape in listed]


def replay_v1_index(record: Json, c: Comparison) -> None:
    shapes, cell = _shapes(record["input"]["shapes"]), record["input"]["chunk_size_factor"]
    packing = pack_v1(shapes, cell)
    for out in record["outputs"]:
        at, dp = f"dp {out['dp']} {out['strategy']}", out["dp"]
        whole = out["strategy"] == "no_shard"
        size = packing.end if whole else packing.size(dp)
        c.equal(f"{at} items", items_of(packing), out["items"])
        c.equal(f"{at} placement_order", packing.placed, out["placement_order"])
        c.equal(f"{at} bucket_size", size, out["bucket_size"])
        c.equal(f"{at} shard_size", size // dp, out["shard_size"])
        c.equal(f"{at} formula", "rank*shard_size", out["shard_starts_formula"])
        last = (dp - 1) * (size // dp) if whole else 0
        c.equal(f"{at} last rank's index", last, out["local_data_index_rank_last"])
        found = sorted(_pieces(packing, size, dp, not whole))
        if whole:  # a buffer that is not distributed is indexed as the whole bucket
            found = [[*p, p[2] + packing.offsets[p[1]], p[3] + packing.offsets[p[1]]] for p in found]
        c.equal(f"{at} pieces", found, sorted(out["pieces"]))
        c.equal(f"{at} cut", _cut_items(packing, size, dp), out["items_cut_inside_a_row"])
        if not whole and cell == v1_cell(sorted(shapes, key=lambda s: -numel(s[1:]))):
            c.equal(f"{at} cut rows", cut_rows(packing, dp), out["items_cut_inside_a_row"])


def parameters_of(
    listed: Json, order: Sequence[str], units: Sequence[str], ep: int = 1, innermost: bool = False
) -> list[Parameter]:
    """Parameters of a recorded model, in the order of `order`.

    The standalone package has the same expert names on every expert-parallel rank; here each rank's get a name
    and a number of their own, so that they can stand in one list.
    """
    by_name = {p["name"]: dict(p.items()) for p in listed}
    numbers = number_units(order, units, innermost)
    found = []
    for name, unit in zip(order, numbers, strict=True):
        p = by_name[name]
        expert = ".experts." in name
        for e in range(ep if expert else 1):
            found.append(
                Parameter(
                    f"{name}@{e}" if expert and ep > 1 else name,
                    tuple(p["shape"]),
                    DTYPES[p["dtype"]] or "",
                    tp_dim=p["tp"],
                    is_expert=expert,
                    expert=Expert(e, ep) if expert else None,
                    unit=unit,
                    trainable=p["requires_grad"],
                    shared_embedding=p["shared_embedding"],
                )
            )
    return found


def bare(name: str) -> str:
    return name.split("@", maxsplit=1)[0]


def names_of(placement: Placement, bucket: Any) -> list[str]:
    return [bare(placement.parameters[i].name) for i in bucket.group.members]


def replay_v1_grouped(record: Json, c: Comparison) -> None:
    given = record["input"]
    params = parameters_of(given["params"], given["named_parameters_order"], given["units_traversal_order"])
    topology = Topology(dp_shard=given["tp"] * given["etp"], tp=given["tp"], etp=given["etp"])
    shapes = [p.local_shape(topology) for p in params]
    named = {p["name"] for p in given["params"]}
    seconds = {name for names in given["tied"] for name in names[1:]}
    c.equal("tied", sorted(named - seconds), sorted(given["named_parameters_order"]))
    for out in record["outputs"]:
        whole = out["strategy"] == "no_shard"
        groups = group_v1(params, shapes, range(len(params)), given["suggested_bucket_size"], not whole)
        packings = []
        c.equal("number of groups", len(groups), len(out["groups"]))
        for g, expected in zip(groups, out["groups"], strict=True):
            items = [shapes[i] for i in g.members]
            packings.append(pack_v1(items, v1_cell(items)))
            found = {
                "params": [params[i].name for i in g.members],
                "local_shapes": items,
                "dtype": f"torch.{g.dtype}",
                "is_expert": g.is_expert,
                "requires_grad": g.trainable,
                "fsdp_unit_id": g.unit,
                "chunk_size_factor": packings[-1].cell,
            }
            c.all_equal("group", found, expected)
        for number, expected in out["bucket_to_bucket_group"].items():
            g = groups[int(number)]
            together = [i for i, o in enumerate(groups) if (o.unit, o.is_expert) == (g.unit, g.is_expert)]
            c.equal("coalesced", [int(number)] if g.unit is None else together, expected)
        for per_dp in out["per_dp"]:
            dp = per_dp["dp"]
            for packing, expected in zip(packings, per_dp["groups"], strict=True):
                size = packing.end if whole else packing.size(dp)
                numels = [numel(s) for s in packing.shapes]
                pieces = sorted(_pieces(packing, size, dp, False))
                c.equal("items", items_of(packing), expected["items"])
                c.equal("bucket_size", size, expected["bucket_size"])
                c.equal("shard_size", size // dp, expected["shard_size"])
                c.equal("padding", size - sum(numels), expected["padding"])
                c.equal("pieces", pieces, sorted(expected["pieces"]))
                c.equal("cut", _cut_items(packing, size, dp), expected["items_cut_inside_a_row"])
                if not whole:
                    c.equal("cut rows", cut_rows(packing, dp), expected["items_cut_inside_a_row"])
                empty = sorted(set(range(dp)) - {p[0] for p in pieces})
                listed = isinstance(expected["ranks_with_no_data"], list)
                c.equal("ranks_with_no_data", empty if listed else len(empty), expected["ranks_with_no_data"])


def replay_v1_memory(record: Json, c: Comparison) -> None:
    given = record["input"]
    params = parameters_of(given["params"], given["named_parameters_order"], given["units_traversal_order"])
    for out in record["outputs"]:
        topology = Topology(dp_shard=out["dp"], strategy=out["strategy"])
        expected = out["persistent_bytes"]
        # Bytes of a layout that crashes later were recorded, too.
        with mock.patch.object(Placement, "_refuse_cut_rows"):
            placement = Placement(params, topology, bucket_size=given["suggested_bucket_size"])
        m = rank_memory(placement, 0, DTYPES[out["main_params_dtype"]], DTYPES[out["main_grads_dtype"]])
        c.equal("weights", m.weights, expected["model_weight"] + expected["raw_param_views"])
        c.equal("main", m.main_weights, expected["main_weight"])
        c.equal("grads", m.gradients, expected["main_grad"])


def replay_v2_layout(record: Json, c: Comparison) -> None:
    if record["id"] == "refusals":
        for out in record["outputs"]:
            params = [Parameter(f"p{i}", tuple(s), "bfloat16") for i, s in enumerate(out["shapes"])]
            if out["error"]:
                c.equal("refused", refuses(partial(Placement, params, Topology(), "mfsdp-v2")), True)
            else:
                packing = pack_v2(_shapes(out["shapes"]))
                c.equal("offsets", packing.offsets, out["offsets"])
                c.equal("size", packing.size(2), out["size"])
        return
    shapes = _shapes(record["input"]["shapes"])
    packing = pack_v2(shapes)
    for out in record["outputs"]:
        size = packing.size(out["dp"])
        c.equal("offsets", packing.offsets, out["offsets"])
        c.equal("size", size, out["size"])
        c.equal("padding", size - sum(map(numel, shapes)), out["padding"])
        c.equal("pieces", sorted(_pieces(packing, size, out["dp"], True)), sorted(out["pieces"]))
    params = [Parameter(f"p{i}", s, "bfloat16") for i, s in enumerate(shapes)]
    for out in record["two_axis"]:
        outer, inner = out["mesh"]
        whole = out["placements"] == "RR"
        topology = Topology(
            inner,
            outer,
            strategy="no_shard" if whole else "optim_grads_params",
            outer_strategy="optim" if out["placements"] == "SS" else "no_shard",
        )
        placement = Placement(params, topology, "mfsdp-v2")
        for o, d, offset, length in out["local_ranges"]:
            (bucket,) = placement.buckets(o * inner + d)
            start, stop = bucket.part_range(placement.part(bucket, o * inner + d))
            if whole:
                start, stop = 0, bucket.size
            c.equal("size", bucket.size, out["size"])
            c.equal("range", [start, stop - start], [offset, length])


def refuses(make: Callable[[], object]) -> bool:
    try:
        make()
    except UsageError:
        return True
    return False
