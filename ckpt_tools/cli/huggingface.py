"""`export-hf` and `import-hf`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ckpt_tools.cli import options as o
from ckpt_tools.cli.convert import finish
from ckpt_tools.cli.inspect import EnableMsc, TrustPickle
from ckpt_tools.cli.manual import page


class MegatronFormat(str, Enum):
    TORCH_DIST = "torch_dist"
    FSDP_DTENSOR = "fsdp_dtensor"


_MODEL = "The model and its target"
Rules = Annotated[
    Path | None,
    typer.Option(
        "--rules", help="YAML file with the rules of one more architecture.", rich_help_panel=_MODEL
    ),
]
AnyDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="Element type of the weights. Default: the model's own.", rich_help_panel=_MODEL
    ),
]
OneIteration = Annotated[
    int | None, typer.Option("--iteration", help="Iteration of a root, instead of its latest.")
]


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    app.command(**page("export-hf"))(export)
    app.command(**page("import-hf"))(import_)


def export(
    input_dir: Annotated[str, typer.Argument(help="A torch_dist or fsdp_dtensor checkpoint.")],
    output_dir: Annotated[str, typer.Argument(help="The Hugging Face directory to make.")],
    *,
    hf_config: Annotated[
        Path | None,
        typer.Option("--hf-config", help="Directory of the original model: supplies tokenizer and settings that the "
                     "checkpoint cannot tell, and is checked against it.", rich_help_panel=_MODEL),
    ] = None,
    rules: Rules = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Element type of the weights. Default: the model's own; float32 takes the "
                     "optimizer's masters.", rich_help_panel=_MODEL),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab-size", max=o.MAX_ROWS, help="Real tokens; the rows after them are cut.",
                     rich_help_panel=_MODEL),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", help="Largest file, e.g. 5GB.", rich_help_panel=_MODEL)
    ] = "5GB",
    mtp_copies: Annotated[
        bool,
        typer.Option("--mtp-copies", help="Repeat embedding and head in DeepSeek's prediction layers.",
                     rich_help_panel=_MODEL),
    ] = False,
    tp: Annotated[
        int | None,
        typer.Option("--tp", help="Tensor parallel size of the job that wrote an fsdp_dtensor checkpoint.",
                     rich_help_panel=_MODEL),
    ] = None,
    iteration: OneIteration = None,
    ignore_keys: o.IgnoreKeys = None,
    check_source: o.CheckSource = o.SourceCheck.ALL,
    overwrite: o.Overwrite = False,
    resume: o.Resume = False,
    dry_run: o.DryRun = False,
    threads: o.Threads = 2,
    max_memory: o.MaxMemory = "96MiB",
    fsync: o.Fsync = False,
    direct: o.Direct = False,
    quiet: o.Quiet = False,
    as_json: o.AsJson = False,
    report: o.ReportFile = None,
    trust_pickle: TrustPickle = False,
    enable_msc: EnableMsc = False,
) -> None:  # fmt: skip
    """Export a checkpoint to Hugging Face: safetensors, index, config.json, without a model in memory.

    A setting that changes what the model computes and that config.json cannot say is refused by its name (exit 5);
    one that this version does not know is named in the report.
    """
    from ckpt_tools.cli.progress import progress_bar
    from ckpt_tools.commands.export_hf import ExportOptions, export_hf
    from ckpt_tools.execute.run import WriteOptions

    chosen = ExportOptions(
        hf_config=str(hf_config) if hf_config else None,
        rules=rules,
        dtype=dtype,
        vocab_size=vocab_size,
        max_shard_bytes=o.parse_bytes(max_shard_size),
        mtp_copies=mtp_copies,
        tp=tp,
        iteration=iteration,
        ignore_keys=tuple(ignore_keys or ()),
        trust_pickle=trust_pickle,
        overwrite=overwrite,
        resume=resume,
        write=WriteOptions(threads, o.parse_bytes(max_memory), fsync, direct, check_source.value),
    )
    with progress_bar(quiet) as progress:
        done = export_hf(input_dir, output_dir, chosen, progress, dry_run)
    finish(done, as_json, report)


def import_(
    input_dir: Annotated[str, typer.Argument(help="A Hugging Face model directory with safetensors.")],
    output_dir: Annotated[str, typer.Argument(help="The run's root to make, with its tracker.")],
    *,
    to: Annotated[MegatronFormat, typer.Option("--to", help="Format of the output.")] = MegatronFormat.TORCH_DIST,
    rules: Rules = None,
    dtype: AnyDtype = None,
    vocab_multiple: Annotated[
        int,
        typer.Option("--vocab-multiple", max=o.MAX_ROWS, help="Rows of the vocabulary are filled up with "
                     "zeros to a multiple of this: make-vocab-size-divisible-by times tensor parallel size.",
                     rich_help_panel=_MODEL),
    ] = 128,
    target: o.Target = None,
    layer_spec: o.LayerSpecOption = None,
    experts: o.ExpertsOption = None,
    layout: o.LayoutOption = None,
    world_size: o.WorldSize = None,
    gpus: o.Gpus = None,
    dp_shard: o.DpShard = None,
    dp_outer: o.DpOuter = 1,
    tp: o.Tp = None,
    cp: o.Cp = 1,
    ep: o.Ep = 1,
    etp: o.Etp = None,
    pp: o.Pp = 1,
    strategy: o.Strategy = o.DEFAULT_STRATEGY,
    outer_strategy: o.OuterStrategy = o.DEFAULT_OUTER_STRATEGY,
    iteration: Annotated[
        int | None, typer.Option("--iteration", help="Number of the iteration to make. Default: a release.")
    ] = None,
    check_source: o.CheckSource = o.SourceCheck.ALL,
    overwrite: o.Overwrite = False,
    resume: o.Resume = False,
    dry_run: o.DryRun = False,
    threads: o.Threads = 2,
    max_memory: o.MaxMemory = "96MiB",
    fsync: o.Fsync = False,
    direct: o.Direct = False,
    quiet: o.Quiet = False,
    as_json: o.AsJson = False,
    report: o.ReportFile = None,
    enable_msc: EnableMsc = False,
) -> None:  # fmt: skip
    """Import a Hugging Face model: weights only, for `--finetune` or `--no-load-optim --no-load-rng`.

    A field of config.json that changes what the model computes and that Megatron cannot be told is refused by its
    name (exit 5); one that this version does not know is named in the report.

    Quantized models are dequantized as they are read, bit for bit as transformers does it: block FP8 (DeepSeek),
    MXFP4 (GPT-OSS), compressed-tensors FP8 and INT4 (pack-quantized).
    """
    from ckpt_tools.cli.progress import progress_bar
    from ckpt_tools.commands.import_hf import ImportOptions, import_hf
    from ckpt_tools.execute.run import WriteOptions
    from ckpt_tools.megatron.fsdp_dtensor.write import TargetOptions

    sizes = (gpus, dp_shard, dp_outer, tp, cp, ep, etp, pp, strategy, outer_strategy)
    chosen = ImportOptions(
        to=to.value,
        rules=rules,
        dtype=dtype,
        vocab_multiple=vocab_multiple,
        layer_spec=layer_spec.value if layer_spec else None,
        fsdp=TargetOptions(
            dialect=target.value if target else None, experts=experts.value if experts else None, tp=tp
        ),
        layout=o.choose_layout(layout, world_size, *sizes),
        iteration=iteration,
        overwrite=overwrite,
        resume=resume,
        write=WriteOptions(threads, o.parse_bytes(max_memory), fsync, direct, check_source.value),
    )
    with progress_bar(quiet) as progress:
        done = import_hf(input_dir, output_dir, chosen, progress, dry_run)
    finish(done, as_json, report)
