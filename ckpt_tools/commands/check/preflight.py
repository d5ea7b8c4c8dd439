"""`preflight`: will a Megatron-FSDP job load this checkpoint, and how is it launched; before a GPU is held."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_tools.close_names import close_names
from ckpt_tools.commands.check.launch import Launch, launch, unsaid
from ckpt_tools.commands.check.verify_checks import fsdp_entries_and_keys
from ckpt_tools.commands.job.opened import Opened, open_checkpoint
from ckpt_tools.commands.job.outputs import place_parts
from ckpt_tools.errors import CorruptCheckpointError, UsageError
from ckpt_tools.formats.locate.detect import TRACKER, tracked_iteration
from ckpt_tools.formats.storage.files import AnyPath, path_text
from ckpt_tools.formats.torch_archive.item_reader import load_object
from ckpt_tools.formats.untrusted_documents import DocumentError, read_named_file
from ckpt_tools.megatron.format import FORMATS
from ckpt_tools.megatron.keys import fsdp_state, is_optimizer_key, is_version_2
from ckpt_tools.megatron.run_state.record import read_record, stored_tp
from ckpt_tools.verify.checkpoint.structure import check_files
from ckpt_tools.verify.readiness import job as jobs
from ckpt_tools.verify.readiness.facts import Facts, Rule, checked_settings, stored_style
from ckpt_tools.verify.readiness.rules import RULES
from ckpt_tools.verify.report import ERROR, WARNING, Check, Finding, Report, Severity

_SCHEDULER = "opt_param_scheduler."
_ENVIRONMENT = "unset CUDA_DEVICE_MAX_CONNECTIONS"
_SCRIPTS = ("pretrain_gpt.py", "pretrain_mamba.py", "pretrain_hybrid.py")  # others may add flags of their own
_PLACE = re.compile(r"\bCHECKPOINT\b")
_AXES = {"ep": "expert_model", "etp": "expert_tensor", "cp": "context"}  # of a record, as Megatron names them
_PACKED = re.compile(r"^(?P<module>.*\.)(?:in_proj\.|conv1d[._])(?:weight|bias)$")


@dataclass(frozen=True, slots=True)
class Start:
    """How a program starts from the checkpoint with the command that is made for it, or the rules that it breaks."""

    program: str
    how: str | None  # "resume", "fresh optimizer", "weights alone"; None: it does not
    broken: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Preflight:
    """The rules' verdicts, the program they were made for, how the job is launched, and what else would start.

    There is no `launch` when it is not ready, and where the job is described without the script that runs it. `as_is`
    starts a 3D-parallel job of Megatron-LM on a `torch_dist` checkpoint, where no job is described.
    """

    report: Report
    program: str
    launch: Launch | None
    starts: tuple[Start, ...] = ()  # of an fsdp_dtensor checkpoint: every program
    as_is: Launch | None = None


def preflight(
    checkpoint: AnyPath,
    words: Sequence[str] = (),
    yaml_file: Path | None = None,
    iteration: int | None = None,
    trust_pickle: bool = False,
    target: str | None = None,
) -> Preflight:
    """Every rule on the checkpoint and on the job that is to load it.

    `target` is the program that runs the job. The job is what `words` and `yaml_file` describe; without them the one
    that the checkpoint's own arguments describe, which is the one that `launch` starts.

    Raises:
        UsageError: the YAML file or the command line cannot be read, or `target` is not a known program.
        Otherwise the errors of opening a checkpoint.
    """
    checkpoint = path_text(checkpoint)
    if target is not None and target not in jobs.PROGRAMS:
        raise UsageError(
            f"{target!r} is not a program that loads checkpoints; known are {', '.join(jobs.PROGRAMS)}"
        )
    words = jobs.command_words(words)
    with open_checkpoint(checkpoint, iteration, trust_pickle, of_run=True) as opened:
        about, packed_for = _about(opened)
        place, is_fsdp = _place(opened), about.kind == "fsdp_dtensor"
        program = target or _program(about, words, yaml_file)
        job = _described(words, yaml_file, program)
        start = None
        if job is not None:
            is_whole = job.script is not None and jobs.launcher_problem(job, words) is None
            start = Launch((_ENVIRONMENT,), tuple(words)) if is_whole else None
        elif is_fsdp:
            start = _launch(about, program, packed_for, place)
            job = jobs.parse_command(start.filled_in, program)
        facts, checks = _checks(about, job, program)
        if is_fsdp or (about.kind == "torch_dist" and job is None):
            checks.append(_place_check(place, job))
        if is_fsdp and (words or yaml_file):
            assert job is not None
            checks += [_launcher_check(job, words), _steps_check(place, job)]
        stored: tuple[Check, ...] = ()
        starts: tuple[Start, ...] = ()
        if is_fsdp:
            # Checks of `verify`: whether a strict load finds every key that it asks for, and its bytes.
            stored = (check_files(opened.files, opened.catalog), *fsdp_entries_and_keys(opened))
            broken = tuple(check.name for check in stored if check.errors)
            starts = tuple(_start(about, other, packed_for, place, broken) for other in jobs.PROGRAMS)
        path = shlex.quote(checkpoint)  # in commands, which can be run as they stand but for what they write
        with_path = (
            replace(c, findings=tuple(f._replace(fix=_PLACE.sub(lambda _: path, f.fix)) for f in c.findings))
            for c in (*checks, *stored)
        )
        report = Report(opened.location.path, opened.location.kind, tuple(with_path))
        as_is = None
        if (
            about.kind == "torch_dist"
            and job is None
            and program != jobs.BRIDGE
            and not about.by_bridge
            and about.args
            and not any(check.errors for check in checks if check.name in ("place", "unsaid"))
        ):
            as_is = _launch(about, program, packed_for, place)
        return Preflight(report, facts.job.program, start if report.is_valid else None, starts, as_is)


def _launch(about: Facts, program: str, packed_for: int | None, place: _Place) -> Launch:
    sizes = {"tensor_model_parallel_size": packed_for or 1}
    step = None if place.tracked in (None, place.name) else place.iteration
    return launch(replace(about, job=jobs.Job(sizes, program=program)), place.root or place.path, step)


def _checks(about: Facts, job: jobs.Job | None, program: str) -> tuple[Facts, list[Check]]:
    """The facts with the job, and the verdicts of the rules on both."""
    facts = replace(about, job=jobs.with_checkpoint_args(job or jobs.Job(program=program), about.args))
    facts, settings = checked_settings(facts)
    if facts.kind != "fsdp_dtensor":  # no setting makes it load
        (rule,) = (rule for rule in RULES if rule.name == "checkpoint-format")
        return facts, [run_rule(rule, facts), _unsaid_check(facts)]
    checks = [_flags_check(facts.job), _unsaid_check(facts), settings] if job is not None else []
    judged = job is not None and facts.job.refused is None
    rules = (r for r in RULES if not r.on_job or (judged and facts.job.program in r.programs))
    return facts, checks + [run_rule(rule, facts) for rule in rules]


def _start(
    about: Facts, program: str, packed_for: int | None, place: _Place, broken: tuple[str, ...]
) -> Start:
    """What comes of the command that would be printed for `program`."""
    job = jobs.parse_command(_launch(about, program, packed_for, place).filled_in, program)
    facts, checks = _checks(about, job, program)
    checks.append(_place_check(place, job))
    broken += tuple(check.name for check in checks if check.errors)
    if broken:
        return Start(program, None, broken)
    if not facts.loads("optim"):
        return Start(program, "weights alone")
    return Start(program, "fresh optimizer" if facts.begins else "resume")


def run_rule(rule: Rule, facts: Facts) -> Check:
    """The verdict of one rule on facts with valid settings (`checked_settings`)."""
    broken = rule.broken(facts)
    fix = rule.fix if isinstance(rule.fix, str) else rule.fix(facts)
    findings = () if broken is None else (Finding(rule.name, rule.severity, broken, rule.why, fix),)
    return Check(rule.name, "rules", 1, findings, source=rule.where)


def _described(words: Sequence[str], yaml_file: Path | None, program: str) -> jobs.Job | None:
    """The job that the user describes, None when there is no description."""
    job = None
    if yaml_file is not None:
        try:
            job = jobs.parse_yaml(read_named_file(yaml_file), str(yaml_file), program)
        except (OSError, DocumentError) as error:
            raise UsageError(f"{yaml_file}: {error}") from None
    if words:
        command = jobs.parse_command(words, program if job is None else job.program)
        job = command if job is None else jobs.merge(job, command)
    return job


def _program(about: Facts, words: Sequence[str], yaml_file: Path | None) -> str:
    """Which program runs the job: its command says it, else the conversion, else the checkpoint's writer."""
    if jobs.is_bridge_command(words):
        return jobs.BRIDGE
    written_for = about.target if about.target in jobs.PROGRAMS else None
    if written_for is not None and (written_for != jobs.BRIDGE or not (words or yaml_file)):
        return written_for
    return jobs.BRIDGE if about.by_bridge and not (words or yaml_file) else jobs.MAIN


def _about(opened: Opened) -> tuple[Facts, int | None]:
    """What the checkpoint tells about the job that can load it, and that job's tensor-parallel size."""
    catalog, common, kind = opened.catalog, opened.common, opened.location.kind
    is_fsdp = kind == "fsdp_dtensor"
    shapes, ranks = FORMATS[kind].weights(catalog).shapes, FORMATS[kind].rng_ranks(catalog)
    if is_fsdp:
        states = {found.kind for found in map(fsdp_state, catalog.tensors) if found} - {"step"}
    else:
        keys = (*catalog.tensors, *catalog.objects)
        states = {"any"} if any(is_optimizer_key(key) for key in keys) else set()
    record = read_record(opened.files)
    stored_size = stored_tp(record, ranks, common.args)
    tp = None if stored_size is None else stored_size.ranks
    job: dict[str, Any] = {}  # that the conversion was made for
    if record is not None:
        job = {"target": record.target, "tokens": record.tokens}
        if is_fsdp:
            sizes = {name: getattr(record, axis) for axis, name in _AXES.items()}
            job["sizes"] = {name: size.ranks for name, size in sizes.items() if size is not None}
            job["ranks"] = None if record.dp is None else record.dp.ranks * (tp or 1)
    facts = Facts(
        kind=kind,
        args=common.args or common.model_config,
        by_bridge=not common.args and bool(common.model_config),
        stored=replace(stored_style(shapes, is_fsdp), version_2=is_fsdp and is_version_2(catalog.tensors)),
        has_args="args" in catalog.objects or not opened.location.has_run_config,
        states=frozenset(states),
        layout=FORMATS[kind].layout(catalog, common),
        rng_ranks=frozenset(ranks),
        tp_of_packed=tp,
        packed=_packed(shapes) if is_fsdp else (),
        schedule={
            key.removeprefix(_SCHEDULER): load_object(opened.files, entry.item, opened.trust_pickle)
            for key, entry in catalog.objects.items()
            if is_fsdp and key.startswith(_SCHEDULER)
        },
        **job,
    )
    size = tp or facts.args.get("tensor_model_parallel_size")
    return facts, size if isinstance(size, int) and size > 0 else None


def _packed(names: Iterable[str]) -> tuple[str, ...]:
    """Projections with rows grouped by tensor-parallel rank: those of gated delta nets and Mamba mixers."""
    live = set(names)
    return tuple(
        name for name in sorted(live) if (m := _PACKED.match(name)) and f"{m['module']}A_log" in live
    )


def _flags_check(job: jobs.Job) -> Check:
    """Whether the program's own parser takes the command line."""
    source = f"training/arguments.py parse_args ({job.program})"
    if job.is_bridge:
        return Check("flags", "settings", len(job.given), (), source="Megatron-Bridge run_recipe.py")
    findings = []
    if job.refused is not None:
        findings.append(Finding("flags", ERROR, job.refused, f"the parser of Megatron-LM {job.program} stops at it",
                                "give the flag as that version takes it"))  # fmt: skip
    known_script = job.script is None or Path(job.script).name in _SCRIPTS
    for word in job.unknown:
        severity: Severity = ERROR if known_script else WARNING
        findings.append(
            Finding("flags", severity, word, f"Megatron-LM {job.program} knows no such flag", _meant(word))
        )
    return Check("flags", "flags", len(job.given) + len(job.unknown), tuple(findings), source=source)


def _meant(word: str) -> str:
    """What to write in the place of a word that no flag takes."""
    option = word.partition("=")[0]
    if others := jobs.versions_with(option):
        return f"drop it, or run one of {', '.join(others)} (--target)"
    known = [spelled for flag in jobs.flags_of(jobs.MAIN) for spelled in flag.options]
    close = close_names(option, known) if option[:2] == "--" else []
    return f"did you mean {', '.join(close)}?" if close else "drop it"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a job looks for the checkpoint: the folder `name` of the run's `root`, which the tracker names."""

    path: str
    root: str | None  # None: the folder is not named as an iteration, so that no job finds it
    name: str
    iteration: int | None
    tracked: str | None = None
    damaged: str | None = None  # what is wrong with the tracker


def _place(opened: Opened) -> _Place:
    location = opened.location
    path = location.path if "://" in location.path else str(Path(location.path).absolute())
    above, _, name = path.rpartition("/")
    number = opened.common.iteration if location.iteration is None else location.iteration
    is_found = name == ("release" if location.is_release else f"iter_{number or 0:07d}")
    place = _Place(path, above if location.root is not None and is_found else None, name, number)
    if place.root is None:
        return place
    try:
        return replace(place, tracked=tracked_iteration(place.root))
    except CorruptCheckpointError as error:
        return replace(place, damaged=str(error))


def _place_check(place: _Place, job: jobs.Job | None) -> Check:
    """Whether a job finds the checkpoint by `--load`: by its tracker, or by `--ckpt-step`."""
    why = "the job would start from random weights"
    latest = "release" if place.name == "release" else str(place.iteration or 0)
    track = f"echo {latest} > {shlex.quote(f'{place.root}/{TRACKER}')}"
    load = job and job.get("load")
    found, fix = None, ""
    severity: Severity = ERROR
    if place.root is None:
        found = f"no job finds {place.path}: it is not a folder iter_NNNNNNN (or release) of a run"
        step = place.iteration or 1
        fix = f"mkdir RUN && mv {shlex.quote(place.path)} RUN/iter_{step:07d} && echo {step} > RUN/{TRACKER}"
    elif load is not None and place_parts(str(load)) != place_parts(place.root):
        found, fix = f"--load is {load}, the checkpoint lies in {place.root}", f"--load {place.root}"
        why = "the job would load something else"
    elif job is not None and job.get("ckpt_step") is not None:
        if (step := job.get("ckpt_step")) != place.iteration:
            found, fix = f"--ckpt-step is {step}, this is iteration {place.iteration}", "drop it"
            why = "the job would load something else"
    elif place.tracked is None:
        found, fix = place.damaged or f"{place.root} has no {TRACKER}", track
    elif place.tracked != place.name:
        found = f"the tracker names {place.tracked}, not {place.name}"
        fix = f"--ckpt-step {latest}, or {track}"
        why = "the job would load something else"
    elif job is not None and load is None and job.refused is None:
        found, fix = "the command has no --load", f"--load {place.root}"
        # Flags alone and files need not be all that the job is given, and a recipe of Bridge has a place.
        severity = WARNING if job.script is None or job.is_bridge else ERROR
    findings = () if found is None else (Finding("place", severity, found, why, fix),)
    return Check("place", "places", 1, findings, source="training/checkpointing.py _load_base_checkpoint")


def _launcher_check(job: jobs.Job, words: Sequence[str]) -> Check:
    """Whether something starts the script, on a number of GPUs."""
    problem = jobs.launcher_problem(job, words)
    is_bare = problem is not None and problem[0].startswith("nothing")
    why = "the number of GPUs is unknown, so batch and schedule are compared only in part"
    findings = () if problem is None else (
        Finding("launcher", WARNING if is_bare else ERROR, problem[0], why if is_bare else "it stops", problem[1]),
    )  # fmt: skip
    return Check("launcher", "commands", 1, findings, source="torch/distributed/run.py")


def _steps_check(place: _Place, job: jobs.Job) -> Check:
    """Whether there is a step left to train."""
    last, step = job.get("train_iters"), place.iteration
    is_done = type(last) is int and bool(step) and last <= (step or 0) and not job.has("finetune")
    found = f"train_iters is {last}, the checkpoint is of iteration {step}"
    fix = f"--train-iters with more than {step}"
    findings = (Finding("steps", ERROR, found, "the job would end at once", fix),) if is_done else ()
    return Check("steps", "settings", 1, findings, source="training/training.py train")


def _unsaid_check(facts: Facts) -> Check:
    """Whether the program has a flag for every setting that changes what the model computes."""
    name = facts.job.program
    findings = [
        Finding("unsaid", ERROR, setting, f"no flag of Megatron-LM {name} can say it: it would train another model",
                "run a program that can (--target), such as bridge")
        for setting in unsaid(facts)
    ]  # fmt: skip
    return Check(
        "unsaid", "settings", len(facts.args), tuple(findings), source=f"training/arguments.py ({name})"
    )
