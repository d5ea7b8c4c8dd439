"""Which modules a quantization_config names."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.errors import MappingError
from ckpt_tools.megatron.huggingface.quantization.quantized import modules_left_alone, targets_ignored

NAMES = st.lists(
    st.sampled_from(["model", "layers", "1", "11", "mlp", "gate", "gate_proj"]), min_size=1, max_size=4
)


@given(
    NAMES.map(".".join),
    st.lists(NAMES.map(".".join) | st.sampled_from(["model.layers.*.mlp", "ate", "layers.(1|mlp)", "mlp."])),
)
def test_modules_are_left_alone_as_transformers_leaves_them(module, said):
    """Its rule (quantizers_utils.py of 5.24): a pattern that ends at a border of the name, or the name's end."""
    border = r"(?:(?<=\.)|(?=\.|$))"
    expected = any(re.match(f"(?:{one}){border}", module) or module.endswith(one) for one in said)
    found = modules_left_alone(said)
    assert (found.listing(module) is not None) == bool(expected)
    assert not found.unchecked


@pytest.mark.parametrize(
    ("said", "module", "listed"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp", False),
        ("re:.*mlp\\.(gate|up)_proj.*", "model.layers.1.mlp.gate_proj", True),
        ("re:.*mlp\\.(gate|up)_proj.*", "model.layers.1.mlp.experts.3.gate_proj", False),
        ("re:.*self_attn.*", "model.layers.1.self_attn.q_proj", True),
        ("re:lm_head", "model.lm_head", False),
    ],
)
def test_targets_are_ignored_as_compressed_tensors_ignores_them(said, module, listed):
    assert (targets_ignored([said]).listing(module) is not None) == listed


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*$", "(.*)*x", ".*" * 20 + "x", "a{1,9}{1,9}", "(", "x" * 999 + "*"]
)
def test_patterns_that_may_run_away_are_not_tried(pattern):
    started = time.monotonic()
    for found in (targets_ignored([f"re:{pattern}"]), modules_left_alone([pattern])):
        assert len(found.unchecked) == 1 and pattern in found.unchecked[0]
        assert found.listing("a" * 5000 + "!") is None
    assert time.monotonic() - started < 1


def test_only_lists_of_names_are_taken():
    for said in ("lm_head", {"lm_head": 1}, [1], [""]):
        with pytest.raises(MappingError, match="expected a list of module names"):
            modules_left_alone(said)
