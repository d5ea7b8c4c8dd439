"""`export-hf` and `import-hf`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ckpt_tools.cli import options as v
from ckpt_tools.cli import table as t
from ckpt_tools.cli.job_sizes import JOB_SIZES, layout_of
from ckpt_tools.cli.options import flag, option
from ckpt_tools.cli.table import fill, with_options
from ckpt_tools.cli.verbs.convert import AS_JSON, convert_to
from ckpt_tools.cli.writing import carry_out
from ckpt_tools.model.choices import MegatronFormat, Quantization, TowerName

# What is said otherwise than for `convert`.
_EXPORTED = {
    "hf_config": option(
        Path, "--hf-config", read=v.model_folder, panel=t.MODEL,
        help="Directory of the original model: supplies tokenizer and settings that the checkpoint cannot tell, and "
             "is checked against it.",
    ),
    "dtype": option(
        str, "--dtype", panel=t.MODEL,
        help="Element type of the weights. Default: the model's own; float32 takes the optimizer's masters.",
    ),
    "vocab_size": option(
        int, "--vocab-size", max=v.MAX_ROWS, panel=t.MODEL, help="Real tokens; the rows after them are cut."
    ),
    "tp": option(
        int, "--tp", panel=t.MODEL,
        help="Tensor parallel size of the job that wrote an fsdp_dtensor checkpoint.",
    ),
    "quantize": option(
        Quantization, "--quantize", panel=t.MODEL,
        help="Write linears as E4M3 codes with a scale for every 128 x 128 block, as DeepSeek-V3 is published. "
             "--hf-config may ask for ue8m0 scales.",
    ),
    "tower": option(
        TowerName, "--tower", panel=t.MODEL,
        help="Of a checkpoint of a whole vision-language model, write this part as a separate model. One of a "
             "language model alone is put back into the model in --hf-config, the other parts as they are there.",
    ),
    "peft": flag(
        "--peft", panel=t.MODEL,
        help="Write the checkpoint's adapter (LoRA), not its model; --hf-config names the base.",
    ),
    "iteration": t.ITERATIONS,
    "as_json": AS_JSON,
}  # fmt: skip
_IMPORTED = {
    "to": option(MegatronFormat, "--to", default="torch_dist", help="Format of the output."),
    "dtype": option(
        str, "--dtype", panel=t.MODEL, help="Element type of the weights. Default: the model's own."
    ),
    "adapter": option(
        str, "--adapter", panel=t.MODEL, help="PEFT directory (LoRA) to merge into the model."
    ),
    "tower": option(
        TowerName, "--tower", panel=t.MODEL,
        help="Import this part of a vision-language model alone; the report names what is left out.",
    ),
    "vocab_size_padded": option(
        int, "--vocab-size-padded", max=v.MAX_ROWS, panel=t.MODEL,
        help="Rows of the vocabulary in the target: zeros are added. Default: a multiple of 128 times --tp, as "
             "Megatron pads it.",
    ),
    "fresh_optimizer": option(
        bool, "--fresh-optimizer/--no-fresh-optimizer", panel=t.FRESH,
        help="With --to fsdp_dtensor: a fresh optimizer. Default: for Megatron-FSDP v1 of core-0.19 "
             "and main, which starts from nothing else.",
    ),
    "iteration": option(
        str, "--iteration", metavar="NUMBER", read=v.one_iteration,
        help="Number of the iteration to make. Default: a release; 1 with an optimizer."
    ),
    "as_json": AS_JSON,
}  # fmt: skip


def export(
    input_dir: Annotated[str, typer.Argument(help="A torch_dist, fsdp_dtensor or PyTorch (DCP) checkpoint.")],
    output_dir: Annotated[str, typer.Argument(help="The Hugging Face directory to make.")],
    **given: Any,
) -> None:
    """Export a checkpoint to Hugging Face: safetensors, index, config.json, without a model in memory.

    A setting that changes what the model computes and that config.json cannot say is refused by its name (exit 5);
    one that this version does not know is named in the report.

    Of a checkpoint of Megatron-Bridge's that holds a vision-language model all towers are written; --hf-config has
    the config.json, and is compared with the settings of the towers that the run records. A run of `import-hf`
    records the whole config.json and needs no other, but for the tokenizer.

    A PyTorch (DCP) checkpoint whose tensors have Hugging Face names already, as FSDP2 jobs save it, is written as it
    is stored: its names and shapes must be exactly those of the model that config.json in --hf-config describes.

    With --peft the adapter (LoRA) that a checkpoint holds becomes a PEFT directory, by the names of its base.
    """
    convert_to("hf", input_dir, output_dir, given)


def import_(
    input_dir: Annotated[str, typer.Argument(help="A Hugging Face model directory with safetensors.")],
    output_dir: Annotated[str, typer.Argument(help="The run's root to make, with its tracker.")],
    **given: Any,
) -> None:
    """Import a Hugging Face model: weights only, for `--finetune` or `--no-load-optim --no-load-rng`.

    Megatron-FSDP of core 0.18 and later starts from a checkpoint with an optimizer only: --fresh-optimizer makes one
    that has not begun, of --lr, --min-lr and --weight-decay.

    A field of config.json that changes what the model computes and that Megatron cannot be told is refused by its
    name (exit 5); one that this version does not know is named in the report.

    Quantized models are dequantized as they are read, bit for bit as transformers does it: block FP8 (DeepSeek),
    MXFP4 (GPT-OSS), compressed-tensors FP8 and INT4 (pack-quantized).

    A vision-language model (Qwen2.5-VL, Qwen3-VL, Gemma 3, Mistral 3) becomes one of Megatron-Bridge's, with all its
    towers, for that program alone. --tower language imports the language model alone (Qwen2-VL too), and
    `export-hf --tower language` puts it back.
    """
    from ckpt_tools.cli.reports import print_report
    from ckpt_tools.commands.huggingface.import_hf import ImportOptions, import_hf
    from ckpt_tools.commands.job.report import ConversionReport
    from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions

    named = {name: given[name] for name in ("dialect", "experts", "tp", *t.FRESH_OPTIMIZER)}
    carry_out(
        input_dir,
        output_dir,
        given,
        fill(ImportOptions, given, fsdp=fill(TargetOptions, named), layout=layout_of(given)),
        lambda options, progress: import_hf(input_dir, output_dir, options, progress, given["dry_run"]),
        ConversionReport.as_json,
        print_report,
    )


COMMANDS = {
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
}
