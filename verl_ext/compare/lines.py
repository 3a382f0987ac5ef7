"""Read the JSON lines that verl writes to `trainer.rollout_data_dir` and `trainer.validation_data_dir`."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext import jsonl
from verl_ext.compare.rollouts import CHARACTERS, TOKENS, Rollouts, Source
from verl_ext.core.groups import Array, Bools, Groups, Index
from verl_ext.errors import DataError, listed, printable
from verl_ext.recipes.evaluation.answers import NOT_REWARDS, split_key

PATTERN = "*.jsonl"
SCORE = "score"
LARGEST_STEP = 2**62


def read(path: Path, files: Sequence[Path], wanted: Collection[str], length: str | None) -> Rollouts:
    """One row per trajectory. Of a trajectory in several parts the last has the reward, as in verl."""
    scan = _Scan(wanted, length or TOKENS, keyed=True)
    scan.read(files)
    order, last, repeated = scan.parts()
    if repeated:  # a key of the trainer occurs once, so these are the uids of prompts
        scan = _Scan(wanted, length or TOKENS, keyed=False)
        scan.read(files)
        order, last, _ = scan.parts()
    rows = order[last]
    lengths, unit = scan.lengths(asked=length is not None)
    if lengths is not None:
        starts = np.flatnonzero(np.concatenate(([True], last[:-1])))
        lengths = np.add.reduceat(lengths[order], starts)
    step = _whole(scan.step)[rows]
    by_step = np.lexsort((rows, step))
    rows, step = rows[by_step], step[by_step]
    ids = _whole(scan.group)[rows]
    groups = Groups.of(ids.tolist())
    names = list(scan.groups)
    return Rollouts(
        path=path,
        step=step,
        update=np.zeros(len(rows), dtype=np.intp),
        groups=groups,
        prompts=[names[group][1] for group in ids[groups.firsts].tolist()],
        columns={key: np.frombuffer(values)[rows] for key, values in scan.columns.items() if key in scan.names},
        names=tuple(scan.names),
        total=SCORE,
        lengths=None if lengths is None else lengths[by_step],
        unit=unit,
        notes=tuple(scan.notes(parts=len(order) - len(rows))),
        source=Source(tuple(files), _whole(scan.file)[rows], _whole(scan.line)[rows]),
        wrong=scan.wrong,
    )


def texts(source: Source | None, rows: Sequence[int]) -> dict[int, tuple[str, str]]:
    """The input and the output of some rows, read from their files again; empty where the files have no text."""
    found: dict[int, tuple[str, str]] = {}
    if source is None:
        return found
    for number, path in enumerate(source.files):
        wanted = {int(source.line[row]): row for row in rows if source.file[row] == number}
        for line, text in jsonl.lines(path) if wanted else ():
            if line in wanted:
                record = jsonl.parse(text)
                found[wanted[line]] = str(record.get("input", "")), str(record.get("output", ""))
                if len(found) == len(rows):
                    return found
    return found


class _Scan:
    """Reads lines into columns. No text is kept."""

    def __init__(self, wanted: Collection[str], tokens: str, *, keyed: bool) -> None:
        self.keyed = keyed
        """Whether a uid may be the trainer's key of a trajectory, `{prompt}_{session}_{part}`."""
        self.columns = {key: array("d") for key in {*wanted, SCORE}}
        self.step, self.group, self.session, self.part, self.file, self.line = (array("q") for _ in range(6))
        self.tokens_key, self.tokens, self.characters = tokens, array("d"), array("d")
        self.groups: dict[tuple[int, str], int] = {}
        self.names: dict[str, None] = {}
        self.missing = dict.fromkeys(self.columns, 0)
        self.wrong: dict[str, str] = {}
        self.torn = self.without_step = self.without_uid = 0

    def read(self, files: Sequence[Path]) -> None:
        """Read all files."""
        keys: tuple[str, ...] = ()
        for number, path in enumerate(files):
            stem = int(path.stem) if path.stem.isdecimal() and len(path.stem) < 19 else 0
            try:
                for at, text in jsonl.lines(path):
                    try:
                        record = jsonl.parse(text)
                    except DataError:
                        self.torn += 1
                        continue
                    if not isinstance(record, dict):
                        self.torn += 1
                        continue
                    if (now := tuple(record)) != keys:
                        keys = now
                        self._see(record, path, at)
                    self._add(record, stem, path, at)
                    self.file.append(number)
                    self.line.append(at)
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error}") from error
        if not self.step:
            torn = f"{self.torn} unreadable line(s) and no others" if self.torn else "no line"
            raise DataError(f"{listed(files)}: {torn}")

    def _see(self, record: Mapping[str, Any], path: Path, at: int) -> None:
        """Note which entries are rewards; raise for a line that is not a rollout."""
        numbers = [key for key, value in record.items() if value is None or isinstance(value, int | float)]
        self.names.update(dict.fromkeys(key for key in numbers if key not in NOT_REWARDS))
        if SCORE not in record:
            raise DataError(
                f"{path}, line {at} is not a rollout of verl: it has no {SCORE!r}, only {listed(record)}; expected the "
                "JSON lines of trainer.rollout_data_dir or trainer.validation_data_dir"
            )

    def _add(self, record: Mapping[str, Any], stem: int, path: Path, at: int) -> None:
        step = record.get("step")
        if step is None:
            step, self.without_step = stem, self.without_step + 1
        elif type(step) is not int or abs(step) > LARGEST_STEP:
            raise DataError(f"{path}, line {at}: the step is {step!r:.80}, expected a whole number")
        for key, values in self.columns.items():
            value = record.get(key)
            if isinstance(value, int | float):
                values.append(value)
                continue
            values.append(np.nan)
            self.missing[key] += 1
            if value is not None and key not in self.wrong:
                self.wrong[key] = f"{path}, line {at} has {value!r:.80}"
        prompt, session, part = self._place(record, path, at)
        self.step.append(step)
        self.group.append(self.groups.setdefault((step, prompt), len(self.groups)))
        self.session.append(session)
        self.part.append(part)
        tokens, output = record.get(self.tokens_key), record.get("output")
        self.tokens.append(tokens if isinstance(tokens, int | float) else np.nan)
        self.characters.append(len(output) if isinstance(output, str) else np.nan)

    def _place(self, record: Mapping[str, Any], path: Path, at: int) -> tuple[str, int, int]:
        """Prompt, session and part; a line without a key of the trainer is a session of its own."""
        uid = record.get("uid")
        if uid is not None:
            place = split_key(uid) if self.keyed else None
            return place or (str(uid), -len(self.step) - 1, 0)
        if "input" not in record:
            raise DataError(
                f"{path}, line {at} has neither 'uid' nor 'input', so its prompt is unknown; it has {listed(record)}"
            )
        self.without_uid += 1
        asked = json.dumps([record["input"], record.get("gts")]).encode()
        return hashlib.blake2b(asked, digest_size=6).hexdigest(), -len(self.step) - 1, 0

    def parts(self) -> tuple[Index, Bools, bool]:
        """The lines by trajectory and part, which of them are the last parts, and whether a part occurs twice."""
        group, session, part = _whole(self.group), _whole(self.session), _whole(self.part)
        order = np.lexsort((part, session, group))
        group, session, part = group[order], session[order], part[order]
        same = (group[1:] == group[:-1]) & (session[1:] == session[:-1])
        repeated = bool((same & (part[1:] == part[:-1])).any())
        return order, np.append(~same, True), repeated

    def lengths(self, *, asked: bool) -> tuple[Array | None, str]:
        """`[lines]` tokens where every line has them, else characters, else None; and what they count."""
        tokens, characters = np.frombuffer(self.tokens), np.frombuffer(self.characters)
        missing = int(np.isnan(tokens).sum())
        if not missing:
            return tokens, TOKENS
        if asked:
            raise DataError(
                f"--length {self.tokens_key} is not a number in {missing} of {len(tokens)} lines; numbers are "
                f"{listed(self.names)}; leave --length out to take the characters"
            )
        return (None if np.isnan(characters).any() else characters), CHARACTERS

    def notes(self, *, parts: int) -> Iterator[str]:
        """What was left out or assumed."""
        if self.torn:
            yield f"{self.torn:,} unreadable line(s) left out"
        if self.without_uid:
            yield (
                f"{self.without_uid:,} lines have no uid: trajectories of one step with the same input and the same "
                "ground truth are taken for answers to one prompt"
            )
        if self.without_step:
            yield f"{self.without_step:,} lines have no step: the step is the name of their file, or 0"
        if parts:
            yield f"{parts:,} lines are earlier parts of a trajectory: the last part has its reward"
        for key, count in self.missing.items():
            if count and key in self.names:
                yield f"{printable(key)} is missing from {count:,} of {len(self.step):,} lines: taken as not scored"


def _whole(values: array[int]) -> Index:
    return np.frombuffer(values, dtype=np.int64)
