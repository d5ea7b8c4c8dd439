"""`export-hf` and `import-hf`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from ckpt_tools.cli import options as o
from ckpt_tools.cli import table as t
from ckpt_tools.cli.convert import carry_out, to_hf, write_options
from ckpt_tools.cli.manual import page


class MegatronFormat(str, Enum):
    TORCH_DIST = "torch_dist"
    FSDP_DTENSOR = "fsdp_dtensor"


_MODEL = "The model and its target"
# What is said otherwise than for `convert`.
_EXPORTED = {
    "hf_config": Annotated[
        Path | None,
        typer.Option("--hf-config", help="Directory of the original model: supplies tokenizer and settings that the "
                     "checkpoint cannot tell, and is checked against it.", rich_help_panel=_MODEL),
    ],
    "dtype": Annotated[
        str | None,
        typer.Option("--dtype", help="Element type of the weights. Default: the model's own; float32 takes the "
                     "optimizer's masters.", rich_help_panel=_MODEL),
    ],
    "vocab_size": Annotated[
        int | None,
        typer.Option("--vocab-size", max=o.MAX_ROWS, help="Real tokens; the rows after them are cut.",
                     rich_help_panel=_MODEL),
    ],
    "tp": Annotated[
        int | None,
        typer.Option("--tp", help="Tensor parallel size of the job that wrote an fsdp_dtensor checkpoint.",
                     rich_help_panel=_MODEL),
    ],
    "iteration": o.OneIteration,
}  # fmt: skip
_IMPORTED = {
    "dtype": Annotated[
        str | None,
        typer.Option("--dtype", help="Element type of the weights. Default: the model's own.",
                     rich_help_panel=_MODEL),
    ],
    "vocab_size_padded": Annotated[
        int | None,
        typer.Option("--vocab-size-padded", max=o.MAX_ROWS, help="Rows of the vocabulary in the target: zeros are "
                     "added. Default: a multiple of 128 times --tp, as Megatron pads it.",
                     rich_help_panel=_MODEL),
    ],
    "fresh_optimizer": Annotated[
        bool | None,
        typer.Option("--fresh-optimizer/--no-fresh-optimizer", help="With --to fsdp_dtensor: an optimizer that has "
                     "not begun. Default: for core-0.19 and main, which start from nothing else.",
                     rich_help_panel="A fresh optimizer"),
    ],
    "iteration": Annotated[
        int | None,
        typer.Option("--iteration", help="Number of the iteration to make. Default: a release; 1 with an optimizer."),
    ],
}  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add this module's commands to `app`."""
    app.command(**page("export-hf"))(
        t.with_options(
            export,
            t.RUNNING | t.READING | _EXPORTED.keys() | {"rules", "max_shard_bytes", "mtp_copies"},
            _EXPORTED,
        )
    )
    app.command(**page("import-hf"))(
        t.with_options(
            import_,
            t.RUNNING
            | t.JOB
            | _IMPORTED.keys()
            | t.FRESH_OPTIMIZER
            | {"rules", "dialect", "layer_spec", "experts"},
            _IMPORTED,
        )
    )


def export(
    input_dir: Annotated[str, typer.Argument(help="A torch_dist or fsdp_dtensor checkpoint.")],
    output_dir: Annotated[str, typer.Argument(help="The Hugging Face directory to make.")],
    **given: Any,
) -> None:
    """Export a checkpoint to Hugging Face: safetensors, index, config.json, without a model in memory.

    A setting that changes what the model computes and that config.json cannot say is refused by its name (exit 5);
    one that this version does not know is named in the report.
    """
    run, iteration = to_hf(given), given["iteration"]
    carry_out(lambda progress: run(input_dir, output_dir, iteration, True, progress), given)


def import_(
    input_dir: Annotated[str, typer.Argument(help="A Hugging Face model directory with safetensors.")],
    output_dir: Annotated[str, typer.Argument(help="The run's root to make, with its tracker.")],
    *,
    to: Annotated[MegatronFormat, typer.Option("--to", help="Format of the output.")] = MegatronFormat.TORCH_DIST,
    **given: Any,
) -> None:  # fmt: skip
    """Import a Hugging Face model: weights only, for `--finetune` or `--no-load-optim --no-load-rng`.

    Megatron-FSDP of core 0.18 and later starts from a checkpoint with an optimizer only: --fresh-optimizer makes one
    that has not begun, of --lr, --min-lr and --weight-decay.

    A field of config.json that changes what the model computes and that Megatron cannot be told is refused by its
    name (exit 5); one that this version does not know is named in the report.

    Quantized models are dequantized as they are read, bit for bit as transformers does it: block FP8 (DeepSeek),
    MXFP4 (GPT-OSS), compressed-tensors FP8 and INT4 (pack-quantized).
    """
    from ckpt_tools.commands.import_hf import ImportOptions, import_hf
    from ckpt_tools.megatron.fsdp_dtensor.write import TargetOptions

    named = {name: given[name] for name in ("dialect", "experts", "tp", *t.FRESH_OPTIMIZER)}
    options = t.fill(
        ImportOptions,
        given,
        to=MegatronFormat(to).value,
        fsdp=t.fill(TargetOptions, named),
        layout=o.layout_of(given),
        write=write_options(given),
    )
    carry_out(lambda progress: import_hf(input_dir, output_dir, options, progress, given["dry_run"]), given)
