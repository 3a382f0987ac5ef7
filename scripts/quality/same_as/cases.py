"""Draw cases: a method with its settings, and batches of rewards. The same seed always gives the same case.

All numbers are multiples of 1/64 and most rows are clean, so that most cases compute; those that raise are compared,
too. `Draw` has the generator of one case.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

KINDS = ("core", "lists", "default", "ray", "filter", "resume", "trainers", "check")
WIDTH = 8
"""Tokens of the longest response."""
COMPONENTS = ("acc", "format", "style", "cost", "flag")
"""What the drawn reward functions return. `acc` lies in [0, 1], `style` is at least 0, `cost` has both signs."""
OURS = (
    *("gdpo", "dgpo", "hadw", "drgrpo", "gd2po", "maxrl", "dara", "dvao", "corrgrpo", "rvpo", "saw"),
    *("weighted_grpo", "liteppo", "fgrpo", "compose"),
)
OF_VERL = (
    *("grpo", "grpo", "rloo", "rloo_vectorized", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "gpg"),
    *("grpo_vectorized", "grpo_passk"),
)
BASES = ("grpo", "gdpo", "drgrpo", "dgpo", "gd2po", "maxrl", "liteppo", "dvao", "weighted_grpo")
PER_REWARD = ("gdpo", "gd2po", "dara", "dvao", "corrgrpo", "rvpo", "saw")
"""Methods that work on each reward separately: they need keys, and have no KL in the reward."""
NO_RUBRIC = ("gd2po", "dara", "saw")
WITH_STD = ("gdpo", "hadw", "gd2po", "dara", "rvpo", "saw", "weighted_grpo", "fgrpo", "grpo")
"""Methods for which `norm_adv_by_std_in_grpo=False` is no error."""
NEED_ACCURACY = ("dgpo", "hadw", "fgrpo")
LOSSES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum")
SOURCES = ("letters", "digits")
# Lists of steps that every version should accept; LOWEST is replaced by one number for each reward.
LOWEST = "LOWEST"
LISTS: tuple[list[Any], ...] = (
    ["weighted_sum", "center"],
    ["weighted_sum", "center", "scale_by_std"],
    ["weighted_sum", {"step": "center", "leave_one_out": True}],
    ["center", "scale_by_std", "weighted_sum", {"step": "whiten", "over": "token"}],
    ["center", {"step": "scale_by_std", "epsilon": 0.01}, "weighted_sum", "whiten"],
    ["center", "scale_by_mad", "weighted_sum", "whiten", {"step": "weight_by_difficulty", "dqw_temp": 1.0}],
    ["weighted_sum", {"step": "length_penalty", "weight": 0.5}, "center"],
    ["weighted_sum", "divide_by_mean", "center"],
    ["divide_by_batch_std", "weighted_sum", "center"],
    ["weighted_sum", "divide_by_batch_std", "center"],
    ["center", "scale_by_std", {"step": "drop_conflicts", "conflict": "snr", "tau": 0.5}, "weighted_sum", "whiten"],
    ["center", "drop_conflicts", "weighted_sum"],
    ["center", "scale_by_std", "weight_by_density", "weighted_sum"],
    ["center", {"step": "weight_by_density", "of": "positive"}, "weighted_sum"],
    ["center", "scale_by_common_std", "weighted_sum"],
    ["center", "scale_by_correlation", "weighted_sum"],
    ["center", "scale_by_std", {"step": "soft_min", "k": 2.0}],
    ["center", "scale_by_std", {"step": "weight_by_variation", "min_values": LOWEST}, "weighted_sum", "whiten"],
    ["weighted_sum", "center", "balance"],
    ["weighted_sum", "center", "scale_by_std", {"step": "balance", "over": "sequence"}],
    ["weighted_sum", "center", {"step": "weight_by_focal", "gamma": 2.0}],
    ["weighted_sum", "center", "scale_by_std", {"step": "weight_by_history", "anchor": "window"}],
    ["center", "scale_by_std", "weighted_sum", "whiten", "weight_by_history"],
    ["weighted_sum", "same_as.own_steps:BySource", "center"],
    ["weighted_sum", "center", "same_as.own_steps:Halve"],
)
STEP_NAMES = (
    *("weighted_sum", "center", "scale_by_std", "scale_by_mad", "whiten", "balance", "weight_by_difficulty"),
    *("weight_by_focal", "weight_by_history", "divide_by_mean", "divide_by_batch_std", "drop_conflicts"),
    *("weight_by_density", "scale_by_common_std", "scale_by_correlation", "soft_min"),
)


@dataclass
class Rows:
    """One batch of a trainer, one entry for each of its rows, or for each trajectory where it says so."""

    prompt: list[int]
    """The prompt of each row; -1 for padding."""
    session: list[int]
    output: list[int]
    """The last output of a session carries the rewards."""
    mask: list[np.ndarray]
    """The tokens of each row: 1 where a token counts in the loss."""
    results: dict[tuple[int, int], tuple[float, dict[str, Any]]]
    """For each trajectory, by prompt and session: the score of the trainer, and what the reward manager returned."""
    columns: dict[str, dict[tuple[int, int], Any]]
    """Columns of the data set, which are the same for all trajectories of a prompt."""
    process: list[np.ndarray]
    """`token_level_scores_process` of each row."""
    log_probs: list[np.ndarray]
    """The log probability of each token; the reference has 0."""
    rollout_log_probs: list[np.ndarray]
    source: dict[int, str]
    """The data source of each prompt."""

    @property
    def uids(self) -> list[str]:
        return [f"pad{row}" if prompt < 0 else f"p{prompt}" for row, prompt in enumerate(self.prompt)]

    @property
    def keys(self) -> list[str]:
        """The names of the rows in verl's queue."""
        return [f"{uid}_{a}_{b}" for uid, a, b in zip(self.uids, self.session, self.output, strict=True)]

    def trajectory(self, row: int) -> tuple[int, int]:
        """Return the trajectory of a row; that of the first real row for padding, as verl copies it."""
        if self.prompt[row] < 0:
            row = next((at for at, prompt in enumerate(self.prompt) if prompt >= 0), row)
        return self.prompt[row], self.session[row]


@dataclass
class Case:
    """One case: what runs, and on what."""

    kind: str
    seed: int
    method: str = ""
    algorithm: dict[str, Any] = field(default_factory=dict)
    """The section `algorithm`, without `adv_estimator`, in the vocabulary of `spelling.PROBES`."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Further settings of verl, by dotted path."""
    batches: list[Any] = field(default_factory=list)
    stateful: bool = False
    resume_after: int = 0
    """The batch after which a new trainer resumes from the checkpoint; 0 for no resume."""
    after_resume: dict[str, Any] = field(default_factory=dict)
    """Sections of `algorithm` that the resumed run changes."""
    trainer: str = ""
    """`default` or `ray`, in the kinds that use both; a kind of trainer in the kind `trainers`."""
    tags: list[str] = field(default_factory=list)
    """What is special about the case, for the table of coverage."""

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.seed}"


class Draw:
    """The draws of one case."""

    def __init__(self, kind: str, seed: int) -> None:
        self.rng = np.random.default_rng([KINDS.index(kind), seed])

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def one(self, values: Sequence[Any]) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def some(self, values: Sequence[Any], least: int = 1) -> list[Any]:
        count = int(self.rng.integers(least, len(values) + 1))
        return [values[at] for at in sorted(self.rng.permutation(len(values))[:count])]

    def whole(self, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))


def draw(kind: str, seed: int) -> Case:
    """Draw the case of a seed."""
    rng = Draw(kind, seed)
    if kind in ("core", "lists"):
        return _core_case(rng, kind, seed)
    if kind == "trainers":
        from same_as.other_trainers import draw_case
    elif kind == "check":
        from same_as.commands import draw_case
    else:
        return _trainer_case(rng, kind, seed)
    return draw_case(seed)


# Settings of the methods.


def method_settings(rng: Draw, method: str, keys: Sequence[str]) -> dict[str, Any]:
    """Draw the sections of a method, most of the time with some settings at their defaults."""
    section: dict[str, Any] = {}

    def maybe(name: str, values: Sequence[Any], probability: float = 0.4) -> None:
        if rng.chance(probability):
            section[name] = rng.one(values)

    if method == "gdpo":
        maybe("whiten", ("token", "sequence", "none"))
        maybe("scale", ("std", "mad", "none"))
        maybe("epsilon", (1e-4, 0.01), 0.2)
    elif method == "dgpo":
        maybe("dgae", (False,), 0.3)
        maybe("dqw", (False,), 0.2)
        if section.get("dqw", True):
            maybe("dqw_temp", (0.5, 1.0, 5.0))
        maybe("balance", ("auto", "token", "sequence", "none"))
    elif method == "hadw":
        maybe("base", BASES if keys else [base for base in BASES if base not in PER_REWARD], 0.6)
        maybe("anchor", ("soft", "window", "fixed"), 0.6)
        maybe("lambda_scale", (1.0, 2.0))
        anchor = section.get("anchor", "soft")
        if anchor != "fixed":
            maybe("history_window", (1, 2, 3))
        if anchor == "soft":
            maybe("eta", (0.0, 0.5))
            maybe("eta_min", (0.0, 0.2))
        if anchor == "fixed":
            maybe("fixed_anchor", (0.25, 0.75))
    elif method == "drgrpo":
        section["check_loss"] = False
    elif method == "gd2po":
        maybe("conflict", ("hard", "snr"))
        if section.get("conflict") == "snr":
            maybe("tau", (0.1, 0.5, 0.8))
        maybe("over", ("token", "sequence"))
    elif method == "maxrl":
        maybe("epsilon", (1e-3, 0.1))
    elif method == "dara":
        maybe("of", ("both", "positive"))
        maybe("over", ("token", "sequence"))
    elif method == "rvpo":
        maybe("k", (0.5, 3.0))
    elif method == "saw":
        section["min_values"] = [0.0] * max(1, len(keys))
        if "cost" in keys:
            section["min_values"] = [-4.0 if key == "cost" else 0.0 for key in keys]
    elif method == "fgrpo":
        maybe("gamma", (0.0, 0.5, 2.0))
    elif method == "compose":
        lists = LISTS if keys or rng.chance(0.05) else [steps for steps in LISTS if steps[0] == "weighted_sum"]
        section["steps"] = steps_of(rng.one(lists), keys)
    sections = {method: section} if section else {}
    if section.get("base") == "drgrpo":
        sections["drgrpo"] = {"check_loss": False}
    if method == "hadw" and "base" in section and rng.chance(0.3):
        below = method_settings(rng, section["base"], keys)
        sections |= {name: given for name, given in below.items() if name != "hadw"}
    return sections


def steps_of(steps: Sequence[Any], keys: Sequence[str]) -> list[Any]:
    """Return a list of steps whose LOWEST is replaced."""
    min_values = [-4.0 if key == "cost" else 0.0 for key in keys] or [0.0]
    return [
        {name: min_values if value == LOWEST else value for name, value in step.items()}
        if isinstance(step, dict)
        else step
        for step in steps
    ]


def needs_accuracy(method: str, algorithm: dict[str, Any]) -> bool:
    """Return whether a method reads the accuracy."""
    steps = str(algorithm.get("compose", {}).get("steps", ""))
    return method in NEED_ACCURACY or any(
        name in steps for name in ("difficulty", "focal", "history", "length_penalty")
    )


def is_stateful(method: str, algorithm: dict[str, Any]) -> bool:
    """Return whether a method carries a state from batch to batch."""
    return method == "hadw" or "history" in str(algorithm.get("compose", {}).get("steps", ""))


def common_settings(
    rng: Draw, method: str, algorithm: dict[str, Any], numbers: Sequence[str], *, positive: bool
) -> None:
    """Draw the settings of `algorithm.rewards` that every method reads. `numbers` are the keys that are numbers."""
    rewards = algorithm["rewards"]
    keys = rewards.get("keys") or []
    below = algorithm.get("hadw", {}).get("base", method)
    soft = method == "rvpo" or "soft_min" in str(algorithm.get("compose"))
    if keys and rng.chance(0.03 if soft else 0.5):
        values = (2.0, 0.5, 1.0, 0.25) if positive else (2.0, 0.5, 1.0, -1.0, 0.25, -0.5)
        rewards["weights"] = [rng.one(values) for _ in keys]
    if len(numbers) > 1 and rng.chance(0.2):
        on, other = (numbers[at] for at in rng.rng.permutation(len(numbers))[:2])
        rewards["conditions"] = {other: {"reward": on, "at_least": rng.one((0.5, 1.0, 0.0))}}
    if rng.chance(0.25 if method in WITH_STD and below in WITH_STD else 0.02):
        algorithm["norm_adv_by_std_in_grpo"] = False


# The core.


def _core_case(rng: Draw, kind: str, seed: int) -> Case:
    method = "compose" if kind == "lists" else rng.one((*OURS, "hadw", "compose", "grpo"))
    names = rng.some(COMPONENTS) if rng.chance(0.8) else []
    positive = method in ("maxrl",) or rng.chance(0.2)
    if positive:
        names = [name for name in names if name != "cost"]
    algorithm: dict[str, Any] = {"rewards": {"keys": list(names)} if names else {}}
    algorithm |= method_settings(rng, method, names)
    if kind == "lists":
        algorithm["compose"] = {"steps": _random_list(rng, names)}
    common_settings(rng, method, algorithm, names, positive=positive)
    turns = bool(names) and rng.chance(0.15)
    if turns:
        algorithm["rewards"]["per_turn"] = [names[0]]
        algorithm["rewards"].pop("conditions", None)
        if rng.chance(0.5):
            algorithm["rewards"]["turn_discount"] = 0.5
    if rng.chance(0.2):
        algorithm["use_kl_in_reward"] = True
    case = Case(kind, seed, method, algorithm, stateful=is_stateful(method, algorithm))
    if rng.chance(0.4):
        case.overrides["loss_agg_mode"] = rng.one(LOSSES)
    case.batches = [_core_batch(rng, names or ["score"], case) for _ in range(rng.whole(1, 5 if case.stateful else 3))]
    case.tags = [f"method {method}", "turns" if turns else "", "KL" if "use_kl_in_reward" in algorithm else ""]
    case.tags += ["conditions" if "conditions" in algorithm["rewards"] else "", "no keys" if not names else ""]
    return case


def _random_list(rng: Draw, names: Sequence[str]) -> list[Any]:
    """Draw a list that may make no sense: steps at random, or a sensible list with one step more or another order."""
    steps = steps_of(rng.one(LISTS), names)
    form = rng.one(("random", "order", "one more", "one more", "one more"))
    if form == "random":
        return rng.some(STEP_NAMES)[:4]
    if form == "order":
        return [steps[at] for at in rng.rng.permutation(len(steps))]
    steps.insert(rng.whole(0, len(steps)), rng.one(STEP_NAMES))
    return steps


def _core_batch(rng: Draw, names: Sequence[str], case: Case) -> dict[str, Any]:
    """Draw the arguments of `Batch.of`."""
    labels: list[str] = []
    turns: list[int] = []
    per_turn = "per_turn" in case.algorithm["rewards"]
    shape = rng.one(("uneven", "even", "one"))
    for prompt in range(rng.whole(1, 5)):
        for _ in range({"uneven": rng.whole(1, 6), "even": 4, "one": rng.whole(1, 2)}[shape]):
            turns.append(rng.whole(1, 3) if per_turn else 1)
            labels += [f"p{prompt}"] * turns[-1]
    size, responses = len(labels), len(turns)
    owner = np.repeat(np.arange(responses), turns)
    matrix = np.stack([component(rng, "acc" if name == "score" else name, responses)[owner] for name in names], axis=1)
    if per_turn:
        matrix[:, 0] = component(rng, names[0], size)
    if rng.chance(0.25):
        matrix[rng.rng.random(matrix.shape) < 0.15] = np.nan
    accuracy = component(rng, "acc", responses)
    if rng.chance(0.1):
        accuracy[rng.rng.random(responses) < 0.3] = np.nan
    given: dict[str, Any] = {
        "rewards": matrix,
        "labels": labels,
        "keys": list(names),
        "lengths": rng.rng.integers(0 if rng.chance(0.2) else 1, WIDTH + 1, size).astype(float),
        "accuracy": accuracy[owner],
        "fields": {"data_source": [SOURCES[at] for at in rng.rng.integers(0, 2, responses)[owner]]},
    }
    if per_turn:
        given["turn_counts"] = turns
    elif rng.chance(0.3):
        given["outputs"] = rng.rng.integers(1, 4, size).astype(float)
    if case.algorithm.get("use_kl_in_reward"):
        given["kl_reward"] = (rng.rng.integers(-32, 33, responses) / 64)[owner]
    return given


def component(rng: Draw, name: str, size: int) -> np.ndarray:
    """Draw the values of a component."""
    few = rng.chance(0.5)
    if name in ("acc", "format", "flag"):
        values = rng.rng.integers(0, 2, size) if few or name != "acc" else rng.rng.integers(0, 5, size) / 4
    elif name == "style":
        values = rng.rng.integers(0, 4, size) if few else rng.rng.integers(0, 257, size) / 64
    else:
        values = rng.rng.integers(-1, 2, size) if few else rng.rng.integers(-256, 257, size) / 64
    return np.asarray(values, dtype=np.float64)


# The trainers.


@dataclass
class Scheme:
    """How the reward function, the reward manager and the data set of a case behave."""

    manager: str
    """`naive`, `dapo`, `rate_limited`: verl's; `custom`: a manager of a user's own, whose score may be any number."""
    number: bool
    """Whether the function returns a number."""
    returns: list[str]
    score: str
    """How the trainer's score comes about from the components: `sum`, `acc` or `drawn`."""
    in_result: str
    """`score` in the result: `equal` to the trainer's, `other`, or `absent` (only with the manager `custom`)."""
    note: bool
    """Whether the function also returns a text."""
    dirt: dict[str, str]
    """Components that are not clean in some rows: `missing`, `None`, `text` or `nan`."""
    columns: list[str]
    """Columns of the data set, named like rewards."""
    process: bool
    steps: bool
    """Whether the function returns the text `steps` of rewards per turn."""
    rubric: bool
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the manager."""
    bonus: bool = False
    """Whether a score that differs from that in the result is above it, so that it stays at least 0."""


def _trainer_case(rng: Draw, kind: str, seed: int) -> Case:
    trainer = kind if kind in ("default", "ray") else "default"
    if kind == "resume":
        trainer = rng.one(("default", "ray"))
        method = "hadw" if rng.chance(0.8) else "compose"
    elif kind == "filter":
        method = rng.one((*OURS, "grpo", "rloo"))
    else:
        method = rng.one(OF_VERL) if rng.chance(0.15) else rng.one((*OURS, "hadw", "compose"))
    ours = method in OURS
    clean = rng.chance(0.75)
    scheme = _scheme(rng, clean, ours)
    scheme.bonus = method == "maxrl"
    if kind == "filter" and rng.chance(0.9):
        scheme.steps = scheme.rubric = False
    if method in NO_RUBRIC and rng.chance(0.9):
        scheme.rubric = False
    keys = _keys(rng, scheme, method, clean)
    algorithm: dict[str, Any] = {"rewards": {"keys": keys} if keys else {}}
    rewards = algorithm["rewards"]
    algorithm |= method_settings(rng, method, keys)
    if kind == "resume" and method == "compose":
        algorithm["compose"] = {"steps": ["weighted_sum", "center", "scale_by_std", "weight_by_history"]}
    numbers = [key for key in keys if key not in ("steps", "rubric")]
    if ours or rng.chance(0.1):
        common_settings(
            rng, method, algorithm, numbers, positive="maxrl" in (method, algorithm.get("hadw", {}).get("base"))
        )
    case = Case(kind, seed, method, algorithm, trainer=trainer, stateful=is_stateful(method, algorithm))
    if "steps" in keys:
        rewards["per_turn"] = ["steps"]
        if rng.chance(0.5):
            rewards["turn_discount"] = rng.one((0.5, 0.9))
    if "rubric" in keys:
        rewards["rubrics"] = ["rubric"]
    if keys and not {"steps", "rubric"} & set(keys) and rng.chance(0.1):
        rewards["token_scores"] = True
    _accuracy(rng, case, scheme, clean)
    if rng.chance(0.45):
        rewards["log"] = rng.one(("all", "keys", "none"))
    below = algorithm.get("hadw", {}).get("base", method)
    per_reward = below in (*PER_REWARD, "maxrl") or below == "compose" or "steps" in keys or "process" in keys
    if rng.chance(0.02 if per_reward else 0.3 if ours else 0.1):
        algorithm["use_kl_in_reward"] = True
    if rng.chance(0.12) and keys and method != "gdpo":
        _to_verls_names(algorithm)
    elif rng.chance(0.25) and keys and method == "gdpo":
        _to_verls_names(algorithm)
        algorithm["gdpo"] = {**algorithm.get("gdpo", {}), "whiten": rng.one(("token", "sequence"))}
    if rng.chance(0.2):
        algorithm["verl_ext"] = {"dump_dir": "DUMPS"}
    rejecting = rng.chance(0.25)
    if rejecting and ours and rng.chance(0.5):
        rewards["rejected"] = rng.one(("exclude", "exclude", "keep"))
    if rng.chance(0.3):
        case.overrides["actor_rollout_ref.actor.loss_agg_mode"] = rng.one(LOSSES)
    if rng.chance(0.03):
        case.overrides["actor_rollout_ref.rollout.n"] = 1
    if trainer == "default" and rng.chance(0.08) and "steps" not in keys:
        algorithm["rollout_correction"] = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.9_1.1"}
        case.overrides["actor_rollout_ref.rollout.calculate_log_probs"] = True
    if kind == "filter":
        _filter(rng, case, scheme)
    if not rewards:
        del algorithm["rewards"]
    count = rng.whole(2, 4) if case.stateful else rng.whole(1, 3)
    sessions = trainer == "default" and rng.chance(0.35)
    case.batches = [draw_rows(rng, case, scheme, sessions=sessions, rejecting=rejecting) for _ in range(count)]
    if case.stateful and (kind == "resume" or rng.chance(0.2)):
        case.resume_after = rng.whole(1, count - 1)
        if kind == "resume" and rng.chance(0.2):
            case.after_resume = {"hadw": {"anchor": rng.one(("soft", "window"))}} if method == "hadw" else {}
    case.tags = [f"method {method}", f"manager {scheme.manager}", f"score in the result {scheme.in_result}"]
    case.tags += [f"{len(keys)} keys" if len(keys) < 2 else "many keys", "clean" if clean else "not clean"]
    case.tags += sorted(rewards.keys() - {"keys"}) + sorted(f"column {name}" for name in scheme.columns)
    case.tags += [name for name in ("use_kl_in_reward", "gdpo_reward_keys", "verl_ext") if name in algorithm]
    flags = {"sessions": sessions, "rejected rows": rejecting, "process reward": scheme.process}
    case.tags += [name for name, on in flags.items() if on] + (["resume"] if case.resume_after else [])
    return case


def _scheme(rng: Draw, clean: bool, ours: bool) -> Scheme:
    manager = rng.one(("naive", "naive", "dapo", "rate_limited", "custom", "custom"))
    number = rng.chance(0.15)
    names = ["acc"] if number else rng.some(COMPONENTS, 2)
    in_result = "equal"
    if manager == "custom":
        in_result = rng.one(("equal", "other", "other", "absent"))
    scheme = Scheme(
        manager=manager,
        number=number,
        returns=names,
        score="acc" if number else rng.one(("sum", "acc", "drawn")),
        in_result=in_result,
        note=not number and rng.chance(0.2),
        dirt={},
        columns=rng.some(("score", "acc", "format", "extra"))[:2] if rng.chance(0.2) else [],
        process=rng.chance(0.12),
        steps=ours and not number and rng.chance(0.15),
        rubric=ours and not number and rng.chance(0.12),
    )
    if manager == "dapo":
        scheme.options = {"log": rng.chance(0.7), "len": rng.whole(2, 6), "penalty_factor": rng.one((0.5, 1.0))}
    if manager == "rate_limited":
        scheme.options = {"late": rng.one((0.0, 0.0, 0.1, 0.3)), "failing": rng.one((0.0, 0.0, 0.0, 0.1))}
    if not clean and not number:
        for name in rng.some(names):
            scheme.dirt[name] = rng.one(("missing", "None", "text", "nan", "nan", "nan"))
    return scheme


def _keys(rng: Draw, scheme: Scheme, method: str, clean: bool) -> list[str]:
    """Draw `rewards.keys`; `gdpo` cannot do without."""
    if rng.chance(0.3) and method not in PER_REWARD:
        return []
    choices = [name for name in scheme.returns if not (method == "maxrl" and name == "cost")]
    if scheme.number and scheme.manager == "dapo" and scheme.options["log"]:
        choices.append("overlong_reward")
    choices += [name for name in scheme.columns if name != "score" and rng.chance(0.5)]
    choices += ["process"] * (scheme.process and method != "maxrl") + ["score"] * rng.chance(0.15)
    choices += ["missing_one"] * (not clean and rng.chance(0.1))
    choices = list(dict.fromkeys(choices)) or ["acc"]
    keys = [rng.one(choices)] if rng.chance(0.25) else rng.some(choices)
    return keys + ["steps"] * scheme.steps + ["rubric"] * scheme.rubric


def _accuracy(rng: Draw, case: Case, scheme: Scheme, clean: bool) -> None:
    rewards = case.algorithm["rewards"]
    if not needs_accuracy(case.method, case.algorithm) and not rng.chance(0.1):
        return
    if "acc" in scheme.returns and rng.chance(0.6):
        if len(rewards.get("keys") or []) > 1 or rng.chance(0.4):
            rewards["accuracy_key"] = "acc"
    else:
        rewards["accuracy_key"] = rng.one((*scheme.returns, "score"))
        if rewards["accuracy_key"] in ("style", "cost", "score") and (clean or rng.chance(0.5)):
            rewards["accuracy_threshold"] = rng.one((0.0, 0.5))
    if rng.chance(0.15):
        rewards["accuracy_threshold"] = 0.5


def _to_verls_names(algorithm: dict[str, Any]) -> None:
    """Write keys and weights by verl's own names."""
    rewards = algorithm["rewards"]
    for ours, theirs in (("keys", "gdpo_reward_keys"), ("weights", "gdpo_reward_weights")):
        if ours in rewards:
            algorithm[theirs] = rewards.pop(ours)


def _filter(rng: Draw, case: Case, scheme: Scheme) -> None:
    metric = rng.one(("any_reward", "any_reward", "accuracy_between", "accuracy_between", "reward", "acc"))
    case.algorithm["filter_groups"] = {"enable": True, "metric": metric}
    if metric == "accuracy_between":
        rewards = case.algorithm["rewards"]
        rewards["accuracy_between"] = rng.one(([0.05, 0.95], [0.25, 0.75], [0.5, 1.0]))
        rewards["accuracy_key"] = "acc" if "acc" in scheme.returns else rng.one(scheme.returns)
        if rewards["accuracy_key"] in ("style", "cost"):
            rewards["accuracy_threshold"] = 0.5


def draw_rows(rng: Draw, case: Case, scheme: Scheme, *, sessions: bool, rejecting: bool) -> Rows:
    """Draw a batch of a trainer: up to five prompts, padding, sessions of several outputs, and their rewards."""
    shape = rng.one(("uneven", "uneven", "even", "one"))
    named = []
    for prompt in range(rng.whole(1, 5)):
        for session in range({"uneven": rng.whole(1, 6), "even": 4, "one": rng.whole(1, 2)}[shape]):
            outputs = rng.whole(2, 3) if sessions and rng.chance(0.4) else 1
            named += [(prompt, session, output) for output in range(outputs)]
    padding = rng.whole(0, 3) if case.trainer == "default" and rng.chance(0.4) else 0
    named += [(-1, pad, 0) for pad in range(padding)]
    rows = [named[at] for at in rng.rng.permutation(len(named))]
    many_turns = scheme.steps or rng.chance(0.2)
    masks = []
    for prompt, _, _ in rows:
        mask = np.ones(rng.whole(1, WIDTH), dtype=np.int64)
        if many_turns:
            mask[rng.rng.random(len(mask)) < 0.3] = 0
            mask[0] = 1
        if prompt < 0 or (rejecting and rng.chance(0.25)):
            mask[:] = 0
        masks.append(mask)
    made = Rows(
        *([row[at] for row in rows] for at in range(3)),
        mask=masks,
        results={},
        columns={},
        process=[_ends(rng.rng.integers(-64, 65) / 64, mask) for mask in masks],
        log_probs=[rng.rng.integers(-16, 17, len(mask)) / 64 for mask in masks],
        rollout_log_probs=[rng.rng.integers(-8, 9, len(mask)) / 64 for mask in masks],
        source={prompt: rng.one(SOURCES) for prompt in range(-1, 6)},
    )
    made.results = _results(rng, made, scheme)
    for name in scheme.columns:
        values = {prompt: float(rng.whole(0, 3)) / 2 for prompt in range(-1, 6)}
        made.columns[name] = {trajectory: values[trajectory[0]] for trajectory in made.results}
    return made


def _ends(value: float, mask: np.ndarray) -> np.ndarray:
    values = np.zeros(len(mask))
    values[0] += 0.5
    values[-1] += value
    return values


def _results(rng: Draw, rows: Rows, scheme: Scheme) -> dict[tuple[int, int], tuple[float, dict[str, Any]]]:
    """Draw what the reward function returns, and pass it through the reward manager."""
    from same_as.rewards import managed

    names = sorted({(p, s) for p, s in zip(rows.prompt, rows.session, strict=True) if p >= 0})
    values = {name: component(rng, name, len(names)) for name in COMPONENTS}
    drawn = component(rng, "cost", len(names))
    prompts = {prompt: [rng.one((-2.0, 1.0, 3.0)) for _ in range(rng.whole(1, 4))] for prompt in range(6)}
    results: list[Any] = []
    for at, (prompt, session) in enumerate(names):
        found: dict[str, Any] = {name: float(values[name][at]) for name in scheme.returns}
        if "flag" in found:
            found["flag"] = bool(found["flag"])
        score = {"sum": sum(found.values()), "acc": float(values["acc"][at]), "drawn": float(drawn[at])}[scheme.score]
        if scheme.number:
            results.append(score)
            continue
        for name, dirt in scheme.dirt.items():
            if rng.chance(0.15):
                if dirt == "missing":
                    del found[name]
                else:
                    found[name] = {"None": None, "text": "n/a", "nan": float("nan")}[dirt]
        if scheme.note:
            found["note"] = f"row {at}"
        if scheme.steps:
            found["steps"] = ("per_turn", _turn_rewards(rng, rows, prompt, session))
        if scheme.rubric:
            met = [rng.one((0.0, 1.0, 0.5)) for _ in prompts[prompt]]
            found["rubric"] = ("rubric", met, prompts[prompt])
        results.append({"score": score, **found})
    lengths = {(p, s): len(mask) for p, s, mask in zip(rows.prompt, rows.session, rows.mask, strict=True) if p >= 0}
    late = [rng.chance(scheme.options.get("late", 0.0)) for _ in names]
    failing = [rng.chance(scheme.options.get("failing", 0.0)) for _ in names]
    found = managed(scheme, results, [lengths[name] for name in names], late, failing)
    if scheme.in_result == "other":
        penalties = rng.rng.integers(-64, 1, len(names)) / (-32 if scheme.bonus else 32)
        found = [(score + penalty, info) for (score, info), penalty in zip(found, penalties.tolist(), strict=True)]
    if scheme.in_result == "absent":
        found = [(score, {key: value for key, value in info.items() if key != "score"}) for score, info in found]
    return dict(zip(names, found, strict=True))


def _turn_rewards(rng: Draw, rows: Rows, prompt: int, session: int) -> list[float]:
    """Draw one number for each turn of a trajectory, which is a run of ones in its masks."""
    masks = [
        mask for mask, p, s in zip(rows.mask, rows.prompt, rows.session, strict=True) if (p, s) == (prompt, session)
    ]
    turns = sum(int((np.diff(mask, prepend=0) == 1).sum()) for mask in masks)
    count = max(1, turns)
    if rng.chance(0.1):
        count = max(1, count - 1)
    return [float(rng.whole(0, 2)) / 2 for _ in range(count)]
