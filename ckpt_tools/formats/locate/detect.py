"""Which checkpoint a path means, and of which kind it is, by the files in it and the keys in
`.metadata`.

A path may be a run's root (its tracker file names the iteration), an iteration directory, any torch distributed
checkpoint, a folder that holds one as `weights/`, or a Hugging Face model directory.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from ckpt_tools.credentials import hidden
from ckpt_tools.errors import CorruptCheckpointError, UnsupportedCheckpointError, UsageError
from ckpt_tools.formats.dcp.metadata_read import MAX_METADATA_BYTES, METADATA, missing_metadata
from ckpt_tools.formats.locate.run_layouts import (
    LOCAL_FILE,
    MODELOPT,
    ForeignFormatError,
    being_written,
    check_folder,
    deepspeed,
    inner_checkpoint,
    iteration_folders,
    layouts_of,
    left_beside,
    loaded_step,
    local_checkpoint,
    names_in,
    snapshot_of,
    step_number,
    step_of,
)
from ckpt_tools.formats.pickle.machine import brief
from ckpt_tools.formats.safetensors import (
    ADAPTER,
    AS_SAFETENSORS,
    INDEX_FILE,
    OTHER_WEIGHTS,
    SINGLE_FILE,
    parts_of_ranks,
)
from ckpt_tools.formats.storage.files import Files, absent_folder, path_in, read_whole
from ckpt_tools.formats.storage.open_files import open_files
from ckpt_tools.formats.torch_archive.item_reader import StoredTensor, load_object, whole_file
from ckpt_tools.formats.untrusted_documents import DocumentError, parse_json
from ckpt_tools.model.choices import CheckpointKind

_FSDP_KEY = re.compile(rb"(model\.module\.|optimizer\.state\.module\.|optimizer\.param_to_group_meta\.)")
_OF_MEGATRON = re.compile(
    rb"(?:optimizer\.state\.module\.|optimizer\.param_to_group_meta\.|checkpoint_version|iteration"
    rb"|(?:decoder|encoder|mtp)\.layers\.|word_embeddings)"
)
_NUMBERED_STATE = re.compile(rb"optimizer\.state\.\d+\.")
# Objects that only `torch_dist` has, a shard of each rank.
_SHARD = re.compile(rb"(?:common_state|_extra_state|rng_state|rerun_state_machine_state)/shard_\d")
METADATA_JSON = "metadata.json"
# Readers of core 0.18 and older look at all four fields, later ones ignore the last two.
METADATA_JSON_TEXT = (
    '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, '
    '"common_backend": "torch", "common_backend_version": 1}'
)
RECORD_FILE = "ckpt_tools.json"  # next to what was converted; see `megatron/run_state/record.py`
PARTIAL_SUFFIX = ".ckpt_tools-partial"  # of the folder in which an output is made
RECORD_FIELDS = {"schema_version", "format", "target", "topology", "tokens"}
MAX_RECORD_BYTES = 1 << 20
COMPANIONS = (METADATA_JSON, "common.pt", "run_config.yaml", "train_state.pt", RECORD_FILE)
"""The small files of a distributed checkpoint, besides `.metadata`."""
# In the metadata of weights alone that were converted for Megatron-FSDP v2, next to the record of that. A plain state
# dict has the same entries, and its record says what it is.
_VERSION_2 = (b"model.", b"checkpoint_version")


def kind_of(files: Files, names: list[str], backend: str | None) -> CheckpointKind:
    """The kind of the checkpoint in a folder with these names; `backend` is the one that metadata.json names."""
    if METADATA in names:
        record = _record(files) if RECORD_FILE in names else None
        if backend:
            return "torch_dist"
        data = read_whole(files, METADATA, MAX_METADATA_BYTES)
        if _is_fsdp_dtensor(data) or _is_version_2(record, data):
            return "fsdp_dtensor"
        if _SHARD.search(data) or ("common.pt" in names and _OF_MEGATRON.search(data)):
            file = path_in(files.location, METADATA_JSON)
            raise CorruptCheckpointError(
                f"{file} is missing: the keys are those of a Megatron torch_dist checkpoint, which nothing loads "
                "without that file. Copy it from where the checkpoint was saved, or write it again:\n"
                f"  echo '{METADATA_JSON_TEXT}' > {shlex.quote(file)}"
            )
        return "dcp"
    if any(name.endswith(".safetensors") for name in names):
        return "safetensors"
    raise missing_metadata(files)


def metadata_json_problems(fields: dict[str, Any]) -> Iterator[str]:
    """What in a `metadata.json` no loader takes."""
    for backend in ("sharded_backend", "common_backend"):
        name = f"{backend}_version"
        if name in fields and backend not in fields:
            yield f"{name} is there, but not {backend}"
        elif fields.get(name, 1) != 1:
            yield f"{name} is {fields[name]!r}, expected 1: no loader is of this version"
    if fields.get("common_backend", "torch") != "torch":
        yield f"common_backend is {fields['common_backend']!r}, expected 'torch'"


def fsdp_keys_problem(keys: Iterable[str]) -> str | None:
    """What is wrong with a `metadata.json` next to tensors of these keys, if they are those of `fsdp_dtensor`."""
    if not any(key.startswith("model.module.") for key in keys):
        return None
    return (
        "the keys are those of fsdp_dtensor, but this file makes loaders take the folder for torch_dist; remove the "
        "file"
    )


def refuse_metadata_json(files: Files, keys: Iterable[str]) -> None:
    """Raise CorruptCheckpointError if a `metadata.json` that names a `sharded_backend` is damaged elsewhere.

    Or if it is not of a checkpoint with these keys.
    """
    if problem := fsdp_keys_problem(keys):
        raise CorruptCheckpointError(f"{files.location}/{METADATA_JSON}: {problem}", [problem])
    problems = list(metadata_json_problems(parse_json(read_whole(files, METADATA_JSON))))
    if problems:
        raise CorruptCheckpointError(
            f"{files.location}/{METADATA_JSON} is damaged: {'; '.join(problems)}. Copy it again", problems
        )


def _is_fsdp_dtensor(data: bytes) -> bool:
    """Whether the keys in a `.metadata` are those of Megatron-LM's Megatron-FSDP.

    A script that saves a wrapped module has `model.module.` too, but not the entries that Megatron-LM puts next to
    it, nor its names; or an optimizer that numbers its parameters, as Megatron-LM's does not.
    """
    if not _FSDP_KEY.search(data) or _NUMBERED_STATE.search(data):
        return False
    return _OF_MEGATRON.search(data) is not None


def _is_version_2(record: dict[str, Any] | None, data: bytes) -> bool:
    """Whether a conversion made it for Megatron-FSDP v2, without the optimizer (its keys would decide)."""
    return record is not None and record.get("format") != "dcp" and all(word in data for word in _VERSION_2)


def _record(files: Files) -> dict[str, Any]:
    """The record in a conversion's output, as far as it names the kind."""
    try:
        record = parse_json(read_whole(files, RECORD_FILE, MAX_RECORD_BYTES))
    except DocumentError as error:
        record = str(error)
    if isinstance(record, dict) and record.keys() <= RECORD_FIELDS and record.get("format") in (None, "dcp"):
        return record
    found = (
        record if isinstance(record, str) else "it has other fields, or another format, than this tool writes"
    )
    raise CorruptCheckpointError(
        f"{files.location}/{RECORD_FILE} is damaged, and it says which format the checkpoint has: {found}. Copy it "
        "again from where the checkpoint was written. Without the file the format is guessed from the keys"
    )


TRACKER = "latest_checkpointed_iteration.txt"
BRIDGE_TRACKER = "latest_train_state.pt"
MAX_DIGITS = 18  # of an iteration
_TRACKER_BYTES = 4096
_LOOKED_AT = 32  # folders of a folder that is no checkpoint
_ITERATION = re.compile(r"iter_(\d{7,})")
_MODEL_FILES = frozenset({SINGLE_FILE, INDEX_FILE, ADAPTER, "config.json"})  # what makes safetensors a model


@dataclass(frozen=True, slots=True)
class Location:
    """A checkpoint's place and kind.

    `dcp` is any other torch distributed checkpoint, `safetensors` a Hugging Face model.
    `path` is the folder that holds the files themselves; `root` the run's folder above it, when there is one.
    """

    kind: CheckpointKind
    path: str
    root: str | None = None
    iteration: int | None = None  # None: release, or unknown
    is_release: bool = False
    tracker: str | None = None  # name of the tracker file in `root`
    has_metadata_json: bool = False
    has_common_pt: bool = False
    has_run_config: bool = False
    has_train_state: bool = False
    left_out: tuple[str, ...] = ()  # a line for each thing other than tensors that is not read

    @property
    def label(self) -> int | Literal["release"] | None:
        """The iteration as reports call it."""
        return "release" if self.is_release else self.iteration


HELD_TWICE: Final = (
    " holds the model twice: these files, and a run; --iteration chooses one of its iterations"
)
NEXT_TO_RUN: Final = "next to the run's iterations"


def locate(path: str, iteration: int | None = None, of_run: bool = False) -> Location:
    """The checkpoint that `path` means; `iteration` picks one of a run's root instead of its latest.

    A folder that holds the model twice, a Hugging Face model next to a run's iterations (ms-swift), is the model, or
    the run where `of_run` says that a Hugging Face model is of no use.
    """
    if iteration is not None and iteration < 0:
        raise UsageError(f"--iteration {iteration}: iterations are counted from 0")
    path = hidden(path)
    if path and "://" not in path:
        _check_folder(path)
    path = snapshot_of(path)
    files = open_files(path)
    try:
        root, found, name, left_out = _resolve(files, path, iteration, of_run)
    finally:
        files.close()
    folder = open_files(found)
    try:
        described = _describe(folder, found, root, name)
        unread = () if described.kind == "safetensors" else left_beside(folder.list())
        return replace(described, left_out=(*left_out, *unread))
    finally:
        folder.close()


def other_copy(found: Location) -> Location | None:
    """The same model in another form, if its folder holds it twice.

    Raises the errors of `locate`.
    """
    if found.kind == "safetensors":
        return locate(found.path, of_run=True) if _is_run(names_in(found.path)) else None
    places = (found.path, path_in(found.path, "hf"))  # the latter is Megatron-Bridge's
    models = (place for place in places if not {SINGLE_FILE, INDEX_FILE}.isdisjoint(names_in(place)))
    return next((Location("safetensors", place) for place in models), None)


def iteration_numbers(root: str) -> list[int]:
    """Numbers of the iteration folders in a run's root, ascending."""
    files = open_files(root)
    try:
        return sorted(number for _, number in iteration_folders(files.list()))
    finally:
        files.close()


def tracked_iteration(root: str) -> str | None:
    """The folder that a run's tracker names, there or not, as Megatron writes last of all; None: it
    has no tracker.
    """
    files = open_files(root)
    try:
        names = files.list()
        has_one = TRACKER in names or BRIDGE_TRACKER in names
        return _chosen_iteration(files, names, None) if has_one else None
    finally:
        files.close()


def _check_folder(path: str) -> None:
    """Refuse what is not a folder, with the closest existing name."""
    folder = Path(path)
    if folder.is_dir():
        return
    if LOCAL_FILE.fullmatch(folder.name):
        raise UnsupportedCheckpointError(local_checkpoint(path))
    if folder.exists():
        raise UnsupportedCheckpointError(f"{path} is a file; {_instead_of_file(str(folder.parent))}")
    raise UnsupportedCheckpointError(absent_folder(folder))


def _instead_of_file(parent: str) -> str:
    """What to give in the place of a file: the folder that it lies in, if that may be a checkpoint's."""
    names = names_in(parent)
    is_one = METADATA in names or _holds_torch(names) or _is_run(names) or not _MODEL_FILES.isdisjoint(names)
    if is_one or any(name.endswith(".safetensors") for name in names):
        return f"give the checkpoint's folder ({parent})."
    return "single files are not read, such as a .pt or .bin of torch.save. A checkpoint is a folder."


class _Resolved(NamedTuple):
    """Run root, folder of the checkpoint itself, the name that holds its iteration, and what is not read."""

    root: str | None
    path: str
    name: str
    left_out: tuple[str, ...] = ()


def _resolve(files: Files, path: str, iteration: int | None, of_run: bool = False) -> _Resolved:
    names = files.list()
    name = path.rstrip("/").rpartition("/")[2]
    if name == MODELOPT:
        raise UnsupportedCheckpointError(
            f"{path} is ModelOpt's state, not a checkpoint; give {_parent(path)}."
        )
    if not any(one.endswith((".safetensors", ".bin")) for one in names) and (
        foreign := deepspeed(path, names)
    ):
        raise foreign
    if _holds_torch(names) or files.exists(METADATA):
        return _one(path, name, iteration)
    if weights := [one for one in names if one.endswith(".safetensors")]:
        return _with_weights(files, path, names, weights, iteration, of_run)
    if _is_run(names):
        return _of_run(files, path, names, iteration)
    if (unfinished := being_written([name]).get(name)) is not None:
        raise UnsupportedCheckpointError(f"{path}: {unfinished[1]}.")
    if (found := _further_in(path, None)) is not None:
        if iteration is not None:
            raise UsageError(f"{path} is one checkpoint, not a run with an iteration {iteration}.")
        return found
    raise _nothing_here(path, names)


def _further_in(path: str, root: str | None) -> _Resolved | None:
    """The checkpoint in a step's or a role's folder."""
    found, step = inner_checkpoint(path), step_of(path)
    if found is None:
        return None
    if _is_run(names_in(found.path)):  # of an iteration that the state in it agrees with
        with closing(open_files(found.path)) as files:
            return _resolve(files, found.path, None)._replace(root=None, left_out=found.left_out)
    name = path if step is None else f"iter_{step:07d}"
    return _Resolved(root, found.path, name, found.left_out)


def _holds_torch(names: list[str]) -> bool:
    """Whether files of a torch checkpoint lie right here."""
    return any(
        name == METADATA_JSON or name.endswith(".distcp") or name.startswith("mp_rank_0") for name in names
    )


def _is_run(names: list[str]) -> bool:
    return TRACKER in names or BRIDGE_TRACKER in names or bool(iteration_folders(names))


def _one(path: str, name: str, iteration: int | None) -> _Resolved:
    """The checkpoint in the folder itself."""
    step = step_number(name)
    name = name if step is None else f"iter_{step:07d}"
    match = _ITERATION.fullmatch(name)
    if iteration is not None and not (match and int(match[1]) == iteration):
        raise UsageError(f"{path} is one checkpoint, not a run with an iteration {iteration}.")
    is_iteration = step is None and (match is not None or name == "release")
    return _Resolved(_parent(path) if is_iteration else None, path, name)


def _of_run(files: Files, path: str, names: list[str], iteration: int | None) -> _Resolved:
    """The iteration of a run that is meant."""
    chosen = _chosen_iteration(files, names, iteration)
    if chosen not in names:
        raise UnsupportedCheckpointError(
            f"{path}: iteration {chosen} is meant, but there is no such folder. {_choices(names)}"
        )
    check_folder(path, chosen)
    folder, layouts = path_in(path, chosen), layouts_of(chosen)
    has_tracker = not any(layout.loaded for layout in layouts)
    is_further_in = any(
        files.exists(f"{chosen}/{model}/{METADATA}") or layout.roles
        for layout in layouts
        for model in layout.models
    )
    found = _further_in(folder, path if has_tracker else None) if is_further_in else None
    if has_tracker:
        return found or _Resolved(path, folder, chosen)
    found = found or _one(folder, chosen, None)
    steps = len(iteration_folders(names))
    said = f"{path}: {chosen} is read, the latest whole one of {steps} steps; --iteration chooses another"
    said_too = () if iteration is not None or steps == 1 else (said,)
    return found._replace(left_out=(*said_too, *found.left_out, *_unfinished(path, names)))


def _unfinished(path: str, names: list[str]) -> list[str]:
    return [f"{path_in(path, name)}: {why}" for name, (_, why) in being_written(names).items()]


def _with_weights(
    files: Files, path: str, names: list[str], weights: list[str], iteration: int | None, of_run: bool
) -> _Resolved:
    """What a folder with safetensors is: a model, or something else with safetensors in it."""
    name = path.rstrip("/").rpartition("/")[2]
    is_model = not _MODEL_FILES.isdisjoint(names) or bool(parts_of_ranks(weights))
    shown = ", ".join(weights[:4]) + (", ..." if len(weights) > 4 else "")
    if _is_run(names):
        if is_model and iteration is None and not of_run:
            return _one(path, name, None)._replace(left_out=(f"{path}{HELD_TWICE}",))
        found = _of_run(files, path, names, iteration)
        return found._replace(left_out=(*found.left_out, f"{shown}: {NEXT_TO_RUN}"))
    inner = [] if is_model else _inner_checkpoints(path, names)
    if inner:
        listed = ", ".join(inner[:4]) + (", ..." if len(inner) > 4 else "")
        raise UnsupportedCheckpointError(
            f"{path} holds {shown}, not named as a Hugging Face model's, and {len(inner)} "
            f"{'checkpoint' if len(inner) == 1 else 'checkpoints'}: {listed}. Give the folder that is meant."
        )
    return _one(path, name, iteration)


def _inner_checkpoints(path: str, names: list[str], more: Iterable[str] = ()) -> list[str]:
    """The folders inside that hold a torch checkpoint or a run, or one of the files `more`."""
    folders = [path_in(path, name) for name in names if "." not in name or iteration_folders([name])]
    marks = (METADATA, TRACKER, BRIDGE_TRACKER, *more)
    found = [(one, mark) for one in folders[:_LOOKED_AT] for mark in marks if open_files(one).exists(mark)]
    return list(dict.fromkeys(path_in(one, mark).rpartition("/")[0] for one, mark in found))


def _chosen_iteration(files: Files, names: list[str], iteration: int | None) -> str:
    """Name of the iteration's folder: the asked one, the tracker's, or the only one."""
    if iteration is not None:
        return _folder_of(files, names, iteration)
    if TRACKER in names:
        text = read_whole(files, TRACKER, _TRACKER_BYTES).decode("utf-8", "replace").strip()
        if text == "release":
            return text
        if not re.fullmatch(rf"[0-9]{{1,{MAX_DIGITS}}}", text):
            raise CorruptCheckpointError(
                f"{files.location}/{TRACKER} holds {text[:40]!r}, not an iteration or 'release'. "
                f"Choose with --iteration. {_choices(names)}"
            )
        return _folder_of(files, names, int(text))
    if BRIDGE_TRACKER in names:
        return f"iter_{_bridge_step(files):07d}"
    folders = [name for name, _ in iteration_folders(names)]
    if len(folders) > 1 and (latest := loaded_step(files, folders)):
        return latest
    if len(folders) > 1:
        raise UsageError(f"{files.location} has no tracker file. Choose with --iteration. {_choices(names)}")
    return folders[0]


def _folder_of(files: Files, names: list[str], iteration: int) -> str:
    """The folder of an iteration; Megatron's name for it if there is no such folder."""
    found = [name for name, number in iteration_folders(names) if number == iteration]
    if len(found) > 1:
        listed = ", ".join(path_in(files.location, name) for name in found)
        raise UsageError(f"{files.location} has several folders of iteration {iteration}; give one: {listed}")
    return found[0] if found else f"iter_{iteration:07d}"


def _bridge_step(files: Files) -> int:
    """The step in Bridge's `latest_train_state.pt`, a dict of 0-d tensors."""
    state = load_object(files, whole_file(files, BRIDGE_TRACKER))
    step = state.get("step") if isinstance(state, dict) else None
    if isinstance(step, StoredTensor) and len(step.data) in (4, 8):
        return int.from_bytes(step.data, "little")
    raise CorruptCheckpointError(f"{files.location}/{BRIDGE_TRACKER} names no step. Choose with --iteration.")


def _choices(names: list[str]) -> str:
    found = [name for name in names if iteration_folders([name]) or name == "release"]
    listed = ", ".join(found[-5:])
    return (
        f"There are {len(found)}: {'... ' if len(found) > 5 else ''}{listed}." if found else "There are none."
    )


def _nothing_here(path: str, names: list[str]) -> UnsupportedCheckpointError:
    if not names:
        return UnsupportedCheckpointError(f"{path} is empty; there is no checkpoint in it.")
    if local := _local_file(path, names):
        return UnsupportedCheckpointError(local_checkpoint(local))
    if unfinished := _unfinished(path, names):
        return UnsupportedCheckpointError(f"{path} holds no whole step. {unfinished[0]}.")
    inner = _inner_checkpoints(path, names, (SINGLE_FILE, INDEX_FILE, f"weights/{METADATA}"))
    hint = f" Did you mean {inner[0]}?" if inner else ""
    if "config.json" in names and any(name.endswith(OTHER_WEIGHTS) for name in names):
        hint = f" It looks like a Hugging Face model without safetensors. {AS_SAFETENSORS}"
    cached = [name for name in names if name.startswith("models--")]
    if cached:
        hint = f" It is a Hugging Face cache; give one of its models, such as {path_in(path, cached[0])}."
    for folder in (path_in(path, name) for name in names[:_LOOKED_AT] if "." not in name and not inner):
        if foreign := deepspeed(folder, names_in(folder)):
            return foreign
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return UnsupportedCheckpointError(
        f"{path} holds no checkpoint: neither {METADATA} nor {TRACKER}, only {shown}.{hint}"
    )


def _local_file(path: str, names: list[str], depth: int = 2) -> str | None:
    """A local checkpoint's file: in a folder of its rank, which may be in one of a session."""
    for name in names:
        if LOCAL_FILE.fullmatch(name):
            return path_in(path, name)
    folders = (path_in(path, name) for name in names[:_LOOKED_AT] if depth and "." not in name)
    inner = (_local_file(folder, names_in(folder), depth - 1) for folder in folders)
    return next(filter(None, inner), None)


def _describe(files: Files, path: str, root: str | None, name: str) -> Location:
    names = files.list()
    backend = _sharded_backend(files) if METADATA_JSON in names else None
    if backend == "zarr":
        raise ForeignFormatError(
            f"{path} is a 'zarr' checkpoint. Load it with the Megatron that wrote it (core 0.15 or older) and save "
            "it with --ckpt-format torch_dist."
        )
    if any(entry.startswith("mp_rank_0") for entry in names):
        raise ForeignFormatError(
            f"{path} is a legacy 'torch' checkpoint (mp_rank_* folders). Load it with Megatron and save it "
            "with --ckpt-format torch_dist."
        )
    match = _ITERATION.fullmatch(name)
    roots = names_in(root) if root else []
    return Location(
        kind=kind_of(files, names, backend),
        path=path,
        root=root if roots else None,
        iteration=int(match[1]) if match else None,
        is_release=name == "release",
        tracker=next((name for name in (TRACKER, BRIDGE_TRACKER) if name in roots), None),
        has_metadata_json=backend is not None,
        has_common_pt="common.pt" in names,
        has_run_config="run_config.yaml" in names,
        has_train_state="train_state.pt" in names,
    )


def _sharded_backend(files: Files) -> str:
    try:
        fields = parse_json(read_whole(files, METADATA_JSON))
    except DocumentError as error:
        raise CorruptCheckpointError(
            f"{files.location}/{METADATA_JSON} does not name a sharded_backend: {error}"
        ) from error
    if not isinstance(fields, dict) or "sharded_backend" not in fields:
        found = "no such field" if isinstance(fields, dict) else f"it holds {brief(fields)}, not fields"
        raise CorruptCheckpointError(
            f"{files.location}/{METADATA_JSON} does not name a sharded_backend ({found}). The file is damaged: "
            "copy it again."
        )
    backend = fields["sharded_backend"]
    if backend not in ("torch_dist", "zarr"):
        raise CorruptCheckpointError(
            f"{files.location}/{METADATA_JSON} names the sharded_backend {brief(backend)}; Megatron writes "
            "'torch_dist', once 'zarr'. The file is damaged: copy it again."
        )
    return str(backend)


def _parent(path: str) -> str:
    return path.rstrip("/").rpartition("/")[0] or ("/" if path.startswith("/") else ".")
