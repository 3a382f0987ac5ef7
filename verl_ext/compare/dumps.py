"""Read dumped advantages (`algorithm.verl_ext.dump_dir`). They have no text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from verl_ext.compare.rollouts import TOKENS, Rollouts
from verl_ext.core.groups import Groups
from verl_ext.errors import ConfigurationError, printable
from verl_ext.registry import ESTIMATORS
from verl_ext.report import groups as dumped


def read(path: Path, length: str | None) -> Rollouts:
    """The rewards and lengths of the dumps in a folder, or of one."""
    if length is not None:
        raise ConfigurationError(
            f"--length {length} has no effect on dumped advantages, which have the tokens: remove it"
        )
    dump = dumped.read([path])
    order = np.lexsort((dump.table["update"], dump.table["step"]))
    groups = Groups.of(dump.groups.ids[order].tolist())
    columns = {key: dump.table[f"reward/{key}"][order] for key in dump.keys}
    total = next(name for name in ("total", "score", "sum") if name not in columns)
    if "accuracy" in dump.table and "accuracy" not in columns:
        columns["accuracy"] = dump.table["accuracy"][order]
    columns[total] = dump.table["total"][order]
    run_as = sorted(set(dump.table["estimator"])) if "estimator" in dump.table else []
    ours = set(run_as) & set(ESTIMATORS)
    what = "the weighted sum of the rewards" if ours else "the score"
    if ours and len(ours) < len(run_as):
        what = f"the weighted sum of the rewards under {', '.join(sorted(ours))}, else the score"
    notes = [f"the run's estimator: {', '.join(map(printable, run_as))}; `{total}` is {what}"]
    if dump.left_out:
        notes += [f"{len(dump.left_out)} unreadable file(s) left out:", *map(printable, dump.left_out)]
    uids = dump.table["uid"][order]
    return Rollouts(
        path=path,
        step=dump.table["step"][order].astype(np.intp),
        update=dump.table["update"][order].astype(np.intp),
        groups=groups,
        prompts=uids[groups.firsts].tolist(),
        columns=columns,
        names=tuple(columns),
        total=total,
        lengths=dump.table["tokens"][order].astype(np.float64),
        unit=TOKENS,
        notes=tuple(notes),
    )
