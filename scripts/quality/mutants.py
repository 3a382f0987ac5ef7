"""The mutants of a Python file: each is the file with one small change. `mutate.py` runs the tests against them."""

from __future__ import annotations

import ast
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPARE = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
BINARY = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
NAMES = {
    "max": "min", "min": "max", "maximum": "minimum", "minimum": "maximum", "fmax": "fmin", "fmin": "fmax",
    "all": "any", "any": "all", "sum": "max", "mean": "max", "std": "var", "nansum": "nanmax", "ones": "zeros",
    "zeros": "ones", "ones_like": "zeros_like", "isnan": "isfinite", "isinf": "isnan", "sqrt": "square",
    "cumsum": "sort",
}  # fmt: skip
UNWRAP = {"abs", "sign", "exp", "sqrt", "clip", "nan_to_num", "fmax", "maximum"}
FIELDS_IN_ORDER = (ast.Tuple, ast.List)


@dataclass(frozen=True)
class Mutant:
    """One changed module."""

    path: Path
    line: int
    what: str
    tree: Callable[[], ast.Module]
    """Makes the change; called only for a mutant that runs."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def mutants(path: Path) -> Iterator[Mutant]:
    """Every single change of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = set(_not_formulas(tree))
    for number, node in enumerate(ast.walk(tree)):
        if id(node) in skipped:
            continue
        for what, change in _changes(node):
            make = functools.partial(_changed, tree, number, change)
            yield Mutant(path, getattr(node, "lineno", 0), what, make)


def _changed(tree: ast.Module, number: int, change: Callable[[ast.AST], object]) -> ast.Module:
    """A copy of a module with one change, at the node with that number."""
    mutated = copy.deepcopy(tree)
    change(next(itertools.islice(ast.walk(mutated), number, None)))
    return ast.fix_missing_locations(mutated)


def _not_formulas(tree: ast.Module) -> Iterator[int]:
    """Nodes to skip: docstrings, annotations, error messages, types, and the order of the elements after `in`."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(ops=[ast.In() | ast.NotIn(), *_], comparators=[ast.Tuple() | ast.List() as among, *_]):
                yield id(among)
        for part in _not_formula(node):
            yield from map(id, ast.walk(part))


def _not_formula(node: ast.AST) -> list[Any]:
    """The parts of a node to skip with all that is in them."""
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return [node]
        case ast.AnnAssign(annotation=ast.AST() as kind) | ast.arg(annotation=ast.AST() as kind):
            return [kind]
        case ast.FunctionDef(returns=kind):
            return [*node.decorator_list, *([kind] if kind else [])]
        case ast.ExceptHandler(type=ast.AST() as kind):
            return [kind]
        case ast.ClassDef():
            return [*node.decorator_list, *node.bases]
        case ast.Assign(value=ast.Subscript() as alias):
            return [alias]
        case ast.Expr(value=ast.Constant()) | ast.keyword(arg="dtype" | "kind" | "count"):
            return [node]
    return []


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], object]]]:
    if isinstance(node, ast.Compare):
        for position, op in enumerate(node.ops):
            for new in COMPARE.get(type(op), ()):
                yield f"{type(op).__name__} -> {new.__name__}", lambda n, p=position, k=new: n.ops.__setitem__(p, k())
    elif isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        other = BINARY[type(node.op)]
        yield f"{type(node.op).__name__} -> {other.__name__}", lambda n: setattr(n, "op", other())
    elif isinstance(node, ast.BoolOp):
        new_op = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"{type(node.op).__name__} -> {new_op.__name__}", lambda n: setattr(n, "op", new_op())
        for position in range(len(node.values)):
            yield f"operand {position} left out", lambda n, p=position: _drop(n, p)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert | ast.Not):
        yield f"{type(node.op).__name__} left out", lambda n: _become(n, n.operand)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        for value in {node.value + 1, 0 if node.value else 2}:
            if value != node.value:
                yield f"{node.value} -> {value}", lambda n, v=value: setattr(n, "value", v)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} -> {not node.value}", lambda n: setattr(n, "value", not n.value)
    elif isinstance(node, ast.Call):
        yield from _call_changes(node)
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "condition negated", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    elif isinstance(node, FIELDS_IN_ORDER) and isinstance(node.ctx, ast.Load):
        for first in range(len(node.elts) - 1):
            yield (
                f"elements {first} and {first + 1} swapped",
                lambda n, f=first: n.elts.__setitem__(slice(f, f + 2), n.elts[f : f + 2][::-1]),
            )
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "statement left out", lambda n: setattr(n, "value", ast.Constant(None))


def _call_changes(node: ast.Call) -> Iterator[tuple[str, Callable[[Any], object]]]:
    key = "attr" if isinstance(node.func, ast.Attribute) else "id"
    name = getattr(node.func, key, "")
    if name in NAMES:
        yield f"{name} -> {NAMES[name]}", lambda n: setattr(n.func, key, NAMES[name])
    if name in UNWRAP and node.args:
        yield f"{name}() left out", lambda n: _become(n, n.args[0])
    if name == "where" and len(node.args) == 3:
        yield "where swapped", lambda n: n.args.__setitem__(slice(1, 3), n.args[1:][::-1])
    if name in ("divide", "cls", "Capability") and len(node.args) > 1:
        yield "first two arguments swapped", lambda n: n.args.__setitem__(slice(0, 2), n.args[:2][::-1])
    for position, keyword in enumerate(node.keywords):
        if keyword.arg in ("initial", "axis", "where", "minlength", "plain", "nan"):
            yield f"{keyword.arg}= left out", lambda n, p=position: n.keywords.pop(p)


def _drop(node: ast.BoolOp, position: int) -> None:
    node.values.pop(position)
    if len(node.values) == 1:  # Python compiles no `and` with one operand
        _become(node, node.values[0])


def _become(node: ast.AST, other: ast.AST) -> None:
    node.__class__ = other.__class__
    node.__dict__.clear()
    node.__dict__.update(other.__dict__)
