"""Train small policies with exact gradients, and compare the other estimators with grpo over many seeds.

    python scripts/evidence/simulate_policies.py            # about two minutes: results, tables, picture
    python scripts/evidence/simulate_policies.py dgpo       # only this study; the others stay as they are stored
    python scripts/evidence/simulate_policies.py --quick    # repeats two seeds; exit status 1 if results differ

A policy is a softmax over a few answers per prompt, so the gradient of its log-probabilities is exact. The advantages
come from this package's estimators. docs/pages/estimators_compared.md states the model and shows the results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from softmax_policies import CONSTANT, EVERY, SEQUENCE, STEPS, TOKEN, Arm, Condition, Curves, Study, World, rates, train

from verl_ext.tools.picture import COLOURS, dress
from verl_ext.tools.tables import Rows, markdown

PAGES = Path(__file__).parents[2] / "docs" / "pages"
RESULTS = Path(__file__).with_name("estimators_compared.json")
PAGE, REST = (PAGES / f"estimators_compared{end}" for end in (".md", "_all.md"))
PICTURE = PAGES / "pictures" / "estimators_compared.png"
SEEDS, QUICK_SEEDS = range(20), range(2)

ONE_RIGHT = ((1, 0),) + ((0, 0),) * 7
DIFFICULTY = ("hardest third", "hardest third, new prompts", "easiest third", "all prompts")
STUDIES = {
    "drgrpo": Study(
        "Do wrong answers grow where length is free?",
        (
            Arm(f"grpo, {SEQUENCE}", loss=SEQUENCE),
            Arm(f"grpo, {TOKEN}"),
            Arm(f"drgrpo, {CONSTANT}", "drgrpo", loss=CONSTANT),
            Arm(f"drgrpo, {SEQUENCE}", "drgrpo", {"check_loss": False}, loss=SEQUENCE),
        ),
        ("length of wrong answers", "length of right answers", "all prompts"),
        ONE_RIGHT[:4],
        lengths=tuple(range(32, 257, 32)),
    ),
    "dgpo": Study(
        "Do the hardest prompts gain?",
        (Arm("grpo"), Arm("dgpo", "dgpo"), Arm("dgpo without DQW", "dgpo", {"dqw": False})),
        DIFFICULTY,
        ONE_RIGHT,
    ),
    "hadw": Study(
        "Do the hardest prompts gain with 4 rollouts?",
        (Arm("grpo"), Arm("hadw", "hadw"), Arm("hadw, lambda_scale=1", "hadw", {"lambda_scale": 1.0})),
        DIFFICULTY,
        ONE_RIGHT,
        rollouts=4,
    ),
    "gdpo": Study(
        "Does the reward of small scale gain?",
        (Arm("grpo"), Arm("gdpo", "gdpo")),
        ("format", "all prompts", "hardest third"),
        ((1, 1), (1, 0), (0, 1), (0, 0)) * 2,
        keys=("correctness", "format"),
        scales=(6.0, 1.0),
    ),
}

CONDITIONS = {
    "SGD, same step": Condition(same_step=True),
    "SGD, same rate": Condition(),
    "Adam": Condition(adam=True, mixed=True),
    "Adam by prompt": Condition(adam=True),
    "nothing shared": Condition(same_step=True, sharing=0.0),
    "nearly all shared": Condition(same_step=True, sharing=60.0),
}
DRAWN = {"SGD, same step": "-", "Adam": "--", "Adam by prompt": ":"}


def runs(study: Study, condition: Condition, rate: Mapping[str, float], seeds: range) -> dict[str, Curves]:
    """Every arm on every seed: label to measures `[seeds, points]`."""
    found, worlds = {}, [World(study, seed, condition.sharing) for seed in seeds]
    for arm in study.arms:
        curves = [train(world, arm, rate[arm.label], condition) for world in worlds]
        found[arm.label] = {name: np.array([curve[name] for curve in curves]) for name in study.measures}
    return found


def compare(base: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """The paired difference over seeds, its spread, the p of a t test, and what would be seen at 80 % power."""
    from scipy import stats

    gap, count = other - base, len(base)
    error = float(gap.std(ddof=1)) / count**0.5
    p = 2 * stats.t.sf(abs(gap.mean()) / error, count - 1) if error else float(not gap.any())
    seen = (stats.t.ppf(0.975, count - 1) + stats.t.ppf(0.8, count - 1)) * error
    return {"difference": float(gap.mean()), "spread": float(gap.std(ddof=1)), "p": float(p), "seen": float(seen)}


def line(study: Study, found: Mapping[str, Curves], label: str) -> dict[str, Any]:
    """The first measure over the steps, against the baseline or for lengths the start, and its 95 % interval."""
    from scipy import stats

    name = study.measures[0]
    values = found[label][name]
    gap = values - (values[:, :1] if len(study.lengths) > 1 else found[study.arms[0].label][name])
    error = stats.t.ppf(0.975, len(gap) - 1) * gap.std(axis=0, ddof=1) / len(gap) ** 0.5
    return {"mean": gap.mean(axis=0).tolist(), "error": error.tolist()}


def summary(study: Study, found: Mapping[str, Curves], rate: Mapping[str, float]) -> dict[str, Any]:
    """What is stored of one study under one condition; values are those after the last step."""
    base, *others = study.arms
    last = {label: {name: curve[:, -1] for name, curve in curves.items()} for label, curves in found.items()}
    since = {
        label: compare(curves[study.measures[0]][:, 0], last[label][study.measures[0]])
        for label, curves in found.items()
    }
    return {
        "rates": dict(rate),
        "values": {
            label: {name: {"mean": float(x.mean()), "spread": float(x.std(ddof=1))} for name, x in values.items()}
            for label, values in last.items()
        },
        "against_start": since,
        "lines": {arm.label: line(study, found, arm.label) for arm in study.arms},
        "against_baseline": {
            arm.label: {name: compare(last[base.label][name], last[arm.label][name]) for name in study.measures}
            for arm in others
        },
        "first_seeds": {
            label: {name: x[: len(QUICK_SEEDS)].tolist() for name, x in values.items()}
            for label, values in last.items()
        },
    }


def rounded(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: rounded(value) for key, value in data.items()}
    if isinstance(data, list):
        return [rounded(value) for value in data]
    return float(f"{data:.7g}")


def ordered(names: Iterable[str], found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in names if name in found}


def digits(name: str) -> str:
    return ".1f" if name.startswith("length") else ".3f"


def chance(p: float) -> str:
    """A p value; where it is tiny its size says nothing, because the differences are not exactly normal."""
    return f"{p:.2g}" if p >= 1e-6 else "< 1e-6"


def changes(study: Study, found: Mapping[str, Any], name: str) -> str:
    """One row per condition and arm: the measure, its difference from the baseline, p, and what would be seen."""
    base, form = study.arms[0].label, digits(name)
    rows: Rows = [("learning", "estimator", f"with {base}", "with it", "difference", "p", "seen from")]
    for condition, one in found.items():
        before = one["values"][base][name]
        for label, against in one["against_baseline"].items():
            after, gap = one["values"][label][name], against[name]
            cells = [f"{x['mean']:{form}} ± {x['spread']:{form}}" for x in (before, after)]
            cells += [f"{gap['difference']:+{form}} ± {gap['spread']:{form}}", chance(gap["p"]), f"{gap['seen']:.2g}"]
            rows.append((condition, label, *cells))
    return markdown(rows)


def growth(study: Study, found: Mapping[str, Any]) -> str:
    """The change of the first measure since the start, one column per arm."""
    form = digits(study.measures[0])
    rows: Rows = [("learning", *(arm.label for arm in study.arms))]
    for condition, one in found.items():
        cells = [one["against_start"][arm.label] for arm in study.arms]
        rows.append(
            (condition, *(f"{x['difference']:+{form}} ± {x['spread']:{form}}, p {chance(x['p'])}" for x in cells))
        )
    return markdown(rows)


def blocks(results: Mapping[str, Any]) -> dict[str, str]:
    """The generated parts of the page, by name: the first measure of each study, and how lengths grow."""
    made = {key: changes(study, results["studies"][key], study.measures[0]) for key, study in STUDIES.items()}
    return made | {"drgrpo: growth": growth(STUDIES["drgrpo"], results["studies"]["drgrpo"])}


def other_blocks(results: Mapping[str, Any]) -> dict[str, str]:
    """The generated parts of the page with all other measures."""
    return {
        key: "\n\n".join(
            f"{name.capitalize()}:\n\n{changes(study, results['studies'][key], name)}" for name in study.measures[1:]
        )
        for key, study in STUDIES.items()
    }


def filled(page: str, made: Mapping[str, str]) -> str:
    """The page with its generated parts replaced."""
    for name, text in made.items():
        start, end = f"<!-- made: {name} -->\n", "<!-- end -->"
        before, found, after = page.partition(start)
        if not found:
            raise ValueError(f"the page has no line {start.strip()!r}: add it, and {end!r} after it")
        page = f"{before}{start}\n{text}\n\n{end}{after.partition(end)[2]}"
    return page


def draw(results: Mapping[str, Any]) -> None:
    """The first measure of each study over the steps: against the baseline, or for lengths against the start."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 7.6), layout="constrained")
    for ax, (key, study) in zip(figure.subplots(2, 2).ravel(), STUDIES.items(), strict=True):
        name, long = study.measures[0], len(study.lengths) > 1
        for condition, style in DRAWN.items():
            for colour, arm in zip(COLOURS, study.arms if long else study.arms[1:], strict=False):
                mean, error = (np.array(x) for x in results["studies"][key][condition]["lines"][arm.label].values())
                steps = np.arange(len(mean)) * EVERY
                ax.plot(steps, mean, style, color=colour, label=arm.label if style == "-" else None)
                ax.fill_between(steps, mean - error, mean + error, color=colour, alpha=0.18, linewidth=0)
        ax.axhline(0, color="#888888", linewidth=0.8)
        dress(ax, f"{study.question}\n{name}: change {'since the start' if long else 'against grpo'}", "")
        ax.title.set_fontsize(10)
        ax.set_xlabel("training step")
        ax.legend(fontsize=8, frameon=False)
    words = {"-": "solid", "--": "dashed", ":": "dotted"}
    lines = "; ".join(f"{words[style]}: {condition}" for condition, style in DRAWN.items())
    figure.suptitle(f"{lines}; band: 95 % interval of the mean over {len(SEEDS)} seeds", fontsize=11)
    figure.savefig(PICTURE, dpi=110)


def differences(results: Mapping[str, Any], studies: list[str]) -> list[str]:
    """Repeat the first seeds with the stored rates; every value that is not the stored one, by name."""
    wrong = []
    for key, (name, condition) in itertools.product(studies, CONDITIONS.items()):
        stored = results["studies"].get(key, {}).get(name)
        if stored is None:
            wrong.append(f"{key}, {name}: not stored")
            continue
        for label, curves in runs(STUDIES[key], condition, stored["rates"], QUICK_SEEDS).items():
            for measure, curve in curves.items():
                found, expected = curve[:, -1], stored["first_seeds"][label][measure]
                if not np.allclose(found, expected, rtol=1e-6, atol=0):
                    wrong.append(f"{key}, {name}, {label}, {measure}: {found.tolist()}, stored {expected}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="study", help=f"only these of {', '.join(STUDIES)}; default: all")
    parser.add_argument("--quick", action="store_true", help="repeat two seeds and compare with the stored results")
    parser.add_argument("--missing", action="store_true", help="keep what is stored, run only the rest")
    options = parser.parse_args()
    if unknown := [key for key in options.studies if key not in STUDIES]:
        parser.error(f"unknown study {unknown[0]}, valid: {', '.join(STUDIES)}")
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"studies": {}}
    if options.quick:
        wrong = differences(stored, options.studies or list(STUDIES))
        print("\n".join(wrong) or f"{len(QUICK_SEEDS)} seeds repeated: all values as stored in {RESULTS.name}")
        return 1 if wrong else 0
    try:
        import matplotlib  # noqa: F401 - before the minutes of work, not after them
        import scipy  # noqa: F401
    except ImportError as error:
        sys.exit(f"{error}: the tables need scipy and the picture matplotlib; pip install scipy matplotlib")
    began, studies = time.monotonic(), stored["studies"]
    for key, (name, condition) in itertools.product(options.studies or STUDIES, CONDITIONS.items()):
        if options.missing and name in studies.get(key, {}):
            continue
        rate = rates(STUDIES[key], condition)
        found = rounded(summary(STUDIES[key], runs(STUDIES[key], condition, rate, SEEDS), rate))
        studies[key] = ordered(CONDITIONS, {**studies.get(key, {}), name: found})
        stored = {"seeds": len(SEEDS), "steps": STEPS, "studies": ordered(STUDIES, studies)}
        RESULTS.write_text(json.dumps(stored) + "\n", encoding="utf-8")
        print(f"{time.monotonic() - began:4.0f} s  {key}: {name}", flush=True)
    if missing := [key for key in STUDIES if set(studies.get(key, {})) != set(CONDITIONS)]:
        sys.exit(f"{RESULTS.name} does not have all results of {', '.join(missing)}: run this script with --missing")
    draw(stored)
    for page, made in ((PAGE, blocks(stored)), (REST, other_blocks(stored))):
        page.write_text(filled(page.read_text(encoding="utf-8"), made), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
