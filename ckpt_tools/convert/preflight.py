"""`preflight`: will a Megatron-FSDP job load this checkpoint, and how is it launched; told before a GPU is held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.convert.opened import Opened, open_checkpoint
from ckpt_tools.errors import UsageError
from ckpt_tools.megatron.fsdp_dtensor import RNG_KEY
from ckpt_tools.megatron.hybrid import is_hybrid
from ckpt_tools.megatron.torch_dist import is_optimizer_key, layer_counts
from ckpt_tools.verify import meaning
from ckpt_tools.verify.job import Job, merge, parse_command, parse_yaml
from ckpt_tools.verify.place import check_entries
from ckpt_tools.verify.report import WARNING, Check, Finding, Report
from ckpt_tools.verify.rules import RULES, Facts, Rule

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True, slots=True)
class Preflight:
    """The rules' verdicts, and how the job is to be launched."""

    report: Report
    environment: tuple[str, ...]  # shell lines
    flags: tuple[str, ...]  # of Megatron-LM


def preflight(
    checkpoint: str,
    words: Sequence[str] = (),
    yaml_file: Path | None = None,
    iteration: int | None = None,
    trust_pickle: bool = False,
) -> Preflight:
    """Every rule on the checkpoint and, when described by flags or YAML, on the job that is to load it.

    Raises:
        UsageError: the YAML file cannot be read.
        Otherwise the errors of opening a checkpoint.
    """
    job = Job()
    if yaml_file is not None:
        try:
            job = parse_yaml(yaml_file.read_text(), str(yaml_file))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{yaml_file}: {error}") from None
    if words:
        job = merge(job, parse_command(words))
    with open_checkpoint(checkpoint, iteration, trust_pickle) as opened:
        facts = facts_of(opened, job)
        checks = [run_rule(rule, facts) for rule in RULES if job or not rule.on_job]
        checks += _stored_checks(opened)
        return Preflight(
            Report(opened.location.path, opened.location.kind, tuple(checks)), *_launch(opened, facts)
        )


def run_rule(rule: Rule, facts: Facts) -> Check:
    """The verdict of one rule."""
    found = rule.broken(facts)
    severity = WARNING if rule.bridge_corrects and facts.job.is_bridge else rule.severity
    findings = () if found is None else (Finding(rule.name, severity, found, rule.why, rule.fix),)
    return Check(rule.name, "rules", 1, findings)


def facts_of(opened: Opened, job: Job) -> Facts:
    """What the checkpoint tells about the job that can load it."""
    catalog, common, kind = opened.catalog, opened.common, opened.location.kind
    weights = (
        meaning.fsdp_weights(catalog) if kind == "fsdp_dtensor" else meaning.torch_dist_weights(catalog)[0]
    )
    names = [weight.name for weight in weights]
    rows = next((w.shape[0] for w in weights if w.name.endswith(EMBEDDING)), None)
    if kind == "fsdp_dtensor":
        ranks = {
            _rng_rank(key) for key in (*catalog.tensors, *catalog.objects) if key.startswith("rng_state.(")
        }
        layout = _stored_style(names)
    else:
        ranks = {(int(m[1]), int(m[2])) for m in map(RNG_KEY.match, catalog.objects) if m}
        layout = (None, None, None)  # decided by the conversion
    keys = (*catalog.tensors, *catalog.objects)
    return Facts(
        kind=kind,
        job=job,
        args=common.args or common.model_config,
        has_optimizer=any(is_optimizer_key(key) for key in keys),
        rng_ranks=frozenset(ranks),
        vocabulary_rows=rows,
        has_output_layer=any(name.endswith(OUTPUT) for name in names) if rows is not None else None,
        gated=layout[0],
        sequential_experts=layout[1],
        local_norms=layout[2],
        mtp_layers=next((n for block, n in layer_counts(names).items() if ".mtp." in f".{block}"), 0),
    )


def _rng_rank(key: str) -> tuple[int, int]:
    pp, tp = key.removeprefix("rng_state.(").partition(")")[0].split(", ")
    return int(pp), int(tp)


def _stored_style(names: Sequence[str]) -> tuple[bool | None, bool | None, bool | None]:
    """Whether fc1 is in halves, experts are modules of their own, and norms are: None where nothing tells."""
    fc1 = [name for name in names if ".linear_fc1.weight" in name]
    experts = [name for name in names if ".experts." in name]
    fused = any(name.endswith(".linear_qkv.layer_norm_weight") for name in names)
    apart = any(name.endswith(".input_layernorm.weight") for name in names)
    return (
        any(name.endswith(("_w", "_v")) for name in fc1) if fc1 else None,
        any(".local_experts." in name for name in experts) if experts else None,
        apart if fused != apart and not is_hybrid(names) else None,  # a HybridModel has one spec only
    )


def _stored_checks(opened: Opened) -> list[Check]:
    """The checks of `verify` that decide whether a strict load finds every key it asks for."""
    if opened.location.kind != "fsdp_dtensor":
        return []
    weights = meaning.fsdp_weights(opened.catalog)
    return [
        check_entries(opened.location, opened.catalog, opened.common),
        meaning.check_layers(weights, (), opened.common),
        meaning.check_experts(weights, opened.common),
        meaning.check_fsdp_states(opened.catalog),
        meaning.check_fsdp_groups(opened.catalog),
    ]


def _launch(opened: Opened, facts: Facts) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Shell lines and flags that start a Megatron-LM job on the checkpoint."""
    flags = [
        "--use-megatron-fsdp",
        "--data-parallel-sharding-strategy optim_grads_params",
        "--use-distributed-optimizer",
        "--no-gradient-accumulation-fusion",
        "--ckpt-format fsdp_dtensor",
        f"--load {(opened.location.root or opened.location.path) if facts.kind == 'fsdp_dtensor' else 'CONVERTED'}",
        f"--tensor-model-parallel-size {facts.tp}",
        "--pipeline-model-parallel-size 1",
    ]
    if facts.sequential_experts is False:
        flags.append("--moe-grouped-gemm")
    if facts.gated:
        flags.append("--swiglu")
    if facts.has_output_layer:
        flags.append("--untie-embeddings-and-output-weights")
    if facts.local_norms is not None:
        flags.append(f"--transformer-impl {'local' if facts.local_norms else 'transformer_engine'}")
    if not facts.has_optimizer:
        flags.append("--finetune")
    elif not all((0, rank) in facts.rng_ranks for rank in range(facts.tp)):
        flags.append("--no-load-rng")
    return ("unset CUDA_DEVICE_MAX_CONNECTIONS",), tuple(flags)
