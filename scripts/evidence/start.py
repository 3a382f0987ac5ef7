"""Judge a scarce start by its samples, and find the weight of `format` that gives grpo gdpo's share of it.

    python scripts/evidence/start.py judge outputs/real/tools-scarce    # exit status 0 if it is right
    python scripts/evidence/start.py weight outputs/real/tools-scarce   # prints the weight

The samples: 8 answers at temperature 1 to each of the 32 questions for checks, and one greedy answer. A start is right
if mean format lies between .1 and .4, format varies in at least half of the groups, answers without format have a mean
correctness above -2 (their calls can be read: -3 is the least), and greedy format is below .5.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from real_tools import REWARDS, share

from verl_ext import Batch, Settings, build


def samples(folder: Path) -> tuple[pd.DataFrame, float]:
    """The rewards at temperature 1, a row an answer, and greedy format."""
    found = json.loads((folder / "samples.json").read_text(encoding="utf-8"))
    rows = pd.DataFrame(found["1.0"]["scores"])
    rows["name"] = [str(at // 8) for at in range(len(rows))]
    return rows, found["0.0"]["means"]["format"]


def judge(folder: Path) -> int:
    rows, greedy = samples(folder)
    mean, without = rows["format"].mean(), rows[rows["format"] == 0]["correctness"].mean()
    varies = (rows.groupby("name")["format"].nunique() > 1).mean()
    right = 0.1 <= mean <= 0.4 and varies >= 0.5 and without > -2 and greedy < 0.5
    print(
        f"{folder.name}: format {mean:.3f}, varies in {varies:.3f} of {rows.name.nunique()} groups, greedy "
        f"{greedy:.3f}; correctness {rows.correctness.mean():.3f}, without format {without:.3f}: right {right}"
    )
    return 0 if right else 1


def share_under(rows: pd.DataFrame, estimator: str, section: dict[str, Any], weight: float = 1.0) -> float:
    """Format's share of the advantages' variance, as `compare` shows it."""
    settings = Settings.parse({"rewards": {"keys": REWARDS, "weights": [1.0, weight]}, estimator: section})
    batch = Batch.of(rows[REWARDS].to_numpy(float), rows.name.tolist(), keys=REWARDS)
    return share(rows.assign(advantage=build(estimator, settings)(batch).advantages))


def weight(folder: Path) -> int:
    """Bisect: the share of format grows with its weight."""
    rows, _ = samples(folder)
    grpo = {"steps": ["weigh_and_sum", "centre", {"step": "scale_by_std", "epsilon": 1e-6}]}
    wanted = share_under(rows, "gdpo", {"whiten": "sequence"})
    low, high = 0.0, 100.0
    while high - low > 0.001:
        middle = (low + high) / 2
        low, high = (middle, high) if share_under(rows, "compose", grpo, middle) < wanted else (low, middle)
    found = round(high, 2)
    shares = [share_under(rows, "compose", grpo, each) for each in (1.0, found)]
    print(f"format's share: grpo {shares[0]:.4f}, gdpo {wanted:.4f}, weight {found} {shares[1]:.4f}", file=sys.stderr)
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit({"judge": judge, "weight": weight}[sys.argv[1]](Path(sys.argv[2])))
