"""The scorers as verl finds and calls them."""

import asyncio
import re
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
from tests.rewards.tool_answers import call, calls
from verl_ext import rewards
from verl_ext.errors import ConfigurationError

CALL = calls(call("f", a=1))
SCORERS = {
    "tool_calling": (CALL, CALL, {"format": 1.0, "correctness": 3.0, "score": 4.0}),
    "gsm8k": (
        "<think> t </think>\n<answer>18</answer>",
        "#### 18",
        {"correctness": 1.0, "integer": 1.0, "format": 1.0, "score": 3.0},
    ),
    "boxed_math": (r"\boxed{\frac{1}{2}}", "0.5", {"accuracy": 1.0, "score": 1.0}),
}


def reward_config(module: str):
    function = {"path": f"pkg://verl_ext.rewards.{module}", "name": "compute_score"}
    return OmegaConf.create({"reward": {"custom_reward_function": function, "num_workers": 1}})


# Its tokens are characters.
TOKENIZER = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(map(chr, ids.tolist())))


def scored_by_verl(module: str, answer: str, truth: str):
    """What verl's reward manager makes of an answer."""
    ids = torch.tensor([[ord(character) for character in answer]])
    data = DataProto.from_dict(
        tensors={"responses": ids, "attention_mask": torch.ones_like(ids)},
        non_tensors={
            "data_source": np.array(["data"], dtype=object),
            "reward_model": np.array([{"ground_truth": truth}], dtype=object),
            "extra_info": np.array([{"index": 5}], dtype=object),
            "tool_extra_fields": np.array([{}], dtype=object),
        },
    )

    async def run() -> dict:  # a manager keeps the event loop that it was made in
        config = reward_config(module)
        made = get_reward_manager_cls("naive")(
            config=config,
            tokenizer=TOKENIZER,
            compute_score=get_custom_reward_fn(config),
            reward_router_address="host:1",
            reward_model_tokenizer=TOKENIZER,
        )
        return await made.run_single(data)

    return asyncio.run(run())


@pytest.mark.parametrize("module", SCORERS)
def test_verl_reward_manager_passes_the_components_on(module):
    answer, truth, expected = SCORERS[module]
    result = scored_by_verl(module, answer, truth)
    assert result == {"reward_score": expected["score"], "reward_extra_info": expected}
    with pytest.raises(ConfigurationError, match=facts("reward_kwargs", "'reward_router_adress'")):
        get_custom_reward_fn(reward_config(module))("data", answer, truth, reward_router_adress="host:1")


CASES = [
    ("gsm8k", {}),
    ("gsm8k", {"strict": "reference"}),
    ("boxed_math", {}),
    ("boxed_math", {"timeout": 1.0}),
    ("tool_calling", {}),
    ("tool_calling", {"length": "fixed"}),
]


@pytest.mark.parametrize(("module", "kwargs"), CASES)
@pytest.mark.parametrize("answer", ["", "nothing of the kind", CALL, "<think>1</think>\n<answer>18</answer>"])
def test_every_answer_has_the_declared_components_and_the_score(module: str, kwargs: dict, answer: str) -> None:
    scorer = import_module(f"verl_ext.rewards.{module}")
    found = scorer.compute_score("data", answer, SCORERS[module][1], {"index": 1}, **kwargs)
    declared = scorer.Options(**kwargs)
    assert list(found) == [*declared.components, "score"]
    assert {type(value) for value in found.values()} == {float}
    assert all(0 <= found[name] <= 1 for name in declared.accuracies)


def test_every_scorer_declares_its_components_and_the_docs_name_them() -> None:
    table = dict(re.findall(r"^\| `verl_ext\.rewards\.(\w+)` \| (.*) \|$", rewards.__doc__ or "", re.MULTILINE))
    assert sorted(table) == sorted(SCORERS)
    for module, text in table.items():
        scorer = import_module(f"verl_ext.rewards.{module}")
        declared = set().union(*(scorer.Options(**kwargs).components for name, kwargs in CASES if name == module))
        assert set(re.findall(r"`(\w+)`", text)) == declared, module
