"""An agent loop of several turns and several outputs, for runs of the real pipeline with a model."""

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

ATTEMPTS = 3
TURN = 8
"""The maximum number of tokens of a turn."""
REMARK = " go on: "


class Attempts(AgentLoopBase):
    """Up to three attempts, each an output of its own, as if the agent discarded its context between attempts.

    The attempts end with a response that begins with a lowercase letter. The last output has two turns. Between the
    turns is a remark of the environment, which is not trained on.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        question = list(kwargs["raw_prompt"])
        outputs = []
        for attempt in range(ATTEMPTS):
            messages = list(question)
            if attempt > 0:
                messages.append({"role": "user", "content": f"attempt {attempt}"})
            prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            response = await self._ask(prompt, sampling_params)
            text = self.tokenizer.decode(response.token_ids, skip_special_tokens=True)
            if text[:1].islower() or attempt == ATTEMPTS - 1:
                break
            outputs.append(self._output(prompt, [(response, 1)]))
        remark = self.tokenizer.encode(REMARK)
        second_turn = await self._ask([*prompt, *response.token_ids, *remark], sampling_params)
        outputs.append(self._output(prompt, [(response, 1), (remark, 0), (second_turn, 1)]))
        return outputs

    async def _ask(self, prompt: list[int], sampling_params: dict[str, Any]) -> Any:
        return await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=prompt, sampling_params={**sampling_params, "max_tokens": TURN}
        )

    def _output(self, prompt: list[int], turns: list[tuple[Any, int]]) -> AgentLoopOutput:
        """Return the output of turns, each a response and 1, or tokens of the environment and 0."""
        tokens: list[int] = []
        mask: list[int] = []
        log_probs: list[float] = []
        for turn, is_trained in turns:
            ids = turn.token_ids if is_trained else turn
            tokens += ids
            mask += [is_trained] * len(ids)
            log_probs += turn.log_probs if is_trained else [0.0] * len(ids)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=tokens,
            response_mask=mask,
            response_logprobs=log_probs,
            num_turns=len(turns),
            metrics=AgentLoopMetrics(),
            extra_fields=dict(turns[-1][0].extra_fields),
        )
