"""HTML pages: escaped text, tables, the page around them, and the page of `inspect`.

Pages are single files: no network, no fonts of their own, readable from 400 pixels on. In the page of `inspect` the
listing is data, and a script draws what is opened: a checkpoint of a hundred thousand tensors opens as fast as a
small one. Without scripts the page still shows the summary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape as escape_html
from pathlib import Path
from typing import Any

from ckpt_tools.commands.look.inspect import Inspection
from ckpt_tools.human import human_bytes as size

_STYLE = (
    ":root{color-scheme:light}*{box-sizing:border-box}"
    "body{margin:16px auto;padding:0 16px;max-width:1600px;font:14px system-ui,sans-serif;color:#222;background:#fff}"
    "h1{font-size:20px;overflow-wrap:anywhere}h2{font-size:16px;margin:28px 0 8px}p{max-width:75ch;margin:8px 0}"
    ".scroll{overflow-x:auto}svg{display:block}.wide{width:100%;min-width:1100px}"
    "table{border-collapse:collapse;margin:12px 0}th,td{padding:3px 12px 3px 0;text-align:left;"
    "border-bottom:1px solid #ddd;white-space:nowrap}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}"
    "td.wrap{white-space:normal;overflow-wrap:anywhere;min-width:12em}tr.sick td{color:#b30000;font-weight:600}"
    "input[type=search]{width:100%;max-width:480px;padding:6px 8px;font:inherit;border:1px solid #888;"
    "border-radius:4px}@media(max-width:600px){table{font-size:13px}th,td{padding-right:8px}td.wrap{min-width:6em}}"
)


def safe(text: str) -> str:
    """Text inside an element or an attribute: no markup, and nothing that hides or turns the text next to it."""
    shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return escape_html(shown)


def page(title: str, body: str, style: str = "", script: str = "") -> str:
    """A whole page; `body`, `style` and `script` are taken as they are."""
    code = f"<script>{script}</script>" if script else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(title)}</title><style>{_STYLE}{style}</style></head>\n<body>\n{body}\n{code}</body></html>\n"
    )


def table(
    columns: Sequence[tuple[str, bool]], rows: Sequence[Sequence[object]], sick: frozenset[int] = frozenset()
) -> str:
    """A table; columns are (title, numbers, which stand to the right). Rows of `sick` are red."""
    head = "".join(f"<th{' class=n' if right else ''}>{safe(title)}</th>" for title, right in columns)
    body = "\n".join(
        f"<tr{' class=sick' if number in sick else ''}>"
        + "".join(
            f"<td{' class=n' if right else ' class=wrap' if i == 0 else ''}>{_cell(cell)}</td>"
            for i, (cell, (_, right)) in enumerate(zip(row, columns, strict=True))
        )
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
    )


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else safe(str(value))


_MOST_CHUNKS = 400_000  # in one page, some 12 MB; of tensors behind them only the number is given
_TREE_STYLE = (
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
    totals = [(*kind, t.tensors, t.elements, size(t.nbytes)) for kind, t in found.totals.items()]
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
    script = Path(__file__).with_name("inspect_page.js").read_text("utf-8")
    return page(f"inspect: {found.location.path}", body, _TREE_STYLE, script)


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
