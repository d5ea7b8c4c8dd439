"""The config.json of a vision-language model that a run records: it says of vision towers what no shape tells.

An import records the whole config.json as the argument `hf_config`, which Megatron-Bridge's provider of Mistral 3 has
too. Its other providers have `vision_config`. In a run_config.yaml these are what a configuration of transformers is
made of again: `{_target_: <class>.from_dict, config_dict: {...}}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckpt_tools.megatron.huggingface.config.read_args import flat_args
from ckpt_tools.megatron.huggingface.vision.towers import QUANTIZED

RECORD = "hf_config"


def record_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The argument that records a config.json; without how its weights were quantized, which the run's are not."""
    return {RECORD: {name: value for name, value in config.items() if name != QUANTIZED}}


def recorded_config(settings: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The whole config.json that a run records, if it does."""
    return _configuration(flat_args(settings or {}).get(RECORD))


def changed_record(
    settings: Mapping[str, Any], part: str, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> dict[str, Any]:
    """The settings that record a config.json, with changes to the fields of `text_config` or `vision_config`."""
    changed = {}
    for name in (RECORD, part):
        fields = _configuration(settings.get(name))
        if fields is None:
            continue
        inside = fields.get(part) if name == RECORD else None
        new = {part: {**inside, **change(inside)}} if isinstance(inside, Mapping) else change(fields)
        own = settings[name]
        changed[name] = own | ({"config_dict": {**fields, **new}} if "config_dict" in own else new)
    return changed


def _configuration(value: Any) -> Mapping[str, Any] | None:
    """A configuration, plain or as Bridge writes one of transformers."""
    if not isinstance(value, Mapping):
        return None
    inside = value.get("config_dict")
    if isinstance(inside, Mapping):
        return inside
    return {name: one for name, one in value.items() if name not in ("_target_", "_call_", "_partial_")}
