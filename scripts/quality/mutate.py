"""Mutation testing: change each formula of the pure core a little, and check that a fast test fails.

    python scripts/quality/mutate.py [--jobs 2] [--only steps.py rows.py:54] [--list] [--seconds 90]

A mutant is one change: a sign, a comparison, a constant, minimum for maximum, a statement or a condition left out,
neighbours swapped. Each runs in a forked process with the changed module; the file is not modified. The script prints
each mutant that passes all tests, with its line. Either a test is missing, or the change makes no difference and
belongs on the list below, with the reason.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from mutants import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("verl_ext/core", "verl_ext/estimators")
SETTINGS_TESTS = ("tests/test_settings.py",)
ESTIMATOR_TESTS = ("tests/estimators/test_compositions.py", *SETTINGS_TESTS)
ALL = (
    "tests/estimators/test_worked_example.py",
    "tests/core",
    *SETTINGS_TESTS,
    "tests/test_registry.py",
    "tests/estimators/test_compositions.py",
    "tests/estimators/test_components.py",
    "tests/estimators/test_compose.py",
    "tests/estimators/test_own_steps.py",
    "tests/estimators/test_meaning.py",
    "tests/estimators/test_accuracy_and_kl.py",
    "tests/estimators/test_direct_call.py",
    "tests/estimators/test_maxrl_and_gd2po.py",
    "tests/estimators/test_against_reference.py",
)
NEEDS_VERL = "tests/core/test_metrics.py::test_verl_combines_each_metric_as_its_last_word_says"
UNUSED_PLUGINS = ("cacheprovider", "unraisableexception", "threadexception")

# Changes that do not change any result: part of the line, part of the change, and the reason. The list only explains
# survivors: a mutant that fails a test counts as noticed.
HARMLESS = (
    ('_NO_BASE = ("compose", "hadw")', "swapped", "only whether a name is among them counts"),
    ("np.fmax.reduce(np.abs(values), axis=None", "axis= left out", "whitening has one column"),
    ("inner[1:] == (type(None),)", "operand 0 left out", "no other type that can be read ends in None"),
    ("abs(value) <= sys.float_info.max", "LtE -> Lt", "the largest number itself may count as either"),
    ("[*window, value]", "swapped", "each of them is judged alone"),
    ("(DivideByMean, DivideByBatchStd", "swapped", "the order of the steps that a list may name"),
    ("np.abs(values) > TOLERANCE", "Gt -> GtE", "a value of exactly TOLERANCE may count as either"),
    ("(WeighAndSum, Whiten, Balance", "swapped", "the same"),
    ("_KINDS: tuple[type[Step], ...] = (", "swapped", "the same"),
    ('("balance", "drop_conflicts", "weigh_by_difficulty"', "swapped", "only whether a name is among them counts"),
    ('("divide_by_mean", "divide_by_batch_std", "scale_by_std"', "swapped", "the same"),
    ("out=np.zeros(mean.shape), where=varies", "where= left out", "centring gives a group that does not vary 0"),
    ("out=np.zeros(mean.shape), where=varies", "zeros -> ones", "the same"),
    ("out=np.zeros(mean.shape), where=varies", "BitAnd -> BitOr", "the same"),
    ("turns.number.tolist(), strict=True", "True -> False", "each row has both"),
    ("reshape(-1, 3)", "1 -> 2", "numpy infers any negative length"),
    ("append=-1", "1 -> 2", "no session has this number either"),
    ("reached = on >= self.at_least", "GtE -> Gt", "a reward just at the margin may count as either"),
    ("values > threshold + margin", "Gt -> GtE", "the same"),
    ("(scored < -1e-6) | (scored > 1 + 1e-6)", "Lt -> LtE", "an accuracy of exactly the margin may count as either"),
    ("(scored < -1e-6) | (scored > 1 + 1e-6)", "Gt -> GtE", "the same"),
    ("negative := values < -TOLERANCE", "Lt -> LtE", "the same"),
    ("where=varies & (mean > 0)", "Gt -> GtE", "a group with mean 0 does not vary"),
    ("out=np.zeros(count.shape), where=deviations > 0", "zeros -> ones", "it multiplies values of 0"),
    ("if TYPE_CHECKING:", "negated", "it imports what only annotations need"),
    ("max(window) - min(window) < 0.01", "Lt -> LtE", "a warning's threshold"),
    ("abs(y - window[-1]) < 0.1", "Lt -> LtE", "a warning's threshold"),
    ("abs(y - window[-1]) < 0.1", "USub left out", "the values of this window are alike"),
    ("abs(y - window[-1]) < 0.1", "1 -> ", "the same"),
    ("np.where(zero, 1.0, divisor)", "1.0 -> 2.0", "its quotient is replaced by 0"),
    ("(dim=-1", "USub left out", "of two dimensions the last is the second"),
    ("narrow = values.dtype.itemsize < 4", "Lt -> LtE", "float32 is summed in float32 either way"),
    ("narrow = values.dtype.itemsize < 4", "4 -> 5", "the same"),
    ("if (np.abs(mean) > TOLERANCE", "Gt -> GtE", "a mean just at the limit may count as either"),
)


def harmless(mutant: Mutant) -> bool:
    """Whether `HARMLESS` explains this mutant."""
    return any(explains(part, change, mutant) for part, change, _ in HARMLESS)


def explains(part: str, change: str, mutant: Mutant) -> bool:
    """Whether an entry of `HARMLESS` is about this mutant."""
    return change in mutant.what and part in _lines(mutant.path)[mutant.line - 1]


@functools.cache
def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")


def replace(mutant: Mutant) -> None:
    """Let every import of the mutant's file load the changed module."""
    get_code = SourceFileLoader.get_code

    def get_changed_code(loader: SourceFileLoader, name: str) -> Any:
        if Path(loader.path) == ROOT / mutant.path:
            return compile(mutant.tree(), loader.path, "exec")
        return get_code(loader, name)

    SourceFileLoader.get_code = get_changed_code


def first_tests(path: Path) -> list[str]:
    """The tests and the doctests of a file, which run before all others: a mutant that fails them needs no more."""
    found = sorted(Path("tests/core").glob(f"test_{path.stem}*.py"))
    return [*(map(str, found) if found else ESTIMATOR_TESTS), str(path)]


def run_tests(paths: Iterable[str]) -> int:
    """Run tests in this process, with few examples per property and no output, until the first failure."""
    import pytest

    arguments = ["-x", "-q", "--assert=plain", "-o", "addopts=", "--doctest-modules", "--deselect", NEEDS_VERL]
    arguments += [part for name in UNUSED_PLUGINS for part in ("-p", f"no:{name}")]
    return int(pytest.main([*arguments, *paths]))


def start(mutant: Mutant | None, first: Iterable[str], seconds: int) -> int:
    """Fork a child, which changes the code, runs the first tests and then all, and exits with 0 if none failed."""
    pid = os.fork()
    if pid:
        return pid
    signal.setitimer(signal.ITIMER_PROF, seconds)  # for endless loops, which are counted separately
    os.environ |= {"HYPOTHESIS_PROFILE": "mutation", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    code = 99  # of an error outside the tests
    try:
        if mutant is not None:
            replace(mutant)
        code = run_tests(first) or run_tests(ALL)
    finally:
        os._exit(code)


def exit_codes(found: Sequence[Mutant], jobs: int, seconds: int) -> Iterator[tuple[Mutant, int]]:
    """Each mutant with the exit code of its child, in the order in which the children end."""
    waiting, running = deque(found), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.popleft()
            running[start(mutant, first_tests(mutant.path), seconds)] = mutant
        pid, status = os.wait()
        yield running.pop(pid), os.waitstatus_to_exitcode(status)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of what --list prints, such as steps.py:146")
    parser.add_argument("--seconds", type=int, default=90, help="CPU time that one mutant may take")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    every = [m for target in TARGETS for path in sorted(Path(target).glob("*.py")) for m in mutants(path)]
    for part, change, _ in HARMLESS:
        if not any(explains(part, change, mutant) for mutant in every):
            parser.error(f"HARMLESS explains {change!r} of {part!r}, but no mutant does that: remove the entry")
    found = [mutant for mutant in every if any(part in str(mutant) for part in options.only)]
    if options.list:
        print(*found, f"{len(found)} mutants", sep="\n")
        return 0
    for name in ("hypothesis.strategies", "numpy", "omegaconf", "pytest", "torch"):
        importlib.import_module(name)  # once, before forking
    gc.freeze()
    began = time.monotonic()
    first = sorted({test for mutant in found for test in first_tests(mutant.path)})
    if os.waitstatus_to_exitcode(os.waitpid(start(None, first, options.seconds), 0)[1]) != 0:
        print("the tests fail without any change")
        return 2
    print(f"{len(found)} mutants; the tests alone take {time.monotonic() - began:.1f} s", flush=True)
    fates: Counter[str] = Counter()
    for mutant, code in exit_codes(found, options.jobs, options.seconds):
        if code == 0:
            fate = "harmless" if harmless(mutant) else "survives"
        else:
            fate = "no end" if code == -signal.SIGPROF else "noticed"
        fates[fate] += 1
        if fate in ("survives", "no end"):
            print(f"{fate}: {mutant}", flush=True)
        if fates.total() % 100 == 0:
            print(f"{fates.total()} done, {fates['survives']} survive, {time.monotonic() - began:.0f} s", flush=True)
    print(
        f"{fates['noticed']} of {len(found)} noticed ({fates['noticed'] / max(len(found), 1):.1%}), "
        f"{fates['no end']} did not end, {fates['harmless']} make no difference by the list in this script, "
        f"{fates['survives']} survive, {time.monotonic() - began:.0f} s"
    )
    return 1 if fates["survives"] else 0


if __name__ == "__main__":
    sys.exit(main())
