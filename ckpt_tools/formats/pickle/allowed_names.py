"""Which globals a checkpoint's pickles may name. None of them is ever imported."""

from __future__ import annotations

import re

from ckpt_tools.errors import HostileCheckpointError, UnsupportedCheckpointError
from ckpt_tools.model.dtypes import ITEMSIZE

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
    # classes of optimizers, which an offloaded optimizer has among the settings of its groups
    r"|torch\.optim\.\w+\.(Adam|AdamW|SGD)"
    r"|(transformer_engine\.pytorch|apex)\.optimizers\.\w+\.Fused(Adam|SGD)"
)


# Modules whose functions act: no checkpoint stores what is in them, a pickle that names it wants it called.
_ACTING = re.compile(
    r"(os|nt|posix|posixpath|sys|subprocess|_posixsubprocess|shutil|socket|importlib|ctypes|_ctypes|runpy|pty|code|codeop"
    r"|webbrowser|tempfile|multiprocessing|threading|_thread|asyncio|pickle|_pickle|marshal|operator|_operator|types"
    r"|gc|inspect|ast|timeit|trace|pdb|bdb|doctest|profile|cProfile|http|urllib|ftplib|smtplib|builtins|__builtin__"
    r"|io|_io|torch\.(hub|load|jit|package|ops|classes))(\..*)?"
)


def check_global(module: str, name: str, where: str) -> None:
    """Refuse a global that is not known to be harmless."""
    if _KNOWN.fullmatch(f"{module}.{name}"):
        return
    if _ACTING.fullmatch(module) or _ACTING.fullmatch(f"{module}.{name}"):
        # In .metadata everything has its place and class, for which a placeholder cannot stand.
        hint = "" if where.endswith(".metadata") else "; --trust-pickle reads it as an inert placeholder"
        raise HostileCheckpointError(
            f"{where}: the pickle names {module}.{name!r}, which no known checkpoint holds and which would run code. "
            f"Nothing was imported, and torch should not load it{hint}."
        )
    raise UnsupportedCheckpointError(
        f"{where}: the pickle names {module}.{name!r}, which no known checkpoint holds. Nothing was imported. If "
        "you trust the file, --trust-pickle reads it as an inert placeholder."
    )


def check_global_count(count: int, where: str) -> None:
    """Refuse more distinct globals than any checkpoint has; each costs a class."""
    if count > MAX_GLOBALS:
        raise HostileCheckpointError(f"{where}: the pickle names more than {MAX_GLOBALS} globals.")


def brief(value: object) -> str:
    """What to say of a value in an error: scalars as they are, of others the class, for they can print forever."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python spells no number of 4300 digits
        return f"an integer of {value.bit_length()} bits"
    plain = isinstance(value, str | int | float | None)
    return f"{value!r:.200}" if plain else f"a {type(value).__name__}"
