"""`export-hf --peft`: a Megatron adapter as a PEFT directory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ckpt_tools.commands.adapters.adapter_source import read_adapter_source
from ckpt_tools.commands.huggingface.hf_parts import families_with, read_config
from ckpt_tools.commands.job.conversion import Conversion
from ckpt_tools.commands.job.opened import Opened
from ckpt_tools.errors import UsageError
from ckpt_tools.megatron.huggingface.config.config import read_config as model_of_config
from ckpt_tools.megatron.huggingface.families.identify import family_of_config
from ckpt_tools.megatron.huggingface.lora.peft import ADAPTER_WEIGHTS
from ckpt_tools.megatron.huggingface.lora.peft_places import ADAPTER_CONFIG
from ckpt_tools.megatron.huggingface.lora.peft_targets import peft_target, with_vocabulary
from ckpt_tools.megatron.huggingface.mapping.rules import expand
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.model.target import Target
from ckpt_tools.plan.build import WeightFile, build_safetensors_plan

if TYPE_CHECKING:
    from ckpt_tools.commands.huggingface.export_options import ExportOptions


def plan_peft(opened: Opened, options: ExportOptions) -> Conversion:
    """Everything up to the first byte."""
    if options.hf_config is None:
        raise UsageError("--peft: the names are those of the base model; pass its directory with --hf-config")
    if options.dtype is not None and options.dtype not in CASTABLE:
        raise UsageError(f"--dtype {options.dtype}: weights can be written as {', '.join(sorted(CASTABLE))}")
    config = read_config(options.hf_config)
    family = family_of_config(config, families_with(options.rules, config))
    model = with_vocabulary(model_of_config(family, config))
    source = read_adapter_source(
        opened, options.alpha, opened, "; without --peft the model itself is exported"
    )
    made = peft_target(
        opened.catalog,
        source.adapters,
        expand(family, model),
        model,
        source.alpha,
        options.hf_config,
        options.dtype,
    )
    text = json.dumps(dict(made.config), indent=2, ensure_ascii=False) + "\n"
    return Conversion(
        "hf",
        "peft",
        opened.location.iteration,
        opened.catalog,
        Target(made.tensors, notes=(source.summary, *made.notes)),
        build_safetensors_plan(opened.catalog, [WeightFile(ADAPTER_WEIGHTS, made.tensors)], {}),
        extra_files={ADAPTER_CONFIG: text.encode()},
        architecture=family.architecture,
    )
