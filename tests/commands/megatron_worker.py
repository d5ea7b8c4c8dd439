"""One rank of a job with the real megatron-core on CPU: loads `torch_dist` checkpoints into a real GPTModel.

    python megatron_worker.py RANK WORLD TP EP STORE_FILE OURS ORIGINAL [AXES]

Every tensor of the model and of its optimizer is loaded from OURS with Megatron's default strictness, and again
from ORIGINAL, the checkpoint that real training wrote; both have to be equal bit by bit. The optimizer's groups are
matched with those that Megatron itself makes for this model and topology. Prints one JSON line.
"""

import enum
import json
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

STATES = ("param", "exp_avg", "exp_avg_sq")
AXES = (
    int(sys.argv[8]) if len(sys.argv) > 8 else 0
)  # of rng states that are asked for; with them, names are TE's
TE_NORMS = AXES > 0


def start(rank: int, world: int, tp: int, ep: int, store: str) -> None:
    """Process groups over gloo; the few CUDA calls on the way answer for a CPU."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.Stream = lambda *_: None
    from megatron.core import parallel_state
    from megatron.core.transformer import enums

    if not hasattr(enums, "InferenceCudaGraphScope"):  # the args of newer versions name it
        make: Any = enum.Enum  # whose members no checker has to know
        scope = make("InferenceCudaGraphScope", {f"s{i}": i for i in range(9)}, module=enums.__name__)
        enums.InferenceCudaGraphScope = scope
        torch.serialization.add_safe_globals([scope])
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, expert_model_parallel_size=ep)


def build_model(args: Any, tp: int, ep: int) -> Any:
    """The model of the checkpoint's own args, local layer spec."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    same = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
            "add_bias_linear", "normalization", "bf16", "params_dtype")  # fmt: skip
    moe = ("moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_shared_expert_intermediate_size",
           "moe_router_enable_expert_bias", "moe_router_score_function")  # fmt: skip
    given = {name: getattr(args, name) for name in same} | {"gated_linear_unit": args.swiglu}
    if args.swiglu:
        given["activation_func"] = torch.nn.functional.silu
    if args.num_experts:
        given |= {name: getattr(args, name) for name in moe} | {"num_moe_experts": args.num_experts}
        given["moe_token_dispatcher_type"] = "alltoall"
    config = TransformerConfig(
        **given, tensor_model_parallel_size=tp, expert_model_parallel_size=ep, use_cpu_initialization=True
    )
    if args.num_experts:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=args.normalization
        )
    else:
        spec = get_gpt_layer_local_spec(normalization=args.normalization)
    return GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    ).bfloat16()


def asked_for(model: Any) -> dict[str, Any]:
    """What the model asks for; the norm before experts by the name that Transformer Engine's layers give it.

    The local spec names it as if it stood in a dense layer, where it is a part of the projection after it.
    """
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    sharded = model.sharded_state_dict(metadata=metadata)
    norm = ".mlp.linear_fc1.layer_norm_weight"
    for value in sharded.values():
        layer = value.key.removesuffix(norm)
        if TE_NORMS and value.key.endswith(norm) and f"{layer}.mlp.router.weight" in sharded:
            value.key = f"{layer}.pre_mlp_layernorm.weight"
    return sharded


def load(model: Any, folder: str, fill: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors of this rank, common state) of a checkpoint; memory is filled with `fill` before."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(fill)
    sharded = asked_for(model)
    optimizer = {
        f"{kind} {name}": make_sharded_optimizer_tensor(
            sharded[name], torch.full(p.shape, fill), prefix=f"optimizer.state.{kind}"
        )
        for name, p in model.named_parameters()
        for kind in STATES
    }
    loaded = dist_checkpointing.load(
        {"model": sharded, "states": optimizer}, folder, validate_access_integrity=True
    )
    tensors = {**loaded.pop("model"), **loaded.pop("states")}
    kept = {key: value for key, value in tensors.items() if not key.endswith("._extra_state")}
    return {key: value.clone() for key, value in kept.items() if isinstance(value, torch.Tensor)}, loaded


def rng_asked_for(axes: int) -> Any:
    """This rank's rng states, as that version's training loop names them: with or without a data-parallel axis."""
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    sizes = (1, ps.get_tensor_model_parallel_world_size(), ps.get_data_parallel_world_size())
    place = (0, ps.get_tensor_model_parallel_rank(), ps.get_data_parallel_rank())
    copy = 0 if axes == 3 else place[2]
    return ShardedObject("rng_state", [], sizes[:axes], place[:axes], replica_id=copy)


def match_groups(model: Any, common: dict[str, Any], args: Any) -> int:
    """Groups that Megatron asks for, all found in the checkpoint by its own matching."""
    from megatron.core.optimizer import OptimizerConfig, _get_param_groups
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    for name, parameter in model.named_parameters():  # as the distributed data-parallel wrapper would
        parameter.main_grad = None
        assert name
    config = OptimizerConfig(optimizer="adam", lr=args.lr, min_lr=args.min_lr, weight_decay=args.weight_decay)
    wanted = _get_param_groups([model], config, None)
    stored = common["optimizer"]
    parts = [stored] if "optimizer" in stored else [stored[i] for i in sorted(stored)]
    marks = [False, True] if len(parts) == 2 else [False]
    found = 0
    for part, mark in zip(parts, marks, strict=True):
        current = [g for g in wanted if g["is_expert_parallel"] is mark]
        groups = [dict(g, params=[]) for g in part["optimizer"]["param_groups"]]
        found += len(MegatronOptimizer._filter_and_reorder_param_groups(current, groups))
    return found if found == len(wanted) else -1


def main() -> None:
    rank, world, tp, ep = map(int, sys.argv[1:5])
    store, ours, original = sys.argv[5:8]
    start(rank, world, tp, ep, store)
    from megatron.core import dist_checkpointing

    args = dist_checkpointing.load_common_state_dict(ours)["args"]
    model = build_model(args, tp, ep)
    (a, common), (b, _) = load(model, ours, 7.0), load(model, original, 9.0)
    assert a.keys() == b.keys()
    different = [key for key in a if a[key].dtype != b[key].dtype or not torch.equal(a[key], b[key])]
    rng = {"rng": rng_asked_for(AXES)} if AXES else {}
    _, missing, unexpected = dist_checkpointing.load(
        {"model": asked_for(model), **rng}, ours, strict="return_all"
    )
    print(
        json.dumps(
            {
                "tensors": len(a),
                "elements": sum(t.numel() for t in a.values()),
                "different": different,
                "groups": match_groups(model, common, args),
                "not asked for": sorted({key for key in missing if not key.startswith("optimizer.")}),
                "not there": sorted(unexpected),
            }
        ),
        flush=True,
    )
    dist.barrier()
    dist.destroy_process_group()  # left to the interpreter's end, gloo's threads now and then abort the process


if __name__ == "__main__":
    main()
