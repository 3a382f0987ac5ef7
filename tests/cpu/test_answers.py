"""A rollout that returns the responses of a file."""

import asyncio
import json

import pytest
import torch

from tests.cpu.conftest import ask, ready
from verl_ext.errors import DataError


@pytest.fixture
def answered(served, tmp_path):
    """Runs a scenario with a server that has the responses of these lines."""

    def run(scenario, *lines, response_length=64):
        file = tmp_path / "responses.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        kwargs = {"embedded": {"responses": str(file)}}
        return served(scenario, engine_kwargs=kwargs, response_length=response_length)

    return run


def test_each_answer_to_a_prompt_is_another_line_with_the_models_probabilities(answered, model, tokenizer):
    async def scenario(server):
        sampling = {"top_k": 1, "temperature": 1.0, "ignore_eos": True}  # under which no answer could be drawn, nor end
        return await asyncio.gather(*(ask(server, [5, 6, 7], **sampling) for _ in range(3)), ask(server, [8, 9]))

    outputs = answered(scenario, "abc", "d")
    texts = [tokenizer.decode(output.token_ids, skip_special_tokens=True) for output in outputs]
    assert texts == ["abc", "d", "abc", "d"]
    assert all(output.token_ids[-1] == tokenizer.eos_token_id for output in outputs)
    tokens = [5, 6, 7, *outputs[0].token_ids]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, 2:-1].log_softmax(-1)
    picked = expected.gather(-1, torch.tensor(outputs[0].token_ids)[:, None])[:, 0]
    assert torch.tensor(outputs[0].log_probs) == pytest.approx(picked, abs=1e-4)


def test_the_turns_of_a_session_are_those_of_its_line(answered, tokenizer):
    async def session(server, first):
        prompt, said = list(first), []
        for _ in range(3):
            tokens = (await ask(server, prompt)).token_ids
            said.append(tokenizer.decode(tokens, skip_special_tokens=True))
            prompt += [*tokens, 9]  # the tool's answer
        return said

    async def scenario(server):
        return await asyncio.gather(session(server, [6, 6]), session(server, [6, 6]), session(server, [8]))

    turns = answered(scenario, ["a", "b"], "c")
    assert sorted(turns) == [["a", "b", "b"], ["a", "b", "b"], ["c", "c", "c"]]


def test_sessions_that_begin_alike_go_on_each_with_its_own_line(answered, tokenizer):
    async def scenario(server):
        first = [await ask(server, [6, 6]) for _ in range(2)]
        assert first[0].token_ids == first[1].token_ids
        prompt = [6, 6, *first[0].token_ids, 9]
        return [await ask(server, prompt) for _ in range(2)]

    outputs = answered(scenario, ["a", "b"], ["a", "c"])
    assert sorted(tokenizer.decode(output.token_ids, skip_special_tokens=True) for output in outputs) == ["b", "c"]


def test_sessions_are_forgotten_with_their_weights(answered, model):
    async def scenario(server):
        first = (await ask(server, [6, 6])).token_ids
        await ask(server, [6, 6, *first, 9])
        await ready(server, model, step=1)
        return server._turns

    assert not answered(scenario, ["a", "b"], "c")


def test_an_answer_is_cut_at_the_limit(answered):
    output = answered(lambda server: ask(server, [5, 6]), "abcdefghijkl", response_length=8)
    assert len(output.token_ids) == 8


@pytest.mark.parametrize("lines", [[{"answer": "a"}], ["a", []], [["a", 1]], []])
def test_a_file_without_answers_or_with_a_line_that_is_none_is_refused_by_its_name(answered, lines):
    with pytest.raises(DataError, match="responses.jsonl"):
        answered(ask, *lines)
