"""The accounts of a Hugging Face model and of the state dict of the same names that it was made of (FSDP2's DCP)."""

from __future__ import annotations

from pathlib import Path

from ckpt_tools.commands.audit_books import RESHAPED, Books, rest_of_checkpoint, rest_of_model, said
from ckpt_tools.commands.hf_parts import read_config, without_frequencies
from ckpt_tools.commands.opened import Opened
from ckpt_tools.commands.plain_to_hf import expected_model, superfluous
from ckpt_tools.formats.left_out import leave_out
from ckpt_tools.megatron.dcp.wrappers import named_model
from ckpt_tools.model.catalog import TensorEntry
from ckpt_tools.model.dtypes import CASTABLE
from ckpt_tools.verify.accounts import amount_of


def draw_up_plain(
    books: Books, model: Opened, checkpoint: Opened, rules: Path | None, ignore_keys: tuple[str, ...]
) -> None:
    """Count both sides; the names of the state dict may stand behind one prefix, as for `export-hf`.

    Raises:
        MappingError: the model's names are in the state dict several times, or nothing tells what the model has.
    """
    folder = model.location.path
    stored, of_model = without_frequencies(model.catalog)
    catalog, ignored = leave_out(checkpoint.catalog, ignore_keys)
    catalog, frequencies = without_frequencies(catalog)
    expected = expected_model(catalog, read_config(folder), rules, folder)
    found = named_model(catalog, stored.tensors)
    if found.prefix:
        books.notes.append(f"the names are those behind {found.prefix!r} in {checkpoint.location.path}")
    alone = sorted(found.keys.keys() ^ stored.tensors.keys())
    equal, without_content = expected.superfluous(name for name in alone if name not in expected.shapes)
    tied = {other: one for one, other in equal}
    follows = {name: superfluous(name, tied) for name in without_content}
    for name, key in found.keys.items():
        if name not in follows:
            _carry(books, name, catalog.tensors[key], stored.tensors.get(name))
    for key in found.stray:
        books.found.error(key, f"{expected.told_by} knows of no such tensor")
        books.in_checkpoint.add("not a parameter of the model", key, amount_of(catalog.tensors[key]))
        books.used.add(key)
    dropped = said((*ignored, *frequencies)) | {
        found.keys[name]: why for name, why in follows.items() if name in found.keys
    }
    rest_of_checkpoint(books, checkpoint, dropped, "none")
    books.reasons |= said(of_model) | {name: why for name, why in follows.items() if name not in found.keys}
    rest_of_model(books, model.catalog)


def _carry(books: Books, name: str, held: TensorEntry, entry: TensorEntry | None) -> None:
    """One parameter: carried, or missing in the model."""
    books.used.add(held.key)
    if entry is None:
        books.found.error(
            name, f"{held.dtype} {list(held.shape)} is missing in the model; the checkpoint has it"
        )
        books.in_checkpoint.add("missing in the model", held.key, amount_of(held))
        return
    if entry.shape != held.shape:
        books.found.error(name, f"has shape {list(entry.shape)}; {held.key} is {list(held.shape)}")
        books.in_checkpoint.add(RESHAPED, held.key, amount_of(held))
        books.reasons[name] = RESHAPED
        return
    if entry.dtype != held.dtype and not {entry.dtype, held.dtype} <= CASTABLE:
        books.found.error(name, f"is {entry.dtype}; {held.dtype} of the checkpoint does not become that")
    books.carry((held.dtype, entry.dtype), amount_of(held), amount_of(entry))
    books.parts.add(name)
