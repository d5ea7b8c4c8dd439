"""The report of a command that writes a checkpoint: the verdict, then what a user should know; `-v` adds the rest."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_tools.cli.render import escape, say, tell, tell_verdict
from ckpt_tools.commands.job.placements import describe_job
from ckpt_tools.execute.output.trackers import root_and_name
from ckpt_tools.execute.proof.masters import describe_masters
from ckpt_tools.human import counted, human_bytes
from ckpt_tools.model.choices import assert_never

if TYPE_CHECKING:
    from ckpt_tools.commands.edit.copy import Copied
    from ckpt_tools.commands.job.report import ConversionReport, Masters
    from ckpt_tools.execute.run import WriteReport
    from ckpt_tools.model.target import Target

_SHOWN = 8  # entries of one kind with -v
_MOST = 8  # lines without -v
_IN_ROOTS = ("torch_dist", "fsdp_dtensor")  # formats of iterations in a run's root
_NEVER = ": not part of "
_FORMATS = {"dcp": "a plain state dict"}
_NAMED = 3  # keys of one reason


def print_report(report: ConversionReport, verbose: bool = False) -> None:
    """What was converted, and what changed; the whole of it only if `verbose`."""
    made = "" if report.iteration == report.source_iteration else iteration_text(report.iteration)
    is_named = report.output_format == "hf" and report.architecture
    architecture = f": {report.architecture}" if is_named else ""
    ends = f"{report.output_format} for {report.loader or 'the same loader'}{architecture}{made}"
    rows = [("formats", f"{_source(report)}{iteration_text(report.source_iteration)} -> {ends}")]
    if report.job is not None:
        rows += describe_job(report.job)[: None if verbose else 1]
    rows.append(("masters", masters_text(report.masters)))
    if report.written:
        rows.append(("checked", _checked(report.written)))
    notes = list(report.notes)
    if report.written and report.output_format in _IN_ROOTS and not _is_numbered(report.written):
        notes.insert(
            0,
            "no job finds this folder by --load: move it to RUN/iter_NNNNNNN, and write the iteration into "
            "RUN/latest_checkpointed_iteration.txt",
        )
    found = [*_lost(report), *(row("note", note) for note in notes)]
    lines = [*(row(*one) for one in rows), *shared(report.plan)]
    print_lines(_verdict(report), lines, found, _details(report), verbose)


def row(title: str, text: str) -> str:
    """A line of a report."""
    return f"{title:<9} {text}"


def print_lines(
    verdict: str, lines: Sequence[str], findings: Sequence[str], details: Sequence[str], verbose: bool
) -> None:
    """The verdict, then the rest: all of it if `verbose`, else no more than eight lines."""
    tell_verdict(escape(verdict), True)
    shown = [*lines, *findings, *details]
    if not verbose:
        room = _MOST - 1 - len(lines) - 1
        fits = findings if len(findings) <= room else findings[:room]
        shown = [*lines, *fits]
        if hidden := len(findings) - len(fits) + len(details):
            shown.append(f"{counted(hidden, 'more line')} with -v, everything with --json")
    for line in shown:
        tell(escape(f"  {line}"))


def _verdict(report: ConversionReport) -> str:
    written = report.written
    if written is None:
        return f"would convert {report.source} -> {report.output}: {_planned_size(report)}"
    done = "compared, it was complete already:" if written.was_there else "converted"
    return f"{done} {report.source} -> {_place(report, written)}: {_size_and_time(written)}"


def shared(links: Mapping[str, Any]) -> list[str]:
    """On the files that are links, as `links_summary` has them."""
    files, unused = links.get("linked_files"), links.get("bytes_unreferenced")
    if not files:
        return []
    size = human_bytes(sum(files.values()))
    rest = f"; {human_bytes(unused)} in them belong to nothing here" if unused else ""
    linked = f"{counted(len(files), 'file')} ({size}) of the source: a change in place changes both{rest}"
    return [row("linked", linked)]


def _size_and_time(written: WriteReport) -> str:
    """What every verdict of a written checkpoint ends with."""
    return f"{human_bytes(written.bytes_written)} {time_and_shared(written)}"


def time_and_shared(written: WriteReport) -> str:
    """How long it took, and what was not copied where that is most of it."""
    shared = written.bytes_cloned
    of_it = (
        f", {human_bytes(shared)} of it shared with the source" if 2 * shared > written.bytes_written else ""
    )
    return f"in {written.seconds:.2f} s{of_it}"


def _lost(report: ConversionReport) -> list[str]:
    """Lines on what the output lacks of the source, and what was there before."""
    written = report.written
    dropped, _ = _apart(report.dropped)
    lines = [row("dropped", entry) for entry in _by_reason(dropped)]
    if written is not None and written.rounded_tensors:
        elements = f"{written.rounded_elements:,} elements of {written.rounded_tensors:,} tensors"
        lines.append(
            row("rounded", f"{elements} by the cast to their new type, most in {written.rounded_most}")
        )
    return [*lines, *changed_before(report)]


def changed_before(of: ConversionReport | Copied) -> list[str]:
    """What becomes of a checkpoint and a tracker that were there before."""
    rows = (("replaced" if of.written else "replaces", of.replaced), ("tracker", of.tracker))
    return [row(title, text) for title, text in rows if text]


def _details(report: ConversionReport) -> list[str]:
    """What was done without any loss."""
    groups = [f"group {number}: {counted(n, 'parameter')}" for number, n in report.groups.items()]
    holds = f"{report.tensors:,} tensors, {report.objects:,} objects and scalars"
    rows = [("holds", "; ".join([holds, *groups]))]
    w = report.written
    if w is not None:
        rate = human_bytes(int(w.bytes_written / max(w.seconds, 1e-9)))
        rows += [
            (
                "speed",
                f"{rate}/s with {counted(w.ranks, 'process')}; read {human_bytes(w.bytes_read)}, "
                f"largest process {human_bytes(w.peak_rss_bytes)}",
            ),
            (
                "copied",
                f"{human_bytes(w.bytes_cloned)} cloned, {human_bytes(w.bytes_kernel_copied)} in kernel, "
                f"{human_bytes(w.bytes_touched)} through buffers; {w.items_resumed:,} of {w.items:,} items resumed",
            ),
        ]
        if w.rounded_and_kept:
            exact = f"{w.rounded_and_kept:,} elements of weights; the masters keep the exact values"
            rows.append(("rounded", exact))
    else:
        rows.append(("writes", _planned_size(report)))
    return [*(row(*one) for one in rows), *changes(report, report.output_format)]


def _planned_size(report: ConversionReport) -> str:
    return f"{human_bytes(report.plan['bytes_to_write'])} in {counted(len(report.plan['files']), 'file')}"


def _checked(w: WriteReport) -> str:
    """What was proven of source and output."""
    return source_checksums(w) + ("; what it wrote was read back and is equal" if w.output_verified else "")


def changes(of: ConversionReport | Target, output_format: str, with_losses: bool = False) -> list[str]:
    """What a conversion changes, in a line each; long lists are cut. Losses are what is dropped, and notes."""
    dropped, no_place = _apart(of.dropped)
    lists = {"kept": of.kept, "renamed": of.renamed, "filled in": of.backfilled}
    if with_losses:
        lists = {"dropped": tuple(_by_reason(dropped)), **lists, "note": of.notes}
    lines = []
    for title, entries in lists.items():
        lines += [row(title, entry) for entry in entries[:_SHOWN]]
        if len(entries) > _SHOWN:
            lines.append(row(title, f"... and {len(entries) - _SHOWN:,} more (--json lists all)"))
    if no_place:
        lines.append(f"not part of {_FORMATS.get(output_format, output_format)}: {no_place}")
    return lines


def iteration_text(label: int | str | None) -> str:
    """What follows a format: the iteration, a release, or nothing if it is unknown."""
    return "" if label is None else f", {label if label == 'release' else f'iteration {label}'}"


def _source(report: ConversionReport) -> str:
    if report.source_format == "safetensors":
        return f"Hugging Face {report.architecture or 'model'}"
    layout = report.optimizer_layout
    same = layout in (None, report.source_format)
    return report.source_format if same else f"{report.source_format}, {layout}"


def masters_text(masters: Masters) -> str:
    """What became of the masters, and what was proven."""
    match masters.use:
        case "none":
            return "no fp32 masters in the source"
        case "left_out":
            proven = f"; {describe_masters(masters.found, masters.mode)}" if masters.found.tensors else ""
            return f"left out, the stored weights are used{proven}"
        case "as_stored":
            return "the source stores them as its weights; there is nothing to compare them with"
        case "merged":
            found = masters.found
            proven = f"; before, {describe_masters(found, masters.mode)}" if found.tensors else ""
            return f"the adapter was added to them; weights are the sums, rounded{proven}"
        case "written":
            if masters.mode == "none":
                return "not checked (--check-masters none)"
            return describe_masters(masters.found, masters.mode)
        case _:
            assert_never(masters.use)


def say_unfinished(iteration: int | None) -> None:
    """Why the newest of all iterations is skipped."""
    say(f"note: skipping iteration {iteration}: it is still being written (no .metadata, no tracker)")


def _apart(dropped: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """The lines on what a user might miss, and in short what the target's format never has."""
    missed, kinds = list[str](), Counter[str]()
    for line in dropped:
        key, _, reason = line.partition(": ")
        what, never, _ = reason.rpartition(_NEVER) if _NEVER in reason else ("", "", "")
        if never or reason.startswith(_NEVER[2:]):
            kinds[what or key.removeprefix("common state ")] += 1
        else:
            missed.append(line)
    return tuple(missed), ", ".join(f"{what} ({n:,} keys)" if n > 1 else what for what, n in kinds.items())


def _by_reason(dropped: tuple[str, ...]) -> list[str]:
    """One line per reason, with the names of the first keys and how many more there are."""
    keys: dict[str, list[str]] = {}
    for line in dropped:
        key, _, reason = line.partition(": ")
        keys.setdefault(reason, []).append(key)
    return [f"{_names(found)}: {why}".removeprefix(": ") for why, found in keys.items()]


def _names(keys: list[str]) -> str:
    if len(keys) <= _NAMED + 1:
        return ", ".join(keys)
    return f"{', '.join(keys[:_NAMED])} and {len(keys) - _NAMED:,} more"


def source_checksums(w: WriteReport) -> str:
    """What was proven of the source's stored bytes."""
    if w.check_source == "none":
        return "the source was not checked (--check-source none)"
    if w.check_source == "unread":
        return "nothing; parts of tensors have no checksum in the output (--check-source unread)"
    proven = f"{w.payloads_proven:,} checksums of the source ({human_bytes(w.bytes_proven)})"
    if not w.payloads_without_checksum:
        return proven if w.payloads_proven else "nothing of the source was read"
    without = f"{w.payloads_without_checksum:,} tensors of the source have no checksum"
    return f"{proven}; {without}" if w.payloads_proven else without


def print_edited(
    done: ConversionReport, lines: Sequence[str], details: Sequence[str] = (), verbose: bool = False
) -> None:
    """The report of a command that writes a checkpoint in the format of its source; `lines` are its own."""
    written = done.written
    holds = f"{counted(done.tensors, 'tensor')}, {counted(done.objects, 'object')}"
    lines = [*lines, *shared(done.plan)]
    if written is None:
        size = human_bytes(done.plan["bytes_to_write"])
        verdict = f"would write {done.output}: {holds}, {size} (--dry-run: nothing was written)"
    else:
        verb = "compared, it was complete already:" if written.was_there else "wrote"
        verdict = f"{verb} {_place(done, written)}: {holds}, {_size_and_time(written)}"
        lines.append(row("checked", _checked(written)))
    notes = [row("note", note) for note in done.notes]
    print_lines(verdict, [*lines, *changed_before(done)], notes, details, verbose)


def _place(of: ConversionReport, w: WriteReport) -> str:
    """Where the checkpoint is, and how a job loads it: without --ckpt-step what the tracker of the root names."""
    root, name = root_and_name(w.directory)
    if of.output_format not in _IN_ROOTS or not _is_numbered(w):
        return w.directory
    number = None if name == "release" else int(name.removeprefix("iter_"))
    if number is not None and name != (known := f"iter_{number:07d}"):
        return f"{w.directory} (jobs find it by --load once it is named {known})"
    if w.is_tracked:
        how = ""
    elif number:
        how = f" --ckpt-step {number}"
    else:  # a release, or iteration 0, which Megatron takes for no number
        how = (
            f" once {name if number is None else 0} is written into {root}/latest_checkpointed_iteration.txt"
        )
    return f"{w.directory} (--load {shlex.quote(root)}{how})"


def _is_numbered(w: WriteReport) -> bool:
    return re.fullmatch(r"release|iter_\d+", root_and_name(w.directory)[1]) is not None
