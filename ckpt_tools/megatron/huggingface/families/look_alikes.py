"""Families whose parameters and settings a model has: what config.json would say, where it is not given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.config.ledger import account_for_args, uncarried
from ckpt_tools.megatron.huggingface.config.model_args import ModelArgs
from ckpt_tools.megatron.huggingface.config.read_args import with_own_settings
from ckpt_tools.megatron.huggingface.families.families import FAMILIES
from ckpt_tools.megatron.huggingface.mapping.checks import Spec, not_of_family, spellings, with_vocabulary
from ckpt_tools.megatron.huggingface.mapping.rules import Family, expand


@contextmanager
def naming_look_alikes(
    asked: bool, parameters: Mapping[str, Spec], args: Mapping[str, Any] | None, model: ModelArgs | None
) -> Iterator[None]:
    """
    Raises:
        MappingError: that of the block; if `asked`, with the families that the model may be of instead.
    """
    try:
        yield
    except MappingError as error:
        names = (
            list(_fitting(parameters, args, model))
            if asked and args is not None and model is not None
            else []
        )
        if not names:
            raise
        raise MappingError(
            f"{error}\nIts parameters and settings are those of {' or '.join(names)}: --hf-config with the model's "
            "config.json says which it is",
            error.problems,
        ) from error


def _fitting(parameters: Mapping[str, Spec], args: Mapping[str, Any], model: ModelArgs) -> Iterator[str]:
    for family in FAMILIES.values():
        if _fits(family, parameters, args, with_own_settings(model, family.settings, args)):
            yield family.model_type or family.name


def _fits(family: Family, parameters: Mapping[str, Spec], args: Mapping[str, Any], model: ModelArgs) -> bool:
    """Whether a family has all parameters and settings, but for what only a reference tells."""
    try:
        model, _ = with_vocabulary(model, parameters, model.vocab_size)
        told = {one.hf: None for one in family.fields if one.wins == "either"}
        problems = [*account_for_args(family, args).problems, *uncarried(family, model)]
        problems += not_of_family(family, model, told)
        _, unused = spellings(expand(family, model), parameters, problems)
    except MappingError:
        return False
    return not problems and not unused
