"""The settings of a training job that is about to start: from its command line, or from its YAML file.

Names are those of Megatron's arguments. A Megatron-LM job is read as the parser of its version reads it, so that a
setting which is not given has that version's default; `megatron_flags.json` is what those parsers said when they were
asked (tests/verify/megatron_flags.py). Megatron-Bridge's settings have its names, without sections.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any, Literal, NamedTuple, NoReturn

from ckpt_tools.errors import UsageError
from ckpt_tools.formats import untrusted_documents as documents

_NOT_IN_PATTERN = re.compile(r"[^,\d\[\]()+*]")  # arguments.py _eval_pattern: not even a space
_LONGEST_PATTERN = 100_000  # layers

MAX_WORDS = 2_000  # of a command line: four times the longest recipe of today


class Flag(NamedTuple):
    """One setting as a version's parser takes it; `kind` is store, true, false or bool (`--x` and `--no-x`)."""

    options: tuple[str, ...]
    name: str
    kind: Literal["store", "true", "false", "bool"]
    type: str
    nargs: str | int | None
    default: Any
    choices: tuple[Any, ...] | None


class Parsed(NamedTuple):
    """What a parser took from a command line, and what it refuses about it."""

    given: dict[str, Any]
    unknown: tuple[str, ...]  # words that no flag of this version takes
    refused: str | None


@cache
def flags_of(version: str) -> tuple[Flag, ...]:
    """Every flag of a version, in the order of their spelling."""
    table = _table()
    number = table["versions"].index(version)
    return tuple(
        Flag(tuple(options), name, kind, type_, nargs, default, None if choices is None else tuple(choices))
        for versions, options, name, kind, type_, nargs, default, choices in table["flags"]
        if number in versions
    )


@cache
def flags_named(version: str) -> dict[str, tuple[Flag, ...]]:
    """The flags of each setting."""
    named: dict[str, tuple[Flag, ...]] = {}
    for flag in flags_of(version):
        named[flag.name] = (*named.get(flag.name, ()), flag)
    return named


def versions_with(option: str) -> tuple[str, ...]:
    """The versions with a parser that knows a flag."""
    return tuple(version for version in _table()["versions"] if is_flag(option, version))


def is_flag(option: str, version: str) -> bool:
    """Whether a version's parser knows a flag."""
    return option in _options(version)


@cache
def _options(version: str) -> frozenset[str]:
    return frozenset(option for flag in flags_of(version) for option in flag.options)


@cache
def defaults_of(version: str) -> dict[str, Any]:
    """What every setting is when nothing is given."""
    return {flag.name: flag.default for flag in reversed(flags_of(version))}


def parse_flags(words: Sequence[str], version: str) -> Parsed:
    """The settings that a command line gives, by Megatron's names; abbreviations are unknown, as there."""
    if len(words) > MAX_WORDS:  # argparse looks at all flags again for every word
        return Parsed({}, (), f"{len(words):,} words; at most {MAX_WORDS:,} are looked at")
    try:
        given, unknown = _parser(version).parse_known_args(list(words))
    except _RefusedError as error:
        return Parsed({}, (), str(error))
    return Parsed(vars(given), tuple(unknown), None)


def flag_words(name: str, value: Any, version: str, always: bool = False) -> list[str] | None:
    """The words that set `name` to `value`, None when no flag of the version can; none for the default, unless
    `always`."""
    flags = flags_named(version).get(name, ())
    if flags and value == defaults_of(version)[name] and not always:
        return []
    return next((words for flag in flags if (words := _words(flag, value)) is not None), None)


def _words(flag: Flag, value: Any) -> list[str] | None:
    if flag.kind == "store":
        items = list(value) if flag.nargs is not None and isinstance(value, list | tuple) else [value]
        known = flag.choices is None or all(item in flag.choices for item in items)
        if not items or not known or any(item is None or isinstance(item, bool) for item in items):
            return None
        return [flag.options[0], *(_runs(item) if flag.type == "pattern" else str(item) for item in items)]
    if not isinstance(value, bool):
        return None
    if flag.kind == "bool":
        return [next(o for o in flag.options if o.startswith("--no-") != value)]
    return [flag.options[0]] if value == (flag.kind == "true") else None


def _runs(value: Any) -> str:
    """A pattern as short as it can be said: `[0]*3+[1]*58`."""
    if not isinstance(value, list):
        return str(value)
    return "+".join(f"[{item}]*{len(list(group))}" for item, group in groupby(value))


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(
        (files("ckpt_tools.verify.readiness") / "megatron_flags.json").read_bytes()
    )
    return table


class _RefusedError(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _RefusedError(message)


@cache
def _parser(version: str) -> _Parser:
    parser = _Parser(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    for flag in flags_of(version):
        if flag.kind == "store":
            parser.add_argument(
                *flag.options, dest=flag.name, nargs=flag.nargs, choices=flag.choices, type=_TYPES[flag.type]
            )
            continue
        for options, value in _switches(flag):
            parser.add_argument(*options, dest=flag.name, action="store_const", const=value)
    return parser


def _switches(flag: Flag) -> list[tuple[list[str], bool]]:
    if flag.kind != "bool":
        return [(list(flag.options), flag.kind == "true")]
    off = [option for option in flag.options if option.startswith("--no-")]
    return [([option for option in flag.options if option not in off], True), (off, False)]


def pattern(text: str) -> int | list[int]:
    """A frequency: a number, or a list that is built from lists with + and * as Python would."""
    if "[" not in text:
        return int(text)
    if _NOT_IN_PATTERN.search(text):
        raise ValueError("only digits, commas, brackets, + and * make a pattern")
    try:
        built = _built(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a list of numbers ({error})") from None
    if not isinstance(built, list):
        raise ValueError("not a list of numbers")
    return built


def _built(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [item for item in map(_built, node.elts) if isinstance(item, int)]
    if isinstance(node, ast.BinOp):
        left, right = _built(node.left), _built(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
            items, times = (left, right) if isinstance(left, list) else (right, left)
            if isinstance(items, list) and isinstance(times, int) and len(items) * times <= _LONGEST_PATTERN:
                return items * times
    raise ValueError("not a list of numbers built with + and *")


def _tuple(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.strip("()").split(","))


_TYPES: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,  # argparse's own trap: every word but the empty one is true
    "tuple": _tuple,
    "pattern": pattern,
}


BRIDGE, MAIN = "bridge", "main"
VERSIONS = ("core-0.16", "core-0.17", "core-0.18", "core-0.19", MAIN)  # of Megatron-LM, oldest first
PROGRAMS = (*VERSIONS, BRIDGE)
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"[+~]{0,2}([a-z_]+(?:\.[a-z_0-9]+)+)=(.*)", re.DOTALL)
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_COUNT = re.compile(r"[1-9][0-9]{0,6}", re.ASCII)
_PROCESSES = re.compile(
    r"[1-9][0-9]{0,6}(:[1-9][0-9]{0,6})?|auto|cpu|gpu|xpu|.*\$.*", re.ASCII
)  # of torchrun
_BRIDGE_SCRIPTS = ("run_recipe.py",)
_SECTIONS = ("model", "ddp", "dist", "checkpoint", "optimizer")
# What the rules look at and Bridge sets by itself (training/config.py and the dataclasses of megatron-core).
BRIDGE_DEFAULTS: Mapping[str, Any] = {
    "ckpt_format": "torch_dist", "strict_fsdp_dtensor_load": False, "data_parallel_sharding_strategy": "no_shard",
    "outer_dp_sharding_strategy": "no_shard", "gradient_accumulation_fusion": True, "megatron_fsdp_version": 1,
    "optimizer": "adam", "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1, "load_optim": True, "load_rng": True,
}  # fmt: skip
# checkpointing.py `load_args_from_checkpoint`: taken from the checkpoint always, or only where the job is silent.
_FROM_CHECKPOINT = (
    "num_query_groups", "group_query_attention", "position_embedding_type", "add_position_embedding",
    "use_rotary_position_embeddings", "rotary_base", "rotary_percent", "rotary_interleaved", "add_bias_linear",
    "add_qkv_bias", "squared_relu", "swiglu", "untie_embeddings_and_output_weights", "normalization",
    "apply_query_key_layer_scaling", "attention_dropout", "hidden_dropout", "mtp_num_layers", "spec",
    "num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax",
    "moe_grouped_gemm", "moe_single_grouped_weight", "moe_single_grouped_bias",
    "moe_shared_expert_intermediate_size", "moe_router_score_function", "moe_router_enable_expert_bias",
    "moe_router_topk_scaling_factor",
)  # fmt: skip
_IF_SILENT = (
    "num_layers", "hidden_size", "ffn_hidden_size", "seq_length", "num_attention_heads", "kv_channels",
    "max_position_embeddings", "padded_vocab_size", "ckpt_format",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """What starts: every setting by name (a default where nothing is given), and what was `given`.

    `refused` is what the program's own parser would end with, `unknown` the words of which it knows nothing.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    program: str = MAIN
    given: frozenset[str] = frozenset()
    script: str | None = None
    unknown: tuple[str, ...] = ()
    refused: str | None = None
    world: int | None = None  # GPUs that its launcher starts; None: unknown

    def __bool__(self) -> bool:
        return bool(self.given or self.unknown or self.refused)

    @property
    def is_bridge(self) -> bool:
        return self.program == BRIDGE

    def get(self, name: str, default: Any = None) -> Any:
        """A setting, or `default` where it is None or not known to the program."""
        found = self.settings.get(name)
        return default if found is None else found

    def has(self, name: str) -> bool:
        """Whether a switch is on."""
        return bool(self.settings.get(name))


def is_bridge_command(words: Sequence[str]) -> bool:
    """Whether a command line is one of Megatron-Bridge: its runner, or settings as `section.name=value`."""
    return any(_OVERRIDE.fullmatch(word) or word.endswith(_BRIDGE_SCRIPTS) for word in words)


def command_words(words: Sequence[str]) -> list[str]:
    """The words of a command line; one word that holds all of it is split as a shell splits it."""
    if words and not words[0].strip():
        raise UsageError("the job's command line begins with an empty word; is a variable not set?")
    if len(words) != 1 or not any(c.isspace() for c in words[0]):
        return list(words)
    try:
        return shlex.split(words[0])
    except ValueError as error:
        raise UsageError(f"the job's command line: {error}") from None


def parse_command(words: Sequence[str], program: str = MAIN) -> Job:
    """The job that a command line starts: `NAME=VALUE ... program.py --flag value ...`, or the flags alone.

    What precedes a `.py` file, or a module after `-m`, belongs to the launcher and is ignored, but for the
    environment and the number of GPUs.
    """
    at = _script_at(words, program)
    script = None if at is None else words[at]
    environment: dict[str, str] = {}
    rest = list(words) if at is None else list(words[at + 1 :])
    for word in _leading_assignments(rest) if at is None else words[:at]:
        if match := _ASSIGNMENT.fullmatch(word):
            environment[match[1]] = match[2]
    world = None if at is None else _world(words[:at])
    if program == BRIDGE:
        return replace(_bridge_job(_bridge_words(rest), environment, script), world=world)
    return replace(_flags_job(rest, program), environment=environment, script=script, world=world)


def _world(words: Sequence[str]) -> int | None:
    """GPUs that torchrun starts; None with another launcher, or if only the machines know the number."""
    counts = [int(size) for size in _sizes(words).values() if _COUNT.fullmatch(size)]
    return counts[0] * counts[1] if len(counts) == 2 else None


def launcher_problem(job: Job, words: Sequence[str]) -> tuple[str, str] | None:
    """What is wrong with the words in front of the script, and what to do."""
    front = [*words[: words.index(job.script)]] if job.script in words else []
    for option, value in _sizes(front).items():
        if not _PROCESSES.fullmatch(value):
            return f"torchrun {option} {value!r} is not a number of processes", f"{option} N"
    if job.script and all(_ASSIGNMENT.fullmatch(word) for word in front):
        return f"nothing starts {job.script}", f"torchrun --nproc-per-node GPUS {job.script} ..."
    return None


def _sizes(words: Sequence[str]) -> dict[str, str]:
    """Nodes, and processes of each, as torchrun is given them; none with another launcher."""
    if not any(word.rpartition("/")[2] in _LAUNCHERS for word in words):
        return {}
    sizes = {"--nnodes": "1", "--nproc-per-node": "1"}
    for word, following in zip(words, (*words[1:], ""), strict=True):
        option, equals, value = word.replace("_", "-").partition("=")
        if option in sizes:
            sizes[option] = value if equals else following
    return sizes


def _script_at(words: Sequence[str], program: str) -> int | None:
    """Index of the training program: the last script before the first flag, as a value may end in `.py` too."""
    flags = (
        i for i, word in enumerate(words) if program != BRIDGE and is_flag(word.partition("=")[0], program)
    )
    first = next(flags, len(words))
    scripts = [i for i in range(first) if words[i].endswith(".py")]
    modules = [i + 1 for i in range(first - 1) if words[i] == "-m" and not words[i + 1].startswith("-")]
    return scripts[-1] if scripts else modules[-1] if modules else None


def parse_yaml(text: bytes | str, name: str = "the YAML file", program: str = MAIN) -> Job:
    """The job that a YAML file describes: Bridge's configuration, a Megatron-LM recipe (`MODEL_ARGS`),
    or settings.
    """
    try:
        document = documents.parse_yaml(text)
    except documents.DocumentError as error:
        raise UsageError(f"{name}: {error}") from None
    if not isinstance(document, Mapping):
        raise UsageError(f"{name}: expected a mapping of settings, found {type(document).__name__}")
    for section in ("ENV_VARS", "MODEL_ARGS"):
        if not isinstance(document.get(section, {}) or {}, Mapping):
            raise UsageError(f"{name}: expected a mapping under {section}")
    variables = document.get("ENV_VARS")
    environment = {str(k): str(v) for k, v in variables.items()} if isinstance(variables, Mapping) else {}
    recipe = document.get("MODEL_ARGS")
    if isinstance(recipe, Mapping):
        return replace(_flags_job(list(_recipe_words(recipe)), program), environment=environment)
    given: dict[str, Any] = {}
    for key, value in _leaves(document):
        if given.get(key) is None:
            given[key] = value
    sections = sum(isinstance(document.get(s), Mapping) for s in _SECTIONS)
    if program == BRIDGE or (sections > 1 and isinstance(document.get("model"), Mapping)):
        return _bridge_job(given, environment, None)
    return Job({**defaults_of(program), **given}, environment, program, frozenset(given))


def merge(first: Job, second: Job) -> Job:
    """Both jobs' settings; what `second` was given wins."""
    return replace(
        second,
        settings={**first.settings, **{name: second.settings[name] for name in second.given}},
        environment={**first.environment, **second.environment},
        given=first.given | second.given,
        unknown=first.unknown + second.unknown,
        refused=first.refused or second.refused,
    )


def with_checkpoint_args(job: Job, args: Mapping[str, Any]) -> Job:
    """The job once `--use-checkpoint-args` has taken its architecture from the checkpoint."""
    if not job.has("use_checkpoint_args"):
        return job
    taken = [*_FROM_CHECKPOINT, *(name for name in _IF_SILENT if job.get(name) is None)]
    found = {name: args[name] for name in taken if args.get(name) is not None}
    return replace(job, settings={**job.settings, **found})


def _leading_assignments(words: list[str]) -> list[str]:
    """The words before the first flag that set a variable, taken off `words`."""
    taken = []
    while words and _ASSIGNMENT.fullmatch(words[0]):
        taken.append(words.pop(0))
    return taken


def _flags_job(words: Sequence[str], program: str) -> Job:
    given, unknown, refused = parse_flags(words, program)
    settings = {**defaults_of(program), **given}
    return Job(settings, program=program, given=frozenset(given), unknown=unknown, refused=refused)


def _bridge_job(given: Mapping[str, Any], environment: Mapping[str, str], script: str | None) -> Job:
    return Job({**BRIDGE_DEFAULTS, **given}, environment, BRIDGE, frozenset(given), script)


def _bridge_words(words: Sequence[str]) -> dict[str, Any]:
    """Settings of `section.name=value` words, and of the runner's own options with their values."""
    given: dict[str, Any] = {}
    option: str | None = None
    for word in words:
        if match := _OVERRIDE.fullmatch(word):
            given[match[1].rpartition(".")[2]] = _yaml_value(match[2])
            option = None
        elif word.startswith("-"):
            option, _, value = word.lstrip("-").partition("=")
            option = option.replace("-", "_")
            given[option] = _yaml_value(value) if value else True
        elif option is not None:
            given[option], option = _yaml_value(word), None
    return given


def _yaml_value(word: str) -> Any:
    """A value as OmegaConf reads it; what is not YAML is text."""
    import yaml

    try:
        return yaml.safe_load(word)
    except (yaml.YAMLError, RecursionError, ValueError):
        return word


def _recipe_words(recipe: Mapping[Any, Any]) -> Iterator[str]:
    """A recipe's flags as its runner puts them on the command line: true is the flag alone, false and null none."""
    for flag, value in recipe.items():
        if value is None or value is False:
            continue
        yield str(flag) if str(flag).startswith("--") else "--" + str(flag).replace("_", "-")
        if value is not True:
            yield from map(str, value) if isinstance(value, list) else command_words([f"{value} "])


def _leaves(section: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if key == "ENV_VARS":
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield str(key).removeprefix("--").replace("-", "_"), value
