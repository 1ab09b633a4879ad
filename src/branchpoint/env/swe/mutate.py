"""Small bugs: one token or statement of a Python file changed, found in its syntax tree, written back by byte range."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

from branchpoint.env.swe import patch

_COMPARE: dict[type[ast.cmpop], tuple[bytes, bytes]] = {
    ast.Lt: (b"<", b"<="), ast.LtE: (b"<=", b"<"), ast.Gt: (b">", b">="), ast.GtE: (b">=", b">"),
    ast.Eq: (b"==", b"!="), ast.NotEq: (b"!=", b"=="), ast.Is: (b"is", b"is not"), ast.IsNot: (b"is not", b"is"),
    ast.In: (b"in", b"not in"), ast.NotIn: (b"not in", b"in"),
}  # fmt: skip
_BINARY: dict[type[ast.operator], tuple[bytes, bytes]] = {
    ast.Add: (b"+", b"-"), ast.Sub: (b"-", b"+"), ast.Mult: (b"*", b"+"), ast.FloorDiv: (b"//", b"*"),
    ast.Div: (b"/", b"*"), ast.Mod: (b"%", b"//"),
}  # fmt: skip
_BOOLEAN: dict[type[ast.boolop], tuple[bytes, bytes]] = {ast.And: (b"and", b"or"), ast.Or: (b"or", b"and")}


class Mutation(NamedTuple):
    """One change: ``old`` at byte ``start`` becomes ``new``. ``line`` counts from 1; ``where`` is the function."""

    kind: str
    start: int
    old: bytes
    new: bytes
    line: int
    where: str

    def apply(self, source: bytes) -> bytes:
        """The changed file. Raises ValueError when ``old`` is not there."""
        end = self.start + len(self.old)
        if source[self.start : end] != self.old:
            raise ValueError(f"{self.old!r} does not stand at byte {self.start}")
        return source[: self.start] + self.new + source[end:]

    def undo(self) -> Mutation:
        """The change back."""
        return self._replace(old=self.new, new=self.old)


def diffs(path: str, source: bytes, mutation: Mutation) -> tuple[str, str]:
    """The unified diff of a mutation, and of the way back."""
    before, after = source.decode(), mutation.apply(source).decode()
    return patch.diff(path, before, after), patch.diff(path, after, before)


def mutations(source: bytes) -> tuple[Mutation, ...]:
    """All mutations of a file's functions, by their place; each leaves it valid Python. Empty for a file that is not
    valid UTF-8 Python."""
    return tuple(m for m, block in sites(source) if valid(m, block, source))


def sites(source: bytes) -> list[tuple[Mutation, tuple[int, int]]]:
    """As :func:`mutations`, unchecked, each with the bytes of the top-level statement that it is in: :func:`valid`
    checks one."""
    try:
        tree = ast.parse(source)
        source.decode()
    except (SyntaxError, ValueError):
        return []
    finder = _Finder(source)
    blocks: dict[Mutation, tuple[int, int]] = {}
    for node in tree.body:
        finder.found.clear()
        finder.visit(node)
        blocks |= dict.fromkeys(finder.found, finder.block(node))
    return sorted(blocks.items(), key=lambda item: (item[0].start, item[0].kind, item[0].new))


def valid(mutation: Mutation, block: tuple[int, int], source: bytes) -> bool:
    """Whether a mutation changes something and leaves its top-level statement valid Python."""
    try:
        ast.parse(mutation._replace(start=mutation.start - block[0]).apply(source[slice(*block)]))
    except (SyntaxError, ValueError):
        return False
    return mutation.old != mutation.new


class _Finder(ast.NodeVisitor):
    """Collects the mutations of what lies in functions; the rest of a module runs on import, and breaks everything."""

    def __init__(self, source: bytes) -> None:
        self.found: list[Mutation] = []
        self._source, self._inside = source, 0
        self._names: list[str] = []
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def _span(self, node: ast.AST) -> tuple[int, int]:
        at = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
        return self._starts[at[0] - 1] + at[1], self._starts[at[2] - 1] + at[3]

    def block(self, node: ast.stmt) -> tuple[int, int]:
        """From the start of a statement's first line, decorators included, to its end."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        return self._starts[first - 1], self._span(node)[1]

    def _text(self, node: ast.AST) -> bytes:
        start, end = self._span(node)
        return self._source[start:end]

    def _add(self, kind: str, start: int, old: bytes, new: bytes) -> None:
        line = self._source.count(b"\n", 0, start) + 1
        self.found.append(Mutation(kind, start, old, new, line, ".".join(self._names)))

    def _whole(self, kind: str, node: ast.AST, new: bytes) -> None:
        self._add(kind, self._span(node)[0], self._text(node), new)

    def _between(self, kind: str, left: ast.AST, right: ast.AST, old: bytes, new: bytes) -> None:
        """The operator between two operands, when nothing but space and brackets is there beside it."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self._source[start:end]
        if gap.strip(b" ()") == old:
            self._add(kind, start + gap.index(old), old, new)

    def visit(self, node: ast.AST) -> None:
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        function = named and not isinstance(node, ast.ClassDef)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._names.append(node.name)
        self._inside += function
        if self._inside and not isinstance(node, ast.JoinedStr):  # places inside an f-string are not reliable
            for kind, rule in _RULES:
                if isinstance(node, kind):
                    rule(self, node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for child in node.body:  # neither annotations nor defaults nor decorators
                self.visit(child)
        elif not isinstance(node, ast.JoinedStr):
            self.generic_visit(node)
        self._inside -= function
        if named:
            self._names.pop()

    def _compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
            self._between("comparison", left, right, *_COMPARE[type(op)])

    def _binary(self, node: ast.BinOp) -> None:
        if type(node.op) in _BINARY and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            self._between("operator", node.left, node.right, *_BINARY[type(node.op)])

    def _boolean(self, node: ast.BoolOp) -> None:
        if len(node.values) == 2:
            self._between("connective", node.values[0], node.values[1], *_BOOLEAN[type(node.op)])

    def _branch(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
            self._whole("condition", node.test, self._text(node.test.operand))
        elif not isinstance(node.test, ast.NamedExpr | ast.Constant) and b"\n" not in self._text(node.test):
            self._whole("condition", node.test, b"not (" + self._text(node.test) + b")")

    def _constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._whole("constant", node, str(not node.value).encode())
        elif isinstance(node.value, int) and self._text(node).isdigit():
            self._whole("constant", node, str(node.value + 1).encode())
            if node.value > 0:
                self._whole("constant", node, str(node.value - 1).encode())

    def _return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._whole("return", node, b"return None")

    def _statement(self, node: ast.Expr | ast.AugAssign | ast.Assign) -> None:
        removable = not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call)
        if removable and not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            self._whole("statement", node, b"pass")

    def _call(self, node: ast.Call) -> None:
        first = node.args[:2]
        if len(first) == 2 and not any(isinstance(a, ast.Starred) for a in first):
            (start, _), (_, end) = self._span(first[0]), self._span(first[1])
            middle = self._source[self._span(first[0])[1] : self._span(first[1])[0]]
            swapped = self._text(first[1]) + middle + self._text(first[0])
            if b"\n" not in swapped and middle.strip() == b",":
                self._add("arguments", start, self._source[start:end], swapped)


_RULES: tuple[tuple[Any, Callable[[_Finder, Any], None]], ...] = (
    (ast.Compare, _Finder._compare),
    (ast.BinOp, _Finder._binary),
    (ast.BoolOp, _Finder._boolean),
    (ast.If | ast.While | ast.IfExp, _Finder._branch),
    (ast.Constant, _Finder._constant),
    (ast.Return, _Finder._return),
    (ast.Expr | ast.AugAssign | ast.Assign, _Finder._statement),
    (ast.Call, _Finder._call),
)
