"""What all pages and drawings share: text that is harmless in them, sizes, and the page around a drawing.

Pages are single files: no network, no fonts of their own, readable from 400 pixels on.
"""

from __future__ import annotations

from html import escape as escape_html

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
    """Text inside an element or an attribute: no markup, and nothing that hides or turns what stands beside it."""
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


def table(columns: list[tuple[str, bool]], rows: list[list[str]], sick: frozenset[int] = frozenset()) -> str:
    """A table of text cells; columns are (title, numbers, which stand to the right). Rows of `sick` are red."""
    head = "".join(f"<th{' class=n' if right else ''}>{safe(title)}</th>" for title, right in columns)
    body = "\n".join(
        f"<tr{' class=sick' if number in sick else ''}>"
        + "".join(
            f"<td{' class=n' if right else ' class=wrap' if i == 0 else ''}>{safe(cell)}</td>"
            for i, (cell, (_, right)) in enumerate(zip(row, columns, strict=True))
        )
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
    )
