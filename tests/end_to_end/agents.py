"""An agent loop of several turns and several outputs, for runs of the real pipeline with a model that answers."""

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

ATTEMPTS = 3
TURN = 8
"""Tokens of one turn at most."""
REMARK = " go on: "


class Attempts(AgentLoopBase):
    """Up to three attempts, each an output of its own, as where an agent throws its context away and begins again.

    An answer that begins with a small letter is an attempt that stands. The last output has two turns, with a remark
    of the environment between them that is not trained on.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        asked = list(kwargs["raw_prompt"])
        outputs = []
        for attempt in range(ATTEMPTS):
            again = [{"role": "user", "content": f"attempt {attempt}"}] if attempt else []
            prompt = self.tokenizer.apply_chat_template([*asked, *again], add_generation_prompt=True, return_dict=False)
            answer = await self._ask(prompt, sampling_params)
            stands = self.tokenizer.decode(answer.token_ids, skip_special_tokens=True)[:1].islower()
            if stands or attempt == ATTEMPTS - 1:
                break
            outputs.append(self._output(prompt, [(answer, 1)]))
        remark = self.tokenizer.encode(REMARK)
        more = await self._ask([*prompt, *answer.token_ids, *remark], sampling_params)
        return [*outputs, self._output(prompt, [(answer, 1), (remark, 0), (more, 1)])]

    async def _ask(self, prompt: list[int], sampling_params: dict[str, Any]) -> Any:
        return await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=prompt, sampling_params={**sampling_params, "max_tokens": TURN}
        )

    def _output(self, prompt: list[int], turns: list[tuple[Any, int]]) -> AgentLoopOutput:
        tokens: list[int] = []
        mask: list[int] = []
        log_probs: list[float] = []
        for turn, counts in turns:
            ids = turn.token_ids if counts else turn
            tokens += ids
            mask += [counts] * len(ids)
            log_probs += turn.log_probs if counts else [0.0] * len(ids)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=tokens,
            response_mask=mask,
            response_logprobs=log_probs,
            num_turns=len(turns),
            metrics=AgentLoopMetrics(),
            extra_fields=dict(turns[-1][0].extra_fields),
        )
