"""What `preflight` knows of a checkpoint and of the job that is to load it, and what a rule on both is.

A command line is typed by its parser. YAML files and stored arguments are not: there a size can be a word, or so
large that no model has it. `checked_settings` names what is wrong once, and the rules go on without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ckpt_tools.megatron.hybrid import is_hybrid
from ckpt_tools.megatron.run_state.stored_values import COUNTED, wanted_kind
from ckpt_tools.megatron.torch_dist.stacking import layer_counts
from ckpt_tools.model.choices import CheckpointKind
from ckpt_tools.verify.readiness.job import PROGRAMS, VERSIONS, Job
from ckpt_tools.verify.report import ERROR, Check, Finding, Severity

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_LAYER = re.compile(r"^(?P<layer>.*\blayers\.\d+\.(?:\w+_layer\.)?)(?P<rest>.+)$")
# Norms that Transformer Engine's projections have inside, and the modules of their own that stand for them elsewhere,
# each next to the weight that it belongs to: MLA's input norm and that of experts are apart in every spec.
_FUSED_NORM = re.compile(r"\.layer_norm_weight$")
_NORM_APART = (
    ("input_layernorm.weight", "self_attention.linear_qkv.weight"),
    ("input_layernorm.weight", "self_attention.in_proj.weight"),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.weight"),
    ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.weight"),
)


@dataclass(frozen=True, slots=True)
class Stored:
    """What the weights' names and shapes tell; None where they are silent."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by name without wrappers
    rows: int | None = None  # of the word embeddings
    output_layer: bool | None = None  # a separate matrix: embeddings are not tied
    gated: bool | None = None  # fc1 is in halves
    sequential_experts: bool | None = None
    local_norms: bool | None = None  # norms are modules of their own, not part of the projection behind them
    mtp_layers: int = 0
    version_2: bool = False  # named for Megatron-FSDP v2, which has a wrapper less


def stored_style(shapes: Mapping[str, tuple[int, ...]], is_fsdp: bool = False) -> Stored:
    """What names and shapes of the weights tell about the model; how it is spelled only where it is spelled live."""
    rows = next((shape[0] for name, shape in shapes.items() if name.endswith(EMBEDDING) and shape), None)
    output = any(name.endswith(OUTPUT) for name in shapes) if rows is not None else None
    mtp = next((n for block, n in layer_counts(shapes).items() if ".mtp." in f".{block}"), 0)
    if not is_fsdp:
        return Stored(shapes, rows, output, mtp_layers=mtp)
    fc1 = [name for name in shapes if ".linear_fc1.weight" in name]
    experts = [name for name in shapes if ".experts." in name]
    return Stored(
        shapes,
        rows,
        output,
        gated=any(name.endswith(("_w", "_v")) for name in fc1) if fc1 else None,
        sequential_experts=any(".local_experts." in name for name in experts) if experts else None,
        local_norms=local_norms(shapes),
        mtp_layers=mtp,
    )


def local_norms(names: Collection[str]) -> bool | None:
    """Whether norms are modules of their own that Transformer Engine would fuse; None if unknown.

    A module `input_layernorm` alone says nothing: before MLA's projections it is in every layer spec.
    """
    rests: dict[str, set[str]] = {}
    for match in filter(None, map(_LAYER.match, names)):
        rests.setdefault(match["layer"], set()).add(match["rest"].removesuffix("_w"))
    fused = any(_FUSED_NORM.search(f".{rest}") for layer in rests.values() for rest in layer)
    apart = any({norm, weight} <= layer for layer in rests.values() for norm, weight in _NORM_APART)
    return apart if fused != apart and not is_hybrid(names) else None  # a HybridModel has one spec only


@dataclass(frozen=True, slots=True)
class Facts:
    """The checkpoint (None: unknown) and the job."""

    kind: CheckpointKind
    job: Job = field(default_factory=Job)
    args: Mapping[str, Any] = field(default_factory=dict)
    stored: Stored = field(default_factory=Stored)
    states: frozenset[str] = frozenset()  # kinds of optimizer state
    layout: str = "none"  # of the optimizer, as `optimizer_layout` names it
    rng_ranks: frozenset[tuple[int, int]] = frozenset()  # (pp, tp)
    tp_of_packed: int | None = None  # for how many tensor-parallel ranks packed projections are arranged
    packed: tuple[str, ...] = ()  # those projections
    ranks: int | None = None  # GPUs of the job that it was converted for
    sizes: Mapping[str, int] = field(default_factory=dict)  # and its other sizes, by the name of the axis
    by_bridge: bool = False  # Megatron-Bridge wrote the checkpoint that was converted
    target: str | None = None  # the program that the conversion wrote names for
    has_args: bool = True  # False: Bridge's configuration replaces Megatron-LM's arguments
    tokens: int | None = None  # of the vocabulary, without padding
    schedule: Mapping[str, Any] = field(default_factory=dict)  # stored state of the learning-rate schedule

    def on(self, name: str) -> bool:
        """Whether the job has a switch on."""
        return self.job.has(name)

    def value(self, name: str, default: Any = None) -> Any:
        """A setting of the job."""
        return self.job.get(name, default)

    @property
    def tp(self) -> int:
        """Tensor-parallel size of the job."""
        found = self.job.get("tensor_model_parallel_size", 1)
        return found if isinstance(found, int) and found > 0 else 1

    @property
    def begins(self) -> bool:
        """Whether the checkpoint's optimizer is a fresh one, made for a warm start."""
        return bool(self.states) and self.schedule.get("num_steps") == 0

    def loads(self, what: str) -> bool:
        """Whether the job asks for `optim` or `rng` entries: not with `finetune`, whatever else it says."""
        wanted = self.job.get(f"load_{what}", True)
        return bool(wanted) and not self.on(f"no_load_{what}") and not self.on("finetune")


class Rule(NamedTuple):
    """`broken` gives what was found, or None. Rules with `on_job` need a job that is described."""

    name: str
    severity: Severity
    broken: Callable[[Facts], str | None]
    why: str
    fix: str | Callable[[Facts], str]
    source: str  # file and function that refuse it, or what the load does with it
    programs: tuple[str, ...] = PROGRAMS
    on_job: bool = True

    @property
    def where(self) -> str:
        """The source with the versions it is true of."""
        versions = [program for program in self.programs if program in VERSIONS]
        if not versions:
            return self.source
        span = versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
        return f"{self.source} ({span})"


def since(version: str) -> tuple[str, ...]:
    """`version` of Megatron-LM and the later ones."""
    return VERSIONS[VERSIONS.index(version) :]


def before(version: str) -> tuple[str, ...]:
    """The versions of Megatron-LM that are older than `version`."""
    return VERSIONS[: VERSIONS.index(version)]


_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?e[-+]?\d+", re.IGNORECASE)


def checked_settings(facts: Facts) -> tuple[Facts, Check]:
    """The facts without settings of another kind than Megatron takes, and what those are."""
    wrong = {name: wanted for name, wanted in map(_judged, facts.job.settings.items()) if wanted}
    sound = {name: value for name, value in facts.job.settings.items() if name not in wrong}
    args = {name: value for name, value in facts.args.items() if not _judged((name, value))[1]}
    findings = tuple(
        Finding("settings", ERROR, f"{name} is {_short(facts.job.settings[name])}", f"Megatron takes {wanted}",
                "correct it where it comes from")
        for name, wanted in sorted(wrong.items())
    )  # fmt: skip
    known = [name for name in facts.job.settings if name in {*COUNTED, "optimizer", "moe_layer_freq"}]
    return replace(facts, job=replace(facts.job, settings=sound), args=args), Check(
        "settings", "settings", len(known), findings
    )


def _judged(setting: tuple[str, Any]) -> tuple[str, str]:
    """A setting's name, and what Megatron takes for it if it is something else."""
    name, value = setting
    if isinstance(value, str) and _NUMBER.fullmatch(
        value
    ):  # YAML takes 1e-05 for a text, argparse and Hydra do not
        value = float(value)
    return name, "" if value is None else wanted_kind(name, value) and wanted_kind(name, setting[1])


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
