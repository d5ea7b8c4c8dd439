"""Writes a base, an adapter and a wrapped checkpoint with released megatron-core and Megatron-Bridge, on CPUs.

Run as a program, with both releases on PYTHONPATH: ``write_adapter.py '<json>'``. A process per tensor-parallel rank
builds a real GPTModel, saves it, lets Bridge's LoRA or CanonicalLoRA wrap its linears, gives A and B random numbers
and saves those alone, as Bridge does, and all together. Beside them stands what every wrapped linear computes: its
output for every unit vector. Numbers are few-bit, so that no sum rounds. Transformer Engine, which Bridge imports and
these layers do not use, is answered by empty classes.
"""

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parent))
from write_checkpoint import (  # type: ignore[import-not-found]  # beside this program, in no package
    answer_cuda_calls,
)

HIDDEN, FFN, RANK, ALPHA = 24, 40, 4, 8


def main() -> None:
    case = json.loads(sys.argv[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(case["port"]), "OMP_NUM_THREADS": "1"}
    answer_cuda_calls()
    mp.start_processes(run, (case,), nprocs=case["tp"], start_method="fork")


def import_bridge() -> Any:
    """Bridge's two kinds of LoRA, without the rest of Bridge."""
    engine: Any = types.ModuleType("transformer_engine")
    pytorch: Any = types.ModuleType("transformer_engine.pytorch")
    pytorch.Linear = type("Linear", (torch.nn.Module,), {})
    pytorch.ops = types.SimpleNamespace(Sequential=torch.nn.Sequential)
    engine.pytorch = pytorch
    bridge = types.ModuleType("megatron.bridge")
    bridge.__path__ = [
        str(Path(path, "megatron", "bridge"))
        for path in sys.path
        if Path(path, "megatron", "bridge").is_dir()
    ]
    absent = "megatron.core.extensions.transformer_engine"
    stand_ins: dict[str, Any] = {
        "transformer_engine": engine,
        "transformer_engine.pytorch": pytorch,
        absent: None,
    }
    sys.modules |= {**stand_ins, "megatron.bridge": bridge}
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.lora import LoRA

    for name in stand_ins:
        del sys.modules[name]
    return {"LoRA": LoRA, "CanonicalLoRA": CanonicalLoRA}


def run(rank: int, case: dict[str, Any]) -> None:
    """One rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=case["tp"])
    from megatron.core import parallel_state as ps

    ps.initialize_model_parallel(case["tp"])
    model = build(case)
    numbers(model, rank, 0)
    save(model, case, "base", lambda key: True)
    kinds = import_bridge()
    kinds[case["kind"]](dim=RANK, alpha=ALPHA)(model, training=True)
    numbers(model, rank, 1)
    save(model, case, "adapter", lambda key: ".adapter." in key)
    save(model, case, "wrapped", lambda key: True)
    torch.save(computed(model, case, rank), Path(case["out"], f"computed_{rank}.pt"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def build(case: dict[str, Any]) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    gated = case["gated"]
    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, num_query_groups=2, kv_channels=8,
        ffn_hidden_size=FFN, gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu, add_bias_linear=False,
        normalization="RMSNorm", params_dtype=torch.float32, use_cpu_initialization=True,
        tensor_model_parallel_size=case["tp"], hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return GPTModel(config, get_gpt_layer_local_spec(normalization="RMSNorm"), 64, 16)


def numbers(model: Any, rank: int, seed: int) -> None:
    """Random eighths in what is trained, the same on all ranks where they share it."""
    for i, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            shared = not getattr(parameter, "tensor_model_parallel", False)
            random = torch.Generator().manual_seed(1000 * seed + 10 * i + (0 if shared else rank + 1))
            parameter.data.copy_(torch.randint(-7, 8, parameter.shape, generator=random) / 8)


def save(model: Any, case: dict[str, Any], name: str, wanted: Any) -> None:
    """A torch_dist checkpoint of the keys that are wanted."""
    import argparse

    from megatron.core import dist_checkpointing

    state = {key: value for key, value in model.sharded_state_dict().items() if wanted(key)}
    args = argparse.Namespace(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, num_query_groups=2, group_query_attention=True,
        kv_channels=8, ffn_hidden_size=FFN, swiglu=case["gated"], bf16=False, fp16=False, transformer_impl="local",
        tensor_model_parallel_size=case["tp"], expert_model_parallel_size=1, params_dtype=torch.float32,
    )  # fmt: skip
    folder = Path(case["out"], name)
    folder.mkdir(exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save({**state, "args": args, "iteration": 1, "checkpoint_version": 3.0}, str(folder))


@torch.no_grad()
def computed(model: Any, case: dict[str, Any], rank: int) -> dict[str, Any]:
    """By stored name: this rank's rows of what a wrapped linear multiplies with, and whether others have more."""
    found = {}
    for name, module in model.named_modules():
        if not hasattr(module, "to_wrap"):
            continue
        is_row = name.endswith(("linear_proj", "linear_fc2"))
        columns = module.to_wrap.weight.shape[1] * (case["tp"] if is_row else 1)
        units = torch.eye(columns).unsqueeze(1)
        if is_row:
            step = columns // case["tp"]
            units = units[..., rank * step : (rank + 1) * step]
        output, _ = module(units.contiguous())
        found[f"{name}.weight"] = {"rows": output.squeeze(1).T.contiguous(), "cut": not is_row}
    return found


if __name__ == "__main__":
    main()
