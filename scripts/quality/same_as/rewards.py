"""Pass what a reward function returns through verl's reward managers."""

import asyncio
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls

import verl_ext
from same_as import renamed
from same_as.cases import WIDTH, Scheme
from same_as.spelling import same

SECONDS = 0.02
"""The time limit of the manager `rate_limited`."""


class Tokenizer:
    """As much of a tokenizer as a reward manager needs."""

    def decode(self, *_args: Any, **_kwargs: Any) -> str:
        return "text"


def managed(
    scheme: Scheme, results: list[Any], lengths: list[int], late: list[bool], failing: list[bool]
) -> list[tuple[float, dict[str, Any]]]:
    """Return `(reward_score, reward_extra_info)` of each trajectory, as verl's manager returns them."""
    results = [with_texts(result) for result in results]
    if scheme.manager == "custom":
        return [
            (result["score"], result) if isinstance(result, dict) else (result, {"acc": result}) for result in results
        ]

    async def compute_score(ground_truth: int, **_other: Any) -> Any:
        if late[ground_truth]:
            await asyncio.sleep(100 * SECONDS)
        if failing[ground_truth]:
            raise KeyError("the reward function failed")
        return results[ground_truth]

    kwargs: dict[str, Any] = {}
    if scheme.manager == "dapo":
        kwargs = {"overlong_buffer_cfg": {"enable": True, **scheme.options}, "max_resp_len": WIDTH}
    config = OmegaConf.create({"reward": {"reward_kwargs": kwargs, "timeout": SECONDS, "max_concurrent": 64}})
    manager = get_reward_manager_cls(scheme.manager)(config, Tokenizer(), compute_score)

    async def score_all() -> list[Any]:
        return await asyncio.gather(*(manager.run_single(data_of(at, length)) for at, length in enumerate(lengths)))

    found = manager.loop.run_until_complete(score_all())
    return [(float(result["reward_score"]), result["reward_extra_info"]) for result in found]


def data_of(number: int, length: int) -> DataProto:
    """Return the data of one response, whose ground truth is its number."""
    tensors = {"responses": torch.ones(1, length, dtype=torch.long), "attention_mask": torch.ones(1, length + 2).long()}
    columns = {"data_source": ["letters"], "reward_model": [{"ground_truth": number}], "extra_info": [{}]}
    return DataProto.from_single_dict(tensors | {name: np.array(at, dtype=object) for name, at in columns.items()})


def with_texts(result: Any) -> Any:
    """Write rewards per turn and rubrics by the functions of this version."""
    if not isinstance(result, dict):
        return result
    return {name: text_of(*value) if isinstance(value, tuple) else value for name, value in result.items()}


def text_of(function: str, *arguments: Any) -> str:
    """Call a function of the public API under the name that this version has for it."""
    for name in same(renamed.FUNCTIONS, function):
        if hasattr(verl_ext, name):
            return getattr(verl_ext, name)(*arguments)
    return "[]"
