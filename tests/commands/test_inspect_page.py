"""The page of `inspect`: its data is what `inspect` lists, and names from strangers are text."""

import json
import re
from typing import Any

import torch
from safetensors.torch import save_file

from ckpt_tools.cli.app import run
from ckpt_tools.commands.look import pages
from ckpt_tools.commands.look.inspect import inspect_checkpoint
from ckpt_tools.commands.look.pages import inspection_html
from tests.conftest import DATA
from tests.pages import parse_page

RUN = DATA / "core019_llama_tp2_fully_reshardable"


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_data_is_what_is_stored():
    found = inspect_checkpoint(str(RUN))
    page = inspection_html(found)
    parse_page(page)
    data = data_of(page)
    assert [t[0] for t in data["tensors"]] == list(found.catalog.tensors)
    assert [o[0] for o in data["objects"]] == [key for key, _ in found.objects()]
    for key, dtype, shape, nbytes, count, chunks in data["tensors"]:
        entry = found.catalog.tensors[str(key)]
        stored = (entry.dtype, entry.shape, entry.nbytes, len(entry.chunks))
        assert (dtype, tuple(shape), nbytes, count) == stored
        held = [(tuple(a), tuple(n), data["files"][i]) for a, n, i in chunks]
        assert held == [(*chunk.box, chunk.item.file) for chunk in entry.chunks]


def test_the_page_of_a_very_large_checkpoint_is_bounded(monkeypatch):
    monkeypatch.setattr(pages, "_MOST_CHUNKS", 10)
    tensors = data_of(inspection_html(inspect_checkpoint(str(RUN))))["tensors"]
    kept = [t for t in tensors if t[5] is not None]
    assert kept
    assert sum(int(str(t[4])) for t in kept) <= 10
    assert len(kept) < len(tensors)


def test_names_from_strangers(tmp_path):
    evil = "</script><script>alert(1)</script>"
    save_file({evil: torch.ones(2)}, tmp_path / "model.safetensors")
    page = inspection_html(inspect_checkpoint(str(tmp_path)))
    parse_page(page)
    assert page.count("<script") == 2  # the data, and our own
    assert data_of(page)["tensors"][0][0] == evil
    script = page.rpartition("<script>")[2]
    assert "innerHTML" not in script
    assert "document.write" not in script


def test_the_option(tmp_path, capsys):
    assert run(["inspect", str(RUN), "--keys", "decoder.*", "--html", str(tmp_path / "a.html")]) == 0
    assert "torch_dist" in capsys.readouterr().out
    keys = [t[0] for t in data_of((tmp_path / "a.html").read_text())["tensors"]]
    assert keys
    assert all(str(key).startswith("decoder.") for key in keys)
    assert run(["inspect", str(RUN), "--html", "-"]) == 0
    parse_page(capsys.readouterr().out)
