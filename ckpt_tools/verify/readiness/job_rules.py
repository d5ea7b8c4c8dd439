"""What Megatron refuses about a job's settings alone, as a table: versions, condition, and what to change.

Read in Megatron-LM core_v0.16.1, core_v0.17.1, core_v0.19.0 and main d98e8a64, and in Megatron-Bridge main 067f987d.
"""

from __future__ import annotations

from collections.abc import Callable

from ckpt_tools.verify.readiness.facts import Facts, Rule, before, since
from ckpt_tools.verify.readiness.job import BRIDGE, MAIN, VERSIONS
from ckpt_tools.verify.report import ERROR, WARNING

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_REQUIRED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "micro_batch_size",
    "lr",
    "eval_interval",
)
_ARGUMENTS = "training/arguments.py validate_args"
_ADAPTER = "distributed/fsdp/mcore_fsdp_adapter.py FullyShardedDataParallelV1.__init__"
_BUFFER = "distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py ParamAndGradBuffer"
_CONFIG = "transformer/transformer_config.py TransformerConfig.__post_init__"
_DDP_CONFIG = "distributed/distributed_data_parallel_config.py __post_init__"
_V2 = "mcore_fsdp_adapter.py FullyShardedDataParallelV2._validate_config, fully_sharded_optimizer.py"
_BRIDGE_CONFIG = "Megatron-Bridge training/config.py ConfigContainer.validate"


def _switch(*names: str) -> Callable[[Facts], str | None]:
    """Broken when any of these switches is on."""
    return lambda f: next((f"{name} is on" for name in names if f.on(name)), None)


def _required(f: Facts) -> str | None:
    missing = [name for name in _REQUIRED if f.value(name) is None]
    if f.value("hybrid_layer_pattern") is not None and "num_layers" in missing:
        missing.remove("num_layers")
    if f.value("seq_length") is None and f.value("encoder_seq_length") is None:
        missing.append("seq_length")
    missing += [] if f.on("train_iters") or f.on("train_samples") else ["train_iters or train_samples"]
    if f.value("save") is not None and not f.on("save_interval"):
        missing.append("save_interval")
    return f"not given: {', '.join(missing)}" if missing else None


def _positions(f: Facts) -> str | None:
    length, most = f.value("seq_length"), f.value("max_position_embeddings")
    if length is None or most is None or most >= length:
        return None
    return f"max_position_embeddings {most} is below seq_length {length}"


def _no_positions(f: Facts) -> str | None:
    kind = "rope" if f.on("use_rotary_position_embeddings") else f.value("position_embedding_type")
    refused = f.value("add_position_embedding", True) is False and kind != "rope"
    return f"no_position_embedding with position_embedding_type {kind}" if refused else None


def _expert_ranks(f: Facts) -> str | None:
    ranks, experts = f.value("expert_model_parallel_size", 1), f.value("num_experts", 0)
    return None if ranks == 1 or (experts and experts % ranks == 0) else f"{experts} experts on {ranks} ranks"


def _ckpt_format(f: Facts) -> str | None:
    found = f.value("ckpt_format")
    return None if found == "fsdp_dtensor" else f"ckpt_format is {found}"


def _megatron_fsdp(f: Facts) -> str | None:
    return None if f.on("use_megatron_fsdp") else "use_megatron_fsdp is off"


def _pipeline(f: Facts) -> str | None:
    size = f.value("pipeline_model_parallel_size", 1)
    names = ("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage")
    virtual = next((f.value(name) for name in names if f.value(name) is not None), None)
    if size == 1 and virtual is None:
        return None
    return f"pipeline parallel size {size}" + ("" if virtual is None else f", virtual stages {virtual}")


def _is_version_2(f: Facts) -> bool:
    return bool(f.value("megatron_fsdp_version", 1) == 2)


def _distributed_optimizer(f: Facts) -> str | None:
    return None if f.on("use_distributed_optimizer") else "use_distributed_optimizer is off"


def _strategy(f: Facts) -> str | None:
    found = f.value("data_parallel_sharding_strategy")
    return None if found in STRATEGIES else f"data_parallel_sharding_strategy is {found!r}"


def _no_sharding(f: Facts) -> str | None:
    found = f.value("data_parallel_sharding_strategy")
    return "data_parallel_sharding_strategy is no_shard" if found == "no_shard" else None


def _meta_device(f: Facts) -> str | None:
    clash = f.on("init_model_with_meta_device") and f.on("use_megatron_fsdp") and _no_sharding(f)
    return "init_model_with_meta_device with data_parallel_sharding_strategy no_shard" if clash else None


def _outer_strategy(f: Facts) -> str | None:
    outer, inner = (
        f.value("outer_dp_sharding_strategy", "no_shard"),
        f.value("data_parallel_sharding_strategy"),
    )
    if outer == "no_shard" or (outer == "optim" and inner == "optim_grads_params"):
        return None
    return f"outer_dp_sharding_strategy is {outer} with {inner}"


def _fusion(f: Facts) -> str | None:
    shards = f.value("data_parallel_sharding_strategy") in ("optim_grads", "optim_grads_params")
    return "gradient_accumulation_fusion is on" if f.on("gradient_accumulation_fusion") and shards else None


def _max_connections(f: Facts) -> str | None:
    found = f.job.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    return "CUDA_DEVICE_MAX_CONNECTIONS is 1" if found == "1" else None


def _cpu_offloading(f: Facts) -> str | None:
    if not (f.on("cpu_offloading") or f.value("cpu_offloading_num_layers", 0) > 0):
        return None
    others = {
        "pipeline parallelism": f.value("pipeline_model_parallel_size", 1) > 1,
        "recompute_granularity": f.value("recompute_granularity") is not None,
        "fine_grained_activation_offloading": f.on("fine_grained_activation_offloading"),
    }
    found = [name for name, on in others.items() if on]
    return f"cpu_offloading with {' and '.join(found)}" if found else None


def _offloaded_layers(f: Facts) -> str | None:
    count, total = f.value("cpu_offloading_num_layers", 0), f.value("num_layers")
    return None if total is None or 0 <= count < total else f"cpu_offloading_num_layers is {count} of {total}"


def _user_buffers(f: Facts) -> str | None:
    segments = f.job.environment.get("PYTORCH_CUDA_ALLOC_CONF", "").split(",")
    clash = f.on("nccl_ub") and "expandable_segments:True" in segments
    return "nccl_ub with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" if clash else None


def _manual_registration(f: Facts) -> str | None:
    alone = f.on("fsdp_manual_registration") and not f.on("nccl_ub")
    return "fsdp_manual_registration without nccl_ub" if alone else None


def _weight_hash(f: Facts) -> str | None:
    every = f.value("check_weight_hash_across_dp_replicas_interval")
    if every is None or f.value("data_parallel_sharding_strategy") != "optim_grads_params":
        return None
    return f"check_weight_hash_across_dp_replicas_interval is {every}"


def _optimizer(f: Facts) -> str | None:
    found = f.value("optimizer")
    return None if found in ("sgd", "adam") else f"optimizer is {found}"


def _sgd(f: Facts) -> str | None:
    """Version 1 wraps it in the distributed optimizer (distrib_optimizer.py), which stops on any but Adam."""
    return None if f.value("optimizer") != "sgd" or _is_version_2(f) else "optimizer is sgd"


def _muon(f: Facts) -> str | None:
    found = f.value("optimizer", "")
    return f"optimizer is {found}" if "muon" in found else None


def _overlap_gather(f: Facts) -> str | None:
    alone = f.on("overlap_param_gather") and not f.on("overlap_grad_reduce")
    return "overlap_param_gather without overlap_grad_reduce" if alone else None


def _weight_shards(f: Facts) -> str | None:
    """Generalized tensor parallelism: more weight shards than ranks that compute with them."""
    sizes = {"tensor": f.tp, "expert_tensor": f.value("expert_tensor_parallel_size", f.tp)}
    for kind, ranks in sizes.items():
        shards = f.value(f"{kind}_parallel_num_weight_shards", ranks)
        if shards > ranks:
            return f"{kind}_parallel_num_weight_shards is {shards} on {ranks} ranks"
    return None


def _two_formats(f: Facts) -> str | None:
    return "fp4 and fp8 are both on" if f.value("fp4") and f.value("fp8") else None


def _fp4_gather(f: Facts) -> str | None:
    on = f.on("fp4_param_gather") or f.on("fp4_param")
    return "fp4_param_gather without fp4_format" if on and not f.value("fp4") else None


def _delayed_gradients(f: Facts) -> str | None:
    other = f.value("transformer_impl") != "transformer_engine"
    return "delay_wgrad_compute without transformer_engine" if f.on("delay_wgrad_compute") and other else None


def _expert_overlap(f: Facts) -> str | None:
    if not f.on("overlap_moe_expert_parallel_comm"):
        return None
    names = ("fsdp_double_buffer", "nccl_ub", "megatron_fsdp_max_pool_double_buffer")
    found = [name for name in names if f.on(name)]
    graphs = f.value("cuda_graph_impl", "none")
    found += [] if graphs in ("none", "full_iteration") else [f"cuda_graph_impl {graphs}"]
    return f"overlap_moe_expert_parallel_comm with {', '.join(found)}" if found else None


_V2_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_V2_SWITCHES = (
    "use_distributed_optimizer", "gradient_accumulation_fusion", "calculate_per_token_loss", "fp16", "fp8", "fp4",
    "fp8_param_gather", "fp4_param_gather", "fsdp_manual_registration", "fsdp_db_use_persist_buf_on_alloc_fail",
    "delay_wgrad_compute", "megatron_fsdp_enable_fine_grained_param_gather", "megatron_fsdp_max_pool_double_buffer",
    "overlap_param_gather_with_optimizer_step", "optimizer_cpu_offload", "data_parallel_random_init",
    "swiglu", "mla_down_proj_fusion",  # whose fused tensors the checkpoint code takes apart by what only v1 has
)  # fmt: skip
_V2_VALUES = ("suggested_communication_unit_size", "ddp_num_buckets", "loss_scale")


def _any_version_2(f: Facts) -> str | None:
    return "megatron_fsdp_version is 2" if _is_version_2(f) else None


def _version_2(f: Facts) -> str | None:
    if not _is_version_2(f):
        return None
    found = [f"{name} is {size}" for name in _V2_SIZES if (size := f.value(name, 1)) != 1]
    found += [f"{name} is on" for name in _V2_SWITCHES if f.on(name)]
    found += [f"{name} is given" for name in _V2_VALUES if f.value(name) is not None]
    wanted = {"data_parallel_sharding_strategy": "optim_grads_params", "outer_dp_sharding_strategy": "no_shard",
              "cuda_graph_impl": "none"}  # fmt: skip
    found += [f"{name} is {is_}" for name, ok in wanted.items() if (is_ := f.value(name, ok)) != ok]
    if f.on("nccl_ub"):  # main switches manual registration on with it, which version 2 refuses
        found.append("nccl_ub is on")
    found += ["the optimizer's state is asked for"] if f.loads("optim") else []
    return ", ".join(found) or None


_LM, _ALL = VERSIONS, (*VERSIONS, BRIDGE)
JOB_RULES = (
    Rule("required", ERROR, _required, "the job stops without them",
         "give them; --use-checkpoint-args takes those of the model from the checkpoint", _ARGUMENTS, _LM),
    Rule("positions", ERROR, _positions, "every position of a sequence needs one", "--max-position-embeddings of at "
         "least --seq-length", _ARGUMENTS, _LM),
    Rule("no-position-embedding", ERROR, _no_positions, "Megatron takes this flag with rope alone",
         "drop --no-position-embedding; if the checkpoint's args have it, import the model again", _ARGUMENTS, _LM),
    Rule("expert-ranks", ERROR, _expert_ranks, "every expert-parallel rank has the same number of experts",
         "--expert-model-parallel-size that divides --num-experts", _ARGUMENTS, _LM),
    Rule("ckpt-format", ERROR, _ckpt_format, "Megatron-FSDP saves and loads in this format only",
         "--ckpt-format fsdp_dtensor", _ARGUMENTS, _ALL),
    Rule("megatron-fsdp", ERROR, _megatron_fsdp, "nothing else loads an fsdp_dtensor checkpoint",
         "--use-megatron-fsdp", _ARGUMENTS, _ALL),
    Rule("fsdp-or-fsdp2", ERROR, _switch("use_torch_fsdp2"), "PyTorch's FSDP2 and Megatron-FSDP exclude each other",
         "drop --use-torch-fsdp2", "training/models/dist_utils.py, " + _ARGUMENTS, _ALL),
    Rule("pipeline", ERROR, _pipeline, "stages number their layers locally in this format: layers would be mixed up",
         "--pipeline-model-parallel-size 1, no virtual stages",
         "training/checkpointing.py preprocess_fsdp_dtensor_state_dict", _ALL),
    Rule("distributed-optimizer", ERROR, _distributed_optimizer, "the sharded states live in the distributed "
         "optimizer; later versions switch it on by themselves", "--use-distributed-optimizer",
         "optimizer/distrib_optimizer.py", before("core-0.19")),
    Rule("sharding-strategy", ERROR, _strategy, f"known strategies are {', '.join(STRATEGIES)}",
         "ddp.data_parallel_sharding_strategy=optim_grads_params", _BUFFER, (BRIDGE,)),
    Rule("no-sharding", WARNING, _no_sharding, "every rank then holds the whole model",
         "--data-parallel-sharding-strategy optim_grads_params", _BUFFER, _ALL),
    Rule("meta-device", ERROR, _meta_device, "without sharding nothing makes the weights real",
         "drop --init-model-with-meta-device, or shard", _ARGUMENTS, since("core-0.19")),
    Rule("outer-strategy", ERROR, _outer_strategy, "hybrid sharding knows the outer strategy optim, with "
         "optim_grads_params inside, only", "--outer-dp-sharding-strategy no_shard", _BUFFER, _ALL),
    Rule("tp-pp-dp-mapping", ERROR, _switch("use_tp_pp_dp_mapping"), "Megatron-FSDP's mesh needs the order of ranks "
         "tp-cp-ep-dp-pp", "dist.use_tp_pp_dp_mapping=false", _BRIDGE_CONFIG, (BRIDGE,)),
    Rule("average-in-collective", WARNING, _switch("average_in_collective"), "Bridge switches it off by itself",
         "ddp.average_in_collective=false", _BRIDGE_CONFIG, (BRIDGE,)),
    Rule("gradient-accumulation-fusion", WARNING, _fusion, "fused weight gradients go around the sharded buffer "
         "unless Transformer Engine is 2.10 or later", "--no-gradient-accumulation-fusion", _ADAPTER, _ALL),
    Rule("max-connections", ERROR, _max_connections, "one hardware queue serialises all-gathers with compute; "
         "Megatron refuses to start", "unset CUDA_DEVICE_MAX_CONNECTIONS", _ARGUMENTS, _ALL),
    Rule("mxfp8-buffer", WARNING, _switch("reuse_grad_buf_for_mxfp8_param_ag"), "Megatron-FSDP has no such "
         "gradient buffer to reuse", "drop --reuse-grad-buf-for-mxfp8-param-ag", _ARGUMENTS, _ALL),
    Rule("cpu-offloading", ERROR, _cpu_offloading, "activation offloading excludes these",
         "drop --cpu-offloading-num-layers", _CONFIG, _ALL),
    Rule("offloaded-layers", ERROR, _offloaded_layers, "at least one layer has to stay on the device",
         "--cpu-offloading-num-layers below the number of layers", _CONFIG, _ALL),
    Rule("user-buffers", ERROR, _user_buffers,
         "NCCL user buffers need memory pools, which expandable segments break",
         "unset PYTORCH_CUDA_ALLOC_CONF, or drop --use-nccl-ub", _DDP_CONFIG, before("core-0.19")),
    Rule("user-buffers", WARNING, _user_buffers, "refused with torch below 2.11: NCCL user buffers "
         "need memory pools, which expandable segments break there",
         "unset PYTORCH_CUDA_ALLOC_CONF, or drop --use-nccl-ub", _DDP_CONFIG, (*since("core-0.19"), BRIDGE)),
    Rule("manual-registration", ERROR, _manual_registration, "it registers NCCL user buffers", "--use-nccl-ub",
         _ARGUMENTS, _ALL),
    Rule("weight-hash", ERROR, _weight_hash, "no rank has whole weights to compare", "drop the interval",
         _ARGUMENTS, _ALL),
    Rule("optimizer", ERROR, _muon, "Megatron-FSDP does not run it", "--optimizer adam", _ARGUMENTS,
         before("core-0.19")),
    Rule("optimizer", ERROR, _optimizer, "Megatron-FSDP runs no emerging optimizer (Muon, Lion, SOAP)",
         "--optimizer adam", _ARGUMENTS, since("core-0.19")),
    Rule("sgd", ERROR, _sgd, "the distributed optimizer that Megatron-FSDP needs takes Adam alone",
         "--optimizer adam", "core/optimizer/distrib_optimizer.py DistributedOptimizer", _ALL),
    Rule("single-grouped", ERROR, _switch("moe_single_grouped_weight", "moe_single_grouped_bias"), "one tensor of "
         "all experts does not go into Megatron-FSDP's buffers", "drop --moe-single-grouped-weight and -bias",
         _ARGUMENTS, since("core-0.19")),
    Rule("hybrid-context-parallel", ERROR, _switch("hybrid_context_parallel"), "Megatron-FSDP does not run it",
         "drop --hybrid-context-parallel", _ARGUMENTS, _LM),
    Rule("overlap-param-gather", ERROR, _overlap_gather, "one is built on the other", "--overlap-grad-reduce",
         _ARGUMENTS, _LM),
    Rule("overlap-optimizer-step", ERROR, _switch("overlap_param_gather_with_optimizer_step"), "it needs an "
         "interleaved pipeline and no distributed checkpoints", "drop --overlap-param-gather-with-optimizer-step",
         _ARGUMENTS, _LM),
    Rule("weight-shards", ERROR, _weight_shards, "generalized tensor parallelism saves torch and torch_dist only",
         "drop --tensor-parallel-num-weight-shards and --expert-tensor-parallel-num-weight-shards", _ARGUMENTS,
         since("core-0.19")),
    Rule("fp4-or-fp8", ERROR, _two_formats, "they exclude each other", "one of --fp8-format and --fp4-format",
         _ARGUMENTS, _LM),
    Rule("fp4-gather", ERROR, _fp4_gather, "there is nothing in FP4 to gather", "--fp4-format", _ARGUMENTS, _LM),
    Rule("delayed-gradients", ERROR, _delayed_gradients, "only its modules delay weight gradients",
         "--transformer-impl transformer_engine", _ARGUMENTS, _LM),
    Rule("expert-overlap", ERROR, _expert_overlap, "the overlapped schedule runs with neither double buffers nor "
         "graphs of single layers", "drop --overlap-moe-expert-parallel-comm, or what it clashes with", _ADAPTER,
         since("core-0.19")),
    Rule("version-2", ERROR, _version_2, "version 2 runs without these, and loads no optimizer states",
         "--megatron-fsdp-version 1", _V2, (MAIN,)),
    Rule("version-2", ERROR, _any_version_2, "Bridge loads no checkpoint with it", "ddp.megatron_fsdp_version=1",
         _BRIDGE_CONFIG, (BRIDGE,)),
)  # fmt: skip
