"""`verify HF --against RUN`: does what an export or import holds follow from its source, by counting alone.

The checkpoint's metadata and the model's headers are enough: the rules of `export-hf` say which tensors a model of
this config.json has and which parameters each is made of. Every stored tensor of both sides is carried over, or in
one side alone for a reason that is named, or an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from ckpt_tools.commands.diff_hf import what_follows
from ckpt_tools.commands.export_hf import ExportOptions, describe_export
from ckpt_tools.commands.export_source import ExportSource
from ckpt_tools.commands.hf_parts import families_with, read_config, without_frequencies
from ckpt_tools.commands.opened import Opened, open_checkpoint
from ckpt_tools.commands.tower_source import whole_model_if_one
from ckpt_tools.errors import NEVER_FINDINGS, CkptError, UsageError
from ckpt_tools.megatron.dcp.state_dict import read_state_dict
from ckpt_tools.megatron.huggingface.quantized import STORED, Dequantized, dequantized
from ckpt_tools.megatron.huggingface.targets import Exported, bulk_dtype
from ckpt_tools.megatron.keys import bucket_key, is_optimizer_key, role_of
from ckpt_tools.model.catalog import Catalog, TensorEntry
from ckpt_tools.model.dtypes import CASTABLE, itemsize
from ckpt_tools.model.expressions import Value
from ckpt_tools.model.target import TargetTensor
from ckpt_tools.model.without_gc import without_gc
from ckpt_tools.verify.accounts import Amount, Audit, Carried, Ledger, amount_of, inventory
from ckpt_tools.verify.report import Check, Findings, Report

MODEL = "safetensors"
_RESHAPED = "of another shape on the other side"
_ROLES = {
    "master": "optimizer: fp32 masters",
    "weight": "weights whose fp32 masters were exported",
}


@dataclass(slots=True)
class _Accounts:
    """The two sides while they are counted; `carried` is by (checkpoint's type, model's type)."""

    found: Findings
    in_checkpoint: Ledger = field(default_factory=Ledger)
    in_model: Ledger = field(default_factory=Ledger)
    carried: dict[tuple[str, str], tuple[Amount, Amount]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)  # the checkpoint's stored tensors that are accounted for
    parts: set[str] = field(default_factory=set)  # the model's stored tensors that are carried
    inside: dict[str, TensorEntry] = field(
        default_factory=dict
    )  # used tensors that lie in the checkpoint's objects
    reasons: dict[str, str] = field(default_factory=dict)  # why one of the others is there

    def carry(self, row: tuple[str, str], checkpoint: Amount, model: Amount) -> None:
        a, b = self.carried.get(row, (Amount(), Amount()))
        self.carried[row] = a.plus(checkpoint), b.plus(model)


def audit_places(
    report: Report,
    against: str,
    iteration: int | None,
    rules: Path | None,
    ignore_keys: tuple[str, ...],
    trust_pickle: bool,
) -> Report:
    """The report on a checkpoint with the accounts of it and of its source at `against`. Raises as `audit`."""
    with (
        open_checkpoint(against, iteration, trust_pickle) as source,
        open_checkpoint(report.checkpoint, None, trust_pickle) as output,
    ):
        check, accounts = audit(output, source, rules, ignore_keys)
    return replace(report, checks=(*report.checks, check), audit=accounts)


def audit(
    output: Opened, source: Opened, rules: Path | None, ignore_keys: tuple[str, ...]
) -> tuple[Check, Audit | None]:
    """The check of the accounts of `output` and `source`, and the accounts, where they could be drawn up.

    Raises:
        UsageError: they are not a Hugging Face model and a checkpoint of Megatron's.
        StorageError: a file system refuses to read.
    """
    if (output.location.kind == MODEL) == (source.location.kind == MODEL):
        raise UsageError(
            f"--against: one side is a Hugging Face model, the other the checkpoint that it was made of or became; "
            f"{output.location.path} is {output.location.kind}, {source.location.path} {source.location.kind}. "
            "`diff` compares any two"
        )
    is_export = output.location.kind == MODEL
    model, checkpoint = (output, source) if is_export else (source, output)
    found = Findings("audit", "values")
    try:
        with without_gc():
            books = _draw_up(model, checkpoint, rules, ignore_keys, found)
    except NEVER_FINDINGS:
        raise
    except CkptError as error:
        found.failure(output.location.path, error)
        return found.done(), None
    made = _accounts_of(books, output, source, is_export)
    found.looked_at = made.output.total.values
    for line in made.imbalances():
        found.error(output.location.path, line)
    return found.done(), made


def _accounts_of(books: _Accounts, output: Opened, source: Opened, is_export: bool) -> Audit:
    rows = [
        Carried(a, b, theirs, ours) if is_export else Carried(b, a, ours, theirs)
        for (a, b), (theirs, ours) in sorted(books.carried.items())
    ]
    alone = books.in_checkpoint.done(), books.in_model.done()
    return Audit(
        inventory(source.location.path, source.location.kind, _all_tensors(source, books)),
        inventory(output.location.path, output.location.kind, _all_tensors(output, books)),
        tuple(rows),
        alone[0] if is_export else alone[1],
        alone[1] if is_export else alone[0],
    )


def _all_tensors(opened: Opened, books: _Accounts) -> Iterable[TensorEntry]:
    inside = () if opened.location.kind == MODEL else books.inside.values()
    return (*opened.catalog.tensors.values(), *inside)


def _draw_up(
    model: Opened, checkpoint: Opened, rules: Path | None, ignore_keys: tuple[str, ...], found: Findings
) -> _Accounts:
    books = _Accounts(found)
    kept, frequencies = without_frequencies(model.catalog)
    config = read_config(model.location.path)
    whole = whole_model_if_one(model.location.path, config)
    plain = dequantized(kept, config, model.files)
    inside = plain.specs if whole is None else whole.tower.names.values()
    own = bulk_dtype(plain.specs[key] for key in inside)
    options = ExportOptions(
        hf_config=model.location.path,
        rules=rules,
        dtype=own if own in CASTABLE else None,
        trust_pickle=checkpoint.trust_pickle,
        ignore_keys=ignore_keys,
        check_masters="none",
    )
    source, exported = describe_export(checkpoint, options, plain.specs, whole)
    used = _carry(books, source, exported, plain)
    _count_stored(books, source, used, checkpoint.catalog)
    _tied_heads(books, source, exported, used)
    _rest_of_checkpoint(books, source, checkpoint)
    books.reasons |= _said((*frequencies, *plain.dropped))
    if whole is not None and source.beside is None:
        books.reasons |= dict.fromkeys(whole.others, "of another tower than the language model")
    wanted = {tensor.key for tensor in exported.tensors}
    extra = [key for key in plain.specs if key not in wanted]
    books.reasons |= what_follows(plain, extra, families_with(rules, plain.config))
    _rest_of_model(books, model.catalog)
    return books


def _said(lines: Iterable[str]) -> dict[str, str]:
    """Reasons by key, of lines `key: reason`."""
    return {key: why for key, _, why in (line.partition(": ") for line in lines)}


def _carry(
    books: _Accounts, source: ExportSource, exported: Exported, plain: Dequantized
) -> dict[str, tuple[str, str]]:
    """Count what every tensor of the model is made of; the parameters that are used, with their row.

    Parameters and tensors that belong together (query, key and value of one projection; the experts of a stacked
    tensor) are counted as a whole.
    """
    used: dict[str, tuple[str, str]] = {}
    for names, tensors in _groups(exported.tensors):
        given = sum(prod(source.bases[name].shape) for name in names)
        taken = sum(prod(tensor.shape) for tensor in tensors)
        row = next(iter({_row(source.bases[names[0]], tensor, plain) for tensor in tensors}))
        used |= dict.fromkeys(names, row)
        for tensor in tensors:
            _carry_one(books, source.bases[names[0]], tensor, exported, plain)
        if given != taken:
            _padding(books, source.bases, names, tensors)
    return used


def _groups(tensors: Iterable[TargetTensor]) -> list[tuple[list[str], list[TargetTensor]]]:
    """Names of parameters with the tensors that they make together."""
    group_of: dict[str, int] = {}
    names: dict[int, list[str]] = {}
    made: dict[int, list[TargetTensor]] = {}
    for number, tensor in enumerate(tensors):
        own = list(dict.fromkeys(one.key for one in tensor.sources))
        joined = {group_of[name] for name in own if name in group_of}
        home = min(joined, default=number)
        for other in joined - {home}:
            names[home] += names.pop(other)
            made[home] += made.pop(other)
        names.setdefault(home, []).extend(name for name in own if name not in group_of)
        made.setdefault(home, []).append(tensor)
        group_of |= dict.fromkeys(names[home] if len(joined) > 1 else own, home)
    return [(names[home], made[home]) for home in names]


def _row(base: Value, tensor: TargetTensor, plain: Dequantized) -> tuple[str, str]:
    """The element types that a tensor has in the checkpoint and, as it is stored, in the model."""
    entry = plain.catalog.tensors.get(tensor.key)
    if entry is None:
        return base.dtype, tensor.dtype
    return base.dtype, plain.catalog.tensors[plain.catalog.stored_keys(tensor.key)[0]].dtype


def _carry_one(
    books: _Accounts, base: Value, tensor: TargetTensor, exported: Exported, plain: Dequantized
) -> None:
    """One tensor of the model: carried, or missing."""
    key, values = tensor.key, prod(tensor.shape)
    row, held = _row(base, tensor, plain), Amount(0, values, values * itemsize(base.dtype))
    entry, shape = plain.catalog.tensors.get(key), exported.shapes.get(key, tensor.shape)
    if entry is None:
        books.found.error(key, f"{base.dtype} {list(shape)} is missing in the model; the checkpoint has it")
        books.in_checkpoint.add("missing in the model", key, held)
        return
    if entry.shape != shape:
        books.found.error(
            key, f"has shape {list(entry.shape)}; the checkpoint and config.json give {list(shape)}"
        )
        books.in_checkpoint.add(_RESHAPED, key, held)
        stored_keys = (one.removesuffix(STORED) for one in plain.catalog.stored_keys(key))
        books.reasons |= dict.fromkeys(stored_keys, _RESHAPED)
        return
    codes, *others = plain.catalog.stored_keys(key)
    stored = plain.catalog.tensors[codes]
    if entry.dtype != base.dtype and not {entry.dtype, base.dtype} <= CASTABLE:
        books.found.error(key, f"is {entry.dtype}; {base.dtype} of the checkpoint does not become that")
    books.carry(row, held, Amount(1, values, stored.nbytes))
    books.parts.add(codes.removesuffix(STORED))
    if stored.numel != values:
        books.in_model.add("several values in one stored element", key, Amount(0, stored.numel - values))
    for name in others:
        part = plain.catalog.tensors[name]
        books.parts.add(name.removesuffix(STORED))
        books.in_model.add("scales and zero points of codes", name.removesuffix(STORED), amount_of(part))


def _padding(
    books: _Accounts, bases: Mapping[str, Value], names: list[str], tensors: list[TargetTensor]
) -> None:
    """More values in the checkpoint than in the model: the rows after the vocabulary, or an error."""
    base, tensor = bases[names[0]], tensors[0]
    rows = base.shape[0] - tensor.shape[0] if base.shape and tensor.shape else 0
    alone = len(names) == len(tensors) == 1 and base.shape[1:] == tensor.shape[1:]
    values = sum(prod(bases[name].shape) for name in names) - sum(prod(one.shape) for one in tensors)
    amount = Amount(0, values, values * itemsize(base.dtype))
    if not alone or rows <= 0:
        books.found.error(names[0], f"{values:,} of its values are in no tensor of the model")
        books.in_checkpoint.add("in no tensor of the model", names[0], amount)
        return
    books.in_checkpoint.add(
        f"vocabulary padding, {rows:,} rows after {tensor.shape[0]:,} tokens", names[0], amount
    )


def _count_stored(
    books: _Accounts, source: ExportSource, used: Mapping[str, tuple[str, str]], stored: Catalog
) -> None:
    """The tensors that parameters are seen in, against the parameters themselves."""
    catalog, held, seen = source.catalog, Amount(), Amount()
    first, is_made = "", False
    for name, row in used.items():
        base = source.bases[name]
        values = prod(base.shape)
        seen = seen.plus(Amount(0, values, values * itemsize(base.dtype)))
        for one in base.sources:
            is_made |= catalog.tensors[one.key].made is not None
            for key in catalog.stored_keys(one.key):
                if key in books.used:
                    continue
                books.used.add(key)
                held = held.plus(amount_of(catalog.tensors[key]))
                books.carry(row, Amount(1), Amount())
                if key not in stored.tensors:
                    books.inside[key] = catalog.tensors[key]
                if not first and (key not in stored.tensors or bucket_key(key) is not None):
                    first = key
    rest = Amount(0, held.values - seen.values, held.nbytes - seen.nbytes)
    if rest == Amount():
        return
    if is_made:
        books.in_checkpoint.add("codes, scales or remainders that weights are computed from", "", rest)
    elif first and rest.values > 0:
        books.in_checkpoint.add("padding of flat buckets", first, rest)
    else:
        books.found.error("parameters", f"{rest.values:,} values of their tensors are of no parameter")


def _tied_heads(
    books: _Accounts, source: ExportSource, exported: Exported, used: Mapping[str, tuple[str, str]]
) -> None:
    """Parameters that the model does without."""
    for one, other in exported.equal:
        for name in {one, other} - used.keys():
            twin = other if name == one else one
            for key in {key for s in source.bases[name].sources for key in source.catalog.stored_keys(s.key)}:
                books.used.add(key)
                amount = amount_of(source.catalog.tensors[key])
                books.in_checkpoint.add(f"tied to {twin}, which the model has once", key, amount)


def _rest_of_checkpoint(books: _Accounts, source: ExportSource, checkpoint: Opened) -> None:
    """What the checkpoint has beside the parameters that were carried."""
    catalog = checkpoint.catalog
    roles = read_state_dict(catalog).roles() if checkpoint.location.kind == "dcp" else None
    places: dict[tuple[str, tuple[int, ...]], list[TensorEntry]] = {}  # which alone may have the same chunks
    for key in books.used & catalog.tensors.keys():
        entry = catalog.tensors[key]
        places.setdefault((entry.dtype, entry.shape), []).append(entry)
    dropped = _said(source.dropped)
    for key, entry in catalog.tensors.items():
        if key in books.used:
            continue
        role = role_of(key) if roles is None else roles.get(key, "other")
        if any(entry.chunks == one.chunks for one in places.get((entry.dtype, entry.shape), ())):
            why = "another name of the same bytes"
        elif key in dropped:
            why = dropped[key]
        elif role == "weight" and source.masters != "written":
            why = "not a parameter of the model"
            books.found.error(
                key, f"{entry.dtype} {list(entry.shape)} is {why}, and nothing of the model is made of it"
            )
        elif role == "other":
            why = "optimizer: steps and the like" if is_optimizer_key(key) else "state of the run"
        else:
            why = _ROLES.get(role, f"optimizer: {role}")
        books.in_checkpoint.add(why, key, amount_of(entry))


def _rest_of_model(books: _Accounts, catalog: Catalog) -> None:
    """What the model has beside the tensors that were carried."""
    for key, entry in catalog.tensors.items():
        if key in books.parts:
            continue
        why = books.reasons.get(key)
        if why is None:
            why = "made of no parameter"
            books.found.error(
                key, f"{entry.dtype} {list(entry.shape)} of the model is {why} of the checkpoint"
            )
        books.in_model.add(why, key, amount_of(entry))
