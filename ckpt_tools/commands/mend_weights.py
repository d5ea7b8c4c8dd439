"""Weights that do not round from whole masters: which they are, and what shows that they are the damaged ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckpt_tools.commands.read_model import master_targets
from ckpt_tools.errors import CorruptCheckpointError, VerificationError, list_problems
from ckpt_tools.execute.check_masters import compare_masters
from ckpt_tools.execute.prove import prove_payloads
from ckpt_tools.execute.read_box import BoxReader
from ckpt_tools.execute.rounding import unlike
from ckpt_tools.formats.files import Files
from ckpt_tools.model.box import full_box
from ckpt_tools.model.casts import Array, cast
from ckpt_tools.model.expressions import Value
from ckpt_tools.model.model import Model, Parameter
from ckpt_tools.model.roles import MASTER, WEIGHT
from ckpt_tools.model.target import Source, TargetTensor
from ckpt_tools.model.views import Narrow, Place
from ckpt_tools.plan.byte_runs import row_major_tiles

_TILE_ELEMS = 1 << 18
_GATED = re.compile(r".*\.linear_fc1\.(?:weight|bias)")
_RANKS = (2, 4, 8, 16, 32, 64)
TE_NAN = "TransformerEngine#2721"
SCRAMBLED = "MLM#2769"


@dataclass(frozen=True, slots=True)
class Damage:
    """A weight that its master does not round to."""

    name: str
    cause: str  # `checksum`, `not-a-number`, or `unknown`
    what: str  # that was seen
    issue: str | None = None

    @property
    def is_proven(self) -> bool:
        """Whether it is shown that the weight is wrong and the master is not."""
        return self.cause != "unknown"


def find_damage(files: Files, model: Model, threads: int) -> dict[int, Damage]:
    """The damaged weights by the number of their parameter in `model`: all of it is read once.

    Raises the errors of `judge_damage`.
    """
    _, problems = compare_masters(
        files,
        model.catalog,
        master_targets(model),
        "all",
        threads=threads,
        fp8_recipe=model.settings.fp8_recipe,
    )
    return judge_damage(files, model, threads, problems)


def judge_damage(files: Files, model: Model, threads: int, problems: Sequence[str]) -> dict[int, Damage]:
    """What is known of the weights of `problems`, lines of `compare_masters`.

    Raises:
        CorruptCheckpointError: masters of damaged weights have other checksums than their writer stored.
        VerificationError: some of those masters are not finite numbers.
    """
    numbers = [i for i, p in enumerate(model.parameters) if MASTER in p.values]
    targets = dict(zip(numbers, master_targets(model), strict=True))
    lines = {line.partition("[")[0]: line for line in problems}
    sound = _Payloads(files, model, threads)
    reader = BoxReader(files, model.catalog)
    found = {}
    try:
        for i, target in targets.items():
            if target.key in lines:
                sound.need(model.parameters[i].main)
                found[i] = _judge(files, model, model.parameters[i], target, reader, sound, lines[target.key])
    finally:
        reader.close()
    return found


def mended(model: Model, damaged: Sequence[int]) -> Model:
    """The model with the rounded masters in the place of damaged weights."""
    parameters = list(model.parameters)
    for i in damaged:
        p = parameters[i]
        weight = Value(p.weight.dtype, p.shape, p.main.sources)
        parameters[i] = replace(p, values={**p.values, WEIGHT: weight})
    return replace(model, parameters=tuple(parameters))


def refuse_unproven(damaged: Sequence[Damage]) -> None:
    """
    Raises:
        VerificationError: nothing shows that it is the weights that are wrong.
    """
    unproven = [f"{d.what}{f' ({d.issue})' if d.issue else ''}" for d in damaged if not d.is_proven]
    if unproven:
        raise VerificationError(
            f"{len(unproven)} weights do not round from their masters, and nothing shows which of the two is "
            f"wrong:\n{list_problems(unproven)}\nIf you know that the masters are right, --trust-masters takes them; "
            "a job that resumes does so after its first step",
            unproven,
        )


class _Payloads:
    """Which stored tensors have the checksums that their writer stored; each is read once."""

    def __init__(self, files: Files, model: Model, threads: int) -> None:
        self._files, self._catalog, self._threads = files, model.catalog, threads
        self._found: dict[str, CorruptCheckpointError | None] = {}

    def need(self, value: Value) -> None:
        """
        Raises:
            CorruptCheckpointError: the value's payloads are damaged.
        """
        for key in dict.fromkeys(source.key for source in value.sources):
            if key not in self._found:
                try:
                    prove_payloads(self._files, self._catalog, [key], self._threads)
                    self._found[key] = None
                except CorruptCheckpointError as error:
                    self._found[key] = error
            error_of_key = self._found[key]
            if error_of_key is not None:
                raise error_of_key


def _judge(
    files: Files,
    model: Model,
    parameter: Parameter,
    target: TargetTensor,
    reader: BoxReader,
    sound: _Payloads,
    problem: str,
) -> Damage:
    try:
        sound.need(parameter.weight)
    except CorruptCheckpointError as error:
        return Damage(target.key, "checksum", f"{target.key}: {error}")
    if _all_are_no_numbers(reader, target):
        what = f"{target.key}: every element that does not round from its master is NaN or infinite"
        return Damage(target.key, "not-a-number", what, TE_NAN)
    for relation, permuted in _permutations(parameter, target):
        if not compare_masters(files, model.catalog, [permuted], "all")[1]:
            return Damage(target.key, "unknown", f"{target.key}: {relation}", SCRAMBLED)
    return Damage(target.key, "unknown", problem)


def _all_are_no_numbers(reader: BoxReader, target: TargetTensor) -> bool:
    """Whether the weights are right wherever they are finite numbers, as every master is.

    Raises:
        VerificationError: a master is not.
    """
    assert target.must_round_dtype is not None
    masters = reader.tensor(target)
    weights = reader.tensor(replace(target, dtype=target.must_round_dtype, sources=target.must_round_to))
    for box in row_major_tiles(full_box(target.shape), _TILE_ELEMS):
        exact, stored = masters(box), weights(box)
        if not np.isfinite(_plain(exact, target.dtype)).all():
            raise VerificationError(
                f"{target.key}: its master holds NaN or infinite numbers too; nothing to repair from"
            )
        wrong = unlike(exact, target.dtype, stored, target.must_round_dtype)
        if (wrong & np.isfinite(_plain(stored, target.must_round_dtype))).any():
            return False
    return True


def _plain(values: Array, dtype: str) -> Array:
    """As numbers that numpy knows."""
    return values if dtype in ("float32", "float64") else cast(values, dtype, "float32")


def _permutations(parameter: Parameter, target: TargetTensor) -> Iterator[tuple[str, TargetTensor]]:
    """Orders in which known defects leave the gate and up rows of an fc1, put right: what, and the comparison."""
    if not _GATED.fullmatch(parameter.name) or target.shape[0] % 2:
        return
    yield "the weight has its gate and up halves the other way round", _reordered(target, (1, 0))
    for ranks in _RANKS:
        if target.shape[0] % (2 * ranks):
            return
        together = [*range(0, 2 * ranks, 2), *range(1, 2 * ranks, 2)]
        apart = [half * ranks + rank for rank in range(ranks) for half in range(2)]
        yield (
            f"the weight has gate and up rows by tensor-parallel rank of {ranks}, the master gate before up",
            _reordered(target, together),
        )
        yield (
            f"the weight has gate before up, the master rows by tensor-parallel rank of {ranks}",
            _reordered(target, apart),
        )


def _reordered(target: TargetTensor, order: Sequence[int]) -> TargetTensor:
    """The comparison with the weight's rows in other order: equal blocks of them, by number."""
    count = target.shape[0] // len(order)
    rest = (0,) * (len(target.shape) - 1)
    sources = tuple(
        Source(s.key, (*s.view, Narrow(0, block * count, count), Place((at * count, *rest), target.shape)))
        for at, block in enumerate(order)
        for s in target.must_round_to
    )
    return replace(target, must_round_to=sources)
