"""The page of `inspect`: keys as a tree with a search, shapes, and who holds which chunk, in one file.

The listing is data inside the page, and what is opened is drawn then: a checkpoint of a hundred thousand tensors
opens as fast as a small one. Without scripts the page still shows the summary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt_tools.commands.look.inspect import Inspection
from ckpt_tools.commands.look.pages import page, safe, table
from ckpt_tools.human import human_bytes as size

_MOST_CHUNKS = 400_000  # in one page, some 12 MB; of tensors behind them only the number is told
_STYLE = (
    "details{margin:1px 0 1px 14px}summary{cursor:pointer;padding:2px 0;overflow-wrap:anywhere}"
    "summary small,.leaf small{color:#555}.leaf{margin:1px 0 1px 14px;padding:2px 0}"
    "body>details,#tree>details,#tree>.leaf{margin-left:0}.chunks{margin:6px 0 10px 14px;font-size:12px}"
    ".chunks svg{width:100%;max-width:520px;height:auto;border:1px solid #999;background:#fff}"
    ".chunks table{font-size:12px;margin:6px 0}"
)


def inspection_html(found: Inspection) -> str:
    """The page of what `found` lists."""
    facts = found.summary()
    shown = {
        name: facts[name]
        for name in ("format", "writer", "iteration", "optimizer_layout", "tensor_count", "object_count")
    }
    if found.location.is_release:
        shown["iteration"] = "release"
    shown |= {"parameters": f"{found.parameters:,}", **facts["parallel_sizes"], **facts["arguments"]}
    rows = [[name.replace("_", " "), str(value)] for name, value in shown.items() if value is not None]
    totals = [
        [role, dtype, f"{t.tensors:,}", f"{t.elements:,}", size(t.nbytes)]
        for (role, dtype), t in found.totals.items()
    ]
    columns = [("role", False), ("dtype", False), ("tensors", True), ("elements", True), ("bytes", True)]
    data = json.dumps(_data(found), separators=(",", ":")).replace("<", "\\u003c")
    body = (
        f"<h1>{safe(found.location.path)}</h1>{table(columns, totals)}"
        f"<details><summary>What the checkpoint says of itself</summary>"
        f"{table([('', False), ('', False)], rows)}</details>"
        '<h2>Keys</h2><p><input type="search" id="wanted" placeholder="part of a key" aria-label="part of a key"> '
        '<span id="count"></span></p><div id="tree"><noscript>The tree needs a browser with scripts; '
        "`inspect --tree` prints it.</noscript></div>"
        f'<script type="application/json" id="data">{data}</script>'
    )
    script = Path(__file__).with_suffix(".js").read_text("utf-8")
    return page(f"inspect: {found.location.path}", body, _STYLE, script)


def _data(found: Inspection) -> dict[str, Any]:
    """Files, tensors (key, dtype, shape, bytes, number of chunks, chunks as [start, size, file]) and objects."""
    files: dict[str, int] = {}
    budget = _MOST_CHUNKS

    def chunks(key: str) -> Iterator[list[Any]]:
        for chunk in found.catalog.tensors[key].chunks:
            number = files.setdefault(chunk.item.file, len(files))
            yield [list(chunk.box.start), list(chunk.box.size), number]

    tensors = []
    for row in found.tensors():
        budget -= row.chunks
        held = list(chunks(row.key)) if budget >= 0 else None
        tensors.append([row.key, row.dtype, list(row.shape), row.nbytes, row.chunks, held])
    objects = [[key, nbytes] for key, nbytes in found.objects()]
    return {"files": list(files), "tensors": tensors, "objects": objects}
