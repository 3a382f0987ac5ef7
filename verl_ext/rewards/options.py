"""Shared by the reward modules: keyword arguments as typed options, and the row that an error names."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, TypeVar

from verl_ext.core.schema import parse_dataclass
from verl_ext.errors import ConfigurationError, DataError

OptionsClass = TypeVar("OptionsClass")
ExtraInfo = Mapping[str, Any] | None
KWARGS = "reward.custom_reward_function.reward_kwargs"
"""The setting with the arguments, for messages."""
FROM_VERL = frozenset({"reward_router_address", "reward_model_tokenizer"})
"""verl adds these arguments to every call if there is a reward model. They are not options of a reward function."""


def parse_options(cls: type[OptionsClass], kwargs: Mapping[str, object]) -> OptionsClass:
    """Make the options, a frozen dataclass, from the keyword arguments of a call."""
    return parse_dataclass(cls, {name: value for name, value in kwargs.items() if name not in FROM_VERL}, KWARGS)


def require_package(module: str, requirement: str, why: str) -> None:
    """Raise if an optional package is not installed."""
    if find_spec(module) is None:
        raise ConfigurationError(
            f"{why} needs the package {module!r}, which is not installed. Install it with "
            f"`pip install {requirement!r}`."
        )


def row_name(data_source: object, extra_info: ExtraInfo) -> str:
    """Name the row of the data set from which a sample comes, for a message.

    >>> row_name("rlla", {"index": 7})
    "row 7 of 'rlla'"
    >>> row_name("rlla", None)
    "a row of 'rlla' (extra_info has no 'index')"
    """
    index = (extra_info or {}).get("index")
    source = repr(str(data_source))
    return f"a row of {source} (extra_info has no 'index')" if index is None else f"row {index} of {source}"


def truth_text(row: str, ground_truth: object) -> str:
    """Return the ground truth as stripped text, or raise `DataError`."""
    if not isinstance(ground_truth, str) or not ground_truth.strip():
        raise bad_truth(row, "is empty or not a string", ground_truth, "a non-empty string")
    return ground_truth.strip()


def bad_truth(row: str, problem: str, ground_truth: object, expected: str) -> DataError:
    """Make the error for an invalid ground truth."""
    text = repr(ground_truth)
    shown = text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
    return DataError(
        f"{row}: the ground truth {problem}. Expected {expected}, found {shown}. Fix reward_model.ground_truth of this "
        "row, or remove the row, where the data are prepared."
    )
