"""`plan`: a conversion's plan and price, as a table, as JSON, and as a picture."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli import options as v
from ckpt_tools.cli import render
from ckpt_tools.cli import table as t
from ckpt_tools.cli.job_sizes import JOB_SIZES, layout_of
from ckpt_tools.cli.options import option
from ckpt_tools.cli.table import fill, with_options
from ckpt_tools.human import human_bytes
from ckpt_tools.plain_data import plain

if TYPE_CHECKING:
    from ckpt_tools.commands.convert.plan import PlanReport
    from ckpt_tools.sharding.memory import Memory

_STDOUT = Path("-")
_LISTED_RANKS = 32
_OWN = {
    "rank": option(int, "--rank", help="Plan this target rank's file alone."),
    "tensor": option(list[str], "--tensor", read=v.globs, help="List target tensors that match this glob."),
    "svg": option(Path, "--svg", callback=v.in_a_folder, help="Draw who owns what, as one SVG file."),
    "html": option(Path, "--html", callback=v.in_a_folder, help="Draw it as one HTML page."),
}


def plan(
    checkpoint: Annotated[
        str, typer.Argument(help="A torch_dist or fsdp_dtensor checkpoint: a root or an iteration.")
    ],
    **given: Any,
) -> None:
    """Show what a conversion to fsdp_dtensor would do: boxes, bytes and memory of every rank. Moves no byte."""
    from ckpt_tools.commands.convert.plan import plan_checkpoint
    from ckpt_tools.commands.job.conversion import ConvertOptions
    from ckpt_tools.commands.job.placements import Layout

    place = layout_of(given) or Layout()
    chosen = fill(ConvertOptions, given, layout=None)
    found = plan_checkpoint(checkpoint, place, chosen, given["rank"], given["tensor"])
    _draw(found, given["svg"], given["html"])
    if _STDOUT in (given["svg"], given["html"]):
        return  # nothing but the picture
    if given["as_json"]:
        names = {"nbytes": "bytes"}
        lists: dict[str, Iterator[Any]] = {
            "ranks": (plain(cost, names) | {"memory": _memory(cost.memory)} for cost in found.costs),
            "tensors": (plain(tensor, names) for tensor in found.tensors()),
            "items": found.item_rows(),
        }
        sys.stdout.writelines(render.json_lines(found.summary(), lists))
    else:
        _print(found)


def _draw(found: PlanReport, svg: Path | None, html: Path | None) -> None:
    if svg is None and html is None:
        return
    from ckpt_tools.commands.convert import picture

    name = Path(found.source).resolve().name
    memory = {cost.rank: cost.memory for cost in found.costs if cost.memory is not None}
    padding = found.padding if len(memory) == found.layout.ranks else None
    shown = picture.picture(found.core, f"{name}: {_layout(found)}", padding)
    if svg is not None:
        render.write_text(svg, picture.svg(shown), found.source)
    if html is not None:
        render.write_text(html, picture.html(shown, memory), found.source)


def _layout(found: PlanReport) -> str:
    topology = found.layout.topology
    if topology is None:
        return f"{found.layout.name}, {found.layout.ranks} ranks"
    sizes = {name: getattr(topology, name) for name in ("dp_outer", "dp_shard", "cp", "tp", "ep", "etp")}
    if sizes["etp"] == sizes["tp"]:
        del sizes["etp"]
    axes = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "dp_shard")
    return f"{found.layout.name}, {axes} = {found.layout.ranks} ranks, {topology.strategy}"


def _memory(memory: Memory | None) -> dict[str, int] | None:
    return None if memory is None else plain(memory) | {"persistent": memory.persistent, "peak": memory.peak}


def _print(found: PlanReport) -> None:
    from ckpt_tools.cli.reports import changes, iteration_text
    from ckpt_tools.commands.job.target_job import describe

    facts = found.summary()
    strategies = ", ".join(f"{name} {human_bytes(n)}" for name, n in facts["bytes_by_strategy"].items())
    iteration = iteration_text(found.location.label)
    rows = [
        ("source", f"{facts['source']} ({facts['format']}{iteration})"),
        ("layout", _layout(found)),
        *describe(facts["job"]),
        ("holds", f"{facts['tensor_count']:,} tensors, {facts['object_count']:,} objects and scalars"),
        (
            "would write",
            f"{human_bytes(facts['bytes_to_write'])} in {len(found.plan.file_bytes)} files",
        ),
        ("moved by", strategies or "nothing"),
        ("imbalance", f"{facts['imbalance']:.3f} (largest rank over the mean)"),
    ]
    if found.layout.name != "even":
        rows.append(("padding", f"{human_bytes(facts['padding_bytes'])} of buffers in training"))
    render.print_table(("plan", ""), rows)
    _print_ranks(found)
    _print_tensors(found)
    for line in changes(found.target, found.job.record.format or "fsdp_dtensor", with_losses=True):
        render.tell(render.escape(f"  {line}"))


def _print_ranks(found: PlanReport) -> None:
    """A row a rank; of many the extremes."""
    costs, title = found.costs, ""
    if len(costs) > _LISTED_RANKS:
        by_size = sorted(costs, key=lambda cost: cost.nbytes)
        costs = sorted({*by_size[:4], *by_size[-4:]}, key=lambda cost: cost.nbytes)
        title = f"the smallest and largest of {len(found.costs):,} ranks (--json lists all, --rank one)"
    size = human_bytes
    columns = ["rank", "files", "items", "bytes"]
    rows: list[list[object]] = [
        [c.rank, " ... ".join(dict.fromkeys((*c.files[:1], *c.files[-1:]))), c.items, size(c.nbytes)]
        for c in costs
    ]
    if found.layout.name != "even":
        columns += ["weights", "main weights", "gradients", "Adam", "padding", "peak, no activations"]
        for row, cost in zip(rows, costs, strict=True):
            m = cost.memory
            assert m is not None  # every layout but even has one
            held = (m.weights, m.main_weights, m.gradients, m.adam, m.padding, m.peak)
            row += [size(n) for n in held]
    render.print_table(columns, rows, title)


def _print_tensors(found: PlanReport) -> None:
    if found.globs:
        render.print_table(
            ("item", "box", "bytes", "file", "offset", "strategies"),
            [
                (
                    item.key,
                    str(item.box),
                    item.nbytes,
                    item.file,
                    item.offset,
                    " ".join(dict.fromkeys(t.strategy for t in item.transfers)),
                )
                for item in found.items()
            ],
        )
        return
    if found.rank is None and len(found.plan.tensors) > 200:
        render.tell(f"{len(found.plan.tensors):,} tensors; --tensor GLOB or --rank R lists them, --json all")
        return
    render.print_table(
        ("tensor", "dtype", "shape", "role", "boxes", "bytes", "strategies"),
        [
            (t.key, t.dtype, list(t.shape), t.role, t.boxes, t.nbytes, " ".join(t.strategies))
            for t in found.tensors()
        ],
    )


_CONVERSION = {
    "dialect",
    "layer_spec",
    "experts",
    "swiglu",
    "weights_only",
    "ignore_keys",
    "as_json",
}
COMMANDS = {"plan": with_options(plan, t.READING | JOB_SIZES | t.FRESH_OPTIMIZER | _CONVERSION, _OWN)}
