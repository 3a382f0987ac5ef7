"""`report --groups`: the hardest, dead and most conflicting prompt groups in dumped advantages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.core.groups import Array, Bools, Groups, divide
from verl_ext.errors import ConfigurationError, DataError, listed, printable
from verl_ext.files import DUMPS, below
from verl_ext.report.table import Rows, plain


@dataclass(frozen=True)
class Dump:
    """All dumped trajectories and their groups. A prompt that occurs in two steps forms two groups."""

    files: int
    left_out: tuple[str, ...]
    """Files that are not dumps, each with the reason."""
    table: dict[str, Any]
    """Columns by name, with one entry per trajectory."""
    keys: tuple[str, ...]
    groups: Groups

    @property
    def rewards(self) -> Array:
        """`[N, K]`."""
        return np.stack([self.table[f"reward/{key}"] for key in self.keys], axis=1)

    def first(self, column: str) -> Any:
        """`[G]` the value of a column that all trajectories of a group share."""
        return self.table[column][self.groups.firsts]

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
        *(f"  {printable(key)} does not vary: {_share(~varies[:, at])}" for at, key in enumerate(dump.keys)),
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
    if dump.left_out:
        lines += ["", f"{len(dump.left_out)} unreadable file(s) left out:", *map(printable, dump.left_out)]
    return "\n".join(lines)


def conflict(dump: Dump) -> Array:
    """`[G]` how far the rewards of a group cancel out: `1 - sum_i |sum_k z_ik| / sum_i sum_k |z_ik|`.

    `z` are the rewards normalised in their group. 0: they agree, or only one varies; 1: they cancel out completely.
    """
    groups, rewards = dump.groups, dump.rewards
    centred = np.where(groups.broadcast(dump.varies), rewards - groups.broadcast(groups.mean(rewards)), 0.0)
    centred = np.where(np.isnan(centred), 0.0, centred)
    std = np.stack([dump.first(f"group_std/{key}") for key in dump.keys], axis=1)
    z = divide(centred, groups.broadcast(std))
    apart = groups.sum(np.abs(z).sum(axis=1))
    return np.where(apart > 0, 1.0 - divide(groups.sum(np.abs(z.sum(axis=1))), apart), 0.0)


def read(paths: Sequence[Path]) -> Dump:
    """Read the given files, and all dumps in the given folders."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError("dumped advantages are parquet files: pip install pyarrow") from error
    files = [file for path in paths for file in _files(path)]
    twice = [file for file, count in Counter(file.resolve() for file in files).items() if count > 1]
    if twice:
        raise ConfigurationError(f"given twice: {listed(twice)}; leave one out")
    tables: dict[Path, Any] = {}
    left_out = []
    for file in files:
        try:
            if not file.is_file():
                raise DataError("it is not a regular file")
            with pyarrow.parquet.ParquetFile(file) as opened:
                content = opened.read()
            if double := [name for name, count in Counter(content.schema.names).items() if count > 1]:
                raise DataError(f"it has several columns of one name: {listed(double)}")
            _check_columns({field.name: field.type for field in content.schema})
            tables[file] = content
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            left_out.append(f"{file}: {error}")
    if not any(content.num_rows for content in tables.values()):
        raise DataError("\n".join([f"no row can be read from {listed(paths)}", *left_out]))
    first, *others = tables
    for other in others:
        if differ := set(tables[first].schema) ^ set(tables[other].schema):
            raise DataError(
                f"{first} and {other} have different columns, so report them one by one; they differ in "
                f"{listed({field.name for field in differ})}"
            )
    joined = pyarrow.concat_tables([content.select(tables[first].column_names) for content in tables.values()])
    table = {name: joined[name].to_numpy() for name in joined.column_names}
    labels = zip(table["step"].tolist(), table["update"].tolist(), table["uid"].tolist(), strict=True)
    return Dump(len(tables), tuple(left_out), table, _keys(table), Groups.of(labels))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.exists():
            raise DataError(f"{path} does not exist")
        return [path]
    files = sorted(path.glob(DUMPS))
    if not files:
        subfolders = below(path, (DUMPS,), "report --groups {}")
        raise DataError(f"{path} holds no {DUMPS}; expected the folder of algorithm.verl_ext.dump_dir{subfolders}")
    return files


def _check_columns(types: Mapping[str, Any]) -> None:
    """Raise unless a file has the columns of a dump (`algorithm.verl_ext.dump_dir`)."""
    from pyarrow.types import is_boolean, is_floating, is_integer, is_string

    keys = _keys(types) or ("*",)
    needed = {"step", "update", "uid", "tokens", "total", "advantage", *({"accuracy"} & set(types))}
    needed |= {f"{of}/{key}" for key in keys for of in ("reward", "group_mean", "group_std", "group_varies")}

    def is_valid(name: str, kind: Any) -> bool:
        if name.startswith("group_varies/"):
            return bool(is_boolean(kind))
        return bool(is_string(kind) if name == "uid" else is_integer(kind) or is_floating(kind))

    wrong = [name for name in needed if name not in types or not is_valid(name, types[name])]
    if wrong:
        has = ", ".join(f"{name} ({kind})" for name, kind in types.items())
        raise DataError(
            f"not dumped advantages: the column {listed(wrong)} is missing or of a wrong type; it has {has}"
        )


def _keys(columns: Iterable[str]) -> tuple[str, ...]:
    return tuple(name.removeprefix("reward/") for name in columns if name.startswith("reward/"))


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
