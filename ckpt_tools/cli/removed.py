"""What former releases had, and what does it now: said where the word is typed that no command knows."""

from __future__ import annotations

from typing import Final

# "verify --against", or a command's name -> a sentence
REMOVED: Final[dict[str, str]] = {
    "verify --against": "Use `diff A B --headers`.",
    **dict.fromkeys(
        ("plan --disk", "plan --network", "plan --nodes"),
        "Times of other machines are no longer predicted; a conversion takes about the time of cp -r.",
    ),
    "watch": "Run 'convert RUN OUT --iteration all' again, from a timer or a loop: it converts what is new.",
    "env": "Use 'checkpoint-inspector --version --verbose'.",
    "man": "Use --help of each command; 'checkpoint-inspector --for-agents' prints the text for assistants.",
}


def removed_option(error: object) -> str:
    """The sentence on the option that click does not know, or nothing."""
    command = getattr(getattr(error, "ctx", None), "info_name", None)
    sentence = REMOVED.get(f"{command} {getattr(error, 'option_name', None)}")
    return f" {sentence}" if sentence else ""
