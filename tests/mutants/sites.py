"""Small wrong changes of a source text, where a silent wrong result would follow.

What only people read is left alone: messages, notes, docstrings, annotations, `__repr__`, whatever is raised.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_PAIRS = (
    ("min", "max"),
    ("any", "all"),
    ("start", "stop"),
)
_OTHER = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}
_STRING_PAIRS = (
    ("min_lr", "max_lr"),
    ("exp_avg", "exp_avg_sq"),
    ("weight", "bias"),
    ("weight_decay", "wd_mult"),
    ("start_wd", "end_wd"),
    ("fp32_param", "param"),
    ("linear_fc1", "linear_fc2"),
    ("gate_proj", "up_proj"),
)
_OTHER_STRING = {a: b for pair in _STRING_PAIRS for a, b in (pair, pair[::-1])}
_WORDS_FOR_PEOPLE = re.compile(
    r"note|messag|short|format_|advice|hint|describ|\bwhy\b|line|text|title|explain|render|table|print|told_where"
)
_LEFT_ALONE = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)  # messages, or nothing
_UNORDERED = {
    "isinstance",
    "issubclass",
    "getattr",
    "hasattr",
    "setattr",
    "print",
    "zip",
    "field",
    "cast",
    "suppress",
}


class Mutant(NamedTuple):
    """A wrong version of one file."""

    file: str  # below the repository
    lines: range  # from the beginning of the statement to where it changes
    name: str  # as `tests/mutants/equivalent.txt` writes it: function, and what became what
    kind: str
    text: str  # of the whole file


def mutants(file: str, source: str) -> list[Mutant]:
    """All of one file."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return finder.found


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, source: str) -> None:
        self._file, self._lines = file, source.encode().splitlines(keepends=True)
        self._scope: list[str] = []
        self._seen = Counter[str]()
        self._begin = 1  # of the statement
        self._names: set[str] = set()  # that the function uses
        self.found: list[Mutant] = []

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self._begin = node.lineno
        if not isinstance(node, _LEFT_ALONE):
            super().visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        self._change(node)
        super().generic_visit(node)

    def _change(self, node: ast.AST) -> None:
        for kind, other in _changes(node):
            if not (isinstance(node, ast.Name) and other in ("start", "stop") and other not in self._names):
                self._add(kind, node, other)

    def _add(self, kind: str, node: ast.AST, other: str) -> None:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None and node.end_col_offset is not None
        before = b"".join(self._lines[: node.lineno - 1]) + self._lines[node.lineno - 1][: node.col_offset]
        after = self._lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(
            self._lines[node.end_lineno :]
        )
        if isinstance(node, ast.expr):
            other = f"({other})"
        text = (before + other.encode() + after).decode()
        change = f"{_short(ast.unparse(node))} -> {_short(other)}"
        scope = ".".join(self._scope) or "module"
        lines = range(min(self._begin, node.lineno), node.lineno + 1)
        name = f"{self._file} {scope}: {change}"
        self._seen[name] += 1
        name += f" #{self._seen[name]}" if self._seen[name] > 1 else ""
        self.found.append(Mutant(self._file, lines, name, kind, text))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if re.search(r"__repr__|__str__", node.name) or _WORDS_FOR_PEOPLE.search(node.name):
            return
        self._scope.append(node.name)
        outer, self._names = self._names, {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        for statement in node.body:
            self.visit(statement)
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d)):
            self.visit(default)
        self._returns(node)
        self._names = outer
        self._scope.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._scope.pop()

    def _returns(self, function: ast.FunctionDef) -> None:
        """A constant instead of what a function of truth values returns."""
        if not (isinstance(function.returns, ast.Name) and function.returns.id == "bool"):
            return
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and not isinstance(node.value, ast.Constant):
                self._add("constant returned", node, "return True")
                self._add("constant returned", node, "return False")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and not _for_people(node.target):
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(_for_people(target) for target in node.targets):
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) or _for_people(node.value):
            return
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _for_people(node.func):
            return
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("startswith", "endswith"):
            self.visit(node.func.value)
            return
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        self._change(node)
        for side in (node.left, *node.comparators):
            parts = side.elts if isinstance(side, ast.Tuple) else [side]  # `in (...)` has no order
            for part in parts:
                self.visit(part)

    def visit_For(self, node: ast.For) -> None:
        for part in (*node.body, *node.orelse):
            self.visit(part)
        if not isinstance(node.iter, ast.Tuple):  # what is done to each of a few names has no order
            self.visit(node.iter)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg is None or not (_WORDS_FOR_PEOPLE.search(node.arg) or node.arg in ("help", "strict")):
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)


def _for_people(node: ast.AST) -> bool:
    """Whether a name says that what it holds or does is for people."""
    names = [
        n.id if isinstance(n, ast.Name) else n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Name | ast.Attribute)
    ]
    return any(_WORDS_FOR_PEOPLE.search(name) for name in names[:2])


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(kind, new text) of what can go wrong at one node."""
    for of_type, change in _OPERATORS:
        if isinstance(node, of_type):
            yield from change(node)


def _comparison(node: ast.Compare) -> Iterator[tuple[str, str]]:
    other = _COMPARED[type(node.ops[0])]()
    yield "comparison", ast.unparse(ast.Compare(node.left, [other, *node.ops[1:]], node.comparators))


def _constant(node: ast.Constant) -> Iterator[tuple[str, str]]:
    if type(node.value) is int:
        yield "off by one", str(node.value + 1)
    if isinstance(node.value, bool):
        yield "truth value", str(not node.value)
    if isinstance(node.value, str) and node.value in _OTHER_STRING:
        yield "state kind", repr(_OTHER_STRING[node.value])


def _name(node: ast.Name) -> Iterator[tuple[str, str]]:
    if isinstance(node.ctx, ast.Load) and node.id in _OTHER:
        yield "opposite name", _OTHER[node.id]


def _attribute(node: ast.Attribute) -> Iterator[tuple[str, str]]:
    if isinstance(node.ctx, ast.Load) and node.attr in ("start", "stop"):
        yield "opposite name", f"{ast.unparse(node.value)}.{_OTHER[node.attr]}"


def _truth(node: ast.BoolOp) -> Iterator[tuple[str, str]]:
    other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield "and/or", ast.unparse(ast.BoolOp(other, node.values))
    for i in range(len(node.values)):
        rest = [v for j, v in enumerate(node.values) if j != i]
        yield "condition dropped", ast.unparse(rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))


def _negation(node: ast.UnaryOp) -> Iterator[tuple[str, str]]:
    if isinstance(node.op, ast.Not):
        yield "dropped not", ast.unparse(node.operand)


def _calculation(node: ast.BinOp) -> Iterator[tuple[str, str]]:
    if any(
        isinstance(side, ast.JoinedStr | ast.List | ast.Tuple) or _is_string(side)
        for side in (node.left, node.right)
    ):
        return
    if type(node.op) in _CALCULATED:
        yield "arithmetic", ast.unparse(ast.BinOp(node.left, _CALCULATED[type(node.op)](), node.right))


def _call(node: ast.Call) -> Iterator[tuple[str, str]]:
    first = node.args[:2]
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if len(first) < 2 or any(isinstance(a, ast.Starred | ast.JoinedStr) for a in first) or name in _UNORDERED:
        return
    if name.endswith("Error") or name == "Option" or type(first[0]) is not type(first[1]):
        return
    yield "swapped arguments", ast.unparse(ast.Call(node.func, [*first[::-1], *node.args[2:]], node.keywords))


def _dictionary(node: ast.Dict) -> Iterator[tuple[str, str]]:
    if len(node.values) < 2 or None in node.keys or ast.dump(node.values[0]) == ast.dump(node.values[1]):
        return
    swapped = [node.values[1], node.values[0], *node.values[2:]]
    yield "swapped values", ast.unparse(ast.Dict(node.keys, swapped))


def _row(node: ast.Tuple) -> Iterator[tuple[str, str]]:
    if (
        isinstance(node.ctx, ast.Load)
        and len(node.elts) > 1
        and all(isinstance(e, ast.Constant) for e in node.elts)
    ):
        yield (
            "swapped entries",
            ast.unparse(ast.Tuple([node.elts[1], node.elts[0], *node.elts[2:]], ast.Load())),
        )


def _slice(node: ast.Subscript) -> Iterator[tuple[str, str]]:
    cut = node.slice
    if not isinstance(cut, ast.Slice) or not isinstance(node.ctx, ast.Load):
        return
    value = ast.unparse(node.value)
    lower, upper = (ast.unparse(end) if end else "" for end in (cut.lower, cut.upper))
    if cut.step is not None:
        yield "slice", f"{value}[{lower}:{upper}]"
    elif lower:
        yield "slice", f"{value}[{lower} + 1:{upper}]"
    elif upper:
        yield "slice", f"{value}[:{upper} - 1]"


def _statement(node: ast.Expr) -> Iterator[tuple[str, str]]:
    if isinstance(node.value, ast.Call):
        yield "dropped statement", "pass"


def _increment(node: ast.AugAssign) -> Iterator[tuple[str, str]]:
    if not _for_people(node.target):
        yield "dropped statement", "pass"


def _check(node: ast.If) -> Iterator[tuple[str, str]]:
    if not node.orelse and isinstance(node.body[-1], ast.Raise | ast.Continue | ast.Return):
        yield "dropped check", "pass"


_OPERATORS: tuple[tuple[type[ast.AST], Callable[..., Iterator[tuple[str, str]]]], ...] = (
    (ast.Compare, _comparison),
    (ast.Constant, _constant),
    (ast.Name, _name),
    (ast.Attribute, _attribute),
    (ast.BoolOp, _truth),
    (ast.UnaryOp, _negation),
    (ast.BinOp, _calculation),
    (ast.Call, _call),
    (ast.Dict, _dictionary),
    (ast.Tuple, _row),
    (ast.Subscript, _slice),
    (ast.Expr, _statement),
    (ast.AugAssign, _increment),
    (ast.If, _check),
)


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 90 else f"{text[:60]} ... {text[-25:]}"
