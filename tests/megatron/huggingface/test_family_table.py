"""The page of families says what is tested, and no more."""

from __future__ import annotations

import pytest

from ckpt_tools.megatron.huggingface.families.families import FAMILIES
from ckpt_tools.megatron.huggingface.families.identify import family_of_config
from ckpt_tools.megatron.huggingface.vision.vision_language import vision_language, vision_language_types
from tests.megatron.huggingface.family_table import GIVEN, INSIDE, PAGE, classes, page
from tests.megatron.huggingface.models import CONFIGS, NOT_IN_MEGATRON, family_of, installed
from tests.megatron.huggingface.test_moe_families import RELEASED
from tests.megatron.huggingface.test_released_configs import RELEASED as DENSE
from tests.megatron.huggingface.vision_language import KINDS
from tests.peers.test_vision_language import CASES as BRIDGE


def test_the_page_is_what_the_lists_make() -> None:
    """Otherwise: `python -m tests.megatron.huggingface.family_table`."""
    assert PAGE.read_text() == page()


def test_every_vision_language_model_is_tested_both_ways() -> None:
    ruled = {name for name in vision_language_types() if vision_language(name).rules}
    assert ruled == KINDS.keys() and BRIDGE.keys() <= ruled


def test_every_family_is_tested_both_ways() -> None:
    """As a tiny model of transformers, or by its rules alone."""
    tiny = {family_of(variant) for variant in CONFIGS}
    released = {family_of_config(config).name for config in (*RELEASED.values(), *DENSE.values())}
    assert tiny | released | INSIDE.keys() == FAMILIES.keys()
    assert GIVEN.keys() <= tiny and CONFIGS.keys() >= set(NOT_IN_MEGATRON)
    known = {kind for names in classes().values() for kind in names}
    assert known == {kind for kind, _ in CONFIGS.values()}


def test_the_classes_of_a_release_are_those_that_are_recorded() -> None:
    transformers = pytest.importorskip(
        "transformers", reason="the optional peer transformers is not installed"
    )
    assert classes()[transformers.__version__] == {kind for kind, _ in installed().values()}
