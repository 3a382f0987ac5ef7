"""What stands in for the model in a run of the V1 pipeline, and the reward function beside it.

Everything else is verl's: these are loaded by its agent-loop and reward workers, in their own Ray processes.
"""

from collections import Counter
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.workers.rollout.replica import TokenOutput

from verl_ext import per_turn

FAILING = "!"

# The first letter of a response determines its rewards: (accuracy, format). The rest is there for the length.
REWARDS = {"a": (1.0, 1.0), "b": (1.0, 0.0), "c": (0.0, 1.0), "d": (0.0, 0.0)}
WITHOUT_ACCURACY = "o"


def rewards_of(answer: str) -> dict[str, Any]:
    """Components of an answer; the score is their sum, so that it is none of them."""
    if answer.startswith(WITHOUT_ACCURACY):
        return {"score": 0.0, "format": 0.0}
    accuracy, form = REWARDS[answer[0]]
    return {"score": accuracy + form, "acc": accuracy, "format": form, "note": f"read {answer}"}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """verl's custom reward function. By turn: 1 for each draft, then the accuracy."""
    result = rewards_of(solution_str)
    return result | {"steps": per_turn([1.0] * (extra_info or {}).get("drafts", 0) + [result.get("acc", 0.0)])}


class Client:
    """In place of verl's client of the generation servers: the answers to each prompt, by a table, in turn."""

    def __init__(self, answers: dict[tuple[int, ...], list[list[int]]], failing: list[int]) -> None:
        self.answers, self.failing = answers, failing
        self.asked: Counter[tuple[int, ...]] = Counter()

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_other: Any) -> TokenOutput:
        prompt = tuple(prompt_ids)
        table = self.answers[prompt]
        tokens = table[self.asked[prompt] % len(table)]
        self.asked[prompt] += 1
        if tokens == self.failing:
            raise RuntimeError("this session fails on purpose")
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-0.5] * len(tokens),
            num_preempted=0,
            extra_fields={"min_global_steps": 0, "max_global_steps": 0},
        )


class SeveralOutputs(AgentLoopBase):
    """An agent loop whose session leaves one, two or three outputs, of which the last is the answer.

    Each draft before it counts as the call of a tool with reward 1.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        messages = list(kwargs["raw_prompt"])
        prompt_ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answer = await self.server_manager.generate("", prompt_ids=prompt_ids, sampling_params=sampling_params)
        drafts = [answer.token_ids * 2] * (len(answer.token_ids) % 3)
        return [
            AgentLoopOutput(
                prompt_ids=prompt_ids,
                response_ids=tokens,
                response_mask=[1] * len(tokens),
                response_logprobs=[-0.5] * len(tokens),
                num_turns=2,
                metrics=AgentLoopMetrics(),
                extra_fields={**answer.extra_fields, "drafts": len(drafts), "tool_rewards": [1.0] * len(drafts)},
            )
            for tokens in (*drafts, answer.token_ids)
        ]
