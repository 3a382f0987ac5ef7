"""The command line of the net."""

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tomllib

from same_as.cases import KINDS
from same_as.compare import differences, expected

HERE = Path(__file__).resolve().parents[3]
"""The current checkout."""
SHARES = {"core": 0.28, "lists": 0.06, "default": 0.29, "ray": 0.25, "filter": 0.06, "resume": 0.06}
"""The share of each kind in the batches."""
SHOWN = 10
"""Differing cases that are printed for each kind."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two versions; return 1 if they differ."""
    parser = argparse.ArgumentParser(description="Compare this checkout with a commit on the same seeded cases.")
    parser.add_argument(
        "commit", help="the commit to compare with, such as HEAD or e318932; or a folder with a version"
    )
    parser.add_argument("--batches", type=int, default=3000, help="batches in all (default: 3000)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"kinds of cases (default: {','.join(KINDS)})")
    parser.add_argument("--case", metavar="KIND:SEED", help="run one case alone and print all that differs")
    parser.add_argument("--expect", action="append", default=[], metavar="KIND", help="a kind that may differ")
    parser.add_argument("--new", type=Path, default=HERE, help="the folder of the new version (default: this checkout)")
    parser.add_argument("--keep", type=Path, help="folder for the results and logs of both versions")
    parser.add_argument("--coverage", action="store_true", help="also print how often each setting was drawn")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="same_as-") as name:
        folder = options.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        with_old = version_of(options.commit, Path(name))
        try:
            plan = plan_of(options)
            results = run_both(with_old, options.new.resolve(), plan, folder)
        finally:
            if with_old.is_relative_to(name):
                git("worktree", "remove", "--force", str(with_old))
    status = report(*results, options)
    used = os.times()
    print(
        f"{time.monotonic() - began:.0f} s of wall clock, {used.children_user + used.children_system:.0f} s of "
        f"processor time in both versions"
    )
    return status


def version_of(commit: str, folder: Path) -> Path:
    """Return the folder of a version: that of a new worktree of a commit, or a folder that exists."""
    if Path(commit).is_dir():
        return Path(commit).resolve()
    target = folder / "old"
    git("worktree", "add", "--detach", str(target), commit)
    return target


def git(*words: str) -> None:
    subprocess.run(["git", "-C", str(HERE), *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def plan_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return which cases run."""
    if options.case:
        kind, _, seed = options.case.partition(":")
        return {kind: {"seeds": [int(seed)]}}
    plan: dict[str, Any] = {}
    # Commands come first: they are forked from a process that is still small.
    for kind in sorted(options.kinds.split(","), key=lambda kind: kind != "check"):
        if kind in SHARES:
            plan[kind] = {"batches": max(1, round(SHARES[kind] * options.batches))}
        else:
            plan[kind] = {"seeds": list(range(count_of(kind)))}
    return plan


def count_of(kind: str) -> int:
    """Return the number of cases of a kind that is a list."""
    if kind == "trainers":
        from same_as.trainer_kinds import KINDS as TRAINERS

        return len(TRAINERS)
    from same_as.command_lines import COMMANDS

    return len(COMMANDS)


def run_both(old: Path, new: Path, plan: dict[str, Any], folder: Path) -> tuple[list[Any], list[Any]]:
    """Run the two versions at the same time and return their results."""
    (folder / "plan.json").write_text(json.dumps(plan))
    processes = []
    for name, root in (("old", old), ("new", new)):
        log = (folder / f"{name}.log").open("w")
        command = [sys.executable, "-m", "same_as.runner", str(root), "plan.json", f"{name}.pickle"]
        with log:
            processes.append(
                subprocess.Popen(command, env=environment(root), cwd=folder, stdout=log, stderr=subprocess.STDOUT)
            )
    codes = [process.wait() for process in processes]
    for name, code in zip(("old", "new"), codes, strict=True):
        if code:
            tail = "\n".join((folder / f"{name}.log").read_text(errors="replace").splitlines()[-15:])
            raise SystemExit(f"the process of the {name} version ended with {code}:\n{tail}")
    old_results, new_results = (list(read(folder / f"{name}.pickle")) for name in ("old", "new"))
    return old_results, new_results


def environment(root: Path) -> dict[str, str]:
    """Return the environment of a version's process: it imports the version and loads its plugins.

    The entry points of the installed package may name modules that the version lacks, so its own are named.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    plugins = project["entry-points"]["verl.plugins"].values()
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPATH": os.pathsep.join([str(root), str(Path(__file__).resolve().parents[1])]),
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        "VERL_USE_EXTERNAL_MODULES": ",".join(plugins),
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }


def read(path: Path) -> Iterator[Any]:
    """Read pickled results one after the other."""
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except EOFError:
                return


def report(old: list[Any], new: list[Any], options: argparse.Namespace) -> int:
    """Print what differs, and how much was compared; return 1 if something differs that is not expected."""
    tables: defaultdict[str, Counter[str]] = defaultdict(Counter)
    tags: defaultdict[str, Counter[str]] = defaultdict(Counter)
    found: defaultdict[str, list[tuple[Any, list[str]]]] = defaultdict(list)
    skipped: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    if [case["name"] for case in old] != [case["name"] for case in new]:
        raise SystemExit("the two versions did not run the same cases")
    for before, after in zip(old, new, strict=True):
        kind, counts = after["kind"], tables[after["kind"]]
        counts["cases"] += 1
        counts["batches"] += after["planned"]
        for tag in filter(None, after["tags"]):
            tags[tag][after["end"]] += 1
        if "skipped" in (before["end"], after["end"]):
            counts["skipped"] += 1
            skipped[
                f"{'old' if before['end'] == 'skipped' else 'new'} version lacks {before['text'] or after['text']}"
            ] += 1
            continue
        counts["compared"] += 1
        counts["raised"] += after["end"] == "raised"
        counts["batches computed"] += len(after["batches"])
        texts = differences(before, after)
        intended = [text for text in texts if expected(kind, after["method"], text)]
        reasons.update(expected(kind, after["method"], text) for text in intended[:1])
        if rest := [text for text in texts if text not in intended]:
            counts["different"] += 1
            found[kind].append((after, rest))
    _print_table(tables)
    for text, count in skipped.most_common(None if options.coverage else 12):
        print(f"skipped {count:4}  {text}")
    for reason, count in reasons.items():
        print(f"expected {count:3}  {reason}")
    for kind, cases in found.items():
        _print_kind(kind, cases, None if options.case else SHOWN)
    if options.coverage:
        _print_coverage(tags)
    bad = [kind for kind in found if kind not in options.expect]
    print(f"different: {', '.join(bad)}" if bad else "no difference")
    return int(bool(bad))


def _print_table(tables: dict[str, Counter[str]]) -> None:
    names = ("cases", "batches", "compared", "skipped", "raised", "batches computed", "different")
    print(f"{'kind':10}" + "".join(f"{name:>{max(10, len(name) + 2)}}" for name in names))
    total: Counter[str] = Counter()
    for kind, counts in [*tables.items(), ("all", total)]:
        print(f"{kind:10}" + "".join(f"{counts[name]:{max(10, len(name) + 2)}}" for name in names))
        total.update(counts)


def _print_kind(kind: str, cases: list[tuple[Any, list[str]]], shown: int | None) -> None:
    """Print the differing cases of a kind, one of each method first."""
    print(f"\n{kind}: {len(cases)} cases differ, by method: ", end="")
    methods = Counter(case["method"] for case, _ in cases)
    print(", ".join(f"{method or 'none'} {count}" for method, count in methods.most_common()))
    what = Counter(text.partition(" of batch")[0].partition(":")[0] for _, texts in cases for text in texts[:1])
    print("  first difference: " + ", ".join(f"{text} {count}" for text, count in what.most_common(8)))
    for case, texts in _one_of_each_method_first(cases)[:shown]:
        more = f" (and {len(texts) - 1} more)" if shown is not None and len(texts) > 1 else ""
        print(f"  --case {case['name']}  {case['method']}: {texts[0]}{more}")
        for text in texts[1:] if shown is None else ():
            print(f"      {text}")


def _one_of_each_method_first(cases: list[tuple[Any, list[str]]]) -> list[tuple[Any, list[str]]]:
    """Order differing cases so that those that are printed show many methods."""
    seen: Counter[str] = Counter()
    ranked = []
    for number, (case, texts) in enumerate(cases):
        ranked.append((seen[case["method"]], number, case, texts))
        seen[case["method"]] += 1
    ranked.sort(key=lambda entry: entry[:2])
    return [(case, texts) for *_, case, texts in ranked]


def _print_coverage(tags: dict[str, Counter[str]]) -> None:
    print("\ncases by what they have (of the new version): computed, raised, skipped")
    for tag in sorted(tags):
        print(f"  {tag:40}" + "".join(f"{tags[tag][end]:7}" for end in ("computed", "raised", "skipped")))
