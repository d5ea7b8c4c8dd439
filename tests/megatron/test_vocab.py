"""Padded vocabularies: what the args tell of the tokens, and which jobs pad to the stored rows."""

import pytest

from ckpt_tools.megatron.vocab import Vocabulary, padded_rows, told_tokens, vocabulary

NULL = {
    "tokenizer_type": "NullTokenizer",
    "make_vocab_size_divisible_by": 16,
    "tensor_model_parallel_size": 2,
}
ROWS = [("decoder.final_layernorm.weight", (8,)), ("embedding.word_embeddings.weight", (224, 32))]


@pytest.mark.parametrize(
    ("tokens", "multiple", "tp", "rows"),
    [(200, 16, 1, 208), (200, 16, 2, 224), (208, 16, 1, 208), (209, 16, 1, 224), (1, 128, 8, 1024)],
)
def test_megatron_pads_to_a_multiple_for_every_rank(tokens, multiple, tp, rows):
    assert padded_rows(tokens, multiple, tp) == rows


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (NULL | {"vocab_size": 200, "padded_vocab_size": 224}, (200, 201)),
        (NULL | {"vocab_size": 224, "padded_vocab_size": 256}, (225,)),  # the token for a document's end
        (NULL | {"vocab_size": 224, "padded_vocab_size": 224}, (224,)),
        (NULL | {"vocab_size": 200, "padded_vocab_size": 512}, ()),  # --padded-vocab-size was given
        (NULL | {"vocab_size": 200}, (200, 201)),
        ({"vocab_size": 61, "should_pad_vocab": True}, (61,)),  # Bridge
        (NULL | {"tokenizer_type": "TikTokenizer", "vocab_size": 200, "padded_vocab_size": 224}, (200,)),
        (NULL | {"tokenizer_type": "HuggingFaceTokenizer", "vocab_size": 200, "padded_vocab_size": 224}, ()),
        (NULL | {"vocab_size": True}, ()),
        (NULL, ()),
        ({}, ()),
    ],
)
def test_tokens_that_the_args_tell(args, expected):
    assert told_tokens(args) == expected


@pytest.mark.parametrize(
    ("args", "tokens", "expected"),
    [
        (NULL | {"vocab_size": 200, "padded_vocab_size": 224, "num_attention_heads": 8}, None,
         Vocabulary(224, 16, (2,), True)),
        (NULL | {"num_attention_heads": 8}, None, Vocabulary(224, 16, (1, 2), False)),
        (NULL, None, Vocabulary(224, 16, (1, 2, 7, 14), False)),
        (NULL | {"vocab_size": 200, "padded_vocab_size": 224}, 210, Vocabulary(224, 16, (1, 2, 7, 14), True)),
        (NULL | {"make_vocab_size_divisible_by": 10**9}, None, Vocabulary(224, 10**9, (), False)),
        (NULL | {"num_attention_heads": 10**12, "make_vocab_size_divisible_by": 1}, 224,
         Vocabulary(224, 1, (1, 2, 4, 8, 16, 32), True)),
        ({}, None, Vocabulary(224, None, (), False)),
    ],
)  # fmt: skip
def test_sizes_whose_jobs_pad_to_the_stored_rows(args, tokens, expected):
    assert vocabulary(ROWS, args, tokens) == expected


def test_a_model_without_a_vocabulary_has_none():
    assert vocabulary(ROWS[:1], NULL, None) is None
