"""Compare what two versions made of the same case."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from same_as import renamed
from same_as.spelling import matches, newest

RELATIVE, ABSOLUTE = 1e-6, 1e-7


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return what differs between the outcomes of a case, the first words of each say what it is.

    `skipped` outcomes are not compared; the caller counts them.
    """
    found = list(_of_ends(old, new))
    for number, (before, after) in enumerate(zip(old["batches"], new["batches"], strict=False), start=1):
        for name in dict.fromkeys([*before, *after]):
            if name not in before or name not in after:
                found.append(f"{name} of batch {number}: only in the {'new' if name in after else 'old'} version")
            elif name == "metrics":
                found += _of_metrics(before[name], after[name], number)
            elif name == "state":
                left, right = (_with_newest(state) for state in (before[name], after[name]))
                found += [f"state of batch {number}{text}" for text in of_values(left, right)]
            else:
                found += [f"{name} of batch {number}{text}" for text in of_values(before[name], after[name])][:1]
    for number, (before, after) in enumerate(_pairs(old.get("dumps"), new.get("dumps")), start=1):
        if before is None or after is None:
            found.append(f"dump {number}: only in the {'old' if after is None else 'new'} version")
        else:
            found += _of_dump(before, after, number)
    return found


def _pairs(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    old, new = old or [], new or []
    for at in range(max(len(old), len(new))):
        yield (old[at] if at < len(old) else None), (new[at] if at < len(new) else None)


def _of_ends(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    before, after = (None if side["error"] is None else newest(renamed.ERRORS, side["error"]) for side in (old, new))
    count = len(old["batches"]), len(new["batches"])
    if before != after or (before is not None and count[0] != count[1]):
        sides = [
            f"{side['error']} in batch {len(side['batches']) + 1}: {side['text'][:120]}"
            if side["error"]
            else "computes"
            for side in (old, new)
        ]
        yield f"error: the old version {sides[0]} | the new version {sides[1]}"


def _of_metrics(old: Mapping[str, Any], new: Mapping[str, Any], number: int) -> list[str]:
    before = {newest(renamed.METRICS, name): value for name, value in old.items()}
    after = {newest(renamed.METRICS, name): value for name, value in new.items()}
    found = [f"metric {name} of batch {number}: only in the old version" for name in before if name not in after]
    added = [name for name in after if name not in before and not matches(renamed.ADDED_METRICS, name)]
    found += [f"metric {name} of batch {number}: only in the new version" for name in added]
    for name in before:
        if name in after:
            found += [f"metric {name} of batch {number}{text}" for text in of_values(before[name], after[name])]
    return found


def _of_dump(old: Mapping[str, Any], new: Mapping[str, Any], number: int) -> list[str]:
    before = {newest(renamed.COLUMNS, name): value for name, value in old.items()}
    after = {newest(renamed.COLUMNS, name): value for name, value in new.items()}
    found = [f"column {name} of dump {number}: only in the old version" for name in before if name not in after]
    added = [name for name in after if name not in before and not matches(renamed.ADDED_COLUMNS, name)]
    found += [f"column {name} of dump {number}: only in the new version" for name in added]
    for name in before:
        if name in after:
            found += [f"column {name} of dump {number}{text}" for text in of_values(before[name], after[name])][:1]
    return found


def of_values(old: Any, new: Any, where: str = "") -> list[str]:
    """Return where two values differ; an exact 0 must be an exact 0 on both sides."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found = [f"{where}.{key}: only in the old version" for key in old if key not in new]
        found += [f"{where}.{key}: only in the new version" for key in new if key not in old]
        return found + [text for key in old if key in new for text in of_values(old[key], new[key], f"{where}.{key}")]
    if isinstance(old, list | tuple) and isinstance(new, list | tuple):
        if len(old) != len(new):
            return [f"{where}: {len(old)} entries | {len(new)} entries"]
        pairs = enumerate(zip(old, new, strict=True))
        return [text for at, (a, b) in pairs for text in of_values(a, b, f"{where}[{at}]")]
    if isinstance(old, np.ndarray) or isinstance(new, np.ndarray):
        return _of_arrays(np.asarray(old), np.asarray(new), where)
    if isinstance(old, int | float | np.number) and isinstance(new, int | float | np.number):
        return [] if same_number(float(old), float(new)) else [f"{where}: {old!r} | {new!r}"]
    return [] if old == new else [f"{where}: {old!r:.60} | {new!r:.60}"]


def _of_arrays(old: np.ndarray, new: np.ndarray, where: str) -> list[str]:
    if old.shape != new.shape:
        return [f"{where}: shape {old.shape} | {new.shape}"]
    close = np.isclose(new, old, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True) & ((old == 0) == (new == 0))
    if close.all():
        return []
    place = tuple(int(at) for at in np.argwhere(~close)[0])
    return [f"{where}{list(place)}: {old[place]:.8g} | {new[place]:.8g} ({int((~close).sum())} of {close.size} differ)"]


def same_number(old: float, new: float) -> bool:
    """Return whether two numbers are the same up to rounding; NaN equals NaN, and 0 only 0."""
    if math.isnan(old) or math.isnan(new):
        return math.isnan(old) and math.isnan(new)
    if (old == 0) != (new == 0):
        return False
    return old == new or abs(new - old) <= ABSOLUTE + RELATIVE * abs(old)


def _with_newest(state: Any) -> Any:
    """Return a saved state with its entries and its steps under their newest names."""
    if isinstance(state, Mapping):
        return {newest(renamed.STATE, newest(renamed.STEPS, key)): _with_newest(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_with_newest(value) for value in state]
    return newest(renamed.METHODS, state) if isinstance(state, str) else state


def expected(kind: str, method: str, difference: str) -> str | None:
    """Return the reason for which a difference is intended, by the list in `renamed`; None without one."""
    for where, pattern, reason in renamed.EXPECTED:
        if where in ("*", kind, f"{kind}/{method}", f"*/{method}") and pattern in difference:
            return reason
    return None
