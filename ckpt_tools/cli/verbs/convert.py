"""From format to format: `convert`, also under the two names that NVIDIA's users know, `export-hf`, `import-hf`.

And what shows or makes a part of it: `plan`, `build-param-group-map`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from ckpt_tools.cli import options as v
from ckpt_tools.cli import render
from ckpt_tools.cli import table as t
from ckpt_tools.cli.options import MAX_RANKS, flag, option
from ckpt_tools.cli.table import TABLE, Given, fill, with_options
from ckpt_tools.cli.writing import carry_out
from ckpt_tools.errors import UsageError
from ckpt_tools.human import human_bytes
from ckpt_tools.model.choices import Format, MegatronFormat, Quantization, TowerName
from ckpt_tools.plain_data import plain

if TYPE_CHECKING:
    from ckpt_tools.commands.convert.plan import PlanReport
    from ckpt_tools.commands.job.conversion import Progress
    from ckpt_tools.commands.job.placements import Layout
    from ckpt_tools.commands.job.report import ConversionReport
    from ckpt_tools.model.choices import CheckpointKind, LayoutName
    from ckpt_tools.sharding.memory import Memory

InputDir = Annotated[str, typer.Argument(help="A run, or one of its iterations.")]


# Mean nothing without a size.
_AXES: Final = ("dp_outer", "cp", "ep", "etp", "pp", "strategy", "outer_strategy")
JOB_SIZES = frozenset({"layout", "world_size", "gpus", "dp_shard", "tp", "units", *_AXES})
# What has a meaning for one direction only; a flag without effect is refused.
_ANY = t.RUNNING | t.READING | {"ignore_keys", "oom_traceback"}
MEANING: dict[Format, frozenset[str]] = {
    "fsdp_dtensor": _ANY | t.FSDP_TARGET | JOB_SIZES | {"check_masters", "hard_link"},
    "torch_dist": _ANY | t.TORCH_DIST_TARGET | {"hard_link"},
    "dcp": _ANY | t.DCP_TARGET | JOB_SIZES | {"check_masters", "hard_link"},
    "hf": _ANY | {"dtype", "tp", "vocab_size", "hf_config", "max_shard_bytes", "check_masters"},
}
_ALWAYS = {"input_dir", "output_dir", "to"}
AS_JSON = flag("--json", panel=t.RUN, help="Print the report as JSON.")
OWN = {
    "iteration": t.ITERATIONS,
    "as_json": AS_JSON,
}
_TO = {
    "to": option(
        Format, "--to", default="fsdp_dtensor",
        help="Format of the output: fsdp_dtensor for Megatron-FSDP, torch_dist for 3D parallelism, dcp for any "
             "PyTorch program, hf for transformers.",
    )
}  # fmt: skip


_MAP = {
    "output": option(
        Path, "-o", "--output", callback=v.in_a_folder, help="File to write. Default: stdout."
    ),
    "explain": flag("--explain", help="Say on stderr which rule placed each parameter."),
}  # fmt: skip


def convert(
    ctx: typer.Context,
    input_dir: InputDir,
    output_dir: t.OutputDir,
    *,
    to: Format,
    **given: Any,
) -> None:
    """Convert a checkpoint to another format, or for a job of another size.

    Two paths are enough: the rest is read from the checkpoint, and an option that contradicts it is an error. Run it
    alone, or under torchrun or srun.
    """
    _refuse_meaningless(ctx, to)
    given["keep_plain"] = not is_given(ctx, "to")
    if not is_given(ctx, "ep") and to == "torch_dist":
        given["ep"] = None  # as the arguments say, not one rank
    convert_to(to, input_dir, output_dir, given)


def convert_to(to: Format, source: str, output: str, given: dict[str, Any]) -> None:
    """Convert one iteration or all, and print the report. `export-hf` is `convert --to hf`."""
    from ckpt_tools.commands.job.iterations import iteration_folder
    from ckpt_tools.commands.job.report import SCHEMA_VERSION
    from ckpt_tools.formats.storage.files import path_in

    function, options = _library(to, given)
    # A Hugging Face model has no root: each iteration gets a folder.
    in_folders = to == "hf" and given["iteration"] == "all"

    def run(options: Any, progress: Progress) -> ConversionReport:
        place = path_in(output, iteration_folder(options.iteration)) if in_folders else output
        report: ConversionReport = function(source, place, options, progress, given["dry_run"])
        return report

    kinds: tuple[CheckpointKind, ...] = ("safetensors",) if to == "hf" else (to,)
    if given.get("keep_plain"):
        kinds = (*kinds, "dcp")  # a plain state dict stays one
    carry_out(
        source,
        output,
        given,
        options,
        run,
        kinds=kinds,
        schema_version=SCHEMA_VERSION,
    )


def _library(to: Format, given: Given) -> tuple[Any, Any]:
    """The library's function that converts to a format, and its options."""
    if to == "hf":
        from ckpt_tools.commands.huggingface.export_hf import export_hf
        from ckpt_tools.commands.huggingface.export_source import ExportOptions

        return export_hf, fill(ExportOptions, given)
    if to == "torch_dist":
        from ckpt_tools.commands.convert.to_torch_dist import ToTorchDistOptions, convert_to_torch_dist
        from ckpt_tools.megatron.torch_dist.write import TorchDistOptions

        extra = given["extra_state"]
        return convert_to_torch_dist, fill(
            ToTorchDistOptions,
            given,
            target=fill(TorchDistOptions, given, extra_state=extra != "none"),
            extra_state_template=None if extra in ("derive", "none") else extra,
        )
    from ckpt_tools.commands.job.conversion import ConvertOptions

    options = fill(ConvertOptions, given, layout=layout_of(given))
    if to == "dcp":
        from ckpt_tools.commands.convert.to_dtensors import convert_to_dcp

        return convert_to_dcp, options
    from ckpt_tools.commands.convert.to_dtensors import convert_to_fsdp_dtensor

    return convert_to_fsdp_dtensor, options


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option was typed."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse_meaningless(ctx: typer.Context, to: Format) -> None:
    """Refuse options that would do nothing, and name the `--to` that they fit."""
    from ckpt_tools.errors import UsageError

    given = {p.name or "": p.opts[0] for p in ctx.command.params if is_given(ctx, p.name or "")}
    given = {name: spelled for name, spelled in given.items() if name not in _ALWAYS}
    useless = [name for name in given if name not in MEANING[to]]
    if not useless:
        return
    why = ""
    fitting = [other for other, names in MEANING.items() if given.keys() <= names]
    if to == "torch_dist" and not JOB_SIZES.isdisjoint(useless):
        why = ", which loads at any TP, PP and EP, on any number of GPUs: leave it out"
        if others := [spelled for name, spelled in given.items() if name in JOB_SIZES - {*useless}]:
            why += f", and {', '.join(others)} unless a message asks for it"
    elif fitting and "to" in {p.name for p in ctx.command.params}:
        why = f"; it has one with {' or '.join(f'--to {other}' for other in fitting)}"
    raise UsageError(
        f"{', '.join(given[name] for name in useless)}: no meaning for a conversion to {to}{why}"
    )


def _long_form(to: Format, source: MegatronFormat) -> Callable[..., None]:
    """`convert` with its `--to` fixed and only the options it uses, under its long name."""

    def command(ctx: typer.Context, input_dir: InputDir, output_dir: t.OutputDir, **given: Any) -> None:
        _expect(source, input_dir, given["iteration"], to)
        convert(ctx, input_dir, output_dir, to=to, **given)

    command.__doc__ = f"Convert a {source} checkpoint to {to}: `convert --to {to}`."
    return with_options(command, MEANING[to] - {"hard_link"}, OWN)  # another format has other files


def _expect(kind: MegatronFormat, path: str, iteration: int | Literal["all"] | None, to: Format) -> None:
    """Refuse a source of another kind than the command's name says."""
    from ckpt_tools.errors import UnsupportedCheckpointError
    from ckpt_tools.formats.locate.detect import locate

    found = locate(path, None if iteration == "all" else iteration, of_run=True).kind
    if found != kind:
        raise UnsupportedCheckpointError(
            f"{path} is a checkpoint of kind {found}; this command takes {kind}. `convert --to {to}` takes any"
        )


def build_param_group_map(
    source: Annotated[
        str, typer.Argument(help="A map dump, or a torch_dist checkpoint to derive the map from.")
    ],
    **given: Any,
) -> None:
    """Write a param_to_param_group_map.json: from a training job's dump, or derived from a checkpoint alone."""
    from ckpt_tools.cli.render import escape, json_text, tell, write_text
    from ckpt_tools.commands.convert.to_dtensors import build_group_map
    from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions

    found = build_group_map(source, fill(TargetOptions, given), given["iteration"])
    write_text(given["output"] or Path("-"), json_text(dict(found.groups), 2) + "\n", source)
    if given["explain"]:
        for name, rule in found.rules.items():
            tell(f"{escape(name)}: group {found.groups[name]} ({rule})", sys.stderr)


def layout_of(given: Given) -> Layout | None:
    """The layout that the placement options ask for; None when they ask for nothing."""
    from ckpt_tools.commands.job.placements import Layout

    _refuse_mistyped(given)
    layout, gpus, world_size = _name(given), given["gpus"], given["world_size"]
    if gpus is None and given["dp_shard"] is None and layout in (None, "even"):
        axes = [
            f"--{name.replace('_', '-')} {given[name]}"
            for name in _AXES
            if given[name] != TABLE[name].default
        ]
        if axes:
            raise UsageError(
                f"{', '.join(axes)}: such options describe a training job, which needs its size too: give --gpus or "
                "--dp-shard"
            )
        return None if world_size is None else Layout(world=_positive(world_size, "--world-size"))
    if gpus is not None and world_size not in (None, gpus):
        raise UsageError(
            f"--gpus {gpus} contradicts --world-size {world_size}: both are the ranks of the job"
        )
    return _of_job(given, world_size if gpus is None else gpus)


def _name(given: Given) -> LayoutName | None:
    """Whose placement is asked for: one that has units where these are named."""
    layout: LayoutName | None = given["layout"]
    if not given["units"]:
        return layout
    if layout not in (None, "mfsdp-v1", "mfsdp-v2"):
        raise UsageError(
            f"--units {', '.join(given['units'])}: with --layout {layout} every tensor is cut on its own; "
            "leave it out"
        )
    return layout or "mfsdp-v1"


def _of_job(given: Given, world: int | None) -> Layout:
    from ckpt_tools.commands.job.placements import Layout
    from ckpt_tools.sharding.topology import Topology

    layout, dp_shard, etp = _name(given), given["dp_shard"], given["etp"]
    sizes = {name: given[name] for name in ("dp_outer", "cp", "ep", "pp", "strategy", "outer_strategy")}
    tp = 1 if given["tp"] is None else given["tp"]
    if world is None:
        if dp_shard is None:
            raise UsageError(f"--layout {layout} needs the size of the job: give --gpus or --dp-shard")
        world = dp_shard * given["dp_outer"] * given["cp"] * (tp or 1) * given["pp"]
    topology = Topology.of_world(
        world, dp_shard=dp_shard, tp=tp, etp=0 if etp is None else _positive(etp, "--etp"), **sizes
    )
    return Layout(
        layout or "mfsdp-v1",
        topology,
        tp_given=given["tp"] is not None,
        name_given=layout is not None,
        units=given["units"],
    )


def _refuse_mistyped(given: Given) -> None:
    factors = [given[name] for name in ("dp_shard", "dp_outer", "tp", "cp", "pp") if given[name] is not None]
    others = [given[name] or 1 for name in ("world_size", "gpus", "ep", "etp")]
    if any(size > MAX_RANKS for size in (*factors, *others, prod(factors))):
        raise UsageError(
            f"a job of more than {MAX_RANKS:,} ranks is asked for; is a size of the topology mistyped?"
        )


def _positive(ranks: int, option: str) -> int:
    if ranks < 1:
        raise UsageError(f"{option} {ranks}: at least one rank is needed")
    return ranks


# What is said otherwise than for `convert`.
_EXPORTED = {
    "hf_config": option(
        Path, "--hf-config", read=v.model_folder, panel=t.MODEL,
        help="Folder of the original model: tokenizer and settings come from it, and it is compared with the "
             "checkpoint.",
    ),
    "dtype": option(
        str, "--dtype", panel=t.MODEL,
        help="Element type of the weights. Default: the model's own; float32 takes the optimizer's masters.",
    ),
    "vocab_size": option(
        int, "--vocab-size", max=v.MAX_ROWS, panel=t.MODEL, help="Number of real tokens; the rows after them are cut."
    ),
    "tp": option(
        int, "--tp", panel=t.MODEL,
        help="Tensor parallel size of the job that wrote an fsdp_dtensor checkpoint.",
    ),
    "quantize": option(
        Quantization, "--quantize", panel=t.MODEL,
        help="Write linear weights in FP8 (E4M3) with a scale for each 128 x 128 block, like DeepSeek-V3. "
             "--hf-config may ask for ue8m0 scales.",
    ),
    "tower": option(
        TowerName, "--tower", panel=t.MODEL,
        help="Write this part of a vision-language model as a separate model. A language model alone is put "
             "back into the model in --hf-config.",
    ),
    "peft": flag(
        "--peft", panel=t.MODEL,
        help="Write the adapter (LoRA), not the model; --hf-config names the base.",
    ),
    "iteration": t.ITERATIONS,
    "as_json": AS_JSON,
}  # fmt: skip
_IMPORTED = {
    "to": option(
        MegatronFormat, "--to",
        help="Format of the output: torch_dist for 3D parallelism, fsdp_dtensor for Megatron-FSDP. Default: the "
             "one that the other options fit (--lr and --gpus: fsdp_dtensor), else torch_dist.",
    ),
    "dtype": option(
        str, "--dtype", panel=t.MODEL, help="Element type of the weights. Default: the model's own."
    ),
    "adapter": option(
        str, "--adapter", panel=t.MODEL, help="PEFT folder (LoRA) to merge into the model."
    ),
    "tower": option(
        TowerName, "--tower", panel=t.MODEL,
        help="Import this part of a vision-language model alone.",
    ),
    "vocab_size_padded": option(
        int, "--vocab-size-padded", max=v.MAX_ROWS, panel=t.MODEL,
        help="Rows of the vocabulary in the output: zeros are added. Default: a multiple of 128 times --tp, like "
             "Megatron.",
    ),
    "fresh_optimizer": option(
        bool, "--fresh-optimizer/--no-fresh-optimizer", panel=t.FRESH,
        help="With --to fsdp_dtensor: a fresh optimizer. Default: yes for core-0.18 to main, which need one.",
    ),
    "iteration": option(
        str, "--iteration", metavar="NUMBER", read=v.one_iteration,
        help="Number of the iteration to make. Default: a release; 1 with an optimizer."
    ),
    "as_json": AS_JSON,
}  # fmt: skip

_OF_FSDP = t.FRESH_OPTIMIZER | {"gpus", "dp_shard", "layout", "world_size"}  # have no meaning for torch_dist


def export(
    input_dir: Annotated[str, typer.Argument(help="A run, one of its iterations, or a PyTorch DCP folder.")],
    output_dir: Annotated[str, typer.Argument(help="The folder to make.")],
    **given: Any,
) -> None:
    """Write a Hugging Face model: safetensors, index and config.json.

    A setting that changes what the model computes and that config.json cannot express is an error (exit code 5).

    --hf-config names the folder of the original model: its tokenizer is copied, and its config.json is compared with
    the checkpoint. A vision-language model of Megatron-Bridge needs it; a run of `import-hf` does not.

    A PyTorch DCP checkpoint with Hugging Face names (FSDP2 jobs) keeps them: names and shapes must be exactly those
    of the model in --hf-config. With --peft the adapter (LoRA) of a checkpoint becomes a PEFT folder.
    """
    convert_to("hf", input_dir, output_dir, given)


def import_(
    ctx: typer.Context,
    input_dir: Annotated[str, typer.Argument(help="Folder of a Hugging Face model with safetensors.")],
    output_dir: Annotated[str, typer.Argument(help="The run to make.")],
    **given: Any,
) -> None:
    """Make a Megatron checkpoint of a Hugging Face model.

    For 3D parallelism it has weights only: start with --finetune. For Megatron-FSDP of core 0.18 and later it needs a
    fresh optimizer too: give --lr, --min-lr and --weight-decay.

    A field of config.json that changes what the model computes and that Megatron does not have is an error (exit
    code 5). Quantized models (block FP8, MXFP4, compressed-tensors FP8 and INT4) are dequantized as transformers
    does it, bit for bit.

    A vision-language model (Qwen2.5-VL, Qwen3-VL, Gemma 3, Mistral 3) becomes one of Megatron-Bridge; --tower
    language imports its language model alone, and `export-hf --tower language` puts it back.
    """
    from ckpt_tools.commands.huggingface.import_hf import ImportOptions, import_hf
    from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions

    given["to"] = given["to"] or (
        "fsdp_dtensor" if any(is_given(ctx, name) for name in _OF_FSDP) else "torch_dist"
    )
    named = {name: given[name] for name in ("dialect", "experts", "tp", *t.FRESH_OPTIMIZER)}
    carry_out(
        input_dir,
        output_dir,
        given,
        fill(ImportOptions, given, fsdp=fill(TargetOptions, named), layout=layout_of(given)),
        lambda options, progress: import_hf(input_dir, output_dir, options, progress, given["dry_run"]),
    )


_STDOUT = Path("-")
_LISTED_RANKS = 32
_PLAN = {
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
    from ckpt_tools.commands.job.placements import describe_job

    facts = found.summary()
    strategies = ", ".join(f"{name} {human_bytes(n)}" for name, n in facts["bytes_by_strategy"].items())
    iteration = iteration_text(found.location.label)
    rows = [
        ("source", f"{facts['source']} ({facts['format']}{iteration})"),
        ("layout", _layout(found)),
        *describe_job(facts["job"]),
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


COMMANDS = {
    "convert": with_options(convert, frozenset().union(*MEANING.values()), _TO | OWN),
    "convert-torch-dist-to-fsdp-dtensor": _long_form("fsdp_dtensor", "torch_dist"),
    "convert-fsdp-dtensor-to-torch-dist": _long_form("torch_dist", "fsdp_dtensor"),
    "build-param-group-map": with_options(
        build_param_group_map,
        t.OPENING | {"dialect", "layer_spec", "experts", "swiglu", "iteration"},
        _MAP,
    ),
    "export-hf": with_options(
        export,
        t.RUNNING
        | t.READING
        | {"ignore_keys", "rules", "max_shard_bytes", "mtp_copies", "alpha", "check_masters"},
        _EXPORTED,
    ),
    "import-hf": with_options(
        import_,
        t.RUNNING | JOB_SIZES | t.FRESH_OPTIMIZER | {"rules", "dialect", "layer_spec", "experts"},
        _IMPORTED,
    ),
    "plan": with_options(plan, t.READING | JOB_SIZES | t.FRESH_OPTIMIZER | _CONVERSION, _PLAN),
}
