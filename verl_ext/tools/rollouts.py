"""Read the trajectories of a run: our dumps of advantages, or the JSON lines that verl writes."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.core.groups import Array, Groups, Index
from verl_ext.errors import DataError, listed, unknown

if TYPE_CHECKING:
    import pandas as pd

DUMPS, LINES = "advantages-*.parquet", "*.jsonl"
METRICS = "metrics.jsonl"
"""The log of a run, which holds no trajectories."""
SCORE, TOKENS, CHARACTERS = "score", "tokens", "characters"
NOT_REWARDS = {"input", "output", "gts", "uid", "step"}
SCORE_ALONE = (
    "verl's default trainer writes the score alone to trainer.rollout_data_dir; all rewards are in "
    "algorithm.verl_ext.dump_dir, in trainer.validation_data_dir, and in the rollouts of RayPPOTrainer"
)


@dataclass(frozen=True)
class Run:
    """The run that wrote a dump."""

    estimator: str
    algorithm: Mapping[str, Any]
    """Its section `algorithm`, as plain data."""
    loss_agg_mode: str
    states: Mapping[tuple[int, int], Any]
    """The state of its estimator before each (step, update); empty for a stateless estimator."""


@dataclass(frozen=True)
class Rollouts:
    """`N` trajectories in the order of the run's updates."""

    path: Path
    table: pd.DataFrame
    """One row a trajectory, with `step`, `update`, `uid`; in a dump `advantage`, else `input` and `output`."""
    rewards: Mapping[str, Array]
    """Each reward as it was scored, NaN where it was not; the score is one of them."""
    total: str
    """The reward that verl's grpo works on."""
    lengths: Array
    unit: str
    """What the lengths count: tokens or characters."""
    seen: Mapping[str, Array] = field(default_factory=dict)
    """In a dump: each reward as the run's estimator saw it."""
    run: Run | None = None
    notes: tuple[str, ...] = ()
    """What was left out or assumed."""

    @cached_property
    def groups(self) -> Groups:
        """The answers to one prompt in one update."""
        return Groups.of(zip(*(self.table[name].tolist() for name in ("step", "update", "uid")), strict=True))

    @cached_property
    def updates(self) -> Mapping[tuple[int, int], Index]:
        """The rows of each (step, update), in order."""
        return dict(self.table.groupby(["step", "update"]).indices)

    @property
    def gaps(self) -> str:
        """Which steps of the run are missing; "" if there is none."""
        steps = [0, *self.table["step"].unique().tolist()]
        missing = [f"{last + 1} to {now - 1}" for last, now in itertools.pairwise(steps) if now > last + 1]
        return ", ".join([*missing[:3], *["..."] * (len(missing) > 3)])

    def reward(self, key: str, setting: str) -> Array:
        """Return the values of a reward; raise if the files do not have it."""
        if key not in self.rewards:
            alone = f". {SCORE_ALONE}" if set(self.rewards) == {SCORE} else ""
            raise DataError(f"{setting}: {unknown('reward', key, self.rewards)}{alone}")
        return self.rewards[key]

    @property
    def summary(self) -> str:
        """Say how much was read, and from where."""
        steps, sizes, count = self.table["step"], self.groups.sizes, len(self.updates)
        span = f"step {steps.min()}" if steps.min() == steps.max() else f"steps {steps.min()} to {steps.max()}"
        answers = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
        batches = f", {count} batches" if count > 1 else ""
        return f"{len(self.table):,} trajectories in {len(sizes):,} groups of {answers}, {span}{batches}: {self.path}"


def read(path: Path) -> Rollouts:
    """Read a file, or those of a folder: our dumps if it has some, else verl's JSON lines."""
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if _dumps(path):
        return read_dumps([path])
    files = [path] if path.is_file() else [file for file in sorted(path.glob(LINES)) if file.name != METRICS]
    if files:
        return _read_lines(path, files)
    below = {str(file.parent) for file in path.glob(f"*/{LINES}") if file.name != METRICS}
    below |= {str(folder) for folder in path.glob("*") if _dumps(folder)}
    raise DataError(f"{path} holds neither {DUMPS} nor {LINES}; subfolders with such files: {listed(below)}")


def _dumps(path: Path) -> list[Path]:
    """Return the dumps in a folder and in its folders `from-<step>-<n>`, or the file itself if it is a dump."""
    if path.is_dir():
        return [*path.glob(DUMPS), *path.glob(f"from-*/{DUMPS}")]
    return [path] if path.suffix == ".parquet" else []


def read_dumps(paths: Sequence[Path]) -> Rollouts:
    """Read dumps of advantages. An update that several folders hold is taken from the one that was written last."""
    import pandas as pd
    import pyarrow
    import pyarrow.parquet

    files = sorted((file for path in paths for file in _dumps(path)), key=lambda file: (file.stat().st_mtime_ns, file))
    tables: dict[tuple[int, int], tuple[Path, Any]] = {}
    notes, again = [], set()
    for file in files:
        try:
            table = pyarrow.parquet.read_table(file)
            name = int(table["step"][0].as_py()), int(table["update"][0].as_py())
        except (OSError, KeyError, IndexError, pyarrow.ArrowException) as error:
            notes.append(f"{file} is left out: {str(error).splitlines()[0]}")
            continue
        again |= {name} & tables.keys()
        tables[name] = file, table
    if not tables:
        raise DataError("\n".join([f"no {DUMPS} can be read in {listed(paths)}", *notes]))
    tables = dict(sorted(tables.items()))
    if again:
        folders = listed({tables[name][0].parent.name for name in again})
        steps = f"{min(again)[0]} to {max(again)[0]}"
        notes.append(f"several folders hold steps {steps}: {len(again)} updates are taken from {folders}, written last")
    frame = pd.concat([_with_raw(table.to_pandas()) for _, table in tables.values()], ignore_index=True)
    keys = [name.partition("/")[2] for name in frame if name.startswith("reward/")]
    seen, raw = ({key: frame[f"{kind}/{key}"].to_numpy(float) for key in keys} for kind in ("reward", "raw"))
    total = next(name for name in ("total", SCORE, "sum") if name not in seen)
    run, more = _run({name: table.schema.metadata or {} for name, (_, table) in tables.items()})
    return Rollouts(
        path=paths[0],
        table=frame,
        rewards=raw | {total: frame["total"].to_numpy(float)},
        total=total,
        seen=seen,
        lengths=frame[TOKENS].to_numpy(float),
        unit=TOKENS,
        run=run,
        notes=(*notes, *more),
    )


def _with_raw(table: pd.DataFrame) -> pd.DataFrame:
    """Add the rewards as they were scored to a file that has only what the estimator saw, because it saw the same."""
    seen = [name for name in table if name.startswith("reward/")]
    raw = {name.replace("reward/", "raw/", 1): table[name] for name in seen}
    return table.assign(**{name: values for name, values in raw.items() if name not in table})


def _run(metadata: Mapping[tuple[int, int], Mapping[bytes, bytes]]) -> tuple[Run | None, list[str]]:
    """Return the run that wrote the files, its settings as the last file has them, and what must be said about it."""
    found = {name: json.loads(each[b"verl_ext"]) for name, each in metadata.items() if b"verl_ext" in each}
    if len(found) < len(metadata):
        return None, ["the dump does not hold the settings of its run: name them as KEY=VALUE"]
    last = list(found.values())[-1]
    run = Run(
        last["estimator"],
        last["algorithm"],
        last["loss_agg_mode"],
        {
            name: each["state"]
            for name, each in found.items()
            if each["state"] and each["estimator"] == last["estimator"]
        },
    )
    parts = ("estimator", "algorithm", "loss_agg_mode")
    others = sum(any(each[part] != last[part] for part in parts) for each in found.values())
    return run, [f"{others} of {len(found)} updates had other settings than the last"] if others else []


def _read_lines(path: Path, files: Sequence[Path]) -> Rollouts:
    """Read verl's JSON lines. Of a trajectory in several parts the last one has the reward, as in verl."""
    import pandas as pd

    places, scores, torn = [], [], 0
    for file in files:
        step = int(file.stem) if file.stem.isdecimal() else 0
        for record in json_lines(file):
            if record is None:
                torn += 1
                continue
            if SCORE not in record or not record.keys() & {"uid", "input"}:
                raise DataError(f"{file} holds no rollouts of verl: a line has {listed(record)}")
            texts = {name: str(record.get(name, "")) for name in ("input", "output")}
            place = {"step": record.get("step", step), "uid": str(record.get("uid") or _prompt(record))}
            places.append({**place, **texts, "length": len(texts["output"])})
            numbers = {key: value for key, value in record.items() if isinstance(value, int | float)}
            scores.append({key: float(value) for key, value in numbers.items() if key not in NOT_REWARDS})
    if not places:
        raise DataError(f"{path} holds no rollout, and {torn} unreadable line(s)")
    table, rewards = pd.DataFrame(places), pd.DataFrame(scores)
    notes = [f"{torn:,} unreadable line(s) left out"] if torn else []
    unit = TOKENS if TOKENS in rewards and rewards[TOKENS].notna().all() else CHARACTERS
    if unit == TOKENS:
        table["length"] = rewards.pop(TOKENS)
    lines = len(table)
    table = _trajectories(table.sort_values("step", kind="stable"))
    rewards = rewards.loc[table.index]
    if parts := lines - len(table):
        notes.append(f"{parts:,} lines are earlier parts of a trajectory: the last part has its reward")
    missing = rewards.isna().sum()
    notes += [f"{key} is missing from {count:,} lines: not scored there" for key, count in missing.items() if count]
    return Rollouts(
        path=path,
        table=table.assign(update=0).reset_index(drop=True),
        rewards={str(key): values.to_numpy(float) for key, values in rewards.items()},
        total=SCORE,
        lengths=table["length"].to_numpy(float),
        unit=unit,
        notes=tuple(notes),
    )


def _prompt(record: Mapping[str, Any]) -> str:
    """Return a name for the prompt of a line without a uid: the same question has the same name."""
    return hashlib.blake2b(json.dumps([record.get("input"), record.get("gts")]).encode(), digest_size=6).hexdigest()


def _trajectories(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row a trajectory, with the length of all its parts.

    The default trainer writes its key, `{prompt}_{session}_{part}`, as `uid`; other trainers write the prompt's uid.
    """
    keys = table["uid"].str.extract(r"^(?P<uid>.+)_(?P<session>\d+)_(?P<part>\d+)$")
    if keys.isna().any(axis=None) or table.duplicated(["step", "uid"]).any():
        return table
    table = table.assign(uid=keys["uid"], session=keys["session"], part=keys["part"].astype(int))
    trajectory = table.groupby(["step", "uid", "session"], sort=False)
    table["length"] = trajectory["length"].transform("sum")
    return table.loc[trajectory["part"].idxmax()]


def json_lines(file: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the record of each line; None for a torn line, which a killed process leaves."""
    with file.open("rb") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            yield record if isinstance(record, dict) else None
