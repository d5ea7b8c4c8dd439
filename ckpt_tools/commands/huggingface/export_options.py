"""What a user may decide about an export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.commands.job.conversion import (
    SourceOptions,
)
from ckpt_tools.megatron.huggingface.mapping.shard_files import DEFAULT_SHARD_SIZE
from ckpt_tools.model.choices import CheckLevel, Quantization, TowerName


@dataclass(frozen=True, slots=True)
class ExportOptions(SourceOptions):
    """What a user may decide about an export; the defaults let the checkpoint decide."""

    ignore_keys: tuple[str, ...] = ()
    hf_config: str | None = None  # directory of the original Hugging Face model
    rules: Path | None = None  # a rule file
    dtype: str | None = None
    vocab_size: int | None = None
    max_shard_bytes: int = DEFAULT_SHARD_SIZE
    mtp_copies: bool = False
    tp: int | None = None  # tensor-parallel size of the job that wrote an fsdp_dtensor checkpoint
    quantize: Quantization | None = None
    peft: bool = False  # the checkpoint's adapter (LoRA) as a PEFT directory
    tower: TowerName | None = None  # the part that it is of the model in `hf_config`
    check_masters: CheckLevel = "sample"  # of the stored weights' masters, whether they are exported or not
    alpha: float | None = None  # its scale times its rank, where nothing stored tells it
