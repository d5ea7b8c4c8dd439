"""`watch`."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli import given_values as v
from ckpt_tools.cli import render
from ckpt_tools.cli.convert import RUNS, as_meant, is_given
from ckpt_tools.cli.manual import page
from ckpt_tools.cli.options import flag, option
from ckpt_tools.cli.signature import fill, read_values, with_options

if TYPE_CHECKING:
    from ckpt_tools.commands.watch_events import Action, Makes, Told
    from ckpt_tools.formats.detect import CheckpointKind
    from ckpt_tools.model.choices import Format

_LONGEST = 7 * 86_400.0  # seconds
_VERBS = ("convert", "export-hf", "copy", "verify")
# Options that say what a watch says itself, and those of one output that a second would replace.
_ITS_OWN = frozenset({
    "iteration", "resume", "overwrite", "dry_run", "as_json", "report", "report_format", "junit", "manifest",
    "write_manifest", "quiet",
})  # fmt: skip
_OWN = {
    "then": option(
        str, "--then",
        help="What is done with an iteration: convert, export-hf, copy or verify with options of its own, in quotes. "
             "Not those that watch sets: --iteration, --resume, --overwrite, --dry-run, --json, -q, and reports.",
    ),
    "every": option(
        float, "--every", default=60.0, min=0.1, max=_LONGEST, read=v.finite,
        help="Seconds between two looks at the run.",
    ),
    "once": flag("--once", help="Do what there is to do now, then end; for cron."),
    "retries": option(
        int, "--retries", default=3, min=0,
        help="How often a failed iteration is tried again, with pauses that double from --every up to an hour. "
             "What is damaged or cannot be converted is not, until its files change.",
    ),
    "settle": option(
        float, "--settle", default=120.0, min=0, max=_LONGEST, read=v.finite,
        help="In a run without a tracker: seconds for which nothing in an iteration must have changed.",
    ),
    "state": option(
        Path, "--state",
        help="Folder for the lock and what is remembered. Default: in OUT; to be given where OUT is in a store.",
    ),
    "as_json": flag("--json", help="A line of JSON for whatever becomes of an iteration."),
}  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command(**page("watch"))(with_options(watch, {"quiet"}, _OWN))


def watch(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="A run's root, to which a job may be writing.")],
    output: Annotated[
        str, typer.Argument(help="A root that gets OUT/iter_XXXXXXX, or OUT/iter_XXXXXXX.json from verify.")
    ],
    **given: Any,
) -> None:
    """Convert, export, copy or verify each new iteration of a run, once, when its job has finished writing it.

    It goes on until SIGTERM or Ctrl-C; started again, it goes on where it was. An iteration is finished when the
    tracker names it or a later one; one that is not whole is left alone and named. What is done stays done, also when
    its output is removed (OUT/.ckpt_tools-watch remembers it), unless it is written again. One watcher
    has an output, a second waits for its end.
    With --once the exit code is the worst of all iterations.
    """
    from ckpt_tools.commands.watch import watch as watch_run
    from ckpt_tools.commands.watch_events import WatchOptions
    from ckpt_tools.errors import Interrupted, Terminated, UsageError

    action = _action(context, given["then"], run, output)
    render.be_quiet(given["quiet"])  # which the parsed command has set for itself
    if given["state"] is None and "://" in output:
        raise UsageError(
            f"{output} is in a store: give --state, a folder for the lock and what is remembered"
        )
    tell = _print_json if given["as_json"] else _print
    options = fill(WatchOptions, given)
    try:
        code = watch_run(run, output, action, options, tell, _note)
    except (Interrupted, Terminated) as stop:  # how a service ends is not an error
        _note(f"note: {stop}")
        code = stop.exit_code
    raise typer.Exit(code)


def _action(context: typer.Context, then: str | None, run: str, output: str) -> Action:
    """What is to be done, with its options checked as the command itself would check them.

    Raises:
        UsageError: watch does not do that, or an option is wrong.
    """
    from ckpt_tools.cli.commands import Commands
    from ckpt_tools.commands.watch_events import Action
    from ckpt_tools.errors import UsageError

    try:
        verb, *options = shlex.split(then or "")
    except ValueError as error:
        what = "say what is to be done" if not (then or "").strip() else str(error)
        raise UsageError(f"--then: {what}; for example --then 'convert --gpus 8'") from None
    if verb not in _VERBS:
        raise UsageError(f"--then {verb}: it can be {', '.join(_VERBS)}")
    if verb == "verify" and "://" in output:
        raise UsageError(f"{output}: the reports of verify are written to a folder, not to a store")
    command = Commands()[verb]
    parsed = command.make_context(
        verb, [*options, "--", run, *([] if verb == "verify" else [output])], parent=context.parent
    )
    own = [p.opts[0] for p in command.params if p.name in _ITS_OWN and is_given(parsed, p.name)]
    if own:
        raise UsageError(f"--then {verb}: watch sets {', '.join(own)} itself; leave out what it sets")
    to = _checked(verb, parsed)
    kinds: tuple[CheckpointKind, ...] = ("torch_dist", "fsdp_dtensor", "dcp", "safetensors")
    if verb == "export-hf" or to == "hf":
        kinds = ("safetensors",)
    elif to is not None:
        kinds = (to,) if is_given(parsed, "to") else (to, "dcp")  # a plain state dict stays one
    makes: Makes = "reports" if verb == "verify" else "folders" if kinds == ("safetensors",) else "root"
    return Action(verb, tuple(options), makes, kinds, parsed.params["trust_pickle"])


def _checked(verb: str, parsed: typer.Context) -> Format | None:
    """The format that is converted to, if any; the options are read as the command would.

    Raises:
        UsageError: they are wrong, or contradict each other.
    """
    given = read_values(parsed)
    if verb == "export-hf":
        RUNS["hf"](given)
    if verb != "convert":
        return None
    to: Format = parsed.params["to"]
    RUNS[to](as_meant(parsed, to, given))
    return to


def _print(told: Told) -> None:
    """Results on stdout, what failed on stderr."""
    where = f"{told.name} -> {told.output}"
    match told.event:
        case "waiting":
            render.say(render.escape_lines(f"note: {told.name} is not finished: {told.why}"))
        case "stale":
            render.complain(f"error: {told.name}: {told.why}")
        case "done" if told.exit_code == 0:
            render.tell(render.escape(f"{_now()} done in {told.seconds:.1f} s: {where}"))
        case "done":
            render.complain(f"error: {told.name} is not valid: see {told.output}")
        case "failed" | "given_up":
            then = (
                "; it is tried again later" if told.event == "failed" else "; given up until its files change"
            )
            render.complain(
                f"error: {told.name}, try {told.tries}, exit code {told.exit_code}{then}: {told.why}"
            )


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _print_json(told: Told) -> None:
    print(render.json_text(told.as_json(), None), flush=True)


def _note(line: str) -> None:
    render.say(render.escape(line))
