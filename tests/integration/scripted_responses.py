"""Scripted responses instead of a model's in a run of the V1 pipeline, and their reward function.

verl's agent-loop workers and reward workers load this file in their own Ray processes.
"""

from collections import Counter
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.workers.rollout.replica import TokenOutput

from verl_ext import per_turn

FAILING = "!"
"""The response of a session that fails."""

REWARDS = {"a": (1.0, 1.0), "b": (1.0, 0.0), "c": (0.0, 1.0), "d": (0.0, 0.0)}
"""Accuracy and format by the first letter of a response. The other letters only make the response longer."""
WITHOUT_ACCURACY = "o"


def rewards_of(response: str) -> dict[str, Any]:
    """Return the rewards of a response. The score is accuracy + format, and differs from both."""
    if response.startswith(WITHOUT_ACCURACY):
        return {"score": 0.0, "format": 0.0}
    accuracy, format_reward = REWARDS[response[0]]
    return {
        "score": accuracy + format_reward,
        "acc": accuracy,
        "format": format_reward,
        "note": f"read {response}",
    }


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """Return the rewards, as verl's custom reward function.

    The per-turn reward `steps` is 1 for each draft, and the accuracy for the last turn.
    """
    rewards = rewards_of(solution_str)
    drafts = extra_info.get("drafts", 0) if extra_info else 0
    rewards["steps"] = per_turn([1.0] * drafts + [rewards.get("acc", 0.0)])
    return rewards


class Client:
    """A replacement for verl's client of the generation servers, which gives the responses of a script in turn."""

    def __init__(self, script: dict[tuple[int, ...], list[list[int]]], failing: list[int]) -> None:
        self.script = script
        self.failing = failing
        self.requests: Counter[tuple[int, ...]] = Counter()

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_other: Any) -> TokenOutput:
        prompt = tuple(prompt_ids)
        responses = self.script[prompt]
        tokens = responses[self.requests[prompt] % len(responses)]
        self.requests[prompt] += 1
        if tokens == self.failing:
            raise RuntimeError("this session fails on purpose")
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-0.5] * len(tokens),
            num_preempted=0,
            extra_fields={"min_global_steps": 0, "max_global_steps": 0},
        )


class SeveralOutputs(AgentLoopBase):
    """An agent loop whose session has up to two drafts before its response.

    The number of drafts is the length of the response modulo 3. Each draft is a call of a tool with reward 1.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        messages = list(kwargs["raw_prompt"])
        prompt_ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        response = await self.server_manager.generate("", prompt_ids=prompt_ids, sampling_params=sampling_params)
        drafts = len(response.token_ids) % 3
        extra_fields = {**response.extra_fields, "drafts": drafts, "tool_rewards": [1.0] * drafts}
        draft_tokens = response.token_ids * 2
        outputs = [self._output(prompt_ids, draft_tokens, extra_fields) for _ in range(drafts)]
        outputs.append(self._output(prompt_ids, response.token_ids, extra_fields))
        return outputs

    def _output(self, prompt_ids: list[int], tokens: list[int], extra_fields: dict[str, Any]) -> AgentLoopOutput:
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=tokens,
            response_mask=[1] * len(tokens),
            response_logprobs=[-0.5] * len(tokens),
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields=dict(extra_fields),
        )
