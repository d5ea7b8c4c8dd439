"""Which files belong to a checkpoint in a format that this tool writes, by their names.

A damaged checkpoint has the same names as a sound one, so contents are not read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from ckpt_tools.errors import UsageError
from ckpt_tools.formats.dcp.metadata_read import METADATA
from ckpt_tools.formats.locate.detect import BRIDGE_TRACKER, COMPANIONS, TRACKER
from ckpt_tools.formats.locate.run_layouts import iteration_folders

TEMPLATES = "additional_chat_templates"  # transformers utils/hub.py CHAT_TEMPLATE_DIR
# By how releases name them: every version of a tokenizer has another name (tokenizer.model.v3, tekken_v13.json),
# every kind another (sentencepiece.bpe.model, spiece.model, qwen.tiktoken), and so has every processor.
CARRIED = (
    "tokenizer*.*", "*.model", "*.tiktoken", "tekken*.json", "*.spm", "vocab*.*", "merges.txt", "*_tokens.json",
    "special_tokens_map.json", "normalizer.json", "chat_template*.*", "*processor_config.json",
    "generation_config.json", "LICENSE", "LICENSE.*", "LICENSE-*", "LICENCE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
_WEIGHTS = ("model.safetensors", "model-*.safetensors", "adapter_model.safetensors")
_CONFIGS = ("config.json", "adapter_config.json")
_HF = (
    *CARRIED, *_WEIGHTS, *_CONFIGS, "model.safetensors.index.json", "configuration_*.py", "modeling_*.py",
    "tokenization_*.py", f"{TEMPLATES}/*.jinja",
)  # fmt: skip
_DCP = (METADATA, "*.distcp", *COMPANIONS)
_SHOWN = 4


def is_like(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns matches; that of a file in the folder itself matches none in a folder inside."""
    return any(fnmatchcase(name, one) and name.count("/") == one.count("/") for one in patterns)


def refuse_foreign(
    where: str, names: Collection[str], written: Collection[str], *, is_unfinished: bool = False
) -> str:
    """The kind of the one checkpoint at `where`, which has `names` and may be replaced by one that has `written`.

    Names of folders end with a slash. An unfinished checkpoint has this tool's work folder.
    """
    kind, why = _what_stands(names, written, is_unfinished)
    if why:
        raise UsageError(
            f"{where} is not replaced: {why}. --overwrite replaces one checkpoint and nothing else. Choose another "
            "output, or remove yourself what is not needed."
        )
    return kind


def _what_stands(names: Collection[str], written: Collection[str], is_unfinished: bool) -> tuple[str, str]:
    """The kind of a checkpoint, or why it is not one; the other is empty."""
    marks = (TRACKER, BRIDGE_TRACKER, "release")
    top = {name.partition("/")[0] for name in names}
    if run := [name for name in top if name in marks or iteration_folders([name])]:
        return "", f"it is the root of a run, with {_listed(run)}"
    is_dcp = any(is_like(name, (METADATA, "*.distcp")) for name in names)
    known = _DCP if is_dcp else _HF
    if foreign := [
        name for name in names if name.endswith("/") or not (name in written or is_like(name, known))
    ]:
        return "", f"it holds {_listed(foreign)}, not a part of a checkpoint that this tool writes"
    if is_unfinished:
        return "an unfinished output", ""
    if is_dcp and METADATA not in names:
        return "", f"it has no {METADATA}: a save was interrupted, or a job is still writing it"
    if not is_dcp and not (
        any(is_like(name, _CONFIGS) for name in names)
        and any(name.endswith(".safetensors") for name in names)
    ):
        return "", f"it is not a checkpoint: it has no {METADATA}, nor config.json and safetensors"
    return "a distributed checkpoint" if is_dcp else "a Hugging Face model", ""


def _listed(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
