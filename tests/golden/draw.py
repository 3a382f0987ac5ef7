"""Draw cases: the number of a case decides all of it, so more can be drawn behind those that are stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.golden.cases import WIDTH, Case, Rows

SEED = 20261126
KEYS = ("correctness", "format_minimal", "length")
KINDS = (
    "gdpo",
    "dgpo",
    "hadw",
    "gdpo",
    "compose",
    "dgpo",
    "drgrpo",
    "gdpo",
    "compose",
    "dgpo",
    "hadw",
    "compose",
    "grpo",
)
"""`grpo` is verl's own, of which this package only logs the named rewards."""
CYCLED, LATER, ALL = 322, ("maxrl", "gd2po"), 362
"""The cases in which all of `KINDS` take turns, the estimators of those behind them, and the number of cases."""
LOSSES = {
    "token": ("token-mean",),
    "sequence": ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    "none": ("token-mean", "seq-mean-token-sum", "token-sum"),
    "auto": ("token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum"),
}


def cases() -> Iterator[Case]:
    return map(draw, range(ALL))


def draw(number: int) -> Case:
    kinds = KINDS if number < CYCLED else LATER
    return Drawing(np.random.default_rng([SEED, number]), kinds[number % len(kinds)]).case(number)


class Drawing:
    """One case in the making."""

    def __init__(self, rng: np.random.Generator, estimator: str) -> None:
        self.rng, self.estimator = rng, estimator
        self.algorithm: dict[str, Any] = {}
        self.rewards: dict[str, Any] = {}
        self.loss = "token-mean"
        self.remembers = self.weighs = self.per_reward = self.kl = self.no_negative = False
        self.norm_by_std = True

    def pick(self, *options: Any) -> Any:
        return options[self.rng.integers(len(options))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def case(self, number: int) -> Case:
        few = self.chance(0.3)
        count = int(self.rng.integers(1 if few else 2, 4))
        self.keys: tuple[str, ...] | None = KEYS[:count]
        if self.chance(0.15):
            self.keys = ("acc", *self.keys[1:])
        if count > 1 and self.chance(0.15):
            self.keys = (*self.keys[:-1], "score")
        getattr(self, self.estimator)()
        if self.keys is not None and not self.per_reward and self.estimator != "grpo" and self.chance(0.3):
            self.keys = None
        if self.kl:
            self.algorithm["use_kl_in_reward"] = True
        if not self.norm_by_std:
            self.algorithm["norm_adv_by_std_in_grpo"] = False
        accuracy = self.accuracy()
        verl_names = self.keys is not None and self.estimator in ("gdpo", "compose") and self.chance(0.35)
        self.name_rewards(verl_names)
        per_token: tuple[str, ...] = ()
        if self.keys is not None and self.chance(0.15):
            per_token = tuple(set(self.keys[1:2]) - {"score"}) or self.keys[:1]
            if accuracy is not None and accuracy[0] in per_token and accuracy[1] is None:
                per_token = ()
        if self.rewards:
            self.algorithm["rewards"] = self.rewards
        batches = int(self.rng.integers(3, 6)) if self.remembers else 1
        notes = [name for name, true in (("kl", self.kl), ("per-token", per_token)) if true]
        drawn = tuple(self.batch(accuracy, per_token) for _ in range(batches))
        notes += [name for name, true in shape_of(drawn).items() if true]
        name = "-".join([f"{number:03d}", self.estimator, *notes])
        return Case(name, self.estimator, self.algorithm, self.loss, self.keys, accuracy, per_token, drawn)

    # Settings

    def name_rewards(self, verl_names: bool) -> None:
        if self.keys is None:
            return
        weights = None
        if self.estimator not in ("grpo", "maxrl") and self.chance(0.6):
            weights = [self.pick(1.0, 0.5, 2.0, -1.0, 0.3, 0.0) for _ in self.keys]
            weights[0] = weights[0] or 0.7
        if verl_names:
            self.algorithm["gdpo_reward_keys"] = list(self.keys)
            if weights is not None:
                self.algorithm["gdpo_reward_weights"] = weights
        else:
            self.rewards["keys"] = list(self.keys)
            if weights is not None:
                self.rewards["weights"] = weights
        if self.chance(0.15):
            self.rewards["token_scores"] = True

    def accuracy(self) -> tuple[str, float | None] | None:
        """The column `acc`, a column of its own name, or a reward over a threshold."""
        if not self.weighs:
            return None
        kind = self.rng.integers(4)
        if kind == 0 or (self.keys is not None and self.keys[0] == "acc" and self.chance(0.6)):
            if self.keys is not None and len(self.keys) > 1:
                self.rewards["accuracy_key"] = "acc"
            return ("acc", None)
        if kind == 1:
            self.rewards["accuracy_key"] = "solved"
            return ("solved", None)
        key, threshold = ("score" if self.keys is None else self.keys[0]), self.pick(0.0, 0.4, 0.5)
        if key != "score" or kind == 2:
            self.rewards["accuracy_key"] = key
        self.rewards["accuracy_threshold"] = threshold
        return (key, threshold)

    def drgrpo(self) -> None:
        self.algorithm["drgrpo"] = {"check_loss": False}
        self.kl = self.chance(0.3)

    def grpo(self) -> None:
        self.norm_by_std = self.chance(0.7)

    def gdpo(self) -> None:
        self.per_reward = True
        own: dict[str, Any] = {}
        if self.chance(0.75):
            own["whiten"] = self.pick("auto", "sequence", "token", "none")
        if self.chance(0.7):
            own["scale"] = self.pick("std", "mad", "none")
        if self.chance(0.6):
            own["epsilon"] = self.pick(1e-4, 1e-3, 0.05, 0.5)
        if self.keys is not None and len(self.keys) > 1 and self.chance(0.4):
            own["conditions"] = self.conditions()
        if own.get("scale", "std") != "mad":
            self.norm_by_std = self.chance(0.8)
        if own:
            self.algorithm["gdpo"] = own

    def gd2po(self) -> None:
        self.per_reward = True
        own: dict[str, Any] = {}
        if self.chance(0.6):
            own["conflict"] = "snr"
            if self.chance(0.7):
                own["tau"] = self.pick(0.05, 0.5, 0.8)
        if self.chance(0.7):
            own["whiten"] = self.pick("token", "sequence", "none")
        if self.chance(0.5):
            own["epsilon"] = self.pick(1e-4, 0.05)
        self.norm_by_std = self.chance(0.8)
        if own:
            self.algorithm["gd2po"] = own

    def maxrl(self) -> None:
        self.no_negative = True
        if self.chance(0.5):
            self.algorithm["maxrl"] = {"epsilon": self.pick(1e-4, 0.05)}

    def conditions(self) -> dict[str, Any]:
        assert self.keys is not None
        on = self.pick(*self.keys)
        others = [key for key in self.keys if key != on]
        chosen = others if self.chance(0.4) else [self.pick(*others)]
        return {key: {"on": on, "at_least": self.pick(0.0, 0.5, 1.0)} for key in chosen}

    def dgpo(self) -> None:
        own: dict[str, Any] = {}
        if self.chance(0.5):
            own["dgae"] = self.chance(0.4)
        if self.chance(0.4):
            own["dqw"] = self.chance(0.4)
        if self.chance(0.5) and own.get("dqw", True):
            own["dqw_temp"] = self.pick(0.25, 1.0, 5.0, 10.0)
        if self.chance(0.6):
            own["balance"] = self.pick("auto", "token", "sequence", "none")
        self.loss = self.pick(*LOSSES[own.get("balance", "auto")])
        self.weighs = own.get("dqw", True)
        if not own.get("dgae", True):
            self.norm_by_std = self.chance(0.7)
        self.kl = self.chance(0.25)
        if own:
            self.algorithm["dgpo"] = own

    def hadw(self) -> None:
        base = self.pick("grpo", "grpo", "drgrpo", "gdpo", "dgpo")
        if base == "grpo":
            self.norm_by_std, self.kl = self.chance(0.7), self.chance(0.3)
        else:
            getattr(self, base)()
        own = {"base": base, **self.history()}
        if base == "grpo" and self.chance(0.5):
            del own["base"]
        if own:
            self.algorithm["hadw"] = own

    def history(self) -> dict[str, Any]:
        self.weighs = self.remembers = True
        own: dict[str, Any] = {}
        if self.chance(0.7):
            own["anchor"] = self.pick("soft", "soft", "window", "fixed")
        anchor = own.get("anchor", "soft")
        if anchor == "fixed":
            own["fixed_anchor"] = self.pick(0.0, 0.3, 0.5, 1.0)
        elif self.chance(0.6):
            own["history_window"] = self.pick(1, 2, 3)
        if anchor == "soft":
            if self.chance(0.6):
                own["eta"] = self.pick(0.0, 0.4, 1.0)
            if self.chance(0.5):
                own["eta_min"] = self.pick(0.0, 0.2, 0.6)
        if self.chance(0.6):
            own["lambda_scale"] = self.pick(0.5, 1.0, 2.0)
        return own

    def compose(self) -> None:
        steps: list[Any] = []
        centred = divided = False

        def divide() -> None:
            name = self.pick("scale_by_std", "scale_by_mad")
            steps.append({"step": name, "epsilon": self.pick(1e-6, 1e-2, 0.3)} if self.chance(0.5) else name)

        self.kl = self.chance(0.2)
        if not self.kl:
            if self.keys is not None and len(self.keys) > 1 and self.chance(0.3):
                steps.append({"step": "condition", "conditions": self.conditions()})
            if self.chance(0.6):
                steps.append("centre")
                centred = True
                if self.chance(0.6):
                    divide()
                    divided = True
        self.per_reward = bool(steps)
        steps.append("weigh_and_sum")
        if not centred or self.chance(0.2):
            steps.append("centre")
        if self.chance(0.4):
            divide()
            divided = True
        whiten = ["whiten", {"step": "whiten", "over": "token"}, {"step": "whiten", "epsilon": 0.01}]
        late: list[Any] = []
        if self.chance(0.35):
            temperature = self.pick(0.5, 3.0)
            late.append(
                {"step": "weigh_by_difficulty", "dqw_temp": temperature} if self.chance(0.6) else "weigh_by_difficulty"
            )
            self.weighs = True
        if self.chance(0.25):
            late.append({"step": "weigh_by_history", **self.history()})
        if self.chance(0.4):
            late.insert(int(self.rng.integers(len(late) + 1)), self.pick(*whiten))
        if self.chance(0.4):
            over = self.pick("token", "sequence")
            self.loss = self.pick(*LOSSES[over])
            late.append({"step": "balance", "over": over})
        self.norm_by_std = divided or self.chance(0.7)
        self.algorithm["compose"] = {"steps": steps + late}

    # Batches

    def batch(self, accuracy: tuple[str, float | None] | None, per_token: tuple[str, ...]) -> Rows:
        rng = self.rng
        sizes = rng.integers(1, 7, size=rng.integers(1, 6))
        if self.chance(0.1):
            sizes[:] = 1
        if self.chance(0.3):
            sizes[:] = rng.integers(2, 7)
        prompt = np.repeat(np.arange(len(sizes)), sizes)
        session = np.concatenate([np.arange(size) for size in sizes])
        outputs = rng.integers(1, 4, size=len(prompt)) if self.chance(0.3) else np.ones(len(prompt), dtype=int)
        prompt, session = np.repeat(prompt, outputs), np.repeat(session, outputs)
        output = np.concatenate([np.arange(count) for count in outputs])
        order = rng.permutation(len(prompt))
        prompt, session, output = prompt[order], session[order], output[order]
        if self.remembers and "token_scores" not in self.rewards and self.chance(0.05):
            # nothing but padding: the history stays as it is
            prompt, session, output = prompt[:0], session[:0], output[:0]
        rows = len(prompt)
        length = rng.integers(1, WIDTH + 1, size=rows)
        seen = np.arange(WIDTH)[None, :] < length[:, None]
        if self.chance(0.3):  # tokens of tools, and whole responses, that are not trained on
            seen &= rng.random((rows, WIDTH)) < self.pick(0.8, 0.4)
        if self.chance(0.3):
            seen[rng.random(rows) < 0.25] = False
        bits = np.packbits(seen, axis=1, bitorder="little")[:, 0]
        columns = self.columns(prompt, accuracy, per_token)
        score = columns.pop("score").astype(np.float32)
        kl = rng.integers(-300, 1500, size=rows) if self.kl else np.zeros(rows, dtype=int)
        found = Rows(prompt, session, output, length, bits, score, kl, columns)
        return with_padding(rng, found) if not rows or self.chance(0.3) else found

    def columns(
        self, prompt: np.ndarray, accuracy: tuple[str, float | None] | None, per_token: tuple[str, ...]
    ) -> dict[str, np.ndarray]:
        rng, size = self.rng, len(prompt)
        unscored = self.pick(0.0, 0.0, 0.0, 0.1, 0.4)
        found = {}
        for key in dict.fromkeys((*(self.keys or ()), "score")):
            column = self.column(prompt)
            if key in per_token:
                column = column.astype(np.float32).astype(np.float64)
            elif key == "score":
                if self.kl:  # sums of tokens are exact in float32, in any order
                    column = rng.integers(-256, 257, size=size) / 64
                if self.keys is None and not self.kl and self.chance(0.3):
                    column[rng.random(size) < 0.2] = np.nan
            else:
                column[rng.random(size) < unscored] = np.nan
            if self.chance(0.03) and key not in (*per_token, "score"):
                column[:] = np.nan
            found[key] = column
        plain = self.keys is not None and len(self.keys) > 1 and self.keys[1] not in (*per_token, "score")
        if self.keys is not None and plain and not self.no_negative and self.chance(0.08):
            found[self.keys[1]] = 1.0 - found[self.keys[0]]  # they cancel
        if accuracy is not None and accuracy[1] is None:
            column = rng.integers(0, 5, size=size) / 4 if self.chance(0.5) else rng.integers(0, 2, size=size) / 1.0
            if self.chance(0.2):
                column = rng.integers(0, 2, size=6)[prompt % 6] / 1.0
            if self.chance(0.2):
                column[rng.random(size) < 0.3] = np.nan
            found[accuracy[0]] = column
        return found

    def column(self, prompt: np.ndarray) -> np.ndarray:
        rng, size = self.rng, len(prompt)
        kind = rng.integers(11)
        if kind < 3:
            column = rng.integers(0, 2, size=size) / 1.0
        elif kind == 3:
            column = rng.choice([0.0, 1.0, -1.0, 0.5], size=size)
        elif kind == 4:
            column = rng.integers(-640, 641, size=size) / 64
        elif kind in (5, 6):
            column = rng.normal(size=size)
        elif kind == 7:
            column = self.pick(2e4, -1e6) + rng.integers(0, 4, size=size) / 4
        elif kind == 8:  # around the range that counts as constant
            column = self.pick(0.3, 50.0) + rng.choice([0.0, 1e-9, 4e-7, 3e-6, 2e-4], size=size)
        elif kind == 9:
            column = rng.normal(size=size) * self.pick(1e-5, 1e-3, 1e4, 1e8)
        else:
            column = rng.normal(size=6)[prompt % 6]
        constant = rng.random(6) < self.pick(0.0, 0.0, 0.3, 0.8)
        column = np.where(constant[prompt % 6], np.round(rng.normal(size=6), 1)[prompt % 6], column)
        return np.abs(column) if self.no_negative else column


def with_padding(rng: np.random.Generator, rows: Rows) -> Rows:
    """A few rows that copy others, with another name and an empty mask, anywhere in the batch."""
    count, size = int(rng.integers(1, 5)), len(rows)
    order = rng.permutation(np.concatenate([np.arange(size), np.full(count, -1)]))
    pad, source = order < 0, np.where(order < 0, 0, order)

    def spread(column: np.ndarray) -> np.ndarray:
        return column[source] if size else np.ones(count, dtype=column.dtype)

    return Rows(
        prompt=np.where(pad, -1, spread(rows.prompt)),
        session=np.where(pad, 0, spread(rows.session)),
        output=np.where(pad, 0, spread(rows.output)),
        length=spread(rows.length),
        bits=np.where(pad, 0, spread(rows.bits)).astype(np.uint8),
        score=spread(rows.score),
        kl=spread(rows.kl),
        columns={key: spread(column) for key, column in rows.columns.items()},
    )


def shape_of(batches: tuple[Rows, ...]) -> dict[str, bool]:
    """What is special about the batches, for the name of a case."""
    columns = [column for rows in batches for column in (rows.score, *rows.columns.values())]
    return {
        "padding": any(rows.padding.any() for rows in batches),
        "sessions": any((rows.output > 0).any() for rows in batches),
        "nan": any(np.isnan(column).any() for column in columns),
        "empty": any((rows.bits[~rows.padding] == 0).any() for rows in batches),
    }
