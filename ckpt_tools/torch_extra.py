"""torch, which an installation may do without: what cannot go on without it says how to get it."""

from __future__ import annotations

from ckpt_tools.errors import UsageError


def require_torch(what: str) -> None:
    """Import torch for `what` needs it."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        why = "which is not installed" if absent else f"which cannot be imported here ({error})"
        raise UsageError(
            f"{what} needs torch, {why}: pip install 'ckpt-tools[torch]', from a checkout pip install '.[torch]'. "
            "All else works without it."
        ) from error
