"""What programs keep beside the tensors that no conversion reads, and files that one rank alone keeps."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

# By name in an iteration's folder: Megatron-Bridge (training/checkpointing.py), ModelOpt, Megatron-LM.
_BESIDE = {
    "tokenizer": "the tokenizer's files, which no loader reads: run_config.yaml or the args name the tokenizer",
    "modelopt_state": "ModelOpt's state: a quantized, pruned or distilled model is not restored as one without it",
    "hf": "Megatron-Bridge's export of the same model to Hugging Face",
    "train_dataloader_dprank*.pt": "where the data loader is",
    "layer_wise_optimizer_*.pt": "states of a layer-wise optimizer in the torch format",
    "*.safetensors": "a Hugging Face model next to the checkpoint",
}
MODELOPT = "modelopt_state"
# nvidia_resiliency_ext/checkpointing/local/ckpt_managers/local_manager.py `_filename_from_template`
LOCAL_FILE = re.compile(r"iter_(\d{7})_(\d+)_local(\.dirty)?\.pt")


def left_beside(names: Iterable[str]) -> tuple[str, ...]:
    """A line for each of the names in a checkpoint's folder that is not read, with what it is."""
    found: dict[str, list[str]] = {}
    for name in names:
        glob = next((glob for glob in _BESIDE if fnmatchcase(name, glob)), None)
        if glob is not None:
            found.setdefault(glob, []).append(name)
    return tuple(f"{name}: {_BESIDE[glob]}" for glob, some in found.items() for name in some)


def local_checkpoint(where: str) -> str:
    """What to say of a file that one rank keeps on its own disk."""
    return (
        f"{where} is a local checkpoint of NVIDIA Resiliency Extension: what one rank had in memory, of use to the "
        "job that wrote it alone. Let that job load it (--non-persistent-ckpt-type local) and save a checkpoint of "
        "all ranks with --save"
    )
