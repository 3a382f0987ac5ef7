"""Mutation testing: change each formula of the pure core a little, and check that a fast test fails.

    python scripts/mutate.py [--jobs 2] [--only steps.py rows.py:54] [--list] [--seconds 90]

A mutant is one change: a sign, a comparison, a constant, minimum for maximum, a statement or a condition left out,
neighbours swapped. Each runs in a forked process with the changed module; the file is not modified. The script prints
each mutant that passes all tests, with its line. Either a test is missing, or the change makes no difference and
belongs on the list below, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("verl_ext/core", "verl_ext/estimators")
# The tests of its own file run first, and ALL only if they pass.
FIRST = {
    "batch": ("tests/core/test_batch.py",),
    "chain": ("tests/core/test_chain.py",),
    "groups": ("tests/core/test_groups.py",),
    "history": (
        "tests/core/test_history.py",
        "tests/core/test_history_state.py",
        "tests/core/test_history_settings.py",
    ),
    "observe": ("tests/core/test_observe.py",),
    "rows": ("tests/core/test_rows.py",),
    "state": ("tests/core/test_state.py",),
    "steps": (
        "tests/core/test_steps.py",
        "tests/core/test_whiten.py",
        "tests/core/test_balance_and_difficulty.py",
    ),
    "typed": ("tests/core/test_typed.py",),
}
UNUSED_PLUGINS = ("cacheprovider", "doctest", "unraisableexception", "threadexception")
SETTINGS_TESTS = ("tests/test_settings.py", "tests/test_settings_rewards.py")
ESTIMATOR_TESTS = ("tests/estimators/test_compositions.py", *SETTINGS_TESTS)
ALL = (
    "tests/estimators/test_worked_example.py",
    "tests/core",
    *SETTINGS_TESTS,
    "tests/estimators/test_compositions.py",
    "tests/estimators/test_components.py",
    "tests/estimators/test_compose.py",
    "tests/estimators/test_own_steps.py",
    "tests/estimators/test_accuracy_and_kl.py",
    "tests/estimators/test_direct_call.py",
    "tests/estimators/test_against_reference.py",
)

# Changes that do not change any result: part of the line, part of the change, and the reason. The list only explains
# survivors: a mutant that fails a test counts as noticed.
HARMLESS = (
    ('_NO_BASE = ("compose", "hadw")', "swapped", "only whether a name is among them counts"),
    ("np.fmax.reduce(np.abs(values), axis=None", "axis= left out", "whitening has one column"),
    ('return ["grpo", *(name for name in ESTIMATORS', "swapped", "the order of names in a message"),
    ("_check_range(", "0.0 -> 1.0", "any start within the range gives the same minimum and maximum"),
    ("_check_range(", "0.0 -> 2", "the same"),
    ("wrong = next(", "swapped", "which of two wrong values is named"),
    ("wrong = next(", "LtE -> Lt", "the least value cannot be the most that is allowed while another is beyond it"),
    ("keys = ids.astype(np.uint16)", "LtE -> Lt", "wider keys give the same order, only more slowly"),
    ("keys = ids.astype(np.uint16)", "65536 -> 0", "the same"),
    ("named = {name for key, needed in", "swapped", "they become a set"),
    ("for kind in (", "swapped", "the order of names in a message"),
    ("draw = np.random.default_rng(0)", " -> ", "any batch does to try a chain out"),
    ("draw.integers(", " -> ", "the same, where it is a batch at all"),
    ("for kept in (state.get(step.name), update.state)", "swapped", "which of two wrong states is named"),
    ("if TYPE_CHECKING:", "negated", "it imports what only annotations need"),
    ("__all__ = ", "swapped", "the order of names"),
    ('for name in ("accuracy_key", "accuracy_threshold")', "swapped", "which of two settings is named"),
    ("max(new.window) - min(new.window) < 0.01", "Lt -> LtE", "a warning's threshold"),
    ("abs(y - new.window[-1]) < 0.1", "Lt -> LtE", "a warning's threshold"),
    ("abs(y - new.window[-1]) < 0.1", "USub left out", "the values of this window are alike"),
    ("abs(y - new.window[-1]) < 0.1", "1 -> ", "the same"),
    ("HUGE = 2**21", "Pow -> Mult", "from where on a way of allocating is faster; the result is the same"),
    ("HUGE = 2**21", "21 -> 22", "the same"),
    ("(dim=-1", "USub left out", "of two dimensions the last is the second"),
    (".unsqueeze(-1)", "USub left out", "the same"),
    ("return cls(every, every, plain=True)", "swapped", "they are the same"),
    ("elif last[number] < (int(index), row)", "Lt -> LtE", "no row comes twice"),
    ("mask.dtype.itemsize < 4", "Lt -> LtE", "float32 is summed in float32 either way"),
    ("mask.dtype.itemsize < 4", "4 -> 5", "the same"),
    ("narrow = token_level.dtype.itemsize < 4", "Lt -> LtE", "the same"),
    ("narrow = token_level.dtype.itemsize < 4", "4 -> 5", "the same"),
    ("if (np.abs(mean) > TOLERANCE", "Gt -> GtE", "a mean just at the limit may count as either"),
    ("scale = divide(count, np.where(deviations > 0", "0.0 -> ", "the values that it scales are 0"),
    ('("balance", "weigh_by_difficulty", "weigh_by_history")', "swapped", "the order in which rules are looked up"),
    ('(SUM, "centre", "scale_by_std", "scale_by_mad")', "swapped", "the same"),
)

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
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
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

    path: str
    line: int
    what: str
    tree: Callable[[], ast.Module]
    """Makes the change; called only for a mutant that runs."""


def mutants(path: Path) -> Iterator[Mutant]:
    """Every single change of a file."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    skipped = set(_not_formulas(tree))
    for number, node in enumerate(ast.walk(tree)):
        if id(node) in skipped:
            continue
        for what, change in _changes(node):
            make = functools.partial(_changed, tree, number, change)
            yield Mutant(str(path.relative_to(ROOT)), getattr(node, "lineno", 0), what, make)


def _changed(tree: ast.Module, number: int, change: Callable[[ast.AST], object]) -> ast.Module:
    """A copy of a module with one change, at the node with that number."""
    mutated = copy.deepcopy(tree)
    change(next(itertools.islice(ast.walk(mutated), number, None)))
    return ast.fix_missing_locations(mutated)


def explains(part: str, change: str, mutant: Mutant) -> bool:
    """Whether an entry of `HARMLESS` is about this mutant."""
    return change in mutant.what and part in _lines(mutant.path)[mutant.line - 1]


@functools.cache
def _lines(path: str) -> list[str]:
    return (ROOT / path).read_text(encoding="utf-8").split("\n")


def _not_formulas(tree: ast.Module) -> Iterator[int]:
    """Nodes to skip: docstrings, annotations, error messages, types, and the order of the elements after `in`."""
    for node in ast.walk(tree):
        out: list[ast.AST] = []
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
            out = list(ast.walk(node))
        elif isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            out = list(ast.walk(node.annotation))
        elif isinstance(node, ast.FunctionDef):
            out = [
                *(ast.walk(node.returns) if node.returns else ()),
                *(n for d in node.decorator_list for n in ast.walk(d)),
            ]
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            out = [node.comparators[0]] if isinstance(node.comparators[0], FIELDS_IN_ORDER) else []
        elif isinstance(node, ast.ExceptHandler) and node.type is not None:
            out = list(ast.walk(node.type))
        elif isinstance(node, ast.ClassDef):
            out = [n for d in (*node.decorator_list, *node.bases) for n in ast.walk(d)]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            out = list(ast.walk(node.value))  # an alias of a type
        elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) or (
            isinstance(node, ast.keyword) and node.arg in ("dtype", "kind", "count")
        ):  # a docstring
            out = list(ast.walk(node))
        yield from map(id, out)


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], object]]]:
    if isinstance(node, ast.Compare) and len(node.ops) >= 1:
        for position, op in enumerate(node.ops):
            for new in COMPARE.get(type(op), ()):
                yield f"{type(op).__name__} -> {new.__name__}", lambda n, p=position, k=new: n.ops.__setitem__(p, k())
    elif isinstance(node, ast.BinOp):
        for new in BINARY.get(type(node.op), ()):
            yield f"{type(node.op).__name__} -> {new.__name__}", lambda n, k=new: setattr(n, "op", k())
    elif isinstance(node, ast.BoolOp):
        new_op = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"{type(node.op).__name__} -> {new_op.__name__}", lambda n: setattr(n, "op", new_op())
        for position in range(len(node.values)):
            yield f"operand {position} left out", lambda n, p=position: _drop(n, p)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert | ast.Not):
        yield f"{type(node.op).__name__} left out", _identity
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
    elif isinstance(node, FIELDS_IN_ORDER) and isinstance(node.ctx, ast.Load) and len(node.elts) > 1:
        for first in range(len(node.elts) - 1):
            yield (
                f"elements {first} and {first + 1} swapped",
                lambda n, f=first: n.elts.__setitem__(slice(f, f + 2), n.elts[f : f + 2][::-1]),
            )
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "statement left out", lambda n: setattr(n, "value", ast.Constant(None))


def _call_changes(node: ast.Call) -> Iterator[tuple[str, Callable[[Any], object]]]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in NAMES:
        key = "attr" if isinstance(node.func, ast.Attribute) else "id"
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


def _identity(node: ast.UnaryOp) -> None:
    _become(node, node.operand)


def _drop(node: ast.BoolOp, position: int) -> None:
    node.values.pop(position)
    if len(node.values) == 1:  # Python compiles no `and` with one operand
        _become(node, node.values[0])


def _become(node: ast.AST, other: ast.AST) -> None:
    node.__class__ = other.__class__
    node.__dict__.clear()
    node.__dict__.update(other.__dict__)


class Replace(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that loads one module from a changed tree."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.name = mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        package = self.mutant.path.endswith("__init__.py")
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=str(ROOT / self.mutant.path), is_package=package)
        if package:
            spec.submodule_search_locations = [str((ROOT / self.mutant.path).parent)]
        return spec

    def exec_module(self, module: object) -> None:
        exec(compile(self.mutant.tree(), self.mutant.path, "exec"), module.__dict__)


def run_tests(paths: tuple[str, ...]) -> int:
    """Run tests in this process, with few examples per property and no output, until the first failure."""
    import pytest

    arguments = ["-x", "-q", "--assert=plain", "-o", "addopts="]
    arguments += [part for name in UNUSED_PLUGINS for part in ("-p", f"no:{name}")]
    needs_verl = "tests/core/test_observe.py::test_verl_combines_each_metric_as_its_last_word_says"
    return int(pytest.main([*arguments, "--deselect", needs_verl, *paths]))


def start(mutant: Mutant | None, seconds: int) -> int:
    """Fork a child, which exits with 0 if no test failed."""
    pid = os.fork()
    if pid:
        return pid
    signal.setitimer(signal.ITIMER_PROF, seconds)  # for endless loops, which are counted separately
    os.environ |= {"HYPOTHESIS_PROFILE": "mutation", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    code = 99
    try:
        code = 0
        if mutant is not None:
            sys.meta_path.insert(0, Replace(mutant))
            code = run_tests(FIRST.get(Path(mutant.path).stem, ESTIMATOR_TESTS))
        code = code or run_tests(ALL)
    finally:
        os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of `path:line`, such as steps.py:146")
    parser.add_argument("--seconds", type=int, default=90, help="CPU time that one mutant may take")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    files = [path for target in TARGETS for path in sorted((ROOT / target).glob("*.py"))]
    every = [mutant for path in files for mutant in mutants(path)]
    for part, change, _ in HARMLESS:
        if not any(explains(part, change, mutant) for mutant in every):
            parser.error(f"HARMLESS explains {change!r} of {part!r}, but no mutant does that: remove the entry")
    found = [m for m in every if any(part in f"{m.path}:{m.line}:" for part in options.only)]
    if options.list:
        for mutant in found:
            print(f"{mutant.path}:{mutant.line}: {mutant.what}")
        print(f"{len(found)} mutants")
        return 0
    for name in ("hypothesis.strategies", "numpy", "omegaconf", "pytest", "torch"):
        importlib.import_module(name)  # once, before forking
    gc.freeze()
    began = time.monotonic()
    if os.waitstatus_to_exitcode(os.waitpid(start(None, options.seconds), 0)[1]) != 0:
        print("the tests fail without any change")
        return 2
    print(f"{len(found)} mutants; the tests alone take {time.monotonic() - began:.1f} s", flush=True)
    survivors, explained, endless, running, waiting = [], [], [], {}, list(reversed(found))
    done = 0
    while waiting or running:
        while waiting and len(running) < options.jobs:
            mutant = waiting.pop()
            running[start(mutant, options.seconds)] = mutant
        pid, status = os.wait()
        mutant, done = running.pop(pid), done + 1
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            harmless = any(explains(part, change, mutant) for part, change, _ in HARMLESS)
            kept = explained if harmless else survivors
        elif code == -signal.SIGPROF:
            kept = endless
        else:
            kept = []
        kept.append(mutant)
        if kept is survivors or kept is endless:
            fate = "survives" if kept is survivors else "no end"
            print(f"{fate}: {mutant.path}:{mutant.line}: {mutant.what}", flush=True)
        if done % 100 == 0:
            print(f"{done} done, {len(survivors)} survive, {time.monotonic() - began:.0f} s", flush=True)
    killed = len(found) - len(survivors) - len(explained) - len(endless)
    print(
        f"{killed} of {len(found)} noticed ({killed / max(len(found), 1):.1%}), {len(endless)} did not end, "
        f"{len(explained)} make no difference by the list in this script, {len(survivors)} survive, "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
