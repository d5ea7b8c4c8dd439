"""The books of an audit while its two sides are counted, and what is left of each side once all is carried over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckpt_tools.commands.conversion_report import MastersUse
from ckpt_tools.commands.opened import Opened
from ckpt_tools.megatron.keys import is_optimizer_key
from ckpt_tools.model.catalog import Catalog, TensorEntry
from ckpt_tools.verify.accounts import Amount, Ledger, amount_of
from ckpt_tools.verify.report import Findings

RESHAPED = "of another shape on the other side"
_ROLES = {
    "master": "optimizer: fp32 masters",
    "weight": "weights whose fp32 masters were exported",
}


@dataclass(slots=True)
class Books:
    """The two sides while they are counted; `carried` is by (checkpoint's type, model's type)."""

    found: Findings
    in_checkpoint: Ledger = field(default_factory=Ledger)
    in_model: Ledger = field(default_factory=Ledger)
    carried: dict[tuple[str, str], tuple[Amount, Amount]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)  # the checkpoint's stored tensors that are accounted for
    parts: set[str] = field(default_factory=set)  # the model's stored tensors that are carried
    inside: dict[str, TensorEntry] = field(default_factory=dict)  # used tensors in the checkpoint's objects
    reasons: dict[str, str] = field(default_factory=dict)  # why one of the others is there
    notes: list[str] = field(default_factory=list)

    def carry(self, row: tuple[str, str], checkpoint: Amount, model: Amount) -> None:
        a, b = self.carried.get(row, (Amount(), Amount()))
        self.carried[row] = a.plus(checkpoint), b.plus(model)


def said(lines: Iterable[str]) -> dict[str, str]:
    """Reasons by key, of lines `key: reason`."""
    return {key: why for key, _, why in (line.partition(": ") for line in lines)}


def rest_of_checkpoint(
    books: Books, checkpoint: Opened, dropped: Mapping[str, str], masters: MastersUse
) -> None:
    """What the checkpoint has beside the parameters that were carried."""
    catalog = checkpoint.catalog
    roles = checkpoint.roles()
    places: dict[tuple[str, tuple[int, ...]], list[TensorEntry]] = {}  # which alone may have the same chunks
    for key in books.used & catalog.tensors.keys():
        entry = catalog.tensors[key]
        places.setdefault((entry.dtype, entry.shape), []).append(entry)
    for key, entry in catalog.tensors.items():
        if key in books.used:
            continue
        role = roles[key]
        if any(entry.chunks == one.chunks for one in places.get((entry.dtype, entry.shape), ())):
            why = "another name of the same bytes"
        elif key in dropped:
            why = dropped[key]
        elif role == "weight" and masters != "written":
            why = "not a parameter of the model"
            books.found.error(
                key, f"{entry.dtype} {list(entry.shape)} is {why}, and nothing of the model is made of it"
            )
        elif role == "other":
            why = "optimizer: steps and the like" if is_optimizer_key(key) else "state of the run"
        else:
            why = _ROLES.get(role, f"optimizer: {role}")
        books.in_checkpoint.add(why, key, amount_of(entry))


def rest_of_model(books: Books, catalog: Catalog) -> None:
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
