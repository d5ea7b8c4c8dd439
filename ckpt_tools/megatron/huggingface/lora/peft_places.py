"""Which modules adapter_config.json says an adapter is of, held against the tensors that are there.

Rules are those of PEFT (tuners/tuners_utils.py `check_target_module_exists`), by the names of the model's modules:

* a list names a module that is called so, or whose name ends so behind a dot; a text is a pattern of whole names
* `layers_to_transform` narrows what a list names by the ends of names
* `exclude_modules` goes before `target_modules`
* `modules_to_save` is the end of a name, without a dot before it, of what was trained whole
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.quantization.module_patterns import cheap_pattern
from ckpt_tools.model.catalog import TensorEntry

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
        """Whether it names the module; None: it cannot be told."""
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
        """Why a module should not be adapted; None where it should, or nothing tells."""
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
    """What adapter_config.json says of places."""
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
    """Whether one is in a module whose name ends so; in a bare model names lack `model.`."""
    return any(f"{end}." in f"model.{name}" for name in tensors)
