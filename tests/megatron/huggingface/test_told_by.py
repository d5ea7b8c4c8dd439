"""What tells a family without a config.json: every word of every line of the table, and what is refused by name."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import yaml

from ckpt_tools.megatron.huggingface import told_by as table
from ckpt_tools.megatron.huggingface.families import FAMILIES
from ckpt_tools.megatron.huggingface.identify import family_of_config, without_modules
from ckpt_tools.megatron.huggingface.read_args import read_model_args
from tests.megatron.huggingface.by_rules import directory, imported
from tests.megatron.huggingface.models import CONFIGS

STEMS = {  # what the name of a configuration class begins with -> the family
    family.architecture.partition("For")[0].removesuffix("LMHeadModel").lower(): name
    for name, family in FAMILIES.items()
}
# Variants that have the parameters and args of another family: a config.json tells them.
TOLD_OTHERWISE: dict[str, str] = {}


@cache
def held(variant: str) -> frozenset[str]:
    """The words that hold for a tiny model."""
    kind, settings = CONFIGS[variant]
    stem = kind.removesuffix("Config").removesuffix("Text").lower()
    family = FAMILIES[STEMS[stem]]
    config = {**settings, "model_type": family.model_type or family.name}
    found, megatron = imported(config, directory(config))
    return frozenset(table.words_of(set(megatron), read_model_args(found.args)))


def test_print() -> None:
    for v in CONFIGS:
        try:
            print(v, sorted(held(v)))
        except Exception as e:
            print("FAIL", v, type(e), str(e)[:300])
