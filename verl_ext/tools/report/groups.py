"""`report --groups`: dead groups, and the hardest of those that a run learned from, in dumped advantages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from verl_ext.core.groups import Bools
from verl_ext.tools.rollouts import read_dumps
from verl_ext.tools.tables import Rows, plain


def report(paths: Sequence[Path], *, top: int) -> str:
    """Return the text to print. Rewards are as the estimator saw them: after conditions."""
    dump = read_dumps(paths)
    groups, table, keys = dump.groups, dump.table, list(dump.seen)
    steps = table["step"]
    varies = {key: groups.varies(dump.seen[key]) for key in keys}
    advantages = table["advantage"].to_numpy(float)
    learned: Bools = groups.sum(np.abs(advantages)) > 0
    files, count = len(dump.updates), len(groups)
    lines = [
        f"{files} files, steps {steps.min()} to {steps.max()}, {count} groups, {len(table)} responses",
        f"dead, no reward varies: {_share(~np.logical_or.reduce(list(varies.values())))}",
        *(f"  {key} does not vary: {_share(~each)}" for key, each in varies.items()),
        f"every advantage is 0: {_share(~learned)}",
    ]
    level = "accuracy" if "accuracy" in table else "total"
    height = groups.mean(table[level].to_numpy(float))
    chosen = [group for group in np.argsort(height, kind="stable").tolist() if learned[group]][:top]
    head = ("step", "uid", "responses", level, *(f"{key} mean ± std" for key in keys), "tokens", "largest |A|")
    rows: Rows = [head]
    for group in chosen:
        members = table[groups.ids == group]
        rewards = [members[f"reward/{key}"] for key in keys]
        rows.append(
            (
                str(members["step"].iloc[0]),
                str(members["uid"].iloc[0]),
                str(len(members)),
                f"{height[group]:.3f}",
                *(f"{values.mean():.3f} ± {values.std():.3f}" for values in rewards),
                f"{members['tokens'].mean():.1f}",
                f"{members['advantage'].abs().max():.3f}",
            )
        )
    lines += ["", f"hardest of those with an advantage (least {level})", plain(rows)]
    return "\n".join([*lines, *dump.notes])


def _share(which: Bools) -> str:
    return f"{int(which.sum())} of {len(which)} groups ({which.mean():.1%})"
