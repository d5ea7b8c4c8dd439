"""Wrong lines that once passed every test, or are of their kind: each is one text for another, in any file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.mutants.sites import Mutant


class Named(NamedTuple):
    """Somewhere in a room, `old` stands once; `new` is wrong."""

    room: str
    what: str
    old: str
    new: str


NAMED = (
    Named("megatron", "GDN holds value before key", '("query", "key", "value", "z", "beta", "alpha")',
          '("query", "value", "key", "z", "beta", "alpha")'),
    Named("megatron", "GDN holds alpha before beta", '"z", "beta", "alpha")', '"z", "alpha", "beta")'),
    Named("megatron", "GDN2 holds b before f", '"z", "f", "b", "w")', '"z", "b", "f", "w")'),
    Named("megatron", "GDN2 holds w before b", '"z", "f", "b", "w")', '"z", "f", "w", "b")'),
    Named("megatron", "GDN's convolution holds value before key", '("query", "key", "value"),',
          '("query", "value", "key"),'),
    Named("megatron", "Mamba holds x before z", '("z", "x", "B", "C", "dt")', '("x", "z", "B", "C", "dt")'),
    Named("megatron", "Mamba holds C before B", '("z", "x", "B", "C", "dt")', '("z", "x", "C", "B", "dt")'),
    Named("megatron", "Mamba's convolution holds C before B", '("x", "B", "C"),', '("x", "C", "B"),'),
    Named("megatron", "fused MLA holds keys before queries", '(".linear_q_down_proj.", ".linear_kv_down_proj.")',
          '(".linear_kv_down_proj.", ".linear_q_down_proj.")'),
    Named("megatron", "gate and up change places", 'HALVES = ("_w", "_v")', 'HALVES = ("_v", "_w")'),
    Named("megatron", "a group's min_lr is filled from max_lr", 'scheduler.get("min_lr")', 'scheduler.get("max_lr")'),
    Named("megatron", "a group's max_lr is filled from min_lr", 'scheduler.get("max_lr")', 'scheduler.get("min_lr")'),
    Named("megatron", "extra TP ranks get the rng of rank 0", "source = min(rank, max(stage))",
          "source = rank if rank in stage else 0"),
    Named("megatron", "extra TP ranks get the rng of the last but one", "source = min(rank, max(stage))",
          "source = rank if rank in stage else max(0, max(stage) - 1)"),
    Named("megatron", "missing rng states are the first rank's of the stage",
          "return stage, max((t for t in held if t <= tp), default=min(held))", "return stage, min(held)"),
    Named("megatron", "missing rng states are another stage's", "stage = pp if any(p == pp for p, _ in rng) else",
          "stage = "),
    Named("megatron", "rank 1's rows of a packed projection stand before rank 0's", "for rank in range(ranks):\n        for part in order:",
          "for rank in reversed(range(ranks)):\n        for part in order:"),
    Named("megatron", "parts of a packed projection are cut from rank 0 alone", "Rows(parameter, rank * count, count, at)",
          "Rows(parameter, 0, count, at)"),
    Named("megatron", "the embedded weight decay of biases", 'wanted["wd_mult"], rule = 0.0, "bias: no weight decay"',
          'wanted["wd_mult"], rule = 1.0, "bias: no weight decay"'),
    Named("megatron", "swapped ids of a group map pass", "_refuse_contradictions(derived or {}, wanted, groups)", "pass"),
    Named("megatron", "a group's step is not written beside its states", "if TORCH_ADAM_FIELDS.isdisjoint(group):\n            continue",
          "if True:\n            continue"),
    Named("execute", "the tracker is written before publication",
          "            staging.publish(sync, output.overwrite)\n        for name, data in output.beside.items():",
          "            for name, data in output.beside.items():\n                staging.write_beside(name, data)\n"
          "            staging.publish(sync, output.overwrite)\n        for name, data in output.beside.items():"),
    Named("execute", "the marker of publication is written after the renames",
          "                folder.write(_MARKER, self._mark(os.fstat(opened.fd)))\n"
          "            if not (overwrite and self.parent().exists(self.final.name)):\n"
          "                move(data, final)  # refused unless it is absent or empty\n"
          "            elif not exchange(data, final):\n"
          "                move(final, Place(folder, _REPLACED))\n"
          "                move(data, final)\n",
          "                mark = self._mark(os.fstat(opened.fd))\n"
          "            if not (overwrite and self.parent().exists(self.final.name)):\n"
          "                move(data, final)  # refused unless it is absent or empty\n"
          "            elif not exchange(data, final):\n"
          "                move(final, Place(folder, _REPLACED))\n"
          "                move(data, final)\n"
          "            folder.write(_MARKER, mark)\n"),
    Named("execute", "what is published is not looked at for its sizes",
          "return all(s is not None and s.st_size == self._sizes[name] for name, s in found.items())", "return True"),
    Named("execute", "what is published is only looked at for its names", "s is not None and s.st_size == self._sizes[name]",
          "s is not None"),
    Named("execute", "`.metadata` is not deleted first on a store", "            self._store.remove(METADATA)\n", "            pass\n"),
    Named("execute", "`.metadata` is deleted after the marker on a store",
          "        if withdraw:  # before all else: from here on no loader takes the folder for a checkpoint\n"
          "            self._store.remove(METADATA)\n"
          "        # With nothing to compare: what lies here now is no work to go on from.\n"
          "        self._put_marker(None if clear else self._plan.digest)\n",
          "        self._put_marker(None if clear else self._plan.digest)\n"
          "        if withdraw:\n"
          "            self._store.remove(METADATA)\n"),
    Named("execute", "a store's tracker is written before `.metadata`",
          "            self._check_marker()\n            if output.is_dcp:\n                store.put(METADATA, metadata)\n",
          "            self._check_marker()\n"
          "            for name, data in output.beside.items():\n"
          "                Store(store.parent).put(name, data)\n"
          "            if output.is_dcp:\n                store.put(METADATA, metadata)\n"),
    Named("execute", "a store's marker is removed before `.metadata` is written",
          "            if output.is_dcp:\n                store.put(METADATA, metadata)\n",
          "            store.remove(MARKER)\n            if output.is_dcp:\n                store.put(METADATA, metadata)\n"
          "            self._put_marker(self._plan.digest)\n"),
    Named("execute", "half a replacement is not undone", "        self._undo_half_replacement()\n", ""),
    Named("execute", "a changed source is not noticed at the end of a local conversion",
          "            check_unchanged(self._source_state, after, self._files.location)\n            prove_shards",
          "            prove_shards"),
    Named("execute", "the output is proven only where nothing went on from finished items",
          "            if found != Found.PUBLISHED.name:\n                proven = prove_source(self._proof, self._plan, self._files, self._options, self._ranks)\n                self._forget",
          "            if found == Found.NOTHING.name:\n                proven = prove_source(self._proof, self._plan, self._files, self._options, self._ranks)\n                self._forget"),
    Named("verify", "experts are counted without the router's rows", "set(range(routers.get(module, fallback)))",
          "set(range(fallback))"),
    Named("verify", "a router without experts passes", 'found.error(module, "there is a router, but no experts are stored")',
          "pass"),
    Named("verify", "groups without states pass", "for group in fields.keys() - wanted.keys():", "for group in ():"),
    Named("verify", "states without groups pass", 'found.error(name, "it has optimizer states, but no optimizer.param_to_group_meta entry")',
          "pass"),
    Named("verify", "halves of different shape pass", "if shapes.get(other) != shape:", "if other not in shapes:"),
    Named("verify", "a half alone passes", "if shapes.get(other) != shape:", "if shapes.get(other, shape) != shape:"),
    Named("verify", "files that a manifest does not list pass", "for name in now.keys() - before.keys():", "for name in ():"),
    Named("convert", "`--keys` that matches nothing calls checkpoints equal",
          'wrong = [f"--keys {line}" for line in idle(options.keys)]', "wrong = list[str]()"),
    Named("convert", "`--ignore` that matches everything calls checkpoints equal", "not any(map(options.wants, names))", "not names"),
)  # fmt: skip


def named_mutants(repo: Path, rooms: tuple[str, ...]) -> tuple[list[Mutant], list[str]]:
    """All of the rooms, and a line for each whose text is not there once: it has to follow the code."""
    found, problems = [], []
    texts = {p: p.read_text() for p in sorted((repo / "ckpt_tools").rglob("*.py"))}
    for named in NAMED:
        if named.room not in rooms:
            continue
        places = [
            p for p, text in texts.items() if p.parts[len(repo.parts) + 1] == named.room and named.old in text
        ]
        if len(places) != 1 or texts[places[0]].count(named.old) != 1:
            problems.append(f"{named.what}: its text stands in {len(places)} files of {named.room}")
            continue
        text = texts[places[0]]
        line = text[: text.index(named.old)].count("\n") + 1
        file = str(places[0].relative_to(repo))
        found.append(Mutant(file, line, named.what, "named", text.replace(named.old, named.new)))
    return found, problems
