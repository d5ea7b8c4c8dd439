"""Saves and loads checkpoints of other optimizers with the classes of megatron-core 0.16.1, on CPUs.

Run as a program, with that release first on PYTHONPATH: ``other_optimizers.py '<json>'``. Each rank leaves beside the
checkpoint what its optimizer holds: after two steps where it saves, after the load where it loads. What stands in for
packages that need a GPU is the arithmetic of their steps alone; every state is named, wrapped and stored by Megatron.
"""

import json
import os
import sys
import types
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import write_checkpoint as base  # type: ignore[import-not-found]  # beside this program, which is run as one

LAYER_WISE, OFFLOADED = "dist_muon", "offloaded_adam"


def main() -> None:
    case = json.loads(sys.argv[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(case["port"]), "OMP_NUM_THREADS": "1"}
    stand_in_for_emerging_optimizers()
    base.answer_cuda_calls()
    answer_stream_calls()
    base.import_megatron()
    prepare_megatron(case["optimizer"])
    world = case["tp"] * case["dp"]
    mp.start_processes(run, (world, case), nprocs=world, start_method="fork")


def run(rank: int, world: int, case: dict[str, Any]) -> None:
    """One rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    from megatron.core import parallel_state as ps

    ps.initialize_model_parallel(
        case["tp"], 1, virtual_pipeline_model_parallel_size=None, expert_model_parallel_size=case["ep"]
    )
    torch.manual_seed(case["seed"])
    model, optimizer = build(case)
    if case["load"]:
        load(model, optimizer, case)
    else:
        base.train(model, optimizer, seed=case["seed"])
        save(model, optimizer, case)
    torch.save(held(model, optimizer, case), Path(case["out"], f"held_{rank}.pt"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class Orthogonalized(torch.optim.Optimizer):
    """What Muon keeps and how it names it; the step takes the momentum as it is."""

    def __init__(self, params: Any, lr: float, momentum_beta: float, **settings: Any) -> None:
        settings.pop("scaled_orthogonalize_fn")
        super().__init__(params, {"lr": lr, "momentum_beta": momentum_beta, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.data))
                    buffer.lerp_(p.grad, 1 - group["momentum_beta"])
                    p.add_(buffer, alpha=-group["lr"])


class FusedAdam(base.FusedAdam):
    """Transformer Engine's has defaults, which an offloaded optimizer needs."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, **settings: Any) -> None:
        super().__init__(params, lr, weight_decay, settings.get("betas", (0.9, 0.999)), 1e-8)


FusedAdam.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"


def stand_in_for_emerging_optimizers() -> None:
    """The package that Muon comes from needs a newer Python."""
    optimizers = types.ModuleType("emerging_optimizers.orthogonalized_optimizers")
    utilities = types.ModuleType("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    optimizers.OrthogonalizedOptimizer = Orthogonalized  # type: ignore[attr-defined]
    optimizers.get_muon_scale_factor = lambda *_, **__: 1.0  # type: ignore[attr-defined]
    utilities.newton_schulz_tp = lambda grad, **_: grad  # type: ignore[attr-defined]
    for module in (types.ModuleType("emerging_optimizers"), optimizers, utilities):
        sys.modules[module.__name__] = module


class Nothing:
    """A stream, and an event of it."""

    def __enter__(self) -> "Nothing":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: Nothing()


def answer_stream_calls() -> None:
    """Lets an offloaded optimizer copy without a GPU."""
    empty = torch.empty
    for name in ("current_stream", "Stream", "stream"):
        setattr(torch.cuda, name, lambda *_, **__: Nothing())
    torch.Tensor.pin_memory = lambda self, *_: self

    def without_pinning(*sizes: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        return empty(*sizes, **settings)

    torch.empty = without_pinning


def prepare_megatron(optimizer: str) -> None:
    """What gloo, and a host without Transformer Engine, cannot do."""
    from megatron.core import optimizer as package
    from megatron.core.optimizer import distrib_optimizer, layer_wise_optimizer, optimizer_config

    layer_wise = layer_wise_optimizer.LayerWiseDistributedOptimizer
    layer_wise.allgather_params = layer_wise.broadcast_params  # gloo gathers equal sizes alone
    if optimizer == OFFLOADED:
        optimizer_config.is_te_min_version = lambda *_, **__: True
        package.Adam = distrib_optimizer.Adam = FusedAdam
        take_parameters_for_cuda()


def take_parameters_for_cuda() -> None:
    """Offloading looks for parameters on a GPU: its own are, their copies are not."""
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    split = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def split_as_on_a_gpu(self: Any, fraction: float) -> Any:
        own = {id(p) for group in self.param_groups for p in group["params"]}
        torch.Tensor.is_cuda = property(lambda tensor: id(tensor) in own)
        try:
            return split(self, fraction)
        finally:
            del torch.Tensor.is_cuda

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = split_as_on_a_gpu


def let_adam_be_pickled() -> None:
    """The groups of an offloaded optimizer name its class, whose module must be there when they are saved."""
    parts = FusedAdam.__module__.split(".")
    for count in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:count]))
        module.__path__ = []
        sys.modules[module.__name__] = module
    sys.modules[FusedAdam.__module__].FusedAdam = FusedAdam  # type: ignore[attr-defined]


def build(case: dict[str, Any]) -> tuple[Any, Any]:
    """The wrapped model chunk and its optimizer."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    experts = case["experts"] or None
    moe = {"num_moe_experts": experts, "moe_ffn_hidden_size": 40, "moe_router_topk": 2} if experts else {}
    config = TransformerConfig(
        num_layers=2, hidden_size=24, num_attention_heads=4, num_query_groups=2, kv_channels=8, ffn_hidden_size=40,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        normalization="RMSNorm", bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True, tensor_model_parallel_size=case["tp"], expert_model_parallel_size=case["ep"],
        hidden_dropout=0.0, attention_dropout=0.0, **moe,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm")
    gpt = GPTModel(config, spec, 64, 16, share_embeddings_and_output_weights=False)
    assert ps.is_pipeline_first_stage()
    name = case["optimizer"]
    distributed = name == OFFLOADED
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    model = DistributedDataParallel(config, ddp, Float16Module(config, gpt))
    settings = OptimizerConfig(
        optimizer="sgd" if name.startswith("sgd") else "adam", sgd_momentum=0.0 if name == "sgd_plain" else 0.9,
        lr=1e-4, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=distributed, clip_grad=0.0,
        use_precision_aware_optimizer=distributed, optimizer_cpu_offload=distributed, optimizer_offload_fraction=1.0,
        overlap_cpu_optimizer_d2h_h2d=False,
    )  # fmt: skip
    if name.endswith("muon"):
        return model, get_megatron_muon_optimizer(
            settings, [model], layer_wise_distributed_optimizer=name == LAYER_WISE
        )
    return model, get_megatron_optimizer(settings, [model])


def state_dict(model: Any, optimizer: Any, case: dict[str, Any], loading: bool) -> dict[str, Any]:
    """What Megatron-LM would save, or ask for."""
    weights = model.module.module.sharded_state_dict()
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if case["optimizer"] == OFFLOADED:
        content["distrib_optim_sharding_type"] = "fully_reshardable"
    states = optimizer.sharded_state_dict(weights, is_loading=loading, metadata=content)
    args = Namespace(
        num_layers=2, hidden_size=24, num_attention_heads=4, num_query_groups=2, group_query_attention=True,
        kv_channels=8, ffn_hidden_size=40, swiglu=True, bf16=True, fp16=False, params_dtype=torch.bfloat16,
        tensor_model_parallel_size=case["tp"], pipeline_model_parallel_size=1, transformer_impl="local",
        expert_model_parallel_size=case["ep"], normalization="RMSNorm", num_experts=case["experts"] or None,
        moe_grouped_gemm=False, untie_embeddings_and_output_weights=True, padded_vocab_size=64, vocab_size=64,
        iteration=2, world_size=case["tp"] * case["dp"], data_parallel_size=case["dp"], add_bias_linear=False,
        optimizer={OFFLOADED: "adam", "sgd_plain": "sgd"}.get(case["optimizer"], case["optimizer"]),
        sgd_momentum=0.0 if case["optimizer"] == "sgd_plain" else 0.9, fp8=None, lr=1e-4, min_lr=0.0,
        weight_decay=0.01, use_distributed_optimizer=case["optimizer"] == OFFLOADED,
        use_precision_aware_optimizer=case["optimizer"] == OFFLOADED,
        optimizer_cpu_offload=case["optimizer"] == OFFLOADED,
    )  # fmt: skip
    more = {} if loading else {"iteration": 2, "checkpoint_version": 3.0, "args": args,
                               "opt_param_scheduler": {"max_lr": 1e-4, "min_lr": 0.0}}  # fmt: skip
    return {**weights, "optimizer": states, **more, "content_metadata": content}


def save(model: Any, optimizer: Any, case: dict[str, Any]) -> None:
    """A torch_dist checkpoint."""
    from megatron.core import dist_checkpointing

    whole = state_dict(model, optimizer, case, loading=False)
    if case["optimizer"] == OFFLOADED:
        let_adam_be_pickled()
    folder = Path(case["out"], "checkpoint")
    folder.mkdir(exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(whole, str(folder))


def load(model: Any, optimizer: Any, case: dict[str, Any]) -> None:
    """As Megatron-LM resumes; what it asks for and does not find ends it."""
    from megatron.core import dist_checkpointing

    if case["optimizer"].startswith(
        "sgd"
    ):  # Megatron cannot initialise its states: those of a step are there
        base.train(model, optimizer, seed=case["seed"] + 1)
    if case["optimizer"] == OFFLOADED:  # 0.16.1 does not tell torch that its own groups hold classes
        let_adam_be_pickled()
        torch.serialization.add_safe_globals([torch.optim.AdamW, FusedAdam])
    asked = state_dict(model, optimizer, case, loading=not case["optimizer"].startswith("sgd"))
    asked = {key: value for key, value in asked.items() if key not in ("args", "opt_param_scheduler")}
    loaded = dist_checkpointing.load(asked, case["checkpoint"], strict="raise_unexpected")
    model.module.module.load_state_dict({k: v for k, v in loaded.items() if torch.is_tensor(v)}, strict=False)
    optimizer.load_state_dict(loaded["optimizer"])


def held(model: Any, optimizer: Any, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What this rank's optimizer has, by name of the parameter and kind; and every group's settings."""
    found: dict[str, Any] = {}
    names = {p: name for name, p in model.module.module.named_parameters()}
    if case["optimizer"] == OFFLOADED:
        (only,) = optimizer.chained_optimizers
        for p in only.model_param_gbuf_map:
            for kind, value in only._get_main_param_and_optimizer_states(p).items():
                found[f"{kind}/{names[p]}"] = torch.as_tensor(value).detach().clone()
        return found
    own = {p.main_param: name for p, name in names.items() if hasattr(p, "main_param")}
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for p in group["params"]:
                found[f"main/{own[p]}"] = p.detach().clone()
                for kind, value in part.optimizer.state.get(p, {}).items():
                    if value is not None:
                        found[f"{kind}/{own[p]}"] = value.detach().clone()
                found[f"group/{own[p]}"] = {k: v for k, v in sorted(group.items()) if k != "params"}
    return found


if __name__ == "__main__":
    main()
