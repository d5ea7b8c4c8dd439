"""Writes a small checkpoint with a released megatron-core, on CPUs, and what each rank held beside it.

Run as a program, with that release first on PYTHONPATH: ``write_checkpoint.py '<json>'``. It starts a process per
rank over gloo, builds a real GPTModel with DistributedDataParallel and the distributed optimizer, makes two optimizer
steps on random gradients, and saves through `dist_checkpointing`. The CUDA calls that these classes make on their way
are answered by the CPU; nothing else is replaced.
"""

import inspect
import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.overrides import TorchFunctionMode


def main() -> None:
    case = json.loads(sys.argv[1])
    world = case["tp"] * case["pp"] * case["dp"]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(case["port"]), "OMP_NUM_THREADS": "1"}
    answer_cuda_calls()
    import_megatron()
    mp.start_processes(run, (world, case), nprocs=world, start_method="fork")


def run(rank: int, world: int, case: dict[str, Any]) -> None:
    """One rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    from megatron.core import parallel_state as ps

    ps.initialize_model_parallel(
        case["tp"], case["pp"], virtual_pipeline_model_parallel_size=None,
        expert_model_parallel_size=case["ep"],
    )  # fmt: skip
    model, optimizer = build(case)
    train(model, optimizer, seed=case["seed"])
    save(model, optimizer, case)
    torch.save(held(model, optimizer, case), Path(case["out"], f"held_{rank}.pt"))
    torch.distributed.barrier()  # a rank that leaves early takes its store with it
    torch.distributed.destroy_process_group()


class FusedAdam(torch.optim.Optimizer):
    """Adam with the states and groups of Apex's and Transformer Engine's: the step is counted in the group."""

    def __init__(self, params: Any, lr: float, weight_decay: float, betas: Any, eps: float, **_: Any) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": True,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                grad = getattr(p, "decoupled_grad", None) if p.grad is None else p.grad
                if grad is None:
                    continue
                state = self.state[p]
                for kind in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(kind, torch.zeros_like(p))
                first, second = group["betas"]
                state["exp_avg"].mul_(first).add_(grad, alpha=1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
                p.addcdiv_(
                    state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-group["lr"]
                )


def import_megatron() -> None:
    """Imports what the ranks need, once for all of them, and gives it the Adam that GPU runs have."""
    import numpy as np

    setattr(np, "product", np.prod)  # noqa: B010  numpy 1's name, which cores up to 0.14 use
    from megatron.core import dist_checkpointing, optimizer, parallel_state  # noqa: F401
    from megatron.core.distributed import DistributedDataParallel  # noqa: F401
    from megatron.core.models.gpt import GPTModel  # noqa: F401
    from megatron.core.optimizer import distrib_optimizer

    for module in (optimizer, distrib_optimizer):
        module.Adam = FusedAdam
        module.USING_PYTORCH_OPTIMIZER = False
        module.HAVE_APEX_OR_TE = True


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU that were asked for on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def answer_cuda_calls() -> None:
    """Lets code that asks for the current CUDA device work on the CPU."""
    cpu = torch.device("cpu")
    type_name = torch.Tensor.type
    torch.cuda.current_device = lambda: cpu
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.empty_cache = lambda: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_: self
    torch.Tensor.type = lambda self, *to: (
        type_name(self, *to) if to else f"torch.cuda.{type_name(self).rsplit('.', 1)[1]}"
    )
    OnCpu().__enter__()


def build(case: dict[str, Any]) -> tuple[Any, Any]:
    """The wrapped model chunk and its optimizer."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    can_choose = (
        "normalization" in inspect.signature(get_gpt_layer_local_spec).parameters
    )  # not in all releases
    norm = "RMSNorm" if can_choose else "LayerNorm"
    moe = {"num_moe_experts": 4, "moe_ffn_hidden_size": 40, "moe_router_topk": 2} if case["moe"] else {}
    config = TransformerConfig(
        num_layers=case["layers"], hidden_size=24, num_attention_heads=4, num_query_groups=2, kv_channels=8,
        ffn_hidden_size=40, gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        normalization=norm, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True, tensor_model_parallel_size=case["tp"], pipeline_model_parallel_size=case["pp"],
        expert_model_parallel_size=case["ep"], sequence_parallel=case["tp"] > 1 and case["moe"],
        hidden_dropout=0.0, attention_dropout=0.0, **moe,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        num_experts=moe.get("num_moe_experts"), **({"normalization": norm} if norm == "RMSNorm" else {})
    )
    gpt = GPTModel(
        config, spec, 64, 16, pre_process=ps.is_pipeline_first_stage(), post_process=ps.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=case["tied"],
    )  # fmt: skip
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=case["bucket_size"] is not None,
        bucket_size=case["bucket_size"],
    )
    model = DistributedDataParallel(config, ddp, Float16Module(config, gpt))
    # So small that all norms still round to one: they look alike, and only their order tells them apart.
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=0.0,
    )
    return model, get_megatron_optimizer(settings, [model])


def train(model: Any, optimizer: Any, seed: int) -> None:
    """Two optimizer steps on gradients that depend on the parameter and the tensor-parallel rank only."""
    from megatron.core import parallel_state as ps

    for step in range(2):
        for i, (name, parameter) in enumerate(model.named_parameters()):
            shared = "word_embeddings" in name or "output_layer" in name  # tied copies need equal gradients
            where = [step, 999 if shared else i, 0 if shared else ps.get_pipeline_model_parallel_rank()]
            if getattr(parameter, "tensor_model_parallel", False):
                where.append(ps.get_tensor_model_parallel_rank())
            if ".experts." in name:
                where.append(ps.get_expert_model_parallel_rank())
            generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, where)).encode()))
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer.step()


def save(model: Any, optimizer: Any, case: dict[str, Any]) -> None:
    """A torch_dist checkpoint with the state dict that Megatron-LM would make."""
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    weights = model.module.module.sharded_state_dict()
    kind = case["layout"]
    if "metadata" in inspect.signature(DistributedOptimizer.sharded_state_dict).parameters:
        states = optimizer.sharded_state_dict(weights, metadata={"distrib_optim_sharding_type": kind})
    else:
        states = optimizer.sharded_state_dict(weights, sharding_type=kind)
    state_dict = {**weights, "optimizer": states, "iteration": 2, "checkpoint_version": 3.0,
                  "content_metadata": {"distrib_optim_sharding_type": kind}}  # fmt: skip
    folder = Path(case["out"], "checkpoint")
    folder.mkdir(exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state_dict, str(folder))


def held(model: Any, optimizer: Any, case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By live name: this rank's shard of a parameter, how it is cut, and its range of masters and moments."""
    from megatron.core import parallel_state as ps

    optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
    owner = {p: o for o in optimizers for p in o.model_param_gbuf_map}
    first = case["layers"] // case["pp"] * ps.get_pipeline_model_parallel_rank()
    experts = 4 // case["ep"]
    out = {}
    for name, parameter in model.module.module.named_parameters():
        parts = name.split(".")
        for i, part in enumerate(parts):
            if part == "layers":
                parts[i + 1] = str(int(parts[i + 1]) + first)
            if part == "local_experts":
                parts[i + 1] = str(int(parts[i + 1]) + experts * ps.get_expert_model_parallel_rank())
        cut = (
            getattr(parameter, "partition_dim", -1)
            if getattr(parameter, "tensor_model_parallel", False)
            else -1
        )
        if ".experts." in name:
            cut = 0 if "linear_fc1" in name else 1
        record: dict[str, Any] = {"weight": parameter.detach().clone(), "cut": cut,
                                  "tp": ps.get_tensor_model_parallel_rank(), "range": None}  # fmt: skip
        try:
            span = owner[parameter]._get_model_param_range_map(parameter)["param"]
        except KeyError:  # another data-parallel rank has all of it
            span = None
        if span is not None:
            states = states_of(owner[parameter], parameter)
            record |= {"range": (span.start, span.end)}
            record |= {kind: states[kind].detach().clone() for kind in ("param", "exp_avg", "exp_avg_sq")}
        out[".".join(parts)] = record
    return out


def states_of(optimizer: Any, parameter: Any) -> dict[str, Any]:
    """Master and moments of this rank's range of a parameter."""
    group, order = optimizer.model_param_group_index_map[parameter]
    master = optimizer.optimizer.param_groups[group]["params"][order]
    return {"param": master, **optimizer.optimizer.state[master]}


if __name__ == "__main__":
    main()
