"""Writes a vision-language model as transformers saves it and as Megatron-Bridge trains it, released, on CPUs.

Run as a program, with both and megatron-core on PYTHONPATH: ``write_vision_language.py '<json>'``. A process per
tensor-parallel rank makes Bridge's own model of the directory that transformers has saved, lets Bridge load that into
it, and saves it as a torch_dist checkpoint with the settings of its provider. Transformer Engine, which Bridge builds
its layers of, is answered by Megatron's own modules, with the norms where Engine fuses them.
"""

import importlib
import importlib.abc
import importlib.machinery
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

ABSENT = ("transformer_engine", "modelopt", "omegaconf", "rich", "datasets", "hydra", "triton", "mamba_ssm",
          "causal_conv1d")  # fmt: skip
BRIDGES = {
    "qwen2_5_vl": ("Qwen2_5_VL", "qwen_vl", "Qwen25VLBridge"),
    "qwen3_vl": ("Qwen3VL", "qwen_vl", "Qwen3VLBridge"),
    "gemma3": ("Gemma3", "gemma_vl", "Gemma3VLBridge"),
}
# What config.json does not tell the providers, or what asks for a GPU.
SETTINGS: dict[str, Any] = {
    "use_cpu_initialization": True, "perform_initialization": False, "bf16": False, "fp16": False,
    "params_dtype": torch.float32, "autocast_dtype": torch.float32, "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False, "bias_activation_fusion": False, "masked_softmax_fusion": False,
    "persist_layer_norm": False, "bias_dropout_fusion": False, "attention_softmax_in_fp32": True,
}  # fmt: skip


class Kind(type):
    """The class of whatever an absent package is asked for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return stand_in(name)


def stand_in(name: str) -> Any:
    return Kind(name, (torch.nn.Module,), {"__init__": lambda self, *_, **__: torch.nn.Module.__init__(self)})


class Absent(types.ModuleType):
    """A module of a package that is not here: whatever is asked for is a class that does nothing."""

    __version__ = "2.9.0"
    __path__ = ()  # type: ignore[assignment]  # a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)


class Answers(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of what is absent."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        here = name.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if here else None

    def create_module(self, spec: Any) -> Any:
        return Absent(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def main() -> None:
    case = json.loads(sys.argv[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(case["port"]), "OMP_NUM_THREADS": "1"}
    answer_cuda_calls()
    save_with_transformers(case)
    mp.start_processes(run, (case,), nprocs=case["tp"], start_method="fork")


def save_with_transformers(case: dict[str, Any]) -> None:
    """A model of random weights, as its class saves it."""
    import transformers

    prefix = BRIDGES[case["kind"]][0]
    config = getattr(transformers, f"{prefix}Config")(
        text_config=case["text"], vision_config=case["vision"], **case["fields"]
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")._from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    model.save_pretrained(Path(case["out"], "hf"))


def run(rank: int, case: dict[str, Any]) -> None:
    """One rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=case["tp"])
    from megatron.core import parallel_state as ps

    ps.initialize_model_parallel(case["tp"])
    scatter_whole()
    bridge = import_bridge(case)
    hf = pretrained(case)
    provider = bridge.provider_bridge(hf)
    for name, value in {**SETTINGS, **case["settings"], "tensor_model_parallel_size": case["tp"]}.items():
        setattr(provider, name, value)
    provider.finalize()
    model = build(provider)
    bridge.load_weights_hf_to_megatron(hf, [model])
    save(model, provider, case)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def scatter_whole() -> None:
    """Gloo scatters the memory of a tensor, whatever its strides: columns of a matrix have to be copied first."""
    scatter = torch.distributed.scatter

    def scattered(tensor: Any, parts: Any = None, *args: Any, **kwargs: Any) -> Any:
        return scatter(tensor, parts and [part.contiguous() for part in parts], *args, **kwargs)

    torch.distributed.scatter = scattered


def import_bridge(case: dict[str, Any]) -> Any:
    """Bridge's bridge, without what starts a training."""
    importlib.import_module(
        "megatron.core.models.gpt.gpt_layer_specs"
    )  # which goes without what is answered below
    sys.meta_path.append(Answers())
    bridge = types.ModuleType("megatron.bridge")
    bridge.__path__ = [
        str(Path(path, "megatron", "bridge"))
        for path in sys.path
        if Path(path, "megatron", "bridge").is_dir()
    ]
    sys.modules["megatron.bridge"] = bridge
    models = importlib.import_module("megatron.bridge.models")
    return getattr(getattr(models, BRIDGES[case["kind"]][1]), BRIDGES[case["kind"]][2])()


def pretrained(case: dict[str, Any]) -> Any:
    """What Bridge asks of a pretrained model: its config, and its tensors by the names of the files."""
    from megatron.bridge.models.hf_pretrained.vlm import PreTrainedVLM

    return PreTrainedVLM.from_pretrained(str(Path(case["out"], "hf")))


def build(provider: Any) -> Any:
    """Bridge's model of modules that run here, with the norms of Transformer Engine's."""
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.bridge.models.gemma_vl import modeling_gemma3_vl
    from megatron.bridge.models.qwen_vl import qwen3_vl_provider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp

    class NormAndLinear(ColumnParallelLinear):
        """A linear with the weight of the norm before it."""

        def __init__(self, input_size: int, *args: Any, **kwargs: Any) -> None:
            super().__init__(input_size, *args, **kwargs)
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))

    class LinearAndNorm(RowParallelLinear):
        """A linear with the norm behind it (Gemma)."""

        def __init__(self, input_size: int, output_size: int, *args: Any, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, *args, **kwargs)
            self.post_layernorm = torch.nn.RMSNorm(output_size)

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
        ) -> Any:
            from megatron.core.transformer.utils import sharded_state_dict_default

            norm, self.post_layernorm = self.post_layernorm, None
            found = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            self.post_layernorm = norm
            return found | sharded_state_dict_default(
                norm, f"{prefix}post_layernorm.", sharded_offsets, metadata, self.tp_group
            )

    NormAndLinear.__name__ = "TELayerNormColumnParallelLinear"  # by which Bridge knows that the norm is whole
    AutoMapping.register_module_type("LinearAndNorm", "row")
    is_gemma = hasattr(provider, "vision_projector_config")
    spec = get_gpt_layer_local_spec(qk_layernorm=provider.qk_layernorm or is_gemma, normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    layer.self_attention.submodules.linear_qkv = NormAndLinear
    layer.mlp.submodules.linear_fc1 = NormAndLinear
    if is_gemma:
        vars(provider.vision_projector_config).update(SETTINGS)
        layer.self_attention.submodules.linear_proj = LinearAndNorm
        layer.mlp.submodules.linear_fc2 = LinearAndNorm
        modeling_gemma3_vl.TENorm = lambda config, size, eps: torch.nn.RMSNorm(size, eps)
    provider.transformer_layer_spec = spec
    qwen3_vl_provider.get_gpt_layer_with_transformer_engine_spec = lambda **_: spec
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    centered, provider.layernorm_zero_centered_gamma = (
        provider.layernorm_zero_centered_gamma,
        False,
    )  # of torch's norms
    model = provider.provide(pre_process=True, post_process=True)
    provider.layernorm_zero_centered_gamma = centered
    return model


def save(model: Any, provider: Any, case: dict[str, Any]) -> None:
    """A torch_dist checkpoint with the settings that Bridge keeps beside it."""
    from megatron.core import dist_checkpointing

    folder = Path(case["out"], "run")
    folder.mkdir(exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(
        {**model.sharded_state_dict(), "iteration": 1, "checkpoint_version": 3.0}, str(folder)
    )
    if torch.distributed.get_rank() == 0:
        from megatron.bridge.utils.yaml_utils import dump_dataclass_to_yaml
        from transformers import PretrainedConfig

        kept: dict[str, Any] = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(provider).items()
            if isinstance(value, bool | int | float | str | list | tuple | None | PretrainedConfig)
        }
        kept |= {"activation_func": provider.activation_func, "params_dtype": torch.float32}
        dump_dataclass_to_yaml({"model": kept}, str(folder / "run_config.yaml"))


if __name__ == "__main__":
    main()
