"""The reward functions as verl loads and calls them."""

import asyncio
import re
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.trainer.ppo.reward import get_custom_reward_fn

from tests.facts import facts
from tests.rewards.tool_call_responses import call, response_with_calls
from verl_ext import rewards
from verl_ext.errors import ConfigurationError

TOOL_CALL = response_with_calls(call("f", a=1))


@dataclass(frozen=True)
class Example:
    """A correct response to a ground truth, and its rewards."""

    response: str
    truth: str
    rewards: dict[str, float]


EXAMPLES = {
    "tool_calling": Example(
        response=TOOL_CALL,
        truth=TOOL_CALL,
        rewards={"format": 1.0, "correctness": 3.0, "score": 4.0},
    ),
    "gsm8k": Example(
        response="<think> t </think>\n<answer>18</answer>",
        truth="#### 18",
        rewards={"correctness": 1.0, "integer": 1.0, "format": 1.0, "score": 3.0},
    ),
    "boxed_math": Example(
        response=r"\boxed{\frac{1}{2}}",
        truth="0.5",
        rewards={"accuracy": 1.0, "score": 1.0},
    ),
}


def reward_config(module: str):
    """Return the configuration of a run with a reward function of the package."""
    function = {"path": f"pkg://verl_ext.rewards.{module}", "name": "compute_score"}
    return OmegaConf.create({"reward": {"custom_reward_function": function, "num_workers": 1}})


# Its tokens are the code points of characters.
TOKENIZER = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(map(chr, ids.tolist())))


def rollout_of(response: str, truth: str) -> DataProto:
    """Return a batch of verl with one response."""
    ids = torch.tensor([[ord(character) for character in response]])
    non_tensors = {
        "data_source": "data",
        "reward_model": {"ground_truth": truth},
        "extra_info": {"index": 5},
        "tool_extra_fields": {},
    }
    return DataProto.from_dict(
        tensors={"responses": ids, "attention_mask": torch.ones_like(ids)},
        non_tensors={name: np.array([value], dtype=object) for name, value in non_tensors.items()},
    )


async def score_with_reward_manager(module: str, rollout: DataProto) -> dict:
    """Return the result of verl's reward manager, which keeps the event loop in which it is created."""
    config = reward_config(module)
    manager = get_reward_manager_cls("naive")(
        config=config,
        tokenizer=TOKENIZER,
        compute_score=get_custom_reward_fn(config),
        reward_router_address="host:1",
        reward_model_tokenizer=TOKENIZER,
    )
    return await manager.run_single(rollout)


@pytest.mark.parametrize("module", EXAMPLES)
def test_reward_manager_of_verl_returns_the_components(module):
    example = EXAMPLES[module]
    rollout = rollout_of(example.response, example.truth)
    result = asyncio.run(score_with_reward_manager(module, rollout))
    assert result["reward_score"] == example.rewards["score"]
    assert result["reward_extra_info"] == example.rewards
    assert len(result) == 2


@pytest.mark.parametrize("module", EXAMPLES)
def test_misspelled_argument_is_rejected(module):
    example = EXAMPLES[module]
    compute_score = get_custom_reward_fn(reward_config(module))
    with pytest.raises(ConfigurationError, match=facts("reward_kwargs", "'reward_router_adress'")):
        compute_score("data", example.response, example.truth, reward_router_adress="host:1")


MODULES_AND_SETTINGS = [
    ("gsm8k", {}),
    ("gsm8k", {"strict": "reference"}),
    ("boxed_math", {}),
    ("boxed_math", {"timeout": 1.0}),
    ("tool_calling", {}),
    ("tool_calling", {"length": "fixed"}),
]


@pytest.mark.parametrize(("module", "kwargs"), MODULES_AND_SETTINGS)
@pytest.mark.parametrize("response", ["", "nothing of the kind", TOOL_CALL, "<think>1</think>\n<answer>18</answer>"])
def test_every_response_gets_the_declared_components(module: str, kwargs: dict, response: str) -> None:
    scorer = import_module(f"verl_ext.rewards.{module}")
    result = scorer.compute_score("data", response, EXAMPLES[module].truth, {"index": 1}, **kwargs)
    declared = scorer.Options(**kwargs)
    assert list(result) == [*declared.components, "score"]
    for value in result.values():
        assert type(value) is float
    for name in declared.accuracies:
        assert 0 <= result[name] <= 1


def components_of(module: str) -> set[str]:
    """Return the components that a reward function declares with any of its settings."""
    scorer = import_module(f"verl_ext.rewards.{module}")
    components = set()
    for name, kwargs in MODULES_AND_SETTINGS:
        if name == module:
            components.update(scorer.Options(**kwargs).components)
    return components


def test_docstring_of_the_package_names_the_components_of_each_reward_function() -> None:
    rows = re.findall(r"^\| `verl_ext\.rewards\.(\w+)` \| (.*) \|$", rewards.__doc__ or "", re.MULTILINE)
    components = {module: set(re.findall(r"`(\w+)`", cell)) for module, cell in rows}
    assert components == {module: components_of(module) for module in EXAMPLES}
