"""What former releases had, and what does it now: said where the word is typed that no command knows."""

from __future__ import annotations

from typing import Final

# "verify --against", or a command's name -> a sentence
REMOVED: Final[dict[str, str]] = {
    "convert --aliases": "Convert once for each program: --target.",
    "convert-torch-dist-to-fsdp-dtensor --aliases": "Convert once for each program: --target.",
    **dict.fromkeys(
        ("convert --like-source", "convert-fsdp-dtensor-to-torch-dist --like-source"),
        "Megatron does not load masters that are stored as remainders; fp32 masters load with the right loss.",
    ),
    **dict.fromkeys(
        ("convert --keep-states", "convert-torch-dist-to-fsdp-dtensor --keep-states", "plan --keep-states"),
        "No job loads such states; keep the source for the way back.",
    ),
    "verify --against": "Use `diff A B --headers`.",
    "repair --trust-masters": "repair corrects keys of fsdp_dtensor and changes no weights.",
    **dict.fromkeys(
        ("plan --disk", "plan --network", "plan --nodes"),
        "Times of other machines are no longer predicted; a conversion takes about the time of cp -r.",
    ),
    "watch": "Run 'convert RUN OUT --iteration all' again, from a timer or a loop: it converts what is new.",
    "du": "inspect CKPT --by role (layer, rank, dtype, file) shows where bytes are, ls RUN sizes of iterations.",
    "env": "Use 'checkpoint-inspector --version --verbose'.",
    "man": "Use --help of each command; 'checkpoint-inspector --for-agents' prints the text for assistants.",
}


def removed_option(error: object) -> str:
    """The sentence on the option that click does not know, or nothing."""
    command = getattr(getattr(error, "ctx", None), "info_name", None)
    sentence = REMOVED.get(f"{command} {getattr(error, 'option_name', None)}")
    return f" {sentence}" if sentence else ""
