"""`report --groups`: the hardest, the dead and the most conflicting prompt groups of dumped advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.core.groups import Array, Bools, Groups, divide
from verl_ext.errors import ConfigurationError, DataError
from verl_ext.report.table import Rows, plain

PATTERN = "advantages-*.parquet"


@dataclass(frozen=True)
class Dump:
    """Every dumped trajectory, and the groups they form; a prompt in two steps is two groups."""

    files: int
    table: dict[str, Any]
    """Columns by name, one entry a trajectory."""
    keys: tuple[str, ...]
    groups: Groups

    @property
    def rewards(self) -> Array:
        """`[N, K]`."""
        return np.stack([self.table[f"reward/{key}"] for key in self.keys], axis=1)

    def first(self, column: str) -> Any:
        """`[G]` a column's value for each group, which all its trajectories share."""
        return self.table[column][self.groups.order[self.groups.starts]]

    @property
    def varies(self) -> Bools:
        """`[G, K]`."""
        return np.stack([self.first(f"group_varies/{key}").astype(bool) for key in self.keys], axis=1)


def report(paths: Sequence[Path], *, top: int) -> str:
    """The text to print."""
    dump = read(paths)
    level = "accuracy" if "accuracy" in dump.table else "total"
    height = dump.groups.mean(dump.table[level])
    varies, against = dump.varies, conflict(dump)
    total_varies = dump.groups.varies(dump.table["total"])
    dead: Bools = np.logical_not(np.logical_or.reduce(varies, axis=1))
    steps = dump.table["step"]
    count = len(dump.groups)
    lines = [
        f"{dump.files} files, steps {steps.min()} to {steps.max()}, {count} groups, {len(steps)} responses",
        f"dead, no reward varies: {_share(dead)}",
        *(f"  {key} does not vary: {_share(~varies[:, at])}" for at, key in enumerate(dump.keys)),
        f"the total does not vary although a reward does: {_share(~total_varies & ~dead)}",
    ]
    live = np.flatnonzero(~dead)
    hardest = live[np.argsort(height[live], kind="stable")][:top]
    lines += _section(dump, f"hardest of those that vary (least {level})", hardest, level, height)
    ended = np.flatnonzero(dead)
    lowest = ended[np.argsort(height[ended], kind="stable")][:top]
    lines += _section(dump, f"dead, least {level} first", lowest, level, height)
    if len(dump.keys) > 1:
        fighting = np.flatnonzero(against > 0)
        worst = fighting[np.argsort(-against[fighting], kind="stable")][:top]
        lines += _section(dump, "most conflicting (1: the rewards cancel out)", worst, "conflict", against)
    return "\n".join(lines)


def conflict(dump: Dump) -> Array:
    """`[G]` how far a group's rewards cancel out: `1 - sum_i |sum_k z_ik| / sum_i sum_k |z_ik|`.

    `z` are the rewards normalised in their group. 0: they agree, or only one varies; 1: they add up to nothing.
    """
    groups, rewards = dump.groups, dump.rewards
    centred = np.where(groups.spread(dump.varies), rewards - groups.spread(groups.mean(rewards)), 0.0)
    centred = np.where(np.isnan(centred), 0.0, centred)
    spread = np.stack([dump.first(f"group_std/{key}") for key in dump.keys], axis=1)
    z = divide(centred, groups.spread(spread))
    apart = groups.sum(np.abs(z).sum(axis=1))
    return np.where(apart > 0, 1.0 - divide(groups.sum(np.abs(z.sum(axis=1))), apart), 0.0)


def read(paths: Sequence[Path]) -> Dump:
    """All files of the given folders, or the files themselves."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError("dumped advantages are parquet files: pip install pyarrow") from error
    files = [file for path in paths for file in (sorted(path.glob(PATTERN)) if path.is_dir() else [path])]
    if not files:
        raise DataError(
            f"{', '.join(map(str, paths))} holds no {PATTERN}; expected a folder that algorithm.verl_ext.dump_dir named"
        )
    try:
        found = pyarrow.concat_tables([pyarrow.parquet.read_table(file) for file in files], promote_options="default")
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise DataError(f"the dumped advantages cannot be read: {error}") from error
    table = {name: found[name].to_numpy() for name in found.column_names}
    keys = tuple(name.removeprefix("reward/") for name in table if name.startswith("reward/"))
    if not keys or not {"step", "update", "uid", "total", "advantage"} <= set(table):
        raise DataError(f"{files[0]} is no dump of advantages: it has the columns {', '.join(table)}")
    labels = zip(table["step"].tolist(), table["update"].tolist(), table["uid"].tolist(), strict=True)
    return Dump(len(files), table, keys, Groups.of(labels))


def _section(dump: Dump, title: str, chosen: Any, named: str, values: Array) -> list[str]:
    if not len(chosen):
        return ["", f"{title}: none"]
    biggest = np.maximum.reduceat(np.abs(dump.table["advantage"])[dump.groups.order], dump.groups.starts)
    tokens = dump.groups.mean(dump.table["tokens"].astype(np.float64))
    rows: Rows = [
        ("step", "uid", "responses", named, *(f"{key} mean ± std" for key in dump.keys), "tokens", "largest |A|")
    ]
    for group in chosen.tolist():
        cells = [
            f"{dump.first(f'group_mean/{key}')[group]:.3f} ± {dump.first(f'group_std/{key}')[group]:.3f}"
            for key in dump.keys
        ]
        rows.append(
            (
                str(dump.first("step")[group]),
                str(dump.first("uid")[group]),
                str(dump.groups.sizes[group]),
                f"{values[group]:.3f}",
                *cells,
                f"{tokens[group]:.1f}",
                f"{biggest[group]:.3f}",
            )
        )
    return ["", title, plain(rows)]


def _share(which: Bools) -> str:
    return f"{int(which.sum())} of {len(which)} groups ({which.mean():.1%})"
