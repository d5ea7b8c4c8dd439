"""The program's command lines, run in this process."""

import json
from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from typing import Any, NamedTuple

from ckpt_tools.cli.app import run


class Said(NamedTuple):
    """What a command line printed."""

    out: str
    err: str

    @property
    def json(self) -> Any:
        """The report on stdout."""
        return json.loads(self.out)


def cli(*words: object, code: int = 0) -> Said:
    """What a command line prints; `code` is the exit code that it must have."""
    out, err = (TextIOWrapper(BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        found = run([str(word) for word in words])
    said = Said(*(stream.buffer.getvalue().decode() for stream in (out, err)))  # type: ignore[attr-defined]
    assert found == code, f"{words}: exit code {found}, {said}"
    return said
