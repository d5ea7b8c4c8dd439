"""Whether a Hugging Face folder is a model: it has tensors, and the JSON files that say what they are can be read."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_tools.errors import NEVER_FINDINGS, CkptError
from ckpt_tools.formats.safetensors import refuse_pointers
from ckpt_tools.formats.storage.files import Files, read_whole
from ckpt_tools.formats.untrusted_documents import parse_json
from ckpt_tools.model.catalog import Catalog
from ckpt_tools.verify.checkpoint.hf_names import CONFIG, check_hf_names
from ckpt_tools.verify.report import Check, Findings

_MAX_BYTES = 256 << 20  # the largest tokenizers have some tens of megabytes


def check_hf_folder(files: Files, catalog: Catalog, names: Iterable[str]) -> list[Check]:
    """Whether there are tensors and a config.json that fit, and the files of `names` are JSON objects."""
    found, config = Findings("model", "settings files"), {}
    if not catalog.tensors:
        found.error(files.location, "its weight files hold no tensor at all")
    if not files.exists(CONFIG):
        found.warning(
            CONFIG, "there is none, so nothing tells what the weights are: no program can load them"
        )
    for name in dict.fromkeys((CONFIG, *names)):
        if not files.exists(name):
            continue
        found.looked_at += 1
        try:
            refuse_pointers(files, [name])
            value = parse_json(read_whole(files, name, _MAX_BYTES))
        except NEVER_FINDINGS:
            raise
        except CkptError as error:
            found.failure(name, error)
            continue
        if not isinstance(value, dict):
            found.error(name, f"it is JSON, but no object: {type(value).__name__}")
        elif not value and name == CONFIG:
            found.error(name, "it is an empty object and tells nothing of the model")
        elif name == CONFIG:
            config = value
    return [found.done(), *([check_hf_names(files, catalog, config)] if config and catalog.tensors else [])]
