"""An option is a row: its spelling, help, choices, limits, default, and how its value is read."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import typer


class Row(NamedTuple):
    """Plain data; what Typer reads is made of it when a command is built, because most commands have few options."""

    kind: Any  # a type, or a `Literal`, which is a choice of its words
    spelled: tuple[str, ...]
    default: Any
    read: Callable[[Any], Any] | None
    how: Mapping[str, Any]

    def parameter(self, name: str) -> inspect.Parameter:
        """The option as a parameter of a function that Typer makes a command of."""
        kind, default = self.kind, self.default
        (inner,) = get_args(kind) if get_origin(kind) is list else (kind,)
        if get_origin(inner) is Literal:
            # Typer knows `Literal` since 0.19 only, enumerations always.
            choices = {word: word for word in get_args(inner)}
            words: Any = Enum("Choice", choices, type=str)  # type: ignore[misc]
            kind = words if inner is kind else list[words]
            default = None if default is None else words(default)
        spelled: Any = Annotated[
            kind | None if default is None else kind, typer.Option(*self.spelled, **self.how)
        ]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=spelled)

    def value(self, given: Any) -> Any:
        """What the library gets."""
        plain = [_plain(one) for one in given] if isinstance(given, list) else _plain(given)
        return plain if self.read is None else self.read(plain)


def _plain(given: Any) -> Any:
    return given.value if isinstance(given, Enum) else given


def option(
    kind: Any,
    *spelled: str,
    default: Any = None,
    read: Callable[[Any], Any] | None = None,
    panel: str | None = None,
    **how: Any,
) -> Row:
    """An option of type `kind`; without a default it is None when it is not given.

    Args:
        spelled: as Typer takes them: "--threads", "--swiglu/--no-swiglu".
        read: makes the library's value of what was given.
        panel: the section of help.
        how: `help`, and whatever else `typer.Option` takes.
    """
    return Row(kind, spelled, default, read, {"rich_help_panel": panel, **how})


def flag(*spelled: str, **how: Any) -> Row:
    """An option that is either there or not."""
    return option(bool, *spelled, default=False, **how)


# More than any machine has; a typing mistake must not fill its memory with plans for them.
MAX_RANKS, MAX_WORKERS, MAX_THREADS, MAX_ROWS = 1 << 20, 256, 1024, (1 << 31) - 1


def given_bytes(text: str | None) -> int | None:
    """As `parse_bytes`, of an option that may be left out."""
    return None if text is None else parse_bytes(text)


def parse_bytes(text: str) -> int:
    """Bytes from a size as people write it: `96MiB`, `5GB`, `1048576`.

    kB, MB, GB and TB are powers of 1000, as Hugging Face reads them; kiB and so on of 1024.
    """
    from ckpt_tools.errors import UsageError

    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kKmMgGtT]?)(i?)[bB]?\s*", text)
    size = 0
    if match:
        base = 1024 if match[3] else 1000
        size = int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))
    if size < 1:
        raise UsageError(f"{text!r} is not a size; write for example 96MiB, 5GB or 1048576")
    return size


def iteration(text: str | None, allowed: str = "a number, or all") -> int | Literal["all"] | None:
    """What `--iteration` names: a number, or all; None for the latest."""
    if text is None:
        return None
    if text == "all":
        return "all"
    from ckpt_tools.errors import UsageError
    from ckpt_tools.formats.locate.detect import MAX_DIGITS

    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise UsageError(f"--iteration {text}: give {allowed}")
    return int(text)


def one_iteration(text: str | None) -> int | None:
    """The number that `--iteration` names where one is meant; None for the latest."""
    from ckpt_tools.errors import UsageError

    number = iteration(text, "a number (`ls RUN` lists them)")
    if number == "all":
        raise UsageError(
            "--iteration all: this command takes one iteration; give its number (`ls RUN` lists them). All of "
            "a run are taken by convert, copy, export-hf, modify-state-dict, slice, strip and verify"
        )
    return number


def words(text: str) -> tuple[str, ...]:
    """Words with commas between them."""
    return tuple(word for word in text.split(",") if word)


def globs(given: list[Any] | None) -> tuple[Any, ...]:
    """What an option that can be repeated was given."""
    return tuple(given or ())


def shares(text: str | None) -> tuple[float, ...] | None:
    """Numbers with commas between them."""
    from ckpt_tools.errors import UsageError

    try:
        return None if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        raise UsageError(f"--weights {text!r}: expected numbers like 0.5,0.3,0.2") from None


def group_map(file: Path | None) -> Mapping[str, int] | None:
    """The parameter groups that a file tells."""
    if file is None:
        return None
    from ckpt_tools.commands.convert.to_dtensors import load_group_map

    return load_group_map(file)


def as_text(path: Path | None) -> str | None:
    """A path as the text that was given."""
    return None if path is None else str(path)


def model_folder(path: Path | None) -> str | None:
    """The folder of a Hugging Face model, of which its config.json may be given."""
    is_file = path is not None and path.name == "config.json" and path.is_file()
    return as_text(path.parent if is_file and path else path)


def in_a_folder(file: Path | None) -> Path | None:
    """`file`, if it can be written: checked before the work.

    A report or a page replaces an earlier one, and nothing else: least of all a file of a checkpoint.
    """
    if file is None or str(file) == "-":  # stdout
        return file
    from ckpt_tools.errors import UsageError
    from ckpt_tools.formats.storage.files import absent_folder

    if file.is_dir():
        why = "it is a folder; give the name of a file"
    elif not file.parent.is_dir():
        why = absent_folder(file.parent)
    elif file.is_symlink() and not file.exists():
        why = "it is a link to nothing"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        why = "check its permissions" if file.exists() else f"check the permissions of {file.parent}"
    elif any(any(file.parent.glob(pattern)) for pattern in _OF_CHECKPOINTS):
        why = f"{file.parent} holds a checkpoint, where only its own files belong"
    elif file.is_file() and not _is_report(file):
        why = "it exists and is neither a report nor a page; choose another name or remove it"
    else:
        return file
    raise UsageError(f"{file} cannot be written: {why}")


_OF_CHECKPOINTS = (".metadata", "*.distcp", "*.safetensors", "common.pt")


def _is_report(file: Path) -> bool:
    """Whether a file begins as what is written in its place does: as JSON, HTML, SVG or XML, or is empty."""
    with file.open("rb") as content:
        start = content.read(64).lstrip()
    return start[:1] in (b"", b"{", b"[", b"<")


def allow_msc(wanted: bool) -> bool:
    """Let msc:// locations be opened, for as long as the process lives."""
    if wanted:
        from ckpt_tools.formats.storage.object_store import allow_msc

        allow_msc()
    return wanted


def be_quiet(wanted: bool) -> bool:
    """Let the process keep its notes to itself, or not."""
    from ckpt_tools.cli import render

    render.be_quiet(wanted)
    return wanted


def follow_links(wanted: bool) -> bool:
    """Let links be followed out of a checkpoint, or not."""
    from ckpt_tools.formats.storage import files

    files.follow_links(wanted)
    return wanted
