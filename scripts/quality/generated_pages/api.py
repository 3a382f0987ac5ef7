"""reference/api.md: the names that the package exports. mkdocstrings replaces each directive by a docstring."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import verl_ext

INTRODUCTION = """
# Python API

This page documents the names that verl_ext exports. Import them from `verl_ext`, for example
`from verl_ext import Batch`. The import loads neither verl nor torch, because each name is loaded on first use.
"""

COMPUTE = """
Build an estimator from settings, and call it with a batch:

```pycon
>>> from verl_ext import Batch, Settings, build
>>> keys = ["correctness", "format"]
>>> estimator = build("gdpo", Settings.parse({"rewards": {"keys": keys}}))
>>> rewards = [[1, 0], [0, 1], [1, 1], [0, 0]]  # of four responses to prompt "p"
>>> batch = Batch.of(rewards, labels=["p", "p", "p", "p"], keys=keys)
>>> result = estimator(batch)
>>> result.advantages.round(3).tolist()
[0.0, 0.0, 1.225, -1.225]
```

Pass `result.state` with the next batch: `estimator(next_batch, result.state)`. Most methods have no state.
"""


class Section(NamedTuple):
    """A section of the page."""

    title: str
    introduction: str
    objects: Sequence[str]
    """Names that the package exports, and paths of other classes whose objects belong to exported ones."""


RESULT = "verl_ext.core.chain.Result"
GROUPS = "verl_ext.core.groups.Groups"
SECTIONS = (
    Section(
        "Compute advantages in your own code",
        COMPUTE,
        ("build", "Settings", "Batch", "Chain", RESULT, GROUPS, "ESTIMATORS"),
    ),
    Section(
        "Write a step",
        "A custom step is a frozen dataclass that inherits from `Step`. [Compose an estimator](../methods/compose.md) "
        "has an example.",
        ("Step", "StepResult", "bounded"),
    ),
    Section(
        "Built-in steps",
        "Use these steps in your own code. [Compose an estimator](../methods/compose.md) lists the names of all steps.",
        (
            "WeightedSum",
            "Center",
            "ScaleByStd",
            "ScaleByMad",
            "Whiten",
            "Balance",
            "WeightByDifficulty",
            "WeightByHistory",
        ),
    ),
    Section(
        "Register a method",
        "A package registers an object of this class as an estimator. [Add a method](../add_method.md) has an example.",
        ("Method",),
    ),
    Section(
        "Return several numbers as one reward",
        "A reward function calls `per_turn` for [per-turn rewards](../per_turn.md), and `rubric` for "
        "[rubrics](../rewards.md).",
        ("per_turn", "rubric", "Turns"),
    ),
    Section(
        "Errors and findings",
        "Every error that verl_ext raises on purpose is a `VerlExtError`.",
        ("VerlExtError", "ConfigurationError", "DataError", "IntegrationError", "CheckpointError", "Finding"),
    ),
    Section("Version", "`verl-ext --version` prints the same version.", ("__version__",)),
)
NO_SIGNATURE = "merge_init_into_class: false"
NO_VALUES = "show_attribute_values: false"
OPTIONS = {
    "Batch": NO_SIGNATURE,
    GROUPS: NO_SIGNATURE,
    RESULT: NO_SIGNATURE,
    "Settings": NO_VALUES,
    "ESTIMATORS": NO_VALUES,
}
"""Options of mkdocstrings by object. The page shows no signature of a class that users do not call themselves."""


def blocks() -> Iterator[str]:
    """Yield the blocks of the page."""
    yield INTRODUCTION
    for section in SECTIONS:
        yield f"## {section.title}"
        yield section.introduction
        for name in section.objects:
            yield _directive(name)


def _directive(name: str) -> str:
    """Return the directive that shows an object. The package loads an exported name from its home module."""
    path = name
    if "." not in name:
        home = verl_ext._HOMES.get(name, "verl_ext")
        path = f"{home}.{name}"
    lines = [f"::: {path}"]
    if name in OPTIONS:
        lines += ["    options:", f"      {OPTIONS[name]}"]
    return "\n".join(lines)
