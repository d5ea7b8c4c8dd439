"""Inspect, convert, verify and redistribute Megatron `torch_dist` and Megatron-FSDP `fsdp_dtensor` checkpoints.

Data goes through these rooms, left to right; a room imports nothing to its right::

    formats/ -> megatron/ -> sharding/ -> plan/ -> execute/ -> verify/ -> commands/ -> cli/       all upon model/
    bytes in    what keys    which rank   which    move and    prove it   a function   options,   plain data
    and out     mean         owns what    bytes    compute                a verb       exit codes

One conversion, as data::

    directory or URL
      | formats.dcp                         .metadata through an allow-listed unpickler, no torch
    Catalog {key: TensorEntry(dtype, shape, chunks) | ObjectEntry}
      | megatron.<source format>.read       keys -> parameters, each value an expression over stored tensors
    Model (parameters, groups, scheduler, rng, settings: free of any format)
      | megatron.<target format>.write      what the target must contain, under its own names
    Target (TargetTensor: key, dtype, shape, the views it is read through)
      | sharding.placement                  a box per (training rank, tensor)
      | plan.build                          views x boxes x chunks -> transfers; coverage is proven here
    Plan (plain data; printed by `plan`, executed by `convert`)
      | execute                             tiles through a fixed buffer, CRCs proven and made as they pass, own files
    files, `.metadata` last, directory renamed into place, tracker replaced

Everything that decides a byte's way is in `.metadata` and the common state. What views show is moved as bytes; what
no stored tensor holds is computed by a kernel, a tile at a time. `README.md` in this folder follows one conversion
through the modules; each room's docstring lists its own.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# The public API, by the module each name comes from. They are imported when they are first used, so that neither
# the command line nor a caller pays for what it does not use.
_PUBLIC = {
    "CkptError": "errors",
    "open": "commands.look.checkpoint",
    "inspect_checkpoint": "commands.look.inspect",
    "build_group_map": "commands.convert.to_dtensors",
    "ConvertOptions": "commands.job.conversion",
    "convert_to_fsdp_dtensor": "commands.convert.to_dtensors",
    "TargetOptions": "megatron.fsdp_dtensor.options",
    "plan_checkpoint": "commands.convert.plan",
    "load_dtensors": "commands.look.load_dtensors",
    "StorageReader": "commands.look.storage_reader",
    "Layout": "commands.job.placements",
    "Topology": "sharding.topology",
    "ToTorchDistOptions": "commands.convert.to_torch_dist",
    "convert_to_torch_dist": "commands.convert.to_torch_dist",
    "convert_to_dcp": "commands.convert.to_dtensors",
    "ExportOptions": "commands.huggingface.export_source",
    "export_hf": "commands.huggingface.export_hf",
    "ImportOptions": "commands.huggingface.import_hf",
    "import_hf": "commands.huggingface.import_hf",
    "VerifyOptions": "verify.report",
    "verify_checkpoint": "commands.check.verify",
    "Tolerance": "verify.compare.arrays",
    "DiffOptions": "verify.compare.differences",
    "diff_checkpoints": "commands.check.diff",
    "preflight": "commands.check.preflight",
    "EditOptions": "commands.job.conversion",
    "modify_state_dict": "commands.edit.modify",
    "slice_layers": "commands.edit.slice",
    "AverageOptions": "commands.edit.average",
    "average_checkpoints": "commands.edit.average",
    "MergeOptions": "commands.edit.merge_adapter",
    "merge_adapter": "commands.edit.merge_adapter",
    "strip_checkpoint": "commands.edit.strip",
    "repair_checkpoint": "commands.edit.repair",
    "print_tensor": "commands.look.checkpoint",
    "list_run": "commands.look.ls",
    "CopyOptions": "commands.edit.copy",
    "copy_checkpoint": "commands.edit.copy",
    "StatsOptions": "commands.look.stats",
    "checkpoint_statistics": "commands.look.stats",
    "checkpoint_change": "commands.look.stats",
}
__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604  keys of _PUBLIC are strings

if TYPE_CHECKING:  # what `__getattr__` finds, for type checkers and editors
    from ckpt_tools.commands.check.diff import diff_checkpoints as diff_checkpoints
    from ckpt_tools.commands.check.preflight import preflight as preflight
    from ckpt_tools.commands.check.verify import verify_checkpoint as verify_checkpoint
    from ckpt_tools.commands.convert.plan import plan_checkpoint as plan_checkpoint
    from ckpt_tools.commands.convert.to_dtensors import build_group_map as build_group_map
    from ckpt_tools.commands.convert.to_dtensors import convert_to_dcp as convert_to_dcp
    from ckpt_tools.commands.convert.to_dtensors import convert_to_fsdp_dtensor as convert_to_fsdp_dtensor
    from ckpt_tools.commands.convert.to_torch_dist import ToTorchDistOptions as ToTorchDistOptions
    from ckpt_tools.commands.convert.to_torch_dist import convert_to_torch_dist as convert_to_torch_dist
    from ckpt_tools.commands.edit.average import AverageOptions as AverageOptions
    from ckpt_tools.commands.edit.average import average_checkpoints as average_checkpoints
    from ckpt_tools.commands.edit.copy import CopyOptions as CopyOptions
    from ckpt_tools.commands.edit.copy import copy_checkpoint as copy_checkpoint
    from ckpt_tools.commands.edit.merge_adapter import MergeOptions as MergeOptions
    from ckpt_tools.commands.edit.merge_adapter import merge_adapter as merge_adapter
    from ckpt_tools.commands.edit.modify import modify_state_dict as modify_state_dict
    from ckpt_tools.commands.edit.repair import repair_checkpoint as repair_checkpoint
    from ckpt_tools.commands.edit.slice import slice_layers as slice_layers
    from ckpt_tools.commands.edit.strip import strip_checkpoint as strip_checkpoint
    from ckpt_tools.commands.huggingface.export_hf import export_hf as export_hf
    from ckpt_tools.commands.huggingface.export_source import ExportOptions as ExportOptions
    from ckpt_tools.commands.huggingface.import_hf import ImportOptions as ImportOptions
    from ckpt_tools.commands.huggingface.import_hf import import_hf as import_hf
    from ckpt_tools.commands.job.conversion import ConvertOptions as ConvertOptions
    from ckpt_tools.commands.job.conversion import EditOptions as EditOptions
    from ckpt_tools.commands.job.placements import Layout as Layout
    from ckpt_tools.commands.look.checkpoint import open as open
    from ckpt_tools.commands.look.checkpoint import print_tensor as print_tensor
    from ckpt_tools.commands.look.inspect import inspect_checkpoint as inspect_checkpoint
    from ckpt_tools.commands.look.load_dtensors import load_dtensors as load_dtensors
    from ckpt_tools.commands.look.ls import list_run as list_run
    from ckpt_tools.commands.look.stats import StatsOptions as StatsOptions
    from ckpt_tools.commands.look.stats import checkpoint_change as checkpoint_change
    from ckpt_tools.commands.look.stats import checkpoint_statistics as checkpoint_statistics
    from ckpt_tools.commands.look.storage_reader import StorageReader as StorageReader
    from ckpt_tools.errors import CkptError as CkptError
    from ckpt_tools.megatron.fsdp_dtensor.options import TargetOptions as TargetOptions
    from ckpt_tools.sharding.topology import Topology as Topology
    from ckpt_tools.verify.compare.arrays import Tolerance as Tolerance
    from ckpt_tools.verify.compare.differences import DiffOptions as DiffOptions
    from ckpt_tools.verify.report import VerifyOptions as VerifyOptions


def __getattr__(name: str) -> Any:
    """A public name, imported now."""
    from importlib import import_module

    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
