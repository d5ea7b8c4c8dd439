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
from ckpt_tools.cli.verbs.convert import AS_JSON, convert_to, is_given
from ckpt_tools.cli.writing import carry_out
from ckpt_tools.model.choices import MegatronFormat, Quantization, TowerName

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
