"""The final report of a conversion, for people; and what all commands that write say of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ckpt_tools.cli.render import escape, say, tell
from ckpt_tools.commands.job.report import ConversionReport, Masters
from ckpt_tools.commands.job.target_job import describe
from ckpt_tools.execute.proof.masters import describe_masters
from ckpt_tools.execute.run import WriteReport
from ckpt_tools.human import human_bytes
from ckpt_tools.model.choices import assert_never

if TYPE_CHECKING:
    from ckpt_tools.commands.job.report import ConversionReport, Masters
    from ckpt_tools.execute.run import WriteReport
    from ckpt_tools.model.target import Target

_SHOWN = 8
_NEVER = ": not part of "
_FORMATS = {"dcp": "a plain state dict"}
_NAMED = 3  # keys of one reason


def print_report(report: ConversionReport) -> None:
    """What was converted, how fast, and what changed on the way; long lists are cut (`--json` has them whole)."""

    done = "would convert" if report.written is None else "converted"
    if report.written and report.written.was_there:
        done = "compared, as all of it was there already:"
    made = "" if report.iteration == report.source_iteration else iteration_text(report.iteration)
    is_named = report.output_format == "hf" and report.architecture
    architecture = f": {report.architecture}" if is_named else ""
    # No groups: weights only, or carried over as they are stored.
    groups = f", groups {report.groups}" if report.groups else ""
    lines = [
        f"{done} {report.source} -> {report.output}",
        f"  source     {_source(report)}{iteration_text(report.source_iteration)}",
        f"  target     {report.output_format} for {report.loader or 'the same loader'}{architecture}{made}",
        f"  holds      {report.tensors:,} tensors, {report.objects:,} objects and scalars{groups}",
        f"  masters    {masters_text(report.masters)}",
    ]
    if report.job is not None:
        lines += [f"  {title:<10} {text}" for title, text in describe(report.job)]
    if report.written:
        lines.append(f"  checksums  {source_checksums(report.written)}")
        lines += _written(report.written)
        if report.output_format in ("torch_dist", "fsdp_dtensor") and not _is_numbered(report.written):
            lines.append(
                "  note       no job finds this folder by --load: move it to RUN/iter_NNNNNNN, and write the "
                "iteration into RUN/latest_checkpointed_iteration.txt"
            )
    else:
        lines.append(
            f"  would write {human_bytes(report.plan['bytes_to_write'])} in {len(report.plan['files'])} files"
        )
    lines += changes(report, report.output_format)
    for line in lines:
        tell(escape(line))


def changes(of: ConversionReport | Target, output_format: str) -> list[str]:
    """What changes on the way, or would, in a line each; long lists are cut."""
    dropped, no_place = _apart(of.dropped)
    lines = []
    for title, entries in (
        ("dropped", _by_reason(dropped)),
        ("kept", of.kept),
        ("renamed", of.renamed),
        ("filled in", of.backfilled),
        ("note", of.notes),
    ):
        lines += [f"  {title:<10} {entry}" for entry in entries[:_SHOWN]]
        if len(entries) > _SHOWN:
            lines.append(f"  {title:<10} ... and {len(entries) - _SHOWN:,} more (--json lists all)")
    if no_place:
        lines.append(f"  not part of {_FORMATS.get(output_format, output_format)}: {no_place}")
    return lines


def iteration_text(label: int | str | None) -> str:
    """What follows a format: the iteration, a release, or nothing where nothing tells."""
    return "" if label is None else f", {label if label == 'release' else f'iteration {label}'}"


def _source(report: ConversionReport) -> str:
    if report.source_format == "safetensors":
        return f"Hugging Face {report.architecture or 'model'}"
    layout = report.optimizer_layout
    same = layout in (None, report.source_format)
    return report.source_format if same else f"{report.source_format}, {layout}"


def masters_text(masters: Masters) -> str:
    """What became of them, and what was proven."""

    match masters.use:
        case "none":
            return "the source has none"
        case "left_out":
            proven = f"; {describe_masters(masters.found, masters.mode)}" if masters.found.tensors else ""
            return f"left out; the stored weights are written{proven}"
        case "as_stored":
            return "the source keeps them in the place of weights; there is nothing to compare them with"
        case "merged":
            found = masters.found
            proven = f"; before, {describe_masters(found, masters.mode)}" if found.tensors else ""
            return f"the adapter was added to them, and weights are their rounding{proven}"
        case "written":
            if masters.mode == "none":
                return "not checked (--check-masters none)"
            return describe_masters(masters.found, masters.mode)
        case _:
            assert_never(masters.use)


def say_unfinished(iteration: int | None) -> None:
    """Why the newest of all iterations is passed over."""
    say(f"note: iteration {iteration} is passed over: its job has not finished it (no .metadata, no tracker)")


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
        return "not checked (--check-source none)"
    proven = f"{w.payloads_proven:,} payloads of the source, {human_bytes(w.bytes_proven)}, proven"
    if not w.payloads_without_checksum:
        return proven if w.payloads_proven else "nothing of the source was read"
    without = f"{w.payloads_without_checksum:,} payloads of the source carry none"
    return f"{proven}; {without}" if w.payloads_proven else without


def print_rewritten(done: ConversionReport) -> None:
    """The last lines of a command that writes a checkpoint in the format of its source."""
    written = done.written
    if written is None:
        tell(
            f"nothing was written (--dry-run); it would be {done.tensors:,} tensors and {done.objects:,} objects, "
            f"{human_bytes(done.plan['bytes_to_write'])}"
        )
        return
    tell(
        f"{'compared' if written.was_there else 'wrote'} {done.tensors:,} tensors and {done.objects:,} objects, "
        f"{human_bytes(written.bytes_written)} in {written.seconds:.2f} s, to {escape(place(written))}"
    )
    if written.replaced:
        tell(f"replaced {written.replaced}")
    if written.tracker:
        tell(written.tracker)
    tell(f"source checksums: {source_checksums(written)}")


def place(w: WriteReport) -> str:
    """Where the checkpoint lies, and by which name a job finds it."""
    return f"{w.directory} (--load {w.directory.rpartition('/')[0]})" if _is_numbered(w) else w.directory


def _is_numbered(w: WriteReport) -> bool:
    name = w.directory.rpartition("/")[2]
    return name == "release" or name.startswith("iter_")


def _written(w: WriteReport) -> list[str]:
    done = "compared" if w.was_there else "wrote"
    rate = human_bytes(int(w.bytes_written / max(w.seconds, 1e-9)))
    rounded = (
        f"  rounded    {w.rounded_elements:,} elements of {w.rounded_tensors:,} tensors by a cast to their new type, "
        f"most of them in {w.rounded_most}"
    )
    kept = (
        f"  rounded    {w.rounded_and_kept:,} elements of weights whose exact values are written as their masters: "
        "nothing is lost"
    )
    return [
        f"  {done:<10} {human_bytes(w.bytes_written)} in {w.seconds:.2f} s ({rate}/s), {w.ranks} process(es); "
        f"read {human_bytes(w.bytes_read)}, largest peak RSS {human_bytes(w.peak_rss_bytes)}",
        f"  lies in    {place(w)}",
        f"  copied     {human_bytes(w.bytes_cloned)} cloned, {human_bytes(w.bytes_kernel_copied)} in the kernel, "
        f"{human_bytes(w.bytes_touched)} through buffers; {w.items_resumed:,} of {w.items:,} items resumed",
        *([f"  replaced   {w.replaced}"] if w.replaced else []),
        *([f"  tracker    {w.tracker}"] if w.tracker else []),
        *([rounded] if w.rounded_tensors else []),
        *([kept] if w.rounded_and_kept else []),
    ]
