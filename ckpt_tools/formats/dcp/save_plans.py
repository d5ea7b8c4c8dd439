"""`all_local_plans`: what every rank wrote, as Megatron keeps it in `.metadata` for its next save.

Nothing is read by it, but torch makes all of it when it loads the file, and fails where it cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ckpt_tools.formats.dcp.metadata_read import METADATA
from ckpt_tools.formats.pickle.machine import Machine, Object
from ckpt_tools.formats.pickle.stored_classes import check_properties, described, fields_of, is_class
from ckpt_tools.formats.storage.files import Files

_PLANS = "all_local_plans"


def plan_problem(files: Files, trust_pickle: bool = False) -> tuple[int, str | None]:
    """How many write items the plans have, and what the first one is that torch could not make."""
    data = files.read(METADATA, 0, files.size(METADATA))
    if _PLANS.encode() not in data:
        return 0, None
    machine = Machine(data, METADATA, trust_pickle)
    root = machine.load()
    count = 0
    try:
        for item in chain(_executed_items(root), machine.planned()):
            count += 1
            _check_write_item(item)
    except Exception as error:  # any error from malformed records
        return count, f"{_PLANS}, behind {count} write items: {type(error).__name__}: {error}"
    return count, None


def _executed_items(root: Object) -> Iterator[object]:
    """The write items that are not packed, of every plan."""
    plans = root.state.as_dict()[_PLANS]
    if plans is None:
        return
    if type(plans) is not list:
        raise TypeError(f"{described(plans)} where a list of plans belongs")
    for plan in plans:
        if plan is None:
            continue
        fields = fields_of(plan, "SavePlan", "MCoreSavePlan")
        if type(fields["items"]) is not list:
            raise TypeError(f"{described(fields['items'])} where the items of a plan belong")
        yield from fields["items"]


def _check_write_item(value: object) -> None:
    fields = fields_of(value, "WriteItem")
    index = fields_of(fields["index"], "MetadataIndex")
    if type(index["fqn"]) is not str:
        raise TypeError(f"{described(index['fqn'])} where a key belongs")
    kind = fields["type"]
    if (
        type(kind) is not Object
        or not is_class(kind.kind, "WriteItemType")
        or kind.args not in ((1,), (2,), (3,))
    ):
        raise TypeError(f"{index['fqn']}: {described(kind)} where a WriteItemType belongs")
    sizes = [index["offset"]] if index.get("offset") is not None else []
    data = fields.get("tensor_data")
    if data is not None:
        tensor = fields_of(data, "TensorWriteData")
        check_properties(tensor["properties"])
        chunk = fields_of(tensor["chunk"], "ChunkStorageMetadata")
        sizes += [tensor["size"], chunk["offsets"], chunk["sizes"]]
    for size in sizes:
        if type(size) is not tuple or not all(type(n) is int for n in size):
            raise TypeError(f"{index['fqn']}: {described(size)} where a torch.Size belongs")
