"""Which globals a checkpoint's pickles may name. None of them is ever imported."""

from __future__ import annotations

import re

from ckpt_tools.dtypes import ITEMSIZE
from ckpt_tools.errors import CorruptCheckpointError, UnsupportedCheckpointError

MAX_GLOBALS = 500  # distinct names in one pickle; real ones have fewer than 30

# What checkpoints are known to hold; Megatron and NeMo classes under any path, as versions move them.
_KNOWN = re.compile(
    r"collections\.(OrderedDict|defaultdict)|_codecs\.encode|argparse\.Namespace|types\.SimpleNamespace|signal\.Signals"
    r"|(builtins|__builtin__)\.(set|frozenset|complex|slice|bytes|bytearray|list|dict|int|float|str)|_?io\.BytesIO|functools\.partial"
    r"|pathlib(\._local)?\.(Pure)?(Posix|Windows)?Path"
    r"|numpy\.(ndarray|dtype|dtypes\.\w+)|numpy\.(_?core)\.multiarray\.(_reconstruct|scalar)"
    r"|numpy\.(_?core)\.numeric\._frombuffer"
    rf"|torch\.(Size|device|serialization\._get_layout|_C\.Generator|{'|'.join(ITEMSIZE)})"
    r"|torch\.distributed\.(checkpoint|_shard)\.[\w.]+"
    r"|(megatron|nemo|nvidia_resiliency_ext)\.[\w.]+"
)


def check_global(module: str, name: str, where: str) -> None:
    """Refuse a global that is not known to be harmless.

    Raises:
        UnsupportedCheckpointError: naming it.
    """
    if not _KNOWN.fullmatch(f"{module}.{name}"):
        raise UnsupportedCheckpointError(
            f"{where}: the pickle names {module}.{name!r}, which no known checkpoint holds. Nothing was imported. If "
            "you trust the file, --trust-pickle reads it as an inert placeholder."
        )


def check_global_count(count: int, where: str) -> None:
    """Refuse more distinct globals than any checkpoint has; each costs a class.

    Raises:
        CorruptCheckpointError: there are more than 500.
    """
    if count > MAX_GLOBALS:
        raise CorruptCheckpointError(f"{where}: the pickle names more than {MAX_GLOBALS} globals.")


def brief(value: object) -> str:
    """What to say of a value in an error: scalars as they are, of others the class, for they can print forever."""
    plain = isinstance(value, str | int | float | None)
    return f"{value!r:.200}" if plain else f"a {type(value).__name__}"
