"""How programs lay out the folders of a run: `LAYOUTS`, a row a program, and where the model is in a step's folder.

verl (0.9.1: utils/megatron_utils.py `get_*_checkpoint_path`)::

    RUN/latest_checkpointed_iteration.txt    names the last step
    RUN/global_step_N/data.pt                where its data loader is
    RUN/global_step_N/actor, critic          a model each
    .../dist_ckpt, huggingface               in the first layout: everything, and a Hugging Face model
    .../ckpt_contents.json                   since the second: what is where, and
    .../model, optimizer, extra              a `dist_ckpt` each, or `model/huggingface`

With PyTorch's FSDP verl keeps a pickle a rank instead (`model_world_size_8_rank_0.pt`), of parts that the rank knows.

slime with FSDP has Megatron's folders of iterations, and in each `model`, `optimizer` and `lr_scheduler`, a DCP
checkpoint each.

NeMo RL (utils/checkpoint.py `CheckpointManager`) writes into `tmp_step_N`, which it renames to `step_N` last of all;
`policy/weights` in it is a run of Megatron-Bridge with one iteration, `iter_0000000`, or a DCP checkpoint.

The cache of the Hugging Face hub holds a model as `models--<owner>--<name>/{blobs,refs,snapshots/<revision>}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ckpt_tools.errors import CorruptCheckpointError, UnsupportedCheckpointError, UsageError
from ckpt_tools.formats.dcp.metadata_read import METADATA
from ckpt_tools.formats.safetensors import INDEX_FILE, SINGLE_FILE
from ckpt_tools.formats.storage.files import Files, LocalFiles, path_in, read_whole, refuse_location
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.untrusted_documents import parse_json

SNAPSHOTS, REFS, MAIN = "snapshots", "refs", "main"
_LONGEST_REVISION = 200


def snapshot_of(path: str) -> str:
    """The snapshot that the root of a cached model means; any other path unchanged.

    That is the one `refs/main` names, or the only one.
    """
    refuse_location(path)
    path = path.rstrip("/") if len(path) > 1 else path
    if re.search(rf"/(?:models|datasets)--[^/]+/{SNAPSHOTS}$", f"/{path}"):  # the folder of all of them
        path = path.removesuffix(f"/{SNAPSHOTS}")
    revisions = _revisions(path)
    if revisions is None:
        return path
    chosen = _main(path)
    if chosen not in revisions:
        if len(revisions) != 1:
            raise UsageError(
                f"{path} is a model in a Hugging Face cache with {len(revisions)} snapshots, and refs/main names "
                f"none of them; give one: {', '.join(f'{path}/{SNAPSHOTS}/{name}' for name in revisions[:4])}"
            )
        chosen = revisions[0]
    return f"{path}/{SNAPSHOTS}/{chosen}"


def _revisions(path: str) -> list[str] | None:
    """Snapshots of a cached model, None for another folder."""
    if not path.rpartition("/")[2].startswith(("models--", "datasets--")):
        return None
    with closing(open_files(path)) as files:
        if not files.exists(SNAPSHOTS):
            return None
    with closing(open_files(f"{path}/{SNAPSHOTS}")) as files:
        return files.list()


def _main(path: str) -> str | None:
    with closing(open_files(f"{path}/{REFS}")) as files:
        if not files.exists(MAIN):
            return None
        return (
            files.read(MAIN, 0, min(files.size(MAIN), _LONGEST_REVISION)).decode("utf-8", "replace").strip()
        )


# By name in an iteration's folder: Megatron-Bridge (training/checkpointing.py), ModelOpt, Megatron-LM.
_BESIDE = {
    "tokenizer": "the tokenizer's files, which no loader reads: run_config.yaml or the args name the tokenizer",
    "modelopt_state": "ModelOpt's state: a quantized, pruned or distilled model is not restored as one without it",
    "hf": "Megatron-Bridge's export of the same model to Hugging Face",
    "train_dataloader_dprank*.pt": "where the data loader is",
    "layer_wise_optimizer_*.pt": "states of a layer-wise optimizer in the torch format",
    "*.safetensors": "a Hugging Face model next to the checkpoint",
}
MODELOPT = "modelopt_state"
# nvidia_resiliency_ext/checkpointing/local/ckpt_managers/local_manager.py `_filename_from_template`
LOCAL_FILE = re.compile(r"iter_(\d{7})_(\d+)_local(\.dirty)?\.pt")


def left_beside(names: Iterable[str]) -> tuple[str, ...]:
    """A line for each of the names in a checkpoint's folder that is not read, with what it is."""
    found: dict[str, list[str]] = {}
    for name in names:
        glob = next((glob for glob in _BESIDE if fnmatchcase(name, glob)), None)
        if glob is not None:
            found.setdefault(glob, []).append(name)
    return tuple(f"{name}: {_BESIDE[glob]}" for glob, some in found.items() for name in some)


def local_checkpoint(where: str) -> str:
    """What to say of a file that one rank keeps on its own disk."""
    return (
        f"{where} is a local checkpoint of NVIDIA Resiliency Extension: what one rank had in memory, of use to the "
        "job that wrote it alone. Let that job load it (--non-persistent-ckpt-type local) and save a checkpoint of "
        "all ranks with --save"
    )


CONTENTS = "ckpt_contents.json"
_CONTENTS_BYTES = 1 << 20
_OF_A_RANK = re.compile(r"(model|optim|extra_state)_world_size_\d+_rank_\d+\.pt")
_DEEPSPEED = re.compile(r".+[-_](model|optim)_states\.pt")
_DEEPSPEED_STEP = re.compile(r"global_step(\d{1,18})")


class Layout(NamedTuple):
    """The folders of one program."""

    step: re.Pattern[str]  # of a step; the number is its group
    being_written: re.Pattern[str] | None = None  # a step under this name is not whole
    loaded: tuple[str, ...] = ()  # there is no tracker: a job loads the last step that has one of these
    roles: tuple[str, ...] = ()  # folders of a step, with a model each
    models: tuple[str, ...] = ()  # where a role or a step has its model; (): in the step's folder itself
    apart: Mapping[str, str] = {}  # in the folder of the model's, not read, and why


_OWN = "in a separate checkpoint, which is not joined to the model"
LAYOUTS: Mapping[str, Layout] = {
    "Megatron": Layout(re.compile(r"iter_(\d{7,})")),
    "verl": Layout(
        re.compile(r"global_step_(\d{1,18})"),
        roles=("actor", "rollout", "actor_rollout", "critic", "ref", "rm", "actor_rollout_ref", "teacher"),
        models=("dist_ckpt", "model/dist_ckpt", "huggingface", "model/huggingface"),
        apart={
            "optimizer/dist_ckpt": f"verl keeps the optimizer {_OWN}",
            "extra/dist_ckpt": f"verl keeps rng states {_OWN}",
            "huggingface": "verl's Hugging Face files of the same step",
            "model/huggingface": "verl's Hugging Face files of the same step",
            "adapter_checkpoint": "verl's adapters of the same step",
            "transformer_config.json": "verl's settings; what they decide is asked for by options",
        },
    ),
    "slime": Layout(
        re.compile(r"iter_(\d{7,})"),
        models=("model",),
        apart={
            "optimizer": f"slime keeps the optimizer {_OWN}",
            "lr_scheduler": f"slime keeps the scheduler {_OWN}",
            "rng.pt": "slime's random number states",
            "meta.json": "slime's counts of steps",
        },
    ),
    "torchtitan": Layout(
        re.compile(r"step-(\d{1,18})"), loaded=(METADATA, INDEX_FILE, SINGLE_FILE)
    ),
    "NeMo RL": Layout(
        re.compile(r"step_(\d{1,18})"),
        re.compile(r"tmp_step_(\d{1,18})"),
        loaded=("policy", "value"),
        roles=("policy", "value"),
        models=("weights", "weights/model"),
        apart={
            "optimizer": f"NeMo RL keeps the optimizer {_OWN}",
            "tokenizer": "the tokenizer's files, which no loader reads",
        },
    ),
}  # fmt: skip
_OF_A_ROLE = {model.partition("/")[0] for one in LAYOUTS.values() for model in one.models} | {
    "optimizer",
    "extra",
}
_BESIDE_ROLES = {"data.pt": "where verl's data loader is", "train_dataloader.pt": "where the data loader is"}


class Inner(NamedTuple):
    """The folder of the model's checkpoint, and a line for each thing next to it that is not read."""

    path: str
    left_out: tuple[str, ...]


class ForeignFormatError(UnsupportedCheckpointError):
    """Another program's format, which that program alone reads."""


def iteration_folders(names: Iterable[str]) -> list[tuple[str, int]]:
    """The names that are those of steps' folders, of any program, with their numbers."""
    kinds = {layout.step.pattern: layout.step for layout in LAYOUTS.values()}.values()
    found = (kind.fullmatch(name) for name in names for kind in kinds)
    return [(match[0], int(match[1])) for match in found if match]


def being_written(names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """The folders of steps that are not whole, with number and what to say of them."""
    return {
        match[0]: (int(match[1]), f"{program} is still writing it, or its save did not end")
        for name in names
        for program, layout in LAYOUTS.items()
        if layout.being_written and (match := layout.being_written.fullmatch(name))
    }


def layouts_of(name: str) -> list[Layout]:
    """The rows that name a step's folder so."""
    return [layout for layout in LAYOUTS.values() if layout.step.fullmatch(name)]


def loaded_step(files: Files, names: Sequence[str]) -> str | None:
    """The step in a run without tracker that its program would load; None if unknown."""
    for layout in LAYOUTS.values():
        steps = {name: int(match[1]) for name in names if (match := layout.step.fullmatch(name))}
        if len(steps) == len(names):
            for name in sorted(steps, key=lambda name: steps[name], reverse=True):
                if any(files.exists(f"{name}/{mark}") for mark in layout.loaded):
                    return name
    return None


def step_number(name: str) -> int | None:
    """The step in the name of a checkpoint's folder without a tracker above it."""
    return next((n for layout in layouts_of(name) if layout.loaded and not layout.models
                 for _, n in iteration_folders([name])), None)  # fmt: skip


def step_of(path: str) -> int | None:
    """The step that a folder in one of a step is of."""
    parts = path.rstrip("/").split("/")[-4:]
    return next(
        (n for part in reversed(parts) if layouts_of(part) for _, n in iteration_folders([part])), None
    )


def inner_checkpoint(path: str) -> Inner | None:
    """The model's checkpoint in a step's folder or in a role's, None where these are not such folders."""
    names = names_in(path)
    if CONTENTS in names:
        return _from_contents(path)
    if _OF_A_ROLE & set(names):
        models = [model for one in LAYOUTS.values() for model in one.models]
        found = [model for model in models if _holds_weights(path_in(path, model))]
        if len(found) > 1:
            raise UsageError(f"{path} holds the model more than once; give one: {_listed(path, found)}")
        if found:
            return _inside(path, found[0])
    if any(map(_OF_A_RANK.fullmatch, names)):
        raise ForeignFormatError(
            f"{path} is of verl with PyTorch's FSDP, a pickle a rank. Make a Hugging Face model of it, which "
            "import-hf and diff read: python -m verl.model_merger merge --backend fsdp "
            f"--local_dir {path} --target_dir HF"
        )
    known = [] if _OF_A_ROLE & set(names) else [role for one in LAYOUTS.values() for role in one.roles]
    roles = [role for role in known if role in names and _is_role(path_in(path, role))]
    if not roles:
        return None
    if len(roles) > 1:
        raise UsageError(f"{path} holds several models; give one: {_listed(path, roles)}")
    check_folder(path, roles[0])
    inner = inner_checkpoint(path_in(path, roles[0]))
    more = [f"{name}: {why}" for name, why in _BESIDE_ROLES.items() if name in names]
    return None if inner is None else Inner(inner.path, (*inner.left_out, *more))


def deepspeed(path: str, names: Sequence[str]) -> ForeignFormatError | None:
    """What to say of a step of DeepSpeed's, or of a run of it; None for another folder."""
    steps = sorted((int(match[1]), name) for name in names if (match := _DEEPSPEED_STEP.match(name)))
    if any(map(_DEEPSPEED.fullmatch, names)):
        root, _, tag = path.rstrip("/").rpartition("/")
    elif "zero_to_fp32.py" in names or any(
        any(map(_DEEPSPEED.fullmatch, names_in(path_in(path, name)))) for _, name in steps[-1:]
    ):
        root, tag = path, steps[-1][1] if steps else "global_stepN"
    else:
        return None
    step = path_in(root or ".", tag)
    return ForeignFormatError(
        f"{path} is a checkpoint of DeepSpeed, which DeepSpeed alone reads. The weights of ZeRO in float32: "
        f"python -m deepspeed.utils.zero_to_fp32 {root or '.'} OUT --safe_serialization -t {tag}. "
        "All of it, for a DeepSpeed job of another size: "
        f"python -m deepspeed.checkpoint.ds_to_universal --input_folder {step} --output_folder OUT"
    )


def names_in(path: str) -> list[str]:
    """What lies in a folder; nothing where there is no folder, or a web server does not list it."""
    try:
        with closing(open_files(path)) as files:
            return files.list()
    except UnsupportedCheckpointError:
        return []


def check_folder(path: str, name: str) -> None:
    """Refuse a folder that is a link to elsewhere: the user named the one it seems to lie in."""
    with closing(open_files(path)) as files:
        if isinstance(files, LocalFiles):
            files.check_folder(name)


def _is_role(path: str) -> bool:
    names = set(names_in(path))
    return CONTENTS in names or bool(_OF_A_ROLE & names) or any(map(_OF_A_RANK.fullmatch, names))


def _inside(path: str, model: str) -> Inner:
    check_folder(path, model)
    layout = next((one for one in LAYOUTS.values() if model in one.models), LAYOUTS["verl"])
    with closing(open_files(path)) as files:
        left_out = [
            f"{name}: {why}" for name, why in layout.apart.items() if name != model and files.exists(name)
        ]
    return Inner(path_in(path, model), tuple(left_out))


def _from_contents(path: str) -> Inner:
    """By what verl wrote of it, last of all."""
    with closing(open_files(path)) as files:
        found = _contents(files)
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
    """Whether a folder is a checkpoint, a model or a run of Megatron's."""
    names = names_in(path)
    return METADATA in names or any(
        name.endswith((".safetensors", ".distcp")) or LAYOUTS["Megatron"].step.fullmatch(name)
        for name in names
    )


def _listed(path: str, parts: Sequence[str]) -> str:
    return ", ".join(path_in(path, part) for part in parts)
