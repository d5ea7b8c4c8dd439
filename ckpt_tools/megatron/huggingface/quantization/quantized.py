"""Quantized Hugging Face models, seen as the plain tensors that they dequantize to.

A weight that is stored as codes and scales becomes a computed tensor under its usual name, so that the import rules,
`diff` and everything behind them meet a plain model; nothing is held, the kernels work tile by tile. Values are, bit
for bit, those of the program that defines the encoding: the product with the scale in float32, rounded once.

    quant_method          stored for a weight NAME                          kernel
    fp8                   NAME float8, NAME_scale_inv                       Dequantize
    mxfp4                 NAME_blocks, NAME_scales                          DecodeMxfp4
    compressed-tensors    NAME float8, NAME_scale                           Dequantize
                          NAME_packed, NAME_scale, NAME_shape (, NAME_zero_point)     UnpackInt4

What these programs would read in another way, or not at all, is refused by name: a scale without its weight, a grid
of another size, a module that config.json says was left alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ckpt_tools.errors import MappingError, UnsupportedCheckpointError, list_problems
from ckpt_tools.formats.storage.files import Files
from ckpt_tools.megatron.huggingface.mapping.checks import Spec
from ckpt_tools.model.catalog import Catalog, Made, TensorEntry, Value, made_entry
from ckpt_tools.model.dtypes import CASTABLE, FLOATING, Form, itemsize
from ckpt_tools.model.kernels.kernel import MINIFLOATS, Dequantize, Kernel
from ckpt_tools.model.kernels.packed import DecodeMxfp4, UnpackInt4
from ckpt_tools.model.views import Source

# Modules that a config.json of a stranger names, as text or as patterns. A pattern is only tried where it cannot run
# away: letters, dots, groups, alternatives and a few `.*`, which is what published models have.
_PLAIN = re.compile(r"[\w.-]*[\w-]")
_CHEAP = re.compile(r"(?:[\w.$^|()-]|\.\*|\\[.\w])*")
_MOST_STARS = 3
_LONGEST = 500  # characters


@dataclass(frozen=True, slots=True)
class Patterns:
    """Names of modules, with what config.json says for each pattern; long lists cost no more than short ones."""

    names: frozenset[str] = frozenset()
    inside: bool = False  # a name stands for the modules inside it too
    ends: tuple[str, ...] = ()
    compiled: tuple[tuple[str, re.Pattern[str]], ...] = ()
    unchecked: tuple[str, ...] = ()

    def listing(self, module: str) -> str | None:
        """What names this module, or None."""
        name = module
        while name:
            if name in self.names:
                return name
            name = name.rpartition(".")[0] if self.inside else ""
        if module.endswith(self.ends):
            return next(end for end in self.ends if module.endswith(end))
        return next((said for said, pattern in self.compiled if pattern.match(module)), None)


def modules_left_alone(said: object) -> Patterns:
    """`modules_to_not_convert` as transformers reads it: a pattern up to a module's border, or the end of a name."""
    texts = _texts(said, "modules_to_not_convert")
    names = frozenset(text for text in texts if _PLAIN.fullmatch(text))
    patterns = {text: rf"(?:{text})(?:(?<=\.)|(?=\.|$))" for text in texts if not _PLAIN.fullmatch(text)}
    return Patterns(names, True, tuple(texts), *_compile(patterns))


def targets_ignored(said: object) -> Patterns:
    """`ignore` of compressed-tensors: whole names, and patterns behind `re:`."""
    texts = _texts(said, "ignore")
    patterns = {text: text.removeprefix("re:") for text in texts if text.startswith("re:")}
    return Patterns(frozenset(texts) - patterns.keys(), False, (), *_compile(patterns))


def _compile(patterns: dict[str, str]) -> tuple[tuple[tuple[str, re.Pattern[str]], ...], tuple[str, ...]]:
    """The patterns that are safe to try, and what config.json says for the others."""
    compiled, unchecked = [], []
    for said, pattern in patterns.items():
        tried = re.compile(pattern) if cheap_pattern(said.removeprefix("re:")) else None
        compiled += [(said, tried)] if tried else []
        unchecked += [] if tried else [said]
    return tuple(compiled), tuple(unchecked)


def cheap_pattern(text: str) -> re.Pattern[str] | None:
    """The pattern, compiled, if it is one and cannot run away."""
    if len(text) > _LONGEST or text.count("*") > _MOST_STARS or not _CHEAP.fullmatch(text):
        return None
    try:
        return re.compile(text)
    except re.error:
        return None


def _texts(said: object, field: str) -> list[str]:
    if not isinstance(said, list | tuple) or not all(isinstance(name, str) and name for name in said):
        raise MappingError(f"config.json: {field} is {said!r}, expected a list of module names")
    return list(said)


FP8, INT4 = "FP8 (compressed-tensors)", "INT4 (compressed-tensors, pack-quantized)"
_FORMATS = {FP8: ("float-quantized", "naive-quantized"), INT4: ("pack-quantized",)}


class Scheme(NamedTuple):
    kind: str  # FP8 or INT4
    strategy: str  # tensor, channel, group or block: what shares a scale
    group: int | None
    block: tuple[int, ...]
    symmetric: bool

    def kernel(self, stored: Sequence[TensorEntry], shape: tuple[int, ...], dtype: str) -> Kernel:
        """The kernel of a weight of `shape` that is stored as these codes and scales."""
        if self.symmetric != (len(stored) == 2):
            raise ValueError(f"zero points are {'not ' * self.symmetric}part of {self.strategy} {self.kind}")
        kernel = self._kernel(stored, shape, dtype)
        form = kernel.form([
            Form("float32" if number == 1 else entry.dtype, entry.shape) for number, entry in enumerate(stored)
        ])  # fmt: skip
        if form.shape != shape:
            raise ValueError(f"weight_shape is {shape}, its codes are {form.shape}")
        return kernel

    def _kernel(self, stored: Sequence[TensorEntry], shape: tuple[int, ...], dtype: str) -> Kernel:
        columns = max(1, shape[-1]) if shape else 1
        if self.kind == INT4:
            return UnpackInt4(columns, self.group or columns, dtype, not self.symmetric)
        rows = (1,) * (len(shape) - 1)
        blocks = {
            "tensor": () if stored[1].shape in ((), (1,)) else tuple(max(1, length) for length in shape),
            "channel": (*rows, columns),
            "group": (*rows, self.group or columns),
            "block": (*rows[1:], *self.block),
        }
        return Dequantize(stored[0].dtype, blocks[self.strategy], dtype)


class Schemes(NamedTuple):
    all: tuple[Scheme, ...]

    def kernels(
        self, kind: str, stored: Sequence[TensorEntry], shape: tuple[int, ...], dtype: str
    ) -> tuple[list[Kernel], list[str]]:
        """The different kernels that fit a weight stored like this, and why others do not."""
        kernels: list[Kernel] = []
        reasons = []
        for scheme in self.all:
            if scheme.kind != kind:
                continue
            try:
                kernel = scheme.kernel(stored, shape, dtype)
            except ValueError as error:
                reasons.append(str(error))
                continue
            if kernel not in kernels:
                kernels.append(kernel)
        return kernels, reasons


def schemes_of(settings: Mapping[str, Any]) -> Schemes:
    sparse = settings.get("sparsity_config") or {}
    if not isinstance(sparse, Mapping) or sparse.get("format", "dense") != "dense":
        raise _unread(f"sparsity_config {sparse!r}")
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise MappingError(f"config.json: config_groups of compressed-tensors is {groups!r}, expected groups")
    found = [_scheme(name, group, settings.get("format")) for name, group in groups.items()]
    return Schemes(tuple(dict.fromkeys(scheme for scheme in found if scheme is not None)))


def _scheme(name: str, group: object, default: object) -> Scheme | None:
    if not isinstance(group, Mapping):
        raise MappingError(f"config.json: config_groups.{name} is {group!r}, expected a set of fields")
    weights = group.get("weights")
    if weights is None:  # activations only
        return None
    if not isinstance(weights, Mapping):
        raise MappingError(
            f"config.json: config_groups.{name}.weights is {weights!r}, expected a set of fields"
        )
    bits, number = weights.get("num_bits", 8), weights.get("type", "int")
    kind = {(8, "float"): FP8, (4, "int"): INT4}.get((bits, number)) if isinstance(number, str) else None
    stored = group.get("format") or default
    if kind is None:
        raise _unread(f"{name}: {bits}-bit {number}")
    if stored not in (*_FORMATS[kind], "mixed-precision"):
        raise _unread(f"{name}: {bits}-bit {number} in the format {stored!r}")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy not in (("tensor", "channel", "group", "block") if kind == FP8 else ("channel", "group")):
        raise _unread(f"{name}: {bits}-bit {number} with a scale for each {strategy}")
    if weights.get("actorder") == "group":
        raise _unread(f"{name}: columns in the order of their activations (actorder: group)")
    size = weights.get("group_size") if strategy == "group" else None
    block = weights.get("block_structure") if strategy == "block" else ()
    lengths = [
        *([size] if strategy == "group" else []),
        *(block if isinstance(block, list | tuple) else [block]),
    ]
    if not all(type(n) is int and n > 0 for n in lengths) or (strategy == "block" and len(lengths) != 2):
        raise MappingError(f"config.json: config_groups.{name}.weights has {strategy} lengths {lengths}")
    symmetric = bool(weights.get("symmetric", True))
    if kind == FP8 and not symmetric:
        raise _unread(f"{name}: 8-bit floats with zero points")
    return Scheme(kind, strategy, size, tuple(block or ()), symmetric)


def _unread(what: str) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        f"config.json: compressed-tensors, {what}, is not read; {FP8} and {INT4} are. Decompress it first "
        "(transformers: `from_pretrained(DIR, quantization_config=CompressedTensorsConfig(run_compressed=False))`, "
        "then `save_pretrained`), or import the model that it was quantized from"
    )


SETTINGS = "quantization_config"
STORED = " as stored"  # the key of codes that have the name of the weight they stand for
_WAYS_OUT = {
    "awq": "AWQ", "gptq": "GPTQ", "bitsandbytes": "bitsandbytes", "bitnet": "BitNet", "aqlm": "AQLM", "eetq": "EETQ",
    "fbgemm_fp8": "FBGEMM FP8", "hqq": "HQQ", "modelopt": "ModelOpt", "quanto": "Quanto", "quark": "Quark",
    "torchao": "torchao", "vptq": "VPTQ",
}  # fmt: skip
_OF_ACTIVATIONS = re.compile(r"\.(?:activation_scale|(?:input|output|q|k|v)_(?:scale|zero_point))$")
_LEFT_BEHIND = {
    "fp8": re.compile(r"_scale_inv$"),
    "mxfp4": re.compile(r"_(?:blocks|scales)$"),
    "compressed-tensors": re.compile(r"\.weight_(?:packed|scale|shape|zero_point|g_idx|global_scale)$"),
}
_CODES = frozenset(name for name in FLOATING if itemsize(name) == 1)
_SCALE_TYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Dequantized:
    """A model without quantization: its catalog has computed tensors and, named in `parts`, what they come from."""

    catalog: Catalog
    config: Mapping[str, Any]
    parts: frozenset[str] = frozenset()
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def specs(self) -> dict[str, Spec]:
        return {
            key: Spec(entry.dtype, entry.shape)
            for key, entry in self.catalog.tensors.items()
            if key not in self.parts
        }


@dataclass(slots=True)
class _Found:
    """What is being made of a quantized model's tensors."""

    tensors: Mapping[str, TensorEntry]
    settings: Mapping[str, Any]
    dtype: str  # of the model, by config.json
    left_alone: Patterns
    files: Files
    made: dict[str, Made] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)  # tensors by encoding and element type
    problems: list[str] = field(default_factory=list)
    unread: list[str] = field(
        default_factory=list
    )  # what is sound, and of which it is not known how to read it

    def make(self, name: str, kind: str, kernel: Kernel, inputs: Iterable[Input]) -> None:
        """`name` is made of these stored tensors, or a problem."""
        inputs = tuple(inputs)
        names = {one.name for one in inputs}
        self.used |= names
        twice = {one for one in (name, name + STORED) if one in self.tensors} - names
        if twice:
            self.problems.append(f"{name} is stored twice, as {kind} and as {' and '.join(sorted(twice))}")
            return
        listed = self.left_alone.listing(name.rpartition(".")[0])
        if listed is not None:
            self.unread.append(
                f"{name} is stored as {kind}, but config.json leaves its module alone ({listed!r})"
            )
            return
        values = tuple(
            Value(one.dtype or entry.dtype, entry.shape, (Source(one.name + STORED * (one.name == name)),))
            for one in inputs
            for entry in [self.tensors[one.name]]
        )
        made = Made(kernel, values)
        try:
            dtype, _ = made.form
        except ValueError as error:
            self.problems.append(f"{name}: {error}")
            return
        self.made[name] = made
        self.kinds[kind, dtype] += 1

    def scale(self, name: str, of: str) -> Input | None:
        """The scales `name` of weight `of` as a kernel takes them, or a problem."""
        entry = self.tensors.get(name)
        if entry is None:
            self.problems.append(f"{of} is stored as codes; its scales, {name}, are missing")
        elif entry.dtype not in _SCALE_TYPES:
            self.unread.append(f"{name} is {entry.dtype}; scales are read as {', '.join(_SCALE_TYPES)}")
        else:
            return Input(name, "float32")
        self.used.add(name)
        return None


class Input(NamedTuple):
    """A stored tensor, and the type that a kernel takes it as; None for its own."""

    name: str
    dtype: str | None = None


def dequantized(catalog: Catalog, config: Mapping[str, Any], files: Files) -> Dequantized:
    """The model of these safetensors as plain tensors; the same catalog when it is not quantized."""
    settings = config.get(SETTINGS)
    if not settings:
        _refuse_unannounced(catalog)
        return Dequantized(catalog, config)
    method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    if not isinstance(settings, Mapping) or not isinstance(method, str) or method not in _READERS:
        raise UnsupportedCheckpointError(_not_read(method))
    if method == "compressed-tensors":
        left_alone = targets_ignored(settings.get("ignore") or ())
    else:
        left_alone = modules_left_alone(settings.get("modules_to_not_convert") or ())
    found = _Found(catalog.tensors, settings, _dtype_of(config), left_alone, files)
    _READERS[method](found)
    activations = [name for name in catalog.tensors if _OF_ACTIVATIONS.search(name)]
    accounted = {*found.used, *activations}
    found.problems += [
        f"{name}: there is no quantized weight that it belongs to"
        for name, entry in catalog.tensors.items()
        if name not in accounted and _is_part(entry, method)
    ]
    if found.problems or found.unread:
        raise MappingError(
            f"config.json says {method}, and the tensors do not agree:\n"
            + list_problems([*found.problems, *found.unread]),
            found.problems,
        )
    rest = {name: value for name, value in config.items() if name != SETTINGS}
    dropped = tuple(
        f"{name}: a scale of activations; they are not quantized in Megatron" for name in activations
    )
    return _result(found, catalog, rest, frozenset(activations), dropped)


def _result(
    found: _Found,
    catalog: Catalog,
    config: Mapping[str, Any],
    unread: frozenset[str],
    dropped: tuple[str, ...],
) -> Dequantized:
    tensors: dict[str, TensorEntry] = {}
    parts = set()
    for name, entry in catalog.tensors.items():
        if name in unread:
            continue
        if name not in found.used:
            tensors[name] = entry
            continue
        key = name + STORED * (name in found.made)
        tensors[key] = entry if key == name else replace(entry, key=key)
        parts.add(key)
    tensors |= {name: made_entry(name, made) for name, made in found.made.items()}
    notes = [
        f"{count:,} tensors were dequantized from {kind} to {dtype}, exactly as their own decoder does; the codes "
        f"cannot be told from the values again: export-hf writes {dtype}"
        for (kind, dtype), count in sorted(found.kinds.items())
    ]
    if found.left_alone.unchecked:
        notes.append(
            "which modules config.json leaves alone was not checked for "
            + ", ".join(map(repr, found.left_alone.unchecked[:4]))
        )
    return Dequantized(replace(catalog, tensors=tensors), config, frozenset(parts), dropped, tuple(notes))


def _is_part(entry: TensorEntry, method: str) -> bool:
    """Whether a tensor has the look of codes or scales."""
    if entry.dtype in _CODES:
        return True
    plain_bytes = method != "mxfp4" or entry.dtype == "uint8"
    return plain_bytes and _LEFT_BEHIND[method].search(entry.key) is not None


def _not_read(method: object) -> str:
    known = ", ".join(_READERS)
    said = _WAYS_OUT.get(method.lower(), repr(method)) if isinstance(method, str) else repr(method)
    return (
        f"config.json says that the weights are quantized by {said}; read are {known}. Save them in bfloat16 first "
        "(transformers: `from_pretrained(DIR)`, then `dequantize()` where the quantizer has that, then "
        "`save_pretrained(NEW)`), or import the model that it was quantized from"
    )


def _dtype_of(config: Mapping[str, Any]) -> str:
    """The type that config.json gives the weights."""
    said = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if said not in CASTABLE:
        raise MappingError(
            f"config.json: torch_dtype is {said!r}; quantized weights become {', '.join(CASTABLE)}"
        )
    return str(said)


def _refuse_unannounced(catalog: Catalog) -> None:
    """Raise MappingError if tensors look like codes or scales."""
    found = [
        f"{name} ({entry.dtype})"
        for name, entry in catalog.tensors.items()
        if any(_is_part(entry, method) for method in _LEFT_BEHIND)
    ]
    if found:
        raise MappingError(
            f"{len(found)} tensors are codes or scales of a quantized model, but config.json has no "
            f"{SETTINGS}, which says how to read them. Take the config.json that was published with the weights:\n"
            + list_problems(found[:4]),
            found,
        )


def _fp8(found: _Found) -> None:
    """`quant_method: fp8`: a scale for every block of `weight_block_size`, or one for the whole tensor."""
    block = found.settings.get("weight_block_size")
    pair = (
        isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    )
    if block is not None and not pair:
        raise MappingError(
            f"config.json: weight_block_size is {block!r}, expected two lengths such as [128, 128]"
        )
    kind = f"block FP8 ({block[0]} x {block[1]})" if block else "FP8"
    for name, entry in found.tensors.items():
        if entry.dtype not in MINIFLOATS or _OF_ACTIVATIONS.search(name):
            continue
        scale = found.scale(f"{name}_scale_inv", name)
        found.used.add(name)
        if scale is not None:
            lead = (1,) * (len(entry.shape) - 2)
            kernel = Dequantize(entry.dtype, (*lead, *block) if block else (), found.dtype)
            found.make(name, kind, kernel, (Input(name), scale))


def _mxfp4(found: _Found) -> None:
    """`quant_method: mxfp4`, the experts of GPT-OSS. The values are bfloat16 whatever the model is."""
    for name in found.tensors:
        if not name.endswith("_blocks"):
            continue
        weight = name.removesuffix("_blocks")
        found.used.add(name)
        if f"{weight}_scales" not in found.tensors:
            found.problems.append(f"{name}: its scales, {weight}_scales, are missing")
            continue
        found.make(weight, "MXFP4", DecodeMxfp4(), (Input(name), Input(f"{weight}_scales")))


def _compressed_tensors(found: _Found) -> None:
    """`quant_method: compressed-tensors`: which of its schemes a weight has is what its tensors fit."""
    schemes = schemes_of(found.settings)
    for name, entry in found.tensors.items():
        packed = name.endswith(".weight_packed")
        if not packed and (entry.dtype not in MINIFLOATS or _OF_ACTIVATIONS.search(name)):
            continue
        weight = name.removesuffix("_packed")
        found.used.update((name, f"{weight}_shape") if packed else (name,))
        scale = found.scale(f"{weight}_scale", weight)
        if scale is None or not _one_rounding(found, scale.name):
            continue
        inputs, shape = [Input(name), scale], entry.shape
        if packed:
            shape = _stored_shape(found, f"{weight}_shape", weight)
            if not shape:
                continue
            if f"{weight}_zero_point" in found.tensors:
                inputs.append(Input(f"{weight}_zero_point"))
        forms = [found.tensors[one.name] for one in inputs]
        kind = INT4 if packed else FP8
        kernels, reasons = schemes.kernels(kind, forms, shape, found.dtype)
        if len(kernels) == 1:
            found.make(weight, kind, kernels[0], inputs)
            continue
        found.used.update(one.name for one in inputs)
        why = "; ".join(reasons) or f"config.json has no scheme of {kind}"
        if kernels:
            found.unread.append(f"{weight}: several schemes of config.json fit")
        else:
            found.problems.append(f"{weight}: {why}")


def _one_rounding(found: _Found, scale: str) -> bool:
    """Whether decoders agree on the result's type, which is the scales' where these are short; or a problem."""
    dtype = found.tensors[scale].dtype
    if dtype in ("float32", found.dtype):
        return True
    found.unread.append(
        f"{scale} is {dtype}, and the model {found.dtype} by config.json: decoders round to one or to the other. "
        "Correct torch_dtype"
    )
    return False


def _stored_shape(found: _Found, name: str, of: str) -> tuple[int, ...]:
    """What `weight_shape` says, the shape before packing; () and a problem if it says nothing."""
    entry = found.tensors.get(name)
    if (
        entry is None
        or entry.dtype not in ("int64", "int32")
        or entry.shape != (2,)
        or len(entry.chunks) != 1
    ):
        found.problems.append(f"{of} is packed; its shape, {name} with two integers, is missing")
        return ()
    item = entry.chunks[0].item
    data = found.files.read(item.file, item.offset, item.length)
    width = itemsize(entry.dtype)
    return tuple(int.from_bytes(data[at : at + width], "little", signed=True) for at in (0, width))


_READERS: Mapping[str, Callable[[_Found], None]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
}
