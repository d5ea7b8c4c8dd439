"""Where verl and slime keep a checkpoint in the folders of a run.

verl (0.9.1: utils/megatron_utils.py `get_*_checkpoint_path`)::

    RUN/latest_checkpointed_iteration.txt    names the last step
    RUN/global_step_N/data.pt                where its data loader is
    RUN/global_step_N/actor, critic          a model each
    .../dist_ckpt, huggingface               in the first layout: everything, and a Hugging Face model
    .../ckpt_contents.json                   since the second: what is where, and
    .../model, optimizer, extra              a `dist_ckpt` each, or `model/huggingface`

slime with FSDP has Megatron's folders of iterations, and in each `model`, `optimizer` and `lr_scheduler`, a DCP
checkpoint each.

With PyTorch's FSDP verl keeps a pickle a rank instead (`model_world_size_8_rank_0.pt`), of parts that the rank knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tools.errors import CorruptCheckpointError, UnsupportedCheckpointError, UsageError
from ckpt_tools.formats.dcp import METADATA
from ckpt_tools.formats.documents import parse_json
from ckpt_tools.formats.files import Files, LocalFiles, open_files, path_in, read_whole

STEP = re.compile(r"global_step_(\d{1,18})")
_STEP_OF_ANY = re.compile(r"(?:global_step_|iter_)(\d{1,18})")
CONTENTS = "ckpt_contents.json"
_OF_A_RANK = re.compile(r"(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt")
_CONTENTS_BYTES = 1 << 20
SLIME_MODEL = "model"
_MODELS = ("dist_ckpt", "model/dist_ckpt", "huggingface", "model/huggingface", SLIME_MODEL)
_OF_A_ROLE = {"dist_ckpt", "huggingface", "model", "optimizer", "extra"}
_ROLES = ("actor", "rollout", "actor_rollout", "critic", "ref", "rm", "actor_rollout_ref", "teacher")
_APART = {
    "optimizer/dist_ckpt": "verl keeps the optimizer in a checkpoint of its own, which is not joined to the model",
    "extra/dist_ckpt": "verl keeps rng states in a checkpoint of its own, which is not joined to the model",
    "huggingface": "verl's Hugging Face files of the same step",
    "model/huggingface": "verl's Hugging Face files of the same step",
    "adapter_checkpoint": "verl's adapters of the same step",
    "transformer_config.json": "verl's settings; what they decide is asked for by options",
}
_APART_IN_SLIME = {
    name: f"slime keeps the {what} in a checkpoint of its own, which is not joined to the model"
    for name, what in (("optimizer", "optimizer"), ("lr_scheduler", "scheduler"))
} | {"rng.pt": "slime's random number states", "meta.json": "slime's counts of steps"}


class Inner(NamedTuple):
    """The folder of the model's checkpoint, and a line for each thing beside it that is not read."""

    path: str
    left_out: tuple[str, ...]


class PicklesOfRanksError(UnsupportedCheckpointError):
    """A pickle a rank, of parts that the rank knows."""


def step_of(path: str) -> int | None:
    """The step that a folder of verl's or slime's is of, by the folders above it."""
    steps = [_STEP_OF_ANY.fullmatch(part) for part in path.rstrip("/").split("/")[-4:]]
    return next((int(match[1]) for match in reversed(steps) if match), None)


def inner_checkpoint(path: str) -> Inner | None:
    """The model's checkpoint in a step's folder or in a role's, None where these are not verl's folders.

    Raises:
        UsageError: there are several.
        UnsupportedCheckpointError: verl saved no model there, or one of FSDP's.
        CorruptCheckpointError: `ckpt_contents.json` does not say what verl says in it.
    """
    names = _names(path)
    if CONTENTS in names:
        return _from_contents(path)
    if any(map(_OF_A_RANK.fullmatch, names)) and not _OF_A_ROLE & set(names):
        raise _of_fsdp(path)
    if _OF_A_ROLE & set(names):
        found = _chosen(path, [part for part in _MODELS if _holds_weights(path_in(path, part))])
        if found is None and any(map(_OF_A_RANK.fullmatch, names)):
            raise _of_fsdp(path)
        return found
    roles = [role for role in _ROLES if role in names and _is_role(path_in(path, role))]
    if not roles:
        return None
    if len(roles) > 1:
        raise UsageError(f"{path} holds several models; give one: {_listed(path, roles)}")
    _check_folder(path, roles[0])
    found = inner_checkpoint(path_in(path, roles[0]))
    data = [f"{name}: where verl's data loader is" for name in ("data.pt",) if name in names]
    return None if found is None else Inner(found.path, (*found.left_out, *data))


def _of_fsdp(path: str) -> PicklesOfRanksError:
    return PicklesOfRanksError(
        f"{path} is of verl with PyTorch's FSDP, a pickle a rank. Make a Hugging Face model of it, which import-hf "
        f"and diff read: python -m verl.model_merger merge --backend fsdp --local_dir {path} --target_dir HF"
    )


def _is_role(path: str) -> bool:
    names = set(_names(path))
    return CONTENTS in names or bool(_OF_A_ROLE & names) or any(map(_OF_A_RANK.fullmatch, names))


def _chosen(path: str, models: Sequence[str]) -> Inner | None:
    """The only one of `models`, which are folders inside `path`."""
    if len(models) > 1:
        raise UsageError(f"{path} holds the model more than once; give one: {_listed(path, models)}")
    if not models:
        return None
    return _inside(path, models[0])


def _check_folder(path: str, name: str) -> None:
    """Refuse a folder that is a link to elsewhere: the user named the one it seems to lie in."""
    files = open_files(path)
    try:
        if isinstance(files, LocalFiles):
            files.check_folder(name)
    finally:
        files.close()


def _inside(path: str, model: str) -> Inner:
    _check_folder(path, model)
    files = open_files(path)
    try:
        apart = _APART_IN_SLIME if model == SLIME_MODEL else _APART
        left_out = [f"{name}: {why}" for name, why in apart.items() if name != model and files.exists(name)]
    finally:
        files.close()
    return Inner(path_in(path, model), tuple(left_out))


def _from_contents(path: str) -> Inner:
    """By what verl wrote of it, last of all."""
    files = open_files(path)
    try:
        found = _contents(files)
    finally:
        files.close()
    models = {name: found[name] for name in ("model", "peft_adapters") if name in found}
    if "model" not in found:
        held = ", ".join(f"{name} in {where}" for name, where in found.items()) or "nothing"
        raise UnsupportedCheckpointError(f"{path}: verl saved no model here; its {CONTENTS} names {held}")
    if len(set(models.values())) > 1:
        raise UsageError(
            f"{path} holds a model and adapters for it; give one: {_listed(path, tuple(models.values()))}"
        )
    return _inside(path, found["model"])


def _contents(files: Files) -> dict[str, str]:
    """Folder by what is in it."""
    where = path_in(files.location, CONTENTS)
    try:
        contents: Mapping[str, Any] = parse_json(read_whole(files, CONTENTS, _CONTENTS_BYTES))["contents"]
        found = {name: entry["path"] for name, entry in contents.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{where}: not what verl writes ({type(error).__name__}: {error})"
        ) from None
    for name, place in found.items():
        if not isinstance(place, str) or not re.fullmatch(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)*", place):
            raise CorruptCheckpointError(
                f"{where}: {name} is said to be in {place!r}, which is not a folder inside"
            )
    return found


def _holds_weights(path: str) -> bool:
    names = _names(path)
    return METADATA in names or any(name.endswith((".safetensors", ".distcp")) for name in names)


def _names(path: str) -> list[str]:
    try:
        files = open_files(path)
        try:
            return files.list()
        finally:
            files.close()
    except UnsupportedCheckpointError:
        return []


def _listed(path: str, parts: Sequence[str]) -> str:
    return ", ".join(path_in(path, part) for part in parts)
