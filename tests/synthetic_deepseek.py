"""The metadata of a DeepSeek-V3 `torch_dist` checkpoint, without payloads: `python -m tests.synthetic_deepseek OUT`.

671 B parameters in 61 layers of 256 experts and one multi-token-prediction layer (shapes of the public config.json),
`fully_reshardable` Adam states, a chunk for every expert and for every one of 8 tensor-parallel ranks: all that
planning reads. Nothing can be read from the files that it names.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

from ckpt_tools.formats.dcp.metadata_write import metadata_bytes
from ckpt_tools.formats.torch_archive.tensor_template import tensor_frame
from ckpt_tools.formats.torch_archive.zip_archive import ALIGNMENT
from ckpt_tools.model.box import Box
from ckpt_tools.model.dtypes import itemsize
from ckpt_tools.model.transfers import OutputItem, Plan, TensorInfo
from ckpt_tools.sharding.units import LiveTensor
from tests.strategies import Shape

WRITERS, TP = 256, 8
HIDDEN, HEADS, Q_LORA, KV_LORA, ROPE, HEAD = 7168, 128, 1536, 512, 64, 128
DENSE_FFN, EXPERT_FFN, EXPERTS, DENSE_LAYERS, VOCAB = 18432, 2048, 256, 3, 129280
_EXPERT = re.compile(r"(?P<head>.*\.experts\.)(?P<leaf>linear_fc\d\.weight)(?P<number>\d+)")


def deepseek_v3(layers: int = 61) -> list[LiveTensor]:
    """Live tensors of DeepSeek-V3 with one multi-token-prediction layer, from its public config.json."""
    tensors = [_t("embedding.word_embeddings.weight", VOCAB, HIDDEN)]
    for n in range(layers):
        tensors += _layer(f"decoder.layers.{n}", dense=n < DENSE_LAYERS)
    mtp = "mtp.layers.0"
    tensors += [_t(f"{mtp}.{norm}.weight", HIDDEN) for norm in ("enorm", "hnorm", "final_layernorm")]
    tensors += [
        _t(f"{mtp}.eh_proj.weight", HIDDEN, 2 * HIDDEN),
        *_layer(f"{mtp}.transformer_layer", dense=False),
    ]
    return [
        *tensors,
        _t("decoder.final_layernorm.weight", HIDDEN),
        _t("output_layer.weight", VOCAB, HIDDEN),
    ]


def _t(name: str, *shape: int, gated: bool = False) -> LiveTensor:
    return LiveTensor(name, shape, "bfloat16", gated)


def _layer(at: str, dense: bool) -> Iterator[LiveTensor]:
    yield _t(f"{at}.input_layernorm.weight", HIDDEN)
    yield _t(f"{at}.self_attention.linear_proj.weight", HIDDEN, HEADS * HEAD)
    yield _t(f"{at}.self_attention.linear_q_down_proj.weight", Q_LORA, HIDDEN)
    yield _t(f"{at}.self_attention.linear_q_up_proj.weight", HEADS * (HEAD + ROPE), Q_LORA)
    yield _t(f"{at}.self_attention.linear_kv_down_proj.weight", KV_LORA + ROPE, HIDDEN)
    yield _t(f"{at}.self_attention.linear_kv_up_proj.weight", HEADS * 2 * HEAD, KV_LORA)
    yield _t(f"{at}.self_attention.q_layernorm.weight", Q_LORA)
    yield _t(f"{at}.self_attention.kv_layernorm.weight", KV_LORA)
    yield _t(f"{at}.pre_mlp_layernorm.weight", HIDDEN)
    if dense:
        yield _t(f"{at}.mlp.linear_fc1.weight", 2 * DENSE_FFN, HIDDEN, gated=True)
        yield _t(f"{at}.mlp.linear_fc2.weight", HIDDEN, DENSE_FFN)
        return
    yield _t(f"{at}.mlp.router.weight", EXPERTS, HIDDEN)
    yield LiveTensor(f"{at}.mlp.router.expert_bias", (EXPERTS,), "float32", buffer=True)
    for e in range(EXPERTS):
        yield _t(f"{at}.mlp.experts.linear_fc1.weight{e}", 2 * EXPERT_FFN, HIDDEN, gated=True)
        yield _t(f"{at}.mlp.experts.linear_fc2.weight{e}", HIDDEN, EXPERT_FFN)
    yield _t(f"{at}.mlp.shared_experts.linear_fc1.weight", 2 * EXPERT_FFN, HIDDEN, gated=True)
    yield _t(f"{at}.mlp.shared_experts.linear_fc2.weight", HIDDEN, EXPERT_FFN)


def stored_weights(layers: int) -> dict[str, tuple[str, Shape]]:
    """Stored key -> element type and global shape of every weight; experts are stacked."""
    stored: dict[str, tuple[str, Shape]] = {}
    for tensor in deepseek_v3(layers):
        match = _EXPERT.fullmatch(tensor.name)
        if match is None:
            stored[tensor.name] = (tensor.dtype, tensor.shape)
        else:
            stored[f"{match['head']}experts.{match['leaf']}"] = (tensor.dtype, (EXPERTS, *tensor.shape))
    return stored


def chunk_boxes(key: str, shape: Shape) -> Iterator[Box]:
    """One chunk an expert, or one a tensor-parallel rank."""
    parts = shape[0] if ".experts.experts." in key else TP if len(shape) > 1 else 1
    rows = shape[0] // parts
    for part in range(parts):
        yield Box((part * rows, *(0,) * (len(shape) - 1)), (rows, *shape[1:]))


def write_metadata(folder: Path, layers: int = 61) -> None:
    """Write `.metadata`, `common.pt` and `metadata.json` of an iteration directory."""
    import torch

    folder.mkdir(parents=True)
    tensors: dict[str, TensorInfo] = {}
    items: list[OutputItem] = []
    ends = [0] * WRITERS
    for key, (dtype, shape) in stored_weights(layers).items():
        tensors[key] = TensorInfo(dtype, shape)
        if not key.endswith("expert_bias"):
            states = (f"optimizer.state.{kind}.{key}" for kind in ("param", "exp_avg", "exp_avg_sq"))
            tensors |= dict.fromkeys(states, TensorInfo("float32", shape))
    for key, (dtype, shape) in tensors.items():
        for box in chunk_boxes(key, shape):
            writer = len(items) % WRITERS
            length = tensor_frame(dtype, box.size).length
            assert length > box.volume * itemsize(dtype)
            items.append(OutputItem(key, box, dtype, f"__{writer}_0.distcp", ends[writer], length, ()))
            ends[writer] += -(-length // ALIGNMENT) * ALIGNMENT
    files = {f"__{writer}_0.distcp": end for writer, end in enumerate(ends)}
    paths = {key: (key,) for key in tensors}
    (folder / ".metadata").write_bytes(metadata_bytes(Plan(tuple(items), (), files, tensors, paths, "")))
    torch.save(common_state(layers), folder / "common.pt")
    (folder / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1,
                    "common_backend": "torch", "common_backend_version": 1})
    )  # fmt: skip


def common_state(layers: int) -> dict[str, object]:
    """What a training job would have stored beside its tensors."""
    adam = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "bias_correction": True, "step": 100}
    rates = {"lr_mult": 1.0, "is_decoupled_lr": False, "max_lr": 1e-4, "min_lr": 1e-5}
    groups = [
        {"wd_mult": wd, "weight_decay": 0.1 * wd, "is_expert_parallel": expert, **adam, **rates}
        for expert, wd in ((False, 1.0), (False, 0.0), (True, 1.0))
    ]
    args = argparse.Namespace(
        num_layers=layers,
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        moe_layer_freq=[0] * 3 + [1] * (layers - 3),
        moe_grouped_gemm=True,
        mtp_num_layers=1,
        multi_latent_attention=True,
        swiglu=True,
        add_bias_linear=False,
        transformer_impl="transformer_engine",
        tensor_model_parallel_size=TP,
        expert_model_parallel_size=64,
        bf16=True,
        fp16=False,
        optimizer="adam",
    )
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 100,
        "optimizer": {
            n: {"optimizer": {"param_groups": part}} for n, part in enumerate((groups[:2], groups[2:]))
        },
        "opt_param_scheduler": {"max_lr": 1e-4, "min_lr": 1e-5, "num_steps": 100},
        "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=61)
    given = parser.parse_args()
    write_metadata(given.out, given.layers)


if __name__ == "__main__":
    main()
