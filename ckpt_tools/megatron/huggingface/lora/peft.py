"""Low-rank adapters (LoRA) as PEFT directories hold them: `adapter_config.json` and `adapter_model.safetensors`.

Names are those of the model's modules behind `base_model.model.` (peft utils/save_and_load.py)::

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      (rank, in)
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight      (out, rank)
    base_model.model.model.embed_tokens.lora_embedding_A                (rank, rows); _B (hidden, rank)
    base_model.model.lm_head.weight                                     trained whole (`modules_to_save`, biases)

What is added to a weight is ``scale * (B @ A)``, turned for the (in, out) weights of GPT-2 (`fan_in_fan_out`) and for
embeddings; scale is `lora_alpha` / r, or / sqrt(r) (`use_rslora`), a module's own by `alpha_pattern`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, list_problems
from ckpt_tools.megatron.adapters import is_finite_number
from ckpt_tools.megatron.huggingface.mapping.checks import Spec
from ckpt_tools.megatron.huggingface.mapping.rules import Family
from ckpt_tools.megatron.huggingface.quantization.quantized import cheap_pattern
from ckpt_tools.model.catalog import Catalog, Made, TensorEntry, Value, made_entry
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.model.kernels.low_rank import AddLowRank
from ckpt_tools.model.views import Permute, Source, View

ADAPTER_CONFIG = "adapter_config.json"
PLACE_FIELDS = frozenset({
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save",
})  # fmt: skip
_EVERY_LINEAR = "all-linear"
_INDEX = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Names:
    """A list of names or ends of names, or a pattern; one that is not tried tells nothing."""

    ends: tuple[str, ...] = ()
    text: str | None = None
    pattern: re.Pattern[str] | None = None

    def has(self, module: str) -> bool | None:
        """Whether it names the module; None: unknown."""
        if self.text is None:
            return is_named(module, self.ends)
        return bool(self.pattern.fullmatch(module)) if self.pattern else None


@dataclass(frozen=True, slots=True)
class Places:
    """What the fields say; None: nothing, or all linears."""

    targets: Names | None = None
    excluded: Names | None = None
    layers: frozenset[int] | None = None
    saved: tuple[str, ...] = ()

    def check(
        self, adapted: Mapping[str, str], whole: Collection[str], base: Mapping[str, TensorEntry]
    ) -> tuple[list[str], tuple[str, ...]]:
        """What is wrong, and what should be known.

        `adapted` has the weight in the base for every adapted module, `whole` the tensors that were trained whole.
        """
        outside = [(module, self._outside(module)) for module in adapted]
        problems = [f"{module}: {why}" for module, why in outside if why]
        notes = [
            f"{ADAPTER_CONFIG}: {field} {names.text!r} is a pattern that is not tried here; whether the adapter's "
            "tensors are those it names was not checked"
            for field, names in (("target_modules", self.targets), ("exclude_modules", self.excluded))
            if names and names.text is not None and names.pattern is None
        ]
        there = {*adapted.values(), *whole}
        missing = [module for module in self._expected(base) if f"{module}.weight" not in there]
        absent = [end for end in (self.targets.ends if self.targets else ()) if not _any_named(adapted, end)]
        problems += [
            f"target_modules names {end}, and the adapter has no tensor of it"
            for end in absent
            if _any_named(missing, end)
        ]
        if missing:
            listed = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
            notes.append(
                f"target_modules names modules of the base that the adapter has no tensors of, {len(missing):,} that "
                f"stay as they are: {listed}"
            )
        unsaved = [name for name in self.saved if not _ends_inside(whole, name)]
        problems += [
            f"modules_to_save names {name}, and the adapter has no tensor of it"
            for name in unsaved
            if _ends_inside(base, name)
        ]
        return problems, tuple(notes)

    def _expected(self, base: Mapping[str, TensorEntry]) -> Iterator[str]:
        """The modules of the base that `target_modules` names for sure."""
        if self.targets is None:
            return
        for key, entry in base.items():
            module = key.removesuffix(".weight")
            if module != key and len(entry.shape) == 2 and self.targets.has(module):
                is_excluded = self.excluded is not None and self.excluded.has(module) is not False
                if not is_excluded and self._outside(module) is None:
                    yield module

    def _outside(self, module: str) -> str | None:
        """Why a module should not be adapted; None where it should, or is unknown."""
        if self.excluded and self.excluded.has(module):
            return "exclude_modules names it"
        if self.targets is None:
            return None
        if self.targets.has(module) is False:
            return "target_modules does not name it"
        by_end = self.targets.text is None and module not in self.targets.ends
        # Releases of PEFT differ in which number of `layers.1.mlp.experts.2.up_proj` is the layer's: any will do.
        numbers = {int(number) for number in _INDEX.findall(module)}
        if by_end and self.layers is not None and not self.layers & numbers:
            return f"layers_to_transform is {sorted(self.layers)}"
        return None


def is_named(module: str, ends: Iterable[str]) -> bool:
    """Whether one of the names is the module's, or its end behind a dot."""
    return f".{module}".endswith(tuple(f".{end}" for end in ends))


def _any_named(modules: Iterable[str], end: str) -> bool:
    return any(is_named(module, (end,)) for module in modules)


def read_places(config: Mapping[str, Any]) -> Places:
    targets, layers = config.get("target_modules"), config.get("layers_to_transform")
    if isinstance(targets, str) and targets.lower() == _EVERY_LINEAR:
        targets = None
    if isinstance(layers, int) and not isinstance(layers, bool):
        layers = [layers]
    if not (layers is None or (isinstance(layers, list) and all(type(n) is int for n in layers))):
        raise MappingError(f"{ADAPTER_CONFIG}: layers_to_transform is {layers!r}; layer numbers are expected")
    saved = config.get("modules_to_save")
    if saved is not None and not _are_names(saved):
        raise MappingError(f"{ADAPTER_CONFIG}: modules_to_save is {saved!r}; a list of names is expected")
    return Places(
        _names("target_modules", targets),
        _names("exclude_modules", config.get("exclude_modules") or None),
        frozenset(layers) if layers else None,
        tuple(saved or ()),
    )


def _names(field: str, said: object) -> Names | None:
    if said is None or said == "":
        return None
    if isinstance(said, str):
        return Names(text=said, pattern=cheap_pattern(said))
    if isinstance(said, list) and _are_names(said):
        return Names(tuple(said))
    raise MappingError(f"{ADAPTER_CONFIG}: {field} is {said!r}; a list of names or a pattern is expected")


def _are_names(said: object) -> bool:
    return isinstance(said, list) and all(isinstance(name, str) and name for name in said)


def _ends_inside(tensors: Iterable[str], end: str) -> bool:
    """Whether a tensor is in a module with a name ending in `end`; a bare model's names lack `model.`."""
    return any(f"{end}." in f"model.{name}" for name in tensors)


ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
BEFORE = " without its adapter"  # the key of a stored weight that an adapter is added to
_FACTOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.default)?(?:\.weight)?"
)
_OTHER = re.compile(
    r"(?:^|\.)(?:lora_|ia3_|hada_|lokr_|oft_|boft_|vera_|adapter|prompt|token_adapter|trainable_tokens)"
)
# Fields of adapter_config.json that say nothing about what is added, or are read below.
_READ = frozenset({
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out",
    "init_lora_weights", "ensure_weight_tying", *PLACE_FIELDS,
})  # fmt: skip
_WITHOUT_PART = frozenset({
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config",
    "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
})  # fmt: skip
_REFUSED = {
    "use_dora": "DoRA scales every row of the merged weight",
    "use_qalora": "QALoRA adds to groups of inputs",
    "use_bdlora": "its matrices are block-diagonal",
    "lora_bias": "B has a bias",
    "layer_replication": "the model has other layers than its base",
    "trainable_token_indices": "single rows of the embedding were trained",
    "target_parameters": "parameters inside modules were adapted (experts as one tensor)",
    "alora_invocation_tokens": "it acts only after its invocation tokens, so that nothing can be merged",
}
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_STARTS = ("gaussian", "eva", "orthogonal", "true", "false")  # these leave the base unchanged
_OF_CONV1D = ("transposed", "qkv_conv1d")  # layouts
_SIMPLE_PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.|\.\*)+\$?")
_MAX_WILDCARDS = 3
MERGE_WITH_PEFT = (
    "`PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(DIR)` of peft merges it"
)


@dataclass(frozen=True, slots=True)
class PeftSettings:
    """What adapter_config.json says of scales and shapes."""

    rank: int
    alpha: float
    rslora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)  # by a pattern of module names
    alphas: Mapping[str, float] = field(default_factory=dict)
    turned: bool = False  # weights are (in, out)
    keeps_tie: bool = False  # the head of a tied model was trained as one with the embedding
    places: Places = field(default_factory=Places)

    def scale(self, module: str, rank: int) -> float:
        """What the product of a module's matrices of this rank is multiplied with."""
        wanted = _by_pattern(self.ranks, module, self.rank)
        if rank != wanted:
            raise MappingError(f"its rank is {rank}; {ADAPTER_CONFIG} says {wanted}")
        alpha = float(_by_pattern(self.alphas, module, self.alpha))
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


@dataclass(frozen=True, slots=True)
class WithAdapter:
    """A model's tensors with an adapter's parts added; `types` are those of tensors that it replaces."""

    catalog: Catalog
    parts: frozenset[str] = frozenset()  # keys of stored tensors that others are made of
    types: Mapping[str, str] = field(default_factory=dict)
    merged: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()  # what could not be checked of the places that adapter_config.json names

    def specs(self, base: Mapping[str, Spec]) -> dict[str, Spec]:
        """Type and shape of every tensor of the model, which are those of its base."""
        there = {name: spec for name, spec in base.items() if name not in self.parts}
        return there | {
            name: Spec(dtype, self.catalog.tensors[name].shape) for name, dtype in self.types.items()
        }

    @property
    def notes(self) -> tuple[str, ...]:
        found = [f"an adapter was added to {len(self.merged):,} tensors, in float64 and rounded once"]
        if self.replaced:
            found.append(f"taken from the adapter, which holds them whole: {', '.join(self.replaced)}")
        return (*found, *self.unproven)


def read_peft_settings(config: Any) -> PeftSettings:
    if not isinstance(config, Mapping):
        raise UnsupportedCheckpointError(f"{ADAPTER_CONFIG} is not an object: {config!r:.40}")
    if config.get("peft_type") != "LORA":
        found = config.get("peft_type")
        raise UnsupportedCheckpointError(
            f"{ADAPTER_CONFIG}: peft_type is {found!r}; LORA is merged. {MERGE_WITH_PEFT}"
        )
    problems = [f"{name} is {config[name]!r}: {why}" for name, why in _REFUSED.items() if config.get(name)]
    known = _READ | _WITHOUT_PART | _REFUSED.keys()
    problems += [
        f"{name} is {value!r}: not known" for name, value in config.items() if value and name not in known
    ]
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        problems.append(
            f"init_lora_weights is {start!r}: the adapter belongs to a changed base. Save it with "
            "path_initial_model_for_weight_conversion, which makes it one of the original"
        )
    elif start is not None and str(start).lower() not in _STARTS:
        problems.append(
            f"init_lora_weights is {start!r}: not known, and the adapter may belong to a changed base"
        )
    if problems:
        raise UnsupportedCheckpointError(
            f"{ADAPTER_CONFIG}: not merged here. {MERGE_WITH_PEFT}:\n" + list_problems(problems), problems
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise MappingError(f"{ADAPTER_CONFIG}: r is {rank!r}; a whole number above 0 is expected")
    if not is_finite_number(alpha):
        raise MappingError(f"{ADAPTER_CONFIG}: lora_alpha is {alpha!r}; a number is expected")
    return PeftSettings(
        rank,
        alpha,
        bool(config.get("use_rslora")),
        _patterns(config, "rank_pattern"),
        _patterns(config, "alpha_pattern"),
        bool(config.get("fan_in_fan_out")),
        bool(config.get("ensure_weight_tying")),
        read_places(config),
    )


def _patterns(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name) or {}
    if not isinstance(found, Mapping) or not all(map(is_finite_number, found.values())):
        raise MappingError(f"{ADAPTER_CONFIG}: {name} is {found!r}; numbers by module names are expected")
    odd = [p for p in found if not _SIMPLE_PATTERN.fullmatch(p) or p.count("*") > _MAX_WILDCARDS]
    if odd:
        raise UnsupportedCheckpointError(
            f"{ADAPTER_CONFIG}: {name} has patterns that are not looked up here; names with .* are: {odd[:4]}"
        )
    return dict(found)


def _by_pattern(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """The value of the first pattern that the end of a module's name fits (peft utils/other.py `get_pattern_key`)."""
    return next((v for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", module)), otherwise)


class _Matrices(NamedTuple):
    a: TensorEntry
    b: TensorEntry
    is_embedding: bool


def with_adapter(
    base: Catalog,
    adapter: Catalog,
    settings: PeftSettings,
    shared: tuple[str, str] | None,
    family: Family | None = None,
) -> WithAdapter:
    """The tensors of `base`, under their names, with the adapter's parts added.

    Tensors of `adapter` have the keys of their file; its entries keep their own keys. `shared` names embedding and
    head of a model that ties them. An adapter that holds both whole leaves both, for their bytes to be compared.
    `family` knows which modules are Conv1D, as PEFT does by their class.
    """
    modules, whole = _sorted_out(adapter, base)
    problems = [
        f"{name}: the base has no such tensor"
        for name in (*modules, *whole)
        if name not in base.tensors and name not in (shared or ())
    ]
    misplaced, unproven = settings.places.check(_adapted(adapter, base), whole, base.tensors)
    problems += misplaced
    problems += _broken_tie(modules, whole, settings, shared)
    problems += [
        f"{name}: A and B are matrices, not {m.a.shape} and {m.b.shape}"
        for name, m in modules.items()
        if not len(m.a.shape) == len(m.b.shape) == 2
    ]
    there = {
        name: m
        for name, m in modules.items()
        if name in base.tensors and len(m.a.shape) == len(m.b.shape) == 2
    }
    square_turned = _square_turned(there, base, settings, family, problems)
    tensors, types = dict(base.tensors), {}
    for name, entry in whole.items():
        if name in base.tensors and entry.shape != base.tensors[name].shape:
            problems.append(
                f"{name} has shape {entry.shape} in the adapter, {base.tensors[name].shape} in the base"
            )
        tensors[name] = replace(entry, key=name)
        types[name] = base.tensors[name].dtype if name in base.tensors else entry.dtype
    for name, matrices in there.items():
        stored, dtype = tensors[name], base.tensors[name].dtype
        try:
            made = _made(
                name, dtype, stored, matrices, settings, _is_turned(stored, matrices, square_turned(name))
            )
        except (MappingError, ValueError) as error:
            problems.append(f"{name}: {error}")
            continue
        tensors[name], tensors[name + BEFORE] = made_entry(name, made), replace(stored, key=name + BEFORE)
    if problems:
        raise MappingError("the adapter does not fit the base:\n" + list_problems(problems), problems)
    parts = frozenset(
        {*(name + BEFORE for name in there), *(m.key for pair in there.values() for m in pair[:2])}
    )
    tensors |= {m.key: m for pair in there.values() for m in pair[:2]}
    return WithAdapter(replace(base, tensors=tensors), parts, types, tuple(there), tuple(whole), unproven)


def _broken_tie(
    modules: Collection[str], whole: Collection[str], settings: PeftSettings, shared: tuple[str, str] | None
) -> list[str]:
    """Why embedding and head of a tied model are not one weight once the adapter is merged.

    Held whole, both are compared later; with `ensure_weight_tying` the head may be left to the embedding. peft adds
    the matrices of both to the one weight, and so twice, which is not what was trained.
    """
    if shared is None:
        return []
    changed = [name for name in shared if name in modules or name in whole]
    one_weight = changed in ([], list(shared)) or (settings.keeps_tie and changed == [shared[0]])
    if one_weight and not any(name in modules for name in changed):
        return []
    return [
        f"{' and '.join(changed)} was trained, but {' and '.join(shared)} are one weight (tie_word_embeddings, in "
        "config.json or by the model's class), and the merged ones would differ. Save the base with "
        "tie_word_embeddings false and a separate head; then the adapter can be merged"
    ]


def _sorted_out(adapter: Catalog, base: Catalog) -> tuple[dict[str, _Matrices], dict[str, TensorEntry]]:
    """The adapter's matrices by the weight they are added to, and what it holds whole, by their names in the base."""
    found: dict[tuple[str, bool], dict[str, TensorEntry]] = {}
    whole, odd, twice = {}, [], list[str]()
    for key, entry in adapter.tensors.items():
        name = key.removeprefix(PREFIX)
        match = _FACTOR.fullmatch(name)
        if match:
            weight = _in_base(f"{match['module']}.weight", base)
            sides = found.setdefault((weight, bool(match["embedding"])), {})
            if match["side"] in sides:
                twice += [sides[match["side"]].key, key]
            sides[match["side"]] = entry
        elif _OTHER.search(name):
            odd.append(key)
        else:
            whole[_in_base(name.replace(".base_layer.", ".").replace(".modules_to_save.", "."), base)] = entry
    if odd:
        raise UnsupportedCheckpointError(
            f"tensors that are not LoRA's A and B (DoRA, or a bias of B, or another method). {MERGE_WITH_PEFT}:\n"
            + list_problems(odd[:8]),
            odd[:8],
        )
    if twice:
        raise MappingError(f"the adapter has a matrix under two names:\n{list_problems(twice)}", twice)
    halves = [
        f"{name}: only lora_{next(iter(sides))} is there"
        for (name, _), sides in found.items()
        if len(sides) < 2
    ]
    if halves or not (found or whole):
        raise MappingError(
            "the adapter is not whole:\n" + list_problems(halves or ["it holds no tensors"]),
            halves or ["it holds no tensors"],
        )
    return {name: _Matrices(s["A"], s["B"], embedding) for (name, embedding), s in found.items()}, whole


def _adapted(adapter: Catalog, base: Catalog) -> dict[str, str]:
    """The weight for every adapted module by the adapter's own name, which is what adapter_config.json means."""
    matches = (_FACTOR.fullmatch(key.removeprefix(PREFIX)) for key in adapter.tensors)
    modules = [match["module"] for match in matches if match]
    return {module: _in_base(f"{module}.weight", base) for module in modules}


def _in_base(name: str, base: Catalog) -> str:
    """What the base calls a tensor: those saved from a bare model lack `model.`."""
    bare = name.removeprefix("model.")
    return bare if name not in base.tensors and bare in base.tensors else name


def _square_turned(
    modules: Mapping[str, _Matrices],
    base: Catalog,
    settings: PeftSettings,
    family: Family | None,
    problems: list[str],
) -> Callable[[str], bool]:
    """Whether a square weight is (in, out): by the family's rules, else like the others, which show it by shape.

    `fan_in_fan_out` does not decide: PEFT sets it by the class of each module (tuners/lora/layer.py
    `dispatch_default`).
    """
    linears = {name: (m.b.shape[0], m.a.shape[-1]) for name, m in modules.items() if not m.is_embedding}
    wide = {
        name: base.tensors[name].shape == shape[::-1]
        for name, shape in linears.items()
        if shape[0] != shape[1]
    }
    if family is not None:
        conv1d = _conv1d_weights(family)
        for name, is_turned in wide.items():
            if is_turned and not conv1d.fullmatch(name):
                problems.append(
                    f"{name}: the adapter's matrices are (in, out), and {family.name} has a Linear there"
                )
        return lambda name: bool(conv1d.fullmatch(name))
    known, square = set(wide.values()), [name for name, shape in linears.items() if shape[0] == shape[1]]
    if len(known) > 1 and square:
        problems.append(f"{square[0]}: some weights are (in, out), others (out, in), and this one is square")
    if not known and square and settings.turned:
        problems.append(
            f"{square[0]}: fan_in_fan_out is true, which holds for Conv1D modules only, and whether this one is one "
            f"cannot be proven. {MERGE_WITH_PEFT}"
        )
    return lambda _: known == {True}


def _conv1d_weights(family: Family) -> re.Pattern[str]:
    """The names of the weights of a family's Conv1D modules, also in a bare model."""
    names = (name for rule in family.rules if rule.layout in _OF_CONV1D for name in rule.hf)
    shapes = "|".join(re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(name)) for name in names)
    return re.compile(shapes.replace(r"transformer\.", r"(?:transformer\.)?"))


def _is_turned(stored: TensorEntry, matrices: _Matrices, square_turned: bool) -> bool:
    a, b, is_embedding = matrices
    if is_embedding or b.shape[0] == a.shape[-1]:
        return is_embedding or square_turned
    return stored.shape == (a.shape[-1], b.shape[0])


def _made(
    name: str, dtype: str, stored: TensorEntry, matrices: _Matrices, settings: PeftSettings, turned: bool
) -> Made:
    """How the merged weight, of type `dtype`, is computed from the stored one."""
    a, b, _ = matrices
    wrong = [e.key for e in (stored, a, b) if e.dtype not in CASTABLE]
    if wrong:
        raise MappingError(f"not plain floating-point numbers: {', '.join(wrong)}")
    scale = settings.scale(name.removesuffix(".weight"), a.shape[0])
    left, right = (a, b) if turned else (b, a)
    turn: View = (Permute((1, 0)),) if turned else ()
    values = (_wide(stored, name + BEFORE, ()), _wide(left, left.key, turn), _wide(right, right.key, turn))
    made = Made(AddLowRank(dtype, scale, (left.key, right.key)), values)
    made.kernel.form([value.form for value in values])
    return made


def _wide(entry: TensorEntry, key: str, view: View) -> Value:
    shape = entry.shape[::-1] if view else entry.shape
    return Value("float64" if entry.dtype == "float64" else "float32", shape, (Source(key, view),))
