"""The command that starts a job on a checkpoint, with the flags of the model that it holds.

Megatron-FSDP's on `fsdp_dtensor`, a 3D-parallel job of Megatron-LM on `torch_dist`.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.formats.pickle.unpickle import StandIn, TorchDtype
from ckpt_tools.megatron.huggingface.config.megatron_args import OF_MLA
from ckpt_tools.verify.readiness.facts import Facts, before
from ckpt_tools.verify.readiness.job import BRIDGE, MAIN, Flag, defaults_of, flag_words, flags_named, flags_of
from ckpt_tools.verify.readiness.model_rules import decoder_layers, gated_delta_nets
from ckpt_tools.verify.readiness.rules import wanted_rows

_SAID: Mapping[str, tuple[type, ...]] = {
    "str": (str,), "int": (int,), "float": (int, float), "bool": (), "tuple": (int,), "pattern": (int,)
}  # fmt: skip
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}
# Settings of the run before that do not go over to the job: places, the 3D-parallel layout, what validate_args itself
# filled in and refuses to be given, and what belongs to one machine or one evening.
_LEFT_OUT = re.compile(
    r"load|save|save_.*|pretrained_checkpoint|.*_(path|dir|file|url)|.*data_path|tokenizer_model|yaml_cfg|mock_data"
    r"|dump_.*|.*pipeline.*|decoder_(first|last)_.*|account_for_.*|overlap_p2p_.*|align_.*|defer_embedding_.*"
    r"|encoder_(num_layers|seq_length)|(start|end)_weight_decay|eval_(global|micro)_batch_size"
    r"|moe_(deepep|hybridep)_num_sms|high_priority_stream_groups|padded_vocab_size|.*_num_weight_shards"
    r"|finetune|no_(load|save)_.*|use_checkpoint_args|auto_detect_.*|ckpt_.*|dist_ckpt_.*|async_.*|non_persistent_.*"
    r"|exit_.*|profile.*|log_.*|tensorboard_.*|wandb_.*|one_logger_.*|timing_.*|record_.*|memory_.*|enable_msc"
    r"|(rl|grpo|langrl|inference|export|muon|inprocess|error_injection|mamba_inference)_.*|distributed_.*|local_rank"
    r"|lazy_mpu_init|iterations_to_skip|result_.*|check_weight_hash_.*|rank|world_size|.*_interval|num_workers"
    r"|use_torch_fsdp2|torch_fsdp2_.*|use_tp_pp_dp_mapping|hybrid_context_parallel|ddp_.*|reuse_grad_buf_.*"
    r"|overlap_param_gather_with_optimizer_step|dist_url|use_gloo_process_groups"
)
# Their defaults differ between versions, or are what a reader looks for first.
_ALWAYS_SAID = (
    "data_parallel_sharding_strategy", "tensor_model_parallel_size", "pipeline_model_parallel_size", "ckpt_format"
)  # fmt: skip
# What Megatron asks for without a default, where no run tells it; numbers with which the rest can be judged.
_TO_FILL: Mapping[str, tuple[str, ...]] = {
    "GLOBAL_BATCH": (), "TRAIN_ITERS": ("--train-iters", "1"), "LR": ("--lr", "1")
}  # fmt: skip
_INTERVAL = 1000  # steps, where no run tells it: of saves, and of evaluation, which every resume divides by
_NODE = 8  # GPUs, if unknown
_NODES = f"# on every node; {_NODE} GPUs a node are assumed, HEAD_NODE is the name of one of them"
_OF_PIPELINE = re.compile(
    r"(?!transformer_).*pipeline.*|decoder_(first|last)_.*|account_for_.*|defer_embedding_.*"
)
_IN_BUCKETS = ("dp_reshardable", "fully_sharded_bucket_space", "dp_zero_gather_scatter")
_OLD_NAMES = {"layernorm_epsilon": "norm_epsilon", "layernorm_zero_centered_gamma": "apply_layernorm_1p"}
_NEW_NAMES = {old: new for new, old in _OLD_NAMES.items()}
_SAID_OTHERWISE = ("params_dtype", "padded_vocab_size", "moe_layer_freq")
_MLA_YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}  # no flags
_OF_FSDP_JOB: Mapping[str, Any] = {
    "use_megatron_fsdp": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "use_distributed_optimizer": True,
    "gradient_accumulation_fusion": False,
    "ckpt_format": "fsdp_dtensor",
    "pipeline_model_parallel_size": 1,
}
_OF_FSDP = re.compile(
    r"(outer_dp_sharding_strategy|num_distributed_optimizer_instances|megatron_fsdp_.*|fsdp_.*|nccl_ub)"
)
# Of Megatron-Bridge's `model` section, in the order in which they are printed.
_BRIDGE_MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "vocab_size", "make_vocab_size_divisible_by", "seq_length", "normalization", "add_bias_linear",
    "add_qkv_bias", "qk_layernorm", "layernorm_epsilon", "position_embedding_type", "rotary_base",
    "rotary_percent", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
    "qk_pos_emb_head_dim", "v_head_dim", "num_moe_experts", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "moe_layer_freq", "moe_router_topk", "moe_grouped_gemm",
    "moe_router_enable_expert_bias", "mtp_num_layers", "transformer_impl", "should_pad_vocab",
    "gated_linear_unit", "share_embeddings_and_output_weights", "expert_model_parallel_size",
    "context_parallel_size",
)  # fmt: skip
_BRIDGE_ARGUMENTS = {"num_moe_experts": "num_experts", "gated_linear_unit": "swiglu"}  # where names differ


@dataclass(frozen=True, slots=True)
class Launch:
    """`words` of the command, after shell lines for the `environment`."""

    environment: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def filled_in(self) -> tuple[str, ...]:
        """The words with numbers in the places that are for the user: all else can be judged."""
        words = list(self.words)
        for name, numbers in _TO_FILL.items():
            if name in words:
                at = words.index(name)
                words[at - 1 : at + 1] = numbers
        return tuple(words)

    @property
    def command(self) -> str:
        """The command as a shell reads it, a line a flag."""
        lines = [list(map(shlex.quote, self.words[:1]))]
        for word in self.words[1:]:
            name, equals, _ = word.partition("=")
            is_override = equals and "." in name and "/" not in name
            if word.startswith("--") or word.endswith(".py") or is_override:
                lines.append([])
            lines[-1].append(shlex.quote(word))
        return " \\\n    ".join(" ".join(line) for line in lines)


def launch(facts: Facts, load: str, step: int | None = None) -> Launch:
    """The command of a job that continues from the checkpoint in the root `load`, with the settings of its run.

    `step` is its iteration where the tracker names another.
    """
    if facts.job.program == BRIDGE:
        words, comments = ("torchrun", *_bridge(facts, load, step)), tuple[str, ...]()
    else:
        settings, comments = _settings(facts)
        words = ("torchrun", *_megatron(facts, load, settings, step))
    assumed = (_NODES,) if "--nnodes" in words else ()
    return Launch((*_environment(facts), *assumed, *comments), words)


def _environment(f: Facts) -> Iterator[str]:
    """What Megatron-FSDP wants of CUDA's queues, and a job of tensor or context parallelism without it.

    And comments: how far the job's sizes may differ from the run's, and how the run cut its pipeline.
    """
    if f.kind == "fsdp_dtensor":
        yield "unset CUDA_DEVICE_MAX_CONNECTIONS"
        return
    if f.tp > 1 or f.args.get("context_parallel_size", 1) != 1:
        yield "export CUDA_DEVICE_MAX_CONNECTIONS=1  # before Blackwell"
    if f.layout in _IN_BUCKETS:
        yield f"# its optimizer ({f.layout}) loads at the TP, PP and EP of the run alone"
    else:
        yield "# it loads at any TP, PP and EP, on any number of GPUs; rng states at the TP and PP of the run alone"
    by_flag = {"pipeline_model_parallel_size": f.args.get("pipeline_model_parallel_size")}
    usual = defaults_of(f.job.program) | by_flag
    for name, value in f.args.items():
        if _OF_PIPELINE.fullmatch(name) and value is not None and value != usual.get(name):
            yield f"# the run's pipeline had {name} {value!a}"


def _launcher(ranks: int) -> list[str]:
    """torchrun's options for this many GPUs: as many a node as there may be of 8, the address is for the user."""
    node = next(gpus for gpus in range(_NODE, 0, -1) if ranks % gpus == 0)
    if node == ranks:
        return ["--nproc-per-node", str(ranks)]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HEAD_NODE:29500"]
    return ["--nnodes", str(ranks // node), "--nproc-per-node", str(node), *rendezvous]


def _megatron(f: Facts, load: str, settings: Mapping[str, Any], step: int | None) -> Iterator[str]:
    version = f.job.program
    yield from (*_launcher(f.ranks or _ranks(settings)), _script(f))
    yield from ("--load", load, "--save", load)
    if step is not None:
        yield from ("--ckpt-step", str(step))
    for name in sorted(settings):
        yield from flag_words(name, settings[name], version, name in _ALWAYS_SAID) or ()
    if f.args.get("global_batch_size") is None:
        yield from ("--global-batch-size", "GLOBAL_BATCH")
    if not settings.keys() & {"train_iters", "train_samples"}:
        yield from ("--train-iters", "TRAIN_ITERS")
    if "lr" not in settings:
        yield from ("--lr", "LR")
    yield from _data(f)


def unsaid(f: Facts) -> list[str]:
    """Settings that change what the model computes and that no flag of the job's program can say."""
    from ckpt_tools.megatron.huggingface.config.ledger import arguments, is_neutral, short

    if f.job.program == BRIDGE or f.by_bridge:
        return []
    ledger, found = arguments(), []
    for name, value in f.args.items():
        change = ledger.changes.get(name)
        known = is_neutral(value, change, f.args) if change else name not in ledger.carried or not value
        usual = _MLA_YARN.get(name, defaults_of(MAIN).get(name))
        if known or name in _SAID_OTHERWISE or value == usual:
            continue
        of = flags_named(f.job.program)
        flags = (*of.get(name, ()), *of.get(_NEW_NAMES.get(name, ""), ()))
        values = ((flag.name, said_by(value, flag)) for flag in flags)
        if not any(v is not None and flag_words(n, v, f.job.program) is not None for n, v in values):
            found.append(f"{name} {short(value)}")
    return found


def _stored_settings(f: Facts) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings that the job keeps from the run, and a comment for each value that its flag cannot express."""
    native = f.kind == "fsdp_dtensor" and bool(f.args.get("use_megatron_fsdp"))
    found: dict[str, Any] = {}
    unsaid: list[str] = []
    for flag in flags_of(f.job.program):
        stored = f.args.get(flag.name, f.args.get(_OLD_NAMES.get(flag.name, "")))
        if stored is None or _LEFT_OUT.fullmatch(flag.name):
            continue
        value = said_by(stored, flag)
        if value is None:
            unsaid.append(f"# the run had {flag.name} {stored!a}, which {flag.options[0]} cannot say")
        elif native or not _OF_FSDP.fullmatch(flag.name):
            found[flag.name] = value
    return found, tuple(unsaid)


def _settings(f: Facts) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Every setting that the job is given, by name: the run's before, but for what checkpoint and program decide.

    And comments on those that no flag can say.
    """
    args = f.args
    found, unsaid = _stored_settings(f)
    found |= _decided(f)
    if found.get("expert_tensor_parallel_size") == args.get("tensor_model_parallel_size"):
        found.pop("expert_tensor_parallel_size", None)  # the default: as many as the job's other tensors
    if found.get("num_query_groups", 1) not in (1, found.get("num_attention_heads")):
        found["group_query_attention"] = True  # Bridge has no such switch
    if f.tp == 1:
        found.pop("sequence_parallel", None)
    if not found.get("multi_latent_attention"):
        found = {name: value for name, value in found.items() if name not in OF_MLA}
    if found.get("num_layers") is not None and found.get("hybrid_layer_pattern") is not None:
        del found["num_layers"]  # Megatron counts the pattern, and refuses both
    if found.get("train_samples") is not None:
        found.pop("train_iters", None)  # which follows, and which Megatron does not take as well
    if found.get("step_batch_size_schedule") is not None:
        found.pop("global_batch_size", None)  # likewise
    for name in ("save_interval", "eval_interval"):
        stored = args.get(name)
        found[name] = stored if type(stored) is int and stored > 0 else _INTERVAL
    found.setdefault("lr", f.schedule.get("max_lr"))
    found.setdefault("micro_batch_size", 1)
    found.setdefault("seq_length", found.get("max_position_embeddings", args.get("encoder_seq_length")))
    found.setdefault("max_position_embeddings", found["seq_length"])
    found |= _batch(found, f)
    return {name: value for name, value in found.items() if value is not None}, unsaid


def _batch(found: Mapping[str, Any], f: Facts) -> dict[str, Any]:
    """The run's global batch in micro-batches that the ranks can share; None where they cannot: one for each rank."""
    cp = found.get("context_parallel_size", 1)
    pp = found["pipeline_model_parallel_size"]
    ranks = (f.ranks or _ranks(found)) // (f.tp * cp * pp) if type(cp) is int and cp > 0 else 0
    total, micro = found.get("global_batch_size"), found["micro_batch_size"]
    if type(total) is not int or type(micro) is not int or min(ranks, total, micro) < 1:
        return {}
    if total % ranks:  # steps of the stored schedule are samples, and stay what they are
        kept = not found.get("override_opt_param_scheduler")
        return {"global_batch_size": None, "use_checkpoint_opt_param_scheduler": kept}
    return {"micro_batch_size": math.gcd(micro, total // ranks)}


def _decided(f: Facts) -> dict[str, Any]:
    """What the checkpoint and its program decide, whatever the run before was given."""
    stored = f.stored
    decided: dict[str, Any] = {
        **_of_record(f),
        **(_OF_FSDP_JOB if f.kind == "fsdp_dtensor" else _of_torch_dist(f)),
        "tensor_model_parallel_size": f.tp,
        # The stored rows, unless the job's own padding gives them.
        "padded_vocab_size": None if stored.rows == wanted_rows(f, f.args) else stored.rows,
    }
    if stored.version_2:  # main neither stores nor loads its optimizer yet
        decided |= {"megatron_fsdp_version": 2, "use_distributed_optimizer": False, "no_load_optim": True}
    if stored.gated is not None:
        decided["swiglu"] = stored.gated
    if stored.sequential_experts is not None:
        decided["moe_grouped_gemm"] = not stored.sequential_experts
    if stored.output_layer is not None:
        decided["untie_embeddings_and_output_weights"] = stored.output_layer
    if stored.local_norms is not None:
        decided["transformer_impl"] = "local" if stored.local_norms else "transformer_engine"
    delta_nets = gated_delta_nets(stored.shapes)
    if delta_nets and f.args.get("experimental_attention_variant") is None:
        layers = range(decoder_layers(stored.shapes))
        decided["experimental_attention_variant"] = "gated_delta_net"
        decided["linear_attention_freq"] = [int(i in delta_nets) for i in layers]
    if stored.mtp_layers:
        decided["mtp_num_layers"] = stored.mtp_layers
    if f.begins:
        # The rates that a fresh optimizer was made with, which the job's arguments replace.
        rates = {"lr": "max_lr", "min_lr": "min_lr", "weight_decay": "start_wd"}
        decided |= {name: f.schedule[key] for name, key in rates.items() if key in f.schedule}
        decided["override_opt_param_scheduler"] = True
    stages = range(decided["pipeline_model_parallel_size"])
    if not f.states and (f.kind == "torch_dist" or f.job.program in before("core-0.18")):
        decided["finetune"] = True
    elif not all((stage, rank) in f.rng_ranks for stage in stages for rank in range(f.tp)):
        decided["no_load_rng"] = True
    return decided


def _of_torch_dist(f: Facts) -> dict[str, Any]:
    """What a 3D-parallel job is given: the run's pipeline, and the optimizer that the checkpoint holds."""
    stages = f.args.get("pipeline_model_parallel_size")
    return {
        "use_megatron_fsdp": False,
        # on by default, and in need of Apex
        **({} if "gradient_accumulation_fusion" in f.args else {"gradient_accumulation_fusion": False}),
        "data_parallel_sharding_strategy": None,
        **({} if f.layout == "none" else {"use_distributed_optimizer": f.layout != "non_distributed"}),
        "ckpt_format": "torch_dist",
        "pipeline_model_parallel_size": stages if type(stages) is int and stages > 0 else 1,
    }


def _of_record(f: Facts) -> dict[str, Any]:
    """Parallel sizes of the job that the checkpoint was converted for, and what they need."""
    found = {f"{axis}_parallel_size": size for axis, size in f.sizes.items()}
    if f.tp > 1 and any(".experts." in name for name in f.stored.shapes):
        found["sequence_parallel"] = True  # without it a layer of experts does not train
    return found


def said_by(value: Any, flag: Flag) -> Any:
    """A stored argument as its flag takes it; None for what it cannot say."""
    if isinstance(value, TorchDtype):
        return _DTYPES.get(value.name)
    if isinstance(value, StandIn):  # a member of an enum that counts from 1
        number = value.args[0] if len(value.args) == 1 else None
        choices = flag.choices or ()
        return choices[number - 1] if isinstance(number, int) and 0 < number <= len(choices) else None
    if flag.kind != "store":
        return value if isinstance(value, bool) else None
    many = flag.nargs is not None or flag.type in ("tuple", "pattern")
    items = value if many and isinstance(value, list | tuple) else [value]
    if flag.type == "int" and not many and isinstance(value, float) and value.is_integer():
        return int(value)  # a base of 500000.0, as config.json has it
    fits = all(isinstance(item, _SAID[flag.type]) and not isinstance(item, bool) for item in items)
    return value if fits else None


def _ranks(settings: Mapping[str, Any]) -> int:
    """The fewest GPUs on which the job's parallel sizes fit."""

    def size(name: str, default: int = 1) -> int:
        found = settings.get(name, default)
        return found if isinstance(found, int) and found > 0 else default

    tp = size("tensor_model_parallel_size")
    dense = tp * size("context_parallel_size")
    stages = size("pipeline_model_parallel_size")
    sparse = size("expert_tensor_parallel_size", tp) * size("expert_model_parallel_size")
    return math.lcm(dense, sparse) * stages * size("num_distributed_optimizer_instances")


def _script(f: Facts) -> str:
    if any(name.startswith("vision_model.") for name in f.stored.shapes):
        return "pretrain_vlm.py"
    if any(".mixer." in name for name in f.stored.shapes):
        return "pretrain_mamba.py" if f.job.program in before("core-0.18") else "pretrain_hybrid.py"
    return "pretrain_gpt.py"


def _data(f: Facts) -> Iterator[str]:
    """Data and tokenizer: their places are for the user to fill in."""
    if f.args.get("mock_data"):
        yield "--mock-data"
    else:
        yield from ("--data-path", "DATA_PATH")
    if f.args.get("tokenizer_type") is None:
        yield from ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "TOKENIZER_MODEL")
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        if f.args.get(name) is not None:
            yield from ("--" + name.replace("_", "-"), name.upper())


def _bridge(f: Facts, load: str, step: int | None) -> Iterator[str]:
    """Bridge's runner: a recipe of the model's family, and what the checkpoint decides about it."""
    model = {name: f.args.get(_BRIDGE_ARGUMENTS.get(name, name), f.args.get(name)) for name in _BRIDGE_MODEL}
    decided = _decided(f)
    model |= {name: decided[name] for name in ("transformer_impl", "moe_grouped_gemm") if name in decided}
    if (untied := f.stored.output_layer) is not None:
        model["share_embeddings_and_output_weights"] = not untied
    if (rows := decided["padded_vocab_size"]) is not None:
        model |= {"vocab_size": rows, "should_pad_vocab": False}
    model |= {
        "tensor_model_parallel_size": f.tp,
        "pipeline_model_parallel_size": 1,
        "gradient_accumulation_fusion": False,
    }
    model |= _of_record(f)
    settings = {f"model.{name}": value for name, value in model.items()} | {
        "dist.use_megatron_fsdp": True,
        "ddp.use_megatron_fsdp": True,
        "ddp.data_parallel_sharding_strategy": "optim_grads_params",
        "checkpoint.ckpt_format": "fsdp_dtensor",
        "checkpoint.load": load,
        "checkpoint.save": load,
        "checkpoint.ckpt_step": step,
        "checkpoint.strict_fsdp_dtensor_load": True,
        "checkpoint.load_optim": bool(f.states),
        "checkpoint.load_rng": all((0, rank) in f.rng_ranks for rank in range(f.tp)),
    }
    yield from (*_launcher(f.ranks or _ranks(model)), "scripts/training/run_recipe.py", "--recipe", "RECIPE")
    for name, value in settings.items():
        is_numbers = isinstance(value, list) and set(map(type, value)) <= {int}
        if isinstance(value, bool | int | float) or is_numbers:
            yield f"{name}={json.dumps(value, separators=(',', ':'))}"
        elif isinstance(value, str):
            yield f"{name}={value}"
