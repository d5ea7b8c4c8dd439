"""A user's rule file: one more family, in YAML.

family: mymodel               # a name of its own; a known family of that name is replaced
architecture: LlamaForCausalLM
model_type: llama             # that of config.json (--hf-config, or the model to import), which chooses the family;
                              # without it: the name
like: llama                   # a known family whose rules, config fields and demands are taken over
fields:                       # config.json fields beside those taken over: which setting of ModelArgs each is
  head_dim: kv_channels       # must be there
  use_qk_norm: {setting: qk_layernorm, default: false}   # what the class takes without it
  q_lora_rank: null           # a field that this config.json does not have
fixed: {hidden_act: silu}     # config.json fields with one value
needs: {qk_layernorm: true}   # Megatron settings without which the model is not of this family: of ModelArgs, or such
                              # that arguments.yaml refuses otherwise and this architecture computes
rules:                        # replace the rule of the same `core`, or add one
  - core: decoder.layers.{l}.mlp.linear_fc2.weight
    hf: model.layers.{l}.mlp.down.weight
    layout: same
    shape: [hidden, ffn]
    when: [dense]
                              # a rule of a decoder layer goes for the layer inside a prediction module (MTP) too
without: [output_layer.weight]      # rules not taken over
ignored: ['rotary_emb\\.inv_freq']  # Hugging Face tensors without content

With `needs: {multi_latent_attention: false}`, a family like one that has it takes the attention of Llama and Qwen in
its place: q_proj to o_proj, q_norm and k_norm, head_dim.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_tools.errors import UsageError, list_problems
from ckpt_tools.formats.documents import DocumentError, parse_yaml, read_named_file
from ckpt_tools.megatron.huggingface import rule_tables
from ckpt_tools.megatron.huggingface.config_fields import HEAD_DIM, MLA, REQUIRED, Field
from ckpt_tools.megatron.huggingface.families import FAMILIES
from ckpt_tools.megatron.huggingface.layouts import LAYOUTS
from ckpt_tools.megatron.huggingface.ledger import arguments
from ckpt_tools.megatron.huggingface.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.rule_tables import MTP, P, core_in_mtp, in_mtp
from ckpt_tools.megatron.huggingface.rules import CONDITIONS, DIMENSIONS, Family, Rule

FAMILY_KEYS = {"family", "architecture", "model_type", "like", "fields", "fixed", "needs", "rules", "without",
               "ignored", "plus_one"}  # fmt: skip
RULE_KEYS = {"core", "hf", "layout", "shape", "when", "also", "norm", "dtype"}
TRANSLATED = {"moe_layers", "sliding_layers", "no_rope_layers", "rope_scaling", "glu_interleave", "params_dtype",
              "moe_router_pre_softmax", "moe_shared_expert_intermediate_size", "activation", "tied"}  # fmt: skip
PLACEHOLDER = re.compile(r"\{(\w*)\}")


def load_rule_file(path: str | Path) -> Family:
    """The family that a rule file describes.

    Raises:
        UsageError: the file is not YAML, or a value is not what it must be; all of them are named with their
            place, as `problem @ $.rules[3].layout`.
    """
    try:
        data = parse_yaml(read_named_file(Path(path)))
    except (OSError, DocumentError) as error:
        raise UsageError(f"{path}: {error}") from error
    problems: list[str] = []
    family = _family(data, problems)
    if problems or family is None:
        raise UsageError(f"{path}: the rule file cannot be used:\n" + list_problems(problems), problems)
    return family


def _family(data: Any, problems: list[str]) -> Family | None:
    if not isinstance(data, dict):
        problems.append("expected a mapping @ $")
        return None
    _unknown(data, FAMILY_KEYS, "$", problems)
    like = data.get("like", "llama")
    if not isinstance(like, str) or like not in FAMILIES:
        problems.append(f"{like!r} is not one of {', '.join(FAMILIES)} @ $.like")
        return None
    base = FAMILIES[like]
    name = _typed(data, "family", str, "$", problems)
    fixed = _typed(data, "fixed", dict, "$", problems, default={})
    needs = _typed(data, "needs", dict, "$", problems, default={})
    problems += [
        f"unknown setting @ $.needs.{key}"
        for key in needs
        if key not in ModelArgs.__dataclass_fields__ and key not in arguments().changes
    ]
    fields = _fields(data, base, needs, problems)
    carried = {name for one in fields if one not in base.fields for name in (one.hf, one.arg)}
    ignored = _texts(data.get("ignored", []), "$.ignored", problems)
    problems += [
        f"not a regular expression @ $.ignored[{i}]" for i, p in enumerate(ignored) if not _compiles(p)
    ]
    return replace(
        base,
        name=name or "",
        like=base.name,
        architecture=_typed(data, "architecture", str, "$", problems, default=base.architecture),
        model_type=_typed(data, "model_type", str, "$", problems, default=name or ""),
        rules=_rules(data, base, needs, problems),
        fields=fields,
        fixed={name: value for name, value in base.fixed.items() if name not in carried} | fixed,
        needs={name: value for name, value in base.needs.items() if name not in carried} | needs,
        plus_one=_typed(data, "plus_one", bool, "$", problems, default=base.plus_one),
        ignored=(*base.ignored, *ignored),
    )


def _drops_latent_attention(base: Family, needs: Mapping[str, Any]) -> bool:
    return bool(base.needs.get("multi_latent_attention")) and needs.get("multi_latent_attention") is False


def _plain_attention(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules with common attention in place of latent attention, in prediction modules too."""
    latent, plain = (*rule_tables.MLA,), (*rule_tables.SELF_ATTENTION, *rule_tables.QK_NORM)
    if any(rule.core.startswith(MTP) for rule in rules):
        latent, plain = ((*part, *map(in_mtp, part)) for part in (latent, plain))
    return (*(rule for rule in rules if rule not in latent), *plain)


def _fields(
    data: Mapping[str, Any], base: Family, needs: Mapping[str, Any], problems: list[str]
) -> tuple[Field, ...]:
    said = _typed(data, "fields", dict, "$", problems, default={})
    kept = base.fields
    if _drops_latent_attention(base, needs):
        kept = (*(one for one in kept if one.arg not in {latent.arg for latent in MLA}), HEAD_DIM)
    known = {one.hf for one in kept}
    problems += [f"{base.name} has no such field to leave out @ $.fields.{hf}"
                 for hf, setting in said.items() if setting is None and hf not in known]  # fmt: skip
    own = [
        field
        for hf, setting in said.items()
        if setting is not None and (field := _field(hf, setting, f"$.fields.{hf}", problems))
    ]
    return (*(one for one in kept if one.hf not in said), *own)


def _field(hf: str, said: Any, at: str, problems: list[str]) -> Field | None:
    """A field with the translation of its values that a known family has, or else with values as they are."""
    said = {"setting": said} if isinstance(said, str) else said
    if not isinstance(said, dict):
        problems.append(f"expected a setting, a mapping or null, found {said!r} @ {at}")
        return None
    _unknown(said, {"setting", "default"}, at, problems)
    setting = _typed(said, "setting", str, at, problems)
    if setting not in ModelArgs.__dataclass_fields__:
        problems.append(f"unknown setting {setting!r} @ {at}")
        return None
    known = [
        one for family in FAMILIES.values() for one in family.fields if (one.hf, one.arg) == (hf, setting)
    ]
    if not known and setting in TRANSLATED:
        others = sorted(
            {one.hf for family in FAMILIES.values() for one in family.fields if one.arg == setting}
        )
        problems.append(
            f"{setting} has a form of its own in config.json; known are {', '.join(others)} @ {at}"
        )
        return None
    return replace(known[0] if known else Field(hf, setting), default=said.get("default", REQUIRED))


def _in_mtp(own: list[Rule], base: Family) -> list[Rule]:
    """Decoder layers' rules for the layer inside a prediction module, where `base` has such and `own` does not."""
    has = any(rule.core.startswith(MTP) for rule in base.rules)
    cores = {rule.core for rule in own}
    made = [in_mtp(rule) for rule in own if has and rule.core.startswith(P)]
    return [rule for rule in made if rule.core not in cores]


def _rules(
    data: Mapping[str, Any], base: Family, needs: Mapping[str, Any], problems: list[str]
) -> tuple[Rule, ...]:
    without = _texts(data.get("without", []), "$.without", problems)
    taken = _plain_attention(base.rules) if _drops_latent_attention(base, needs) else base.rules
    rules = {(rule.core, rule.when, rule.parts): rule for rule in taken}
    cores = {rule.core for rule in base.rules}
    problems += [f"no rule for {core!r} to leave out @ $.without[{i}]"
                 for i, core in enumerate(without) if core not in cores]  # fmt: skip
    own = [
        rule
        for i, item in enumerate(_typed(data, "rules", list, "$", problems, default=[]))
        if (rule := _rule(item, f"$.rules[{i}]", problems))
    ]
    own += _in_mtp(own, base)
    replaced = {rule.core for rule in own} | {name for core in without for name in (core, core_in_mtp(core))}
    return (*(rule for rule in rules.values() if rule.core not in replaced), *own)


def _rule(item: Any, at: str, problems: list[str]) -> Rule | None:
    if not isinstance(item, dict):
        problems.append(f"expected a mapping @ {at}")
        return None
    before = len(problems)
    _unknown(item, RULE_KEYS, at, problems)
    core = _typed(item, "core", str, at, problems)
    hf = _texts(item.get("hf"), f"{at}.hf", problems)
    layout = _typed(item, "layout", str, at, problems, default="same")
    shape = _texts(item.get("shape"), f"{at}.shape", problems)
    when = _texts(item.get("when", []), f"{at}.when", problems)
    also = _texts(item.get("also", []), f"{at}.also", problems)
    norm = _typed(item, "norm", bool, at, problems, default=False)
    if layout not in LAYOUTS:
        problems.append(f"{layout!r} is not one of {', '.join(LAYOUTS)} @ {at}.layout")
    elif len(hf) != LAYOUTS[layout][0]:
        problems.append(f"layout {layout} has {LAYOUTS[layout][0]} tensors, found {len(hf)} @ {at}.hf")
    problems += [f"{one!r} is not one of {', '.join(DIMENSIONS)} @ {at}.shape[{i}]"
                 for i, one in enumerate(shape) if one not in DIMENSIONS]  # fmt: skip
    problems += [f"{one!r} is not one of {', '.join(CONDITIONS)} @ {at}.when[{i}]"
                 for i, one in enumerate(when) if one not in CONDITIONS]  # fmt: skip
    if not shape and layout != "same":
        problems.append(f"layout {layout} cuts rows, and shape names no dimension @ {at}.shape")
    places = set(PLACEHOLDER.findall(core or ""))
    for i, name in enumerate(hf):
        strange = set(PLACEHOLDER.findall(name)) - places - ({"n"} if "m" in places else set())
        if strange or (places - {"e", "m"}) - set(PLACEHOLDER.findall(name)):
            problems.append(f"{name!r} has other placeholders than {core!r} @ {at}.hf[{i}]")
    dtype = _typed(item, "dtype", str, at, problems, default="") or None
    return Rule(core, hf, layout, shape, when, also, norm, dtype) if len(problems) == before else None


def _typed(
    data: Mapping[str, Any], key: str, kind: type, at: str, problems: list[str], *, default: Any = None
) -> Any:
    """The value of `key`; without `default` (None) it must be there."""
    value = data.get(key, default)
    if not isinstance(value, kind):
        found = "missing" if value is None else f"expected {kind.__name__}, found {value!r}"
        problems.append(f"{found} @ {at}.{key}")
        return kind()
    return value


def _texts(value: Any, at: str, problems: list[str]) -> tuple[str, ...]:
    """A list of texts, or one text for a list of one."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        problems.append(f"expected a text or a list of texts, found {value!r} @ {at}")
        return ()
    return tuple(values)


def _unknown(data: Mapping[str, Any], known: set[str], at: str, problems: list[str]) -> None:
    problems += [f"unknown key @ {at}.{key}" for key in data if key not in known]


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True
