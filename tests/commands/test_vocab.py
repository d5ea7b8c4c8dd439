"""Another padded vocabulary: zeros added, or rows cut off that are proven to be padding."""

import pytest
import torch

from ckpt_tools import ConvertOptions, TargetOptions, convert_to_dcp, convert_to_fsdp_dtensor
from ckpt_tools.errors import MappingError
from tests.commands import oracle
from tests.commands.made import fsdp
from tests.conftest import DATA
from tests.folders import root_of

LLAMA = DATA / "core019_llama_tp2_fully_reshardable" / "iter_0000002"
ROWS = 224


def convert(output, **options):
    target = TargetOptions(**options)
    report = convert_to_fsdp_dtensor(LLAMA, output, ConvertOptions(target=target, check_masters="all"))
    return oracle.tensors(output), report


@pytest.mark.parametrize(
    "options",
    [
        {"vocab_size_padded": 256},
        {"vocab_size_padded": 208, "vocab_size": 201},
        {"vocab_size_padded": 208},  # the args tell of 200 tokens and one for a document's end
    ],
)
def test_weights_and_states_get_the_rows_asked_for(tmp_path, options):
    plain = oracle.tensors(fsdp(LLAMA))
    resized, report = convert(tmp_path / "resized", **options)
    rows, changed = options["vocab_size_padded"], 0
    for key, before in plain.items():
        after = resized[key]
        if ("word_embeddings" not in key and "output_layer" not in key) or before.dim() == 0:
            assert oracle.same_bytes(before, after), key
            continue
        kept = min(rows, ROWS)
        assert after.shape == (rows, before.shape[1])
        assert oracle.same_bytes(after[:kept], before[:kept])
        assert torch.count_nonzero(after[kept:]) == 0
        changed += 1
    assert changed == 6  # two tensors: master and two moments each
    assert any("vocabulary: 224 ->" in note for note in report.notes)
    told = "vocabulary: 201 tokens, as the source's args tell"
    assert (told in report.notes) == ("vocab_size" not in options)
    assert report.job["vocabulary"]["fits_tp"] == {208: [1], 256: [4]}[rows]


def test_rows_that_are_not_known_to_be_padding_are_not_cut(tmp_path):
    with pytest.raises(MappingError, match="rows 200 to 223 would be cut off and are not zeros"):
        convert(tmp_path / "out", vocab_size_padded=200)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", ["fsdp_dtensor to dcp", "dcp to fsdp_dtensor"])
def test_nor_where_masters_are_in_the_place_of_weights(way, tmp_path):
    source, run = root_of("core019_llama_tp2_native_fsdp_dtensor"), convert_to_dcp
    if way.startswith("dcp"):
        convert_to_dcp(source, tmp_path / "dcp")
        source, run = tmp_path / "dcp", convert_to_fsdp_dtensor
    with pytest.raises(MappingError, match="rows 200 to 223 would be cut off and are not zeros"):
        run(source, tmp_path / "out", ConvertOptions(target=TargetOptions(vocab_size_padded=200)))
    run(source, tmp_path / "cut", ConvertOptions(target=TargetOptions(vocab_size_padded=208)))
