"""The rules of a family file, each checked on its own and against the others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ckpt_tools.megatron.huggingface.families.file_places import (
    Place,
    Problems,
    RuleSource,
    first_line,
    not_one_of,
    parse_rule_source,
    texts,
    typed,
    unknown_keys,
)
from ckpt_tools.megatron.huggingface.mapping.layouts import JOINED, LAYOUTS
from ckpt_tools.megatron.huggingface.mapping.rules import Rule

NAMED = re.compile(r"<(\w*)>")


@cache
def pieces() -> RuleSource:
    path = Path(__file__).with_name("pieces.yaml")
    return parse_rule_source(path.read_bytes(), path.name, ours=True)


def parts_of(
    said: Any, kind: str, at: Place, problems: Problems, inside: tuple[str, ...] = ()
) -> Iterator[tuple[Any, Place]]:
    """The parts of a list, with those of every piece that it names, in order; a mapping is a list of one.

    `{when: [...], rules: [...]}` are rules under further conditions. `{module: {core: ..., hf: ...}, tensors: {...}}`
    are rules of tensors with equal names on both sides and their shapes, in files of this package.
    """
    if isinstance(said, Mapping):
        yield said, at
        return
    if not isinstance(said, list):
        problems.append(
            f"expected a mapping, or a list of mappings and names of pieces, found {said!r} @ {at}"
        )
        return
    known = pieces().data[kind]
    for number, part in enumerate(said):
        place = at / number
        if isinstance(part, Mapping) and "rules" in part:
            unknown_keys(part, {"when", "rules"}, place, problems)
            when = texts(part.get("when"), place / "when", problems)
            for rule, where in parts_of(part["rules"], kind, place / "rules", problems, inside):
                own = (
                    texts(rule.get("when", []), where / "when", problems) if isinstance(rule, Mapping) else ()
                )
                yield {**rule, "when": [*when, *own]} if isinstance(rule, Mapping) else rule, where
        elif isinstance(part, Mapping) and "tensors" in part and at.source.name:
            module, when = part["module"], part.get("when", [])
            for name, shapes in part["tensors"].items():
                leaves = shapes.items() if isinstance(shapes, Mapping) else [("", shapes)]
                for leaf, shape in leaves:
                    full = f"{name}.{leaf}" if leaf else name
                    rule = {
                        "core": module["core"] + full,
                        "hf": module["hf"] + full,
                        "shape": shape,
                        "when": when,
                    }
                    yield rule, place
        elif not isinstance(part, str):
            yield part, place
        elif part not in known:
            problems.append(f"{not_one_of(part, f'pieces of {kind}', list(known))} @ {place}")
        elif part in inside:
            problems.append(f"the piece {part!r} contains itself @ {place}")
        else:
            yield from parts_of(known[part], kind, pieces().top / kind / part, problems, (*inside, part))


class Names:
    """What `<name>` stands for in a file's texts; `used` are those that were asked for."""

    def __init__(self, own: Mapping[str, str]) -> None:
        self.values: Mapping[str, str] = {**pieces().data["names"], **own}
        self.used: set[str] = set()

    def fill(self, text: str, at: Place, problems: Problems) -> str:

        def value(match: re.Match[str]) -> str:
            name = match.group(1)
            self.used.add(name)
            if name not in self.values:
                problems.append(f"{not_one_of(f'<{name}>', 'names', self.values)} @ {at}")
            return self.values.get(name, "")

        return NAMED.sub(value, text)


RULE_KEYS = {"core", "hf", "layout", "shape", "when", "also", "norm", "dtype", "fused", "parts", "plain"}
PLACEHOLDER = re.compile(r"\{(\w*)\}")
LAYER, MTP = "decoder.layers.{l}.", "mtp.layers.{m}."
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Words:
    names: Names
    dimensions: tuple[str, ...]
    conditions: tuple[str, ...]
    counters: frozenset[str] = frozenset("lmep")  # placeholders of what there are several of


def read_rules(said: Any, words: Words, at: Place, problems: Problems) -> list[Rule]:
    """The rules, those of pieces among them; no tensor of either side has two at once."""
    found: list[Rule] = []
    places: dict[tuple[object, frozenset[str]], Place] = {}
    for item, place in parts_of(said, "rules", at, problems):
        rule = _rule(item, words, place, problems)
        if rule is None:
            continue
        cores = [rule.core.replace("{p}", part) for part, _ in rule.parts] or [rule.core]
        for side in (*cores, *rule.hf):
            key = (side, frozenset(rule.when))
            other = places.setdefault(key, place)
            if other is not place:
                problems.append(f"{side!r} has a rule already, {other} @ {place}")
        found.append(rule)
    return found


def _rule(item: Any, words: Words, at: Place, problems: Problems) -> Rule | None:
    if not isinstance(item, Mapping):
        problems.append(f"expected a mapping @ {at}")
        return None
    before = len(problems)
    unknown_keys(item, RULE_KEYS, at, problems)

    def named(key: str, default: Any = None) -> tuple[str, ...]:
        place = at / key
        found = texts(item.get(key, default), place, problems)
        return tuple(words.names.fill(one, place, problems) for one in found)

    core = words.names.fill(typed(item, "core", str, at, problems), at / "core", problems)
    hf, also, fused = named("hf"), named("also", []), named("fused", [])
    rule = Rule(
        core,
        hf,
        words.names.fill(typed(item, "layout", str, at, problems, default="same"), at / "layout", problems),
        texts(item.get("shape"), at / "shape", problems),
        texts(item.get("when", []), at / "when", problems),
        also,
        typed(item, "norm", bool, at, problems, default=False),
        typed(item, "dtype", str, at, problems, default="") or None,
        fused[0] if fused else None,
        tuple(typed(item, "parts", dict, at, problems, default={}).items()),
        typed(item, "plain", bool, at, problems, default=False),
        "" if at.source.name else str(at),
    )
    if len(problems) == before:
        _check(rule, words, at, problems)
        _check_names(rule, words, at, problems)
    return rule if len(problems) == before else None


def _check(rule: Rule, words: Words, at: Place, problems: Problems) -> None:
    """Layout, dimensions and conditions are known and fit together."""
    layouts = JOINED if rule.parts else LAYOUTS
    wanted = 1 if rule.parts else LAYOUTS.get(rule.layout, (0,))[0]
    if rule.layout not in layouts:
        said = {
            name: first_line(one if callable(one) else one[1])
            for name, one in (JOINED if rule.parts else LAYOUTS).items()
        }
        problems.append(f"{not_one_of(rule.layout, 'layouts', said)} @ {at / 'layout'}")
    elif len(rule.hf) != wanted:
        problems.append(f"layout {rule.layout} has {wanted} tensors, found {len(rule.hf)} @ {at / 'hf'}")
    for key, kind, found, known in (("shape", "dimensions", rule.shape, words.dimensions),
                                    ("when", "conditions", rule.when, words.conditions)):  # fmt: skip
        problems += [
            f"{not_one_of(one, kind, known)} @ {at / key / i}"
            for i, one in enumerate(found)
            if one not in known
        ]
    problems += [
        f"{not_one_of(rows, 'dimensions', words.dimensions)} @ {at / 'parts' / part}"
        for part, rows in rule.parts
        if rows not in words.dimensions
    ]
    if not rule.shape and not rule.parts and rule.layout != "same":
        problems.append(f"layout {rule.layout} cuts rows, and shape names no dimension @ {at / 'shape'}")
    if rule.dtype not in (None, *DTYPES):
        problems.append(f"{rule.dtype!r} is not one of {', '.join(DTYPES)} @ {at / 'dtype'}")


def _check_names(rule: Rule, words: Words, at: Place, problems: Problems) -> None:
    """Layers and experts are numbered on both sides."""
    places = _places(rule.core)
    if bool(rule.parts) != ("p" in places):
        problems.append(f"parts and {{p}} in core go together @ {at / 'core'}")
    for one in sorted(places - words.counters):
        problems.append(f"{{{one}}} in {rule.core!r} is not one of {{l}}, {{m}} and {{e}} @ {at / 'core'}")
    further = {"n"} if "m" in places else set()
    for i, name in enumerate(rule.hf):
        strange = _places(name) - places - further
        if strange or "p" in _places(name) or (places - {"e", "m", "p"}) - _places(name):
            problems.append(f"{name!r} has other placeholders than {rule.core!r} @ {at / 'hf' / i}")
    for i, name in enumerate(rule.also):
        if _places(name) != places:
            problems.append(f"{name!r} has other placeholders than {rule.core!r} @ {at / 'also' / i}")
    is_one = "e" in places or rule.layout == "same"
    if rule.fused is not None and (not is_one or _places(rule.fused) != _places(rule.hf[0]) - {"e"}):
        problems.append(
            f"{rule.fused!r} is to be {rule.hf[0]!r} of all experts, with its other placeholders @ {at / 'fused'}"
        )


def _places(name: str) -> set[str]:
    return set(PLACEHOLDER.findall(name))


def core_in_mtp(core: str) -> str:
    """A decoder layer's parameter as the layer inside a multi-token prediction module names it."""
    return core.replace(LAYER, MTP + "transformer_layer.")


def in_mtp(rule: Rule, layer: str = "", mtp_layer: str = "") -> Rule:
    """A decoder layer's rule for the layer inside a prediction module.

    Its tensors are named as one layer more, or as `mtp_layer` has it where they begin with `layer`. An indexer is in
    it wherever there is one (megatron_args.py).
    """

    def turned(name: str) -> str:
        if layer and name.startswith(layer):
            return mtp_layer + name[len(layer) :]
        return name.replace("{l}", "{n}")

    return replace(
        rule,
        core=core_in_mtp(rule.core),
        hf=tuple(map(turned, rule.hf)),
        also=tuple(map(core_in_mtp, rule.also)),
        fused=rule.fused and turned(rule.fused),
        when=tuple(one for one in rule.when if one != "indexer"),
    )


def has_mtp(rules: Iterable[Rule]) -> bool:
    return any(rule.core.startswith(MTP) for rule in rules)
