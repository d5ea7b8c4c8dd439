"""What former releases had, and what does it now: said where the word is typed that no command knows."""

from __future__ import annotations

from typing import Final

REMOVED: Final[dict[str, str]] = {  # "verify --against", or a command's name -> a sentence
    "convert --aliases": "Convert once for each program: --target.",
    "convert-torch-dist-to-fsdp-dtensor --aliases": "Convert once for each program: --target.",
    "repair --trust-masters": "repair corrects keys of fsdp_dtensor and changes no weights.",
    "du": "inspect CKPT --by role (layer, rank, dtype, file) shows where bytes are, ls RUN sizes of iterations.",
}


def removed_option(error: object) -> str:
    """The sentence on the option that click does not know, or nothing."""
    command = getattr(getattr(error, "ctx", None), "info_name", None)
    sentence = REMOVED.get(f"{command} {getattr(error, 'option_name', None)}")
    return f" {sentence}" if sentence else ""
