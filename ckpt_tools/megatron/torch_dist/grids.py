"""Objects that every rank stored a shard of: `<name>/shard_<index>_<grid>`, both a number an axis (`0.1`, `1.2`).

The grid says how many shards there were, so a missing one is seen from the keys alone. Rng states have one for each
rank. A loading job asks for its own ranks' when its TP and PP sizes are those in the checkpoint's args
(checkpointing.py `load_checkpoint`), so the grid has those sizes, whatever ranks an `fsdp_dtensor` checkpoint holds
states of. Of the releases, core 0.16 alone has data-parallel ranks as a third axis, for jobs with expert parallelism
(checkpointing.py `get_rng_state`); Bridge has it too.

Extra states have one for each layer and expert. Linear modules of every layer spec have them; Transformer Engine's
attention and norms too. With Megatron's default strictness an object that is asked for and absent is fatal, while one
that nobody asks for is ignored, so the keys here are a superset of what any version of Transformer Engine has. `None`
is what modules without FP8 store, and every version takes it for "nothing to restore".
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from typing import Final, NamedTuple

from ckpt_tools.errors import MappingError, UsageError, raise_if
from ckpt_tools.megatron.keys import is_of_transformers, object_shard, shard_key
from ckpt_tools.megatron.names import Dialect
from ckpt_tools.megatron.run_state.common_state import CommonState
from ckpt_tools.megatron.run_state.record import Size
from ckpt_tools.megatron.torch_dist.stacking import Stack
from ckpt_tools.model.target import TargetObject

_SHOWN = 3

Index = tuple[int, ...]


class ObjectGrid(NamedTuple):
    """The shards of one object that are there, and how many there are along every axis."""

    name: str
    axes: Index
    found: frozenset[Index]

    @property
    def problem(self) -> str | None:
        outside = [i for i in self.found if len(i) != len(self.axes) or any(map(int.__ge__, i, self.axes))]
        if outside:
            return f"{shard_key(self.name, outside[0], self.axes)} is outside its grid"
        missing = prod(self.axes) - len(self.found)
        if not missing:
            return None
        first = [shard_key(self.name, index, self.axes) for index in self._absent(min(missing, _SHOWN))]
        more = f" and {missing - len(first)} more" if missing > len(first) else ""
        return f"{missing} of {prod(self.axes)} shards are missing: {', '.join(first)}{more}"

    def _absent(self, count: int) -> list[Index]:
        """The first missing shards. A key may claim any grid, so no more of it is walked than that takes."""
        walked = map(self._index, range(len(self.found) + count))
        return [index for index in walked if index not in self.found][:count]

    def _index(self, number: int) -> Index:
        """The shard of this number in row-major order."""
        index = []
        for length in reversed(self.axes):
            number, at = divmod(number, length)
            index.append(at)
        return tuple(reversed(index))


def object_grids(keys: Iterable[str]) -> list[ObjectGrid]:
    """Every object among the keys that is stored in shards."""
    found: dict[tuple[str, Index], set[Index]] = {}
    for key in keys:
        if shard := object_shard(key):
            found.setdefault((shard.name, shard.grid), set()).add(shard.place)
    return [ObjectGrid(name, axes, frozenset(shards)) for (name, axes), shards in found.items()]


def incomplete_objects(keys: Iterable[str], common: CommonState) -> tuple[tuple[str, str], ...]:
    """(name, what is wrong) of each object whose shards are not a whole grid.

    A job with --ckpt-drop-redundant-extra-state leaves out the extra states that hold nothing: those of some layers,
    where others have delayed scaling (checkpointing.py `_localize_redundant_extra_states`).
    """
    grids = object_grids(keys)
    if common.arg("ckpt_drop_redundant_extra_state"):
        grids = [grid for grid in grids if not grid.name.endswith("._extra_state")]
    several = "its shards are of {} grids; which one is meant cannot be known"
    return (
        *((grid.name, grid.problem) for grid in grids if grid.problem),
        *((name, several.format(n)) for name, n in Counter(grid.name for grid in grids).items() if n > 1),
    )


def refuse_incomplete(
    objects: Iterable[tuple[str, str]], command: str = "", option: str = "--ignore-keys '{}/*'"
) -> None:
    """Raise MappingError if there are any of `incomplete_objects`.

    `option` of `command`, filled with a name, leaves an object out.
    """
    problems = dict(objects)
    flags = {
        "--no-load-rng" if name == "rng_state" else "--dist-ckpt-strictness log_all" for name in problems
    }
    raise_if(
        (f"{name}: {problem}" for name, problem in problems.items()),
        MappingError,
        "stored objects are not whole",
        f"Leave each out whole: {command}{' '.join(map(option.format, problems))}. Jobs then start with "
        f"{' '.join(sorted(flags))}",
    )


# Of a size of the job that is given where nothing written depends on it.
NO_SIZE: Final = (
    "no meaning for this conversion to torch_dist, which loads at any TP, PP and EP, on any number of GPUs: leave it "
    "out"
)
Ranks = Mapping[tuple[int, int], object]  # (pp, tp) -> list of rng states


class RngGrid(NamedTuple):
    """Sizes of the axes; `dp` is None where data-parallel ranks share their states."""

    pp: int
    tp: int
    dp: Size | None = None


def rng_grid(
    rng: Ranks, common: CommonState, dialect: Dialect, ep: int | None = None, gpus: int | None = None
) -> RngGrid:
    """The grid that the job which loads the checkpoint asks for; `ep` and `gpus` are its sizes where known."""
    pp, tp = (
        common.arg(f"{axis}_model_parallel_size") or 1 + max((ranks[i] for ranks in rng), default=0)
        for i, axis in enumerate(("pipeline", "tensor"))
    )
    ep = ep or common.arg("expert_model_parallel_size") or 1
    if not dialect.rng_by_dp or ep == 1:
        return RngGrid(pp, tp)
    world, source = (gpus, "--gpus") if gpus is not None else (common.arg("world_size"), "args")
    if world is None or world % (pp * tp) or world < pp * tp:
        problem = (
            "their number is unknown" if world is None else f"{world} GPUs are not a multiple of TP x PP"
        )
        raise UsageError(
            f"a {dialect.name} job with expert parallel size {ep} asks for the rng states of each of its "
            f"data-parallel ranks, and {problem}: give --gpus, the GPUs of the job (TP {tp} x PP {pp} x the data and "
            "context parallel ranks)"
        )
    return RngGrid(pp, tp, Size(world // (pp * tp), source))


def refuse_sizes(sizes: Mapping[str, int | None], has_experts: bool, grid: RngGrid | None) -> None:
    """Raise UsageError if a size of the job decides nothing: of experts where there are none, GPUs without states."""
    decides = {"gpus": grid is not None and grid.dp is not None, "ep": has_experts, "etp": has_experts}
    useless = [f"--{name} {n}" for name, n in sizes.items() if n is not None and not decides[name]]
    if useless:
        raise UsageError(f"{', '.join(useless)}: {NO_SIZE}")


def rng_objects(rng: Ranks, grid: RngGrid | None) -> tuple[list[TargetObject], list[str]]:
    """`rng_state/shard_<pp>.<tp>[.<dp>]_<grid>` of every rank of the grid (None: there are no states), and notes.

    States that the source does not have are copies of the nearest rank's: without them no job would start. An empty
    mapping of trackers vanishes in `fsdp_dtensor`; the loader asks for it.
    """
    if grid is None:
        return [], ["the source has no rng states: resume with --no-load-rng"]
    whole = {rank: _with_trackers(rank, states) for rank, states in rng.items()}
    sizes = [grid.pp, grid.tp] if grid.dp is None else [grid.pp, grid.tp, grid.dp.ranks]
    objects, notes = [], []
    for index in itertools.product(*map(range, sizes)):
        source = _nearest(whole, index[0], index[1])
        objects.append(TargetObject(shard_key("rng_state", index, sizes), [whole[source]]))
        if source != index[:2] and not any(index[2:]):
            notes.append(f"rng of (pp, tp) rank {index[:2]}: copied from rank {source}")
    lost = sorted(rank for rank in whole if rank[0] >= grid.pp or rank[1] >= grid.tp)
    if lost:
        notes.append(f"rng of (pp, tp) ranks {lost}: dropped, the args name no such ranks")
    if grid.dp is not None and grid.dp.ranks > 1:
        notes.append("rng of data-parallel ranks: all have rank 0's, the source keeps no others")
    return objects, notes


def _nearest(rng: Ranks, pp: int, tp: int) -> tuple[int, int]:
    """The rank itself, or the one to copy states from: the last of its stage before it, else of the first stage."""
    stage = pp if any(p == pp for p, _ in rng) else min(p for p, _ in rng)
    held = [t for p, t in rng if p == stage]
    return stage, max((t for t in held if t <= tp), default=min(held))


def _with_trackers(rank: tuple[int, int], states: object) -> list[dict[str, object]]:
    if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
        raise MappingError(f"rng_state.{rank}: expected a list of states, found {type(states).__name__}")
    return [{"rng_tracker_states": {}} | state for state in states]


_LINEAR = re.compile(
    r"^(?P<module>.*\.(?:linear_\w+|in_proj|out_proj|eh_proj|fc[12]_latent_proj))\.weight(?:\.\w+)?$"
)
_NORM = re.compile(r"^(?P<module>.*(?:norm|\.ln_\w+))\.weight$")
_HYBRID_END = re.compile(r"^(?P<model>(?:.*\.)?)decoder\.final_norm\.weight$")
_ATTENTION = re.compile(r"^(?P<module>.*(?:self|cross)_attention)\.linear_proj\.weight$")


def extra_state_keys(stacks: Iterable[Stack], transformer_engine: bool) -> tuple[str, ...]:
    """One key per module and (layer, expert) index; with `transformer_engine` also that library's modules."""
    modules: dict[str, tuple[int, ...]] = {}
    for stack in stacks:
        for module in _modules(stack.key, transformer_engine):
            modules[module] = stack.lead or (1,)
    return tuple(
        shard_key(f"{module}._extra_state", index, lead)
        for module, lead in modules.items()
        for index in itertools.product(*map(range, lead))
    )


def _modules(key: str, transformer_engine: bool) -> Iterable[str]:
    if is_of_transformers(key):
        return
    if match := _LINEAR.match(key):
        yield match["module"]
    if match := _HYBRID_END.match(key):  # MambaModel asks for what GPTModel leaves out, tied or not
        yield f"{match['model']}output_layer"
    if transformer_engine:
        if match := _NORM.match(key):
            yield match["module"]
        if match := _ATTENTION.match(key):
            yield f"{match['module']}.core_attention"
