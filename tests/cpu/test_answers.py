"""A rollout that returns the answers of a file."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch

from tests.cpu.servers import ask, ready
from verl_ext.errors import DataError


@pytest.fixture
def given(make, tmp_path):
    def build(*lines, **settings):
        file = tmp_path / "answers.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return make(engine_kwargs={"embedded": {"answers": str(file)}}, **settings)

    return build


def test_each_answer_to_a_prompt_is_another_line_with_the_models_probabilities(given, model, tokenizer):
    async def scenario():
        server = given("abc", "d", response_length=16)
        await ready(server, model)
        sampling = {"top_k": 1, "temperature": 1.0, "ignore_eos": True}  # under which no answer could be drawn, nor end
        return await asyncio.gather(*(ask(server, [5, 6, 7], **sampling) for _ in range(3)), ask(server, [8, 9]))

    outputs = asyncio.run(scenario())
    texts = [tokenizer.decode(output.token_ids, skip_special_tokens=True) for output in outputs]
    assert texts == ["abc", "d", "abc", "d"]
    assert all(output.token_ids[-1] == tokenizer.eos_token_id for output in outputs)
    tokens = [5, 6, 7, *outputs[0].token_ids]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, 2:-1].log_softmax(-1)
    picked = expected.gather(-1, torch.tensor(outputs[0].token_ids)[:, None])[:, 0]
    assert torch.tensor(outputs[0].log_probs) == pytest.approx(picked, abs=1e-4)


def test_the_turns_of_a_session_are_those_of_its_line(given, model, tokenizer):
    async def session(server, first):
        prompt, said = list(first), []
        for _ in range(3):
            tokens = (await ask(server, prompt)).token_ids
            said.append(tokenizer.decode(tokens, skip_special_tokens=True))
            prompt += [*tokens, 9]  # the tool's answer
        return said

    async def scenario():
        server = given(["a", "b"], "c", response_length=64)
        await ready(server, model)
        return await asyncio.gather(session(server, [6, 6]), session(server, [6, 6]), session(server, [8]))

    assert sorted(asyncio.run(scenario())) == [["a", "b", "b"], ["a", "b", "b"], ["c", "c", "c"]]


def test_sessions_that_begin_alike_go_on_each_with_its_own_line(given, model, tokenizer):
    async def scenario():
        server = given(["a", "b"], ["a", "c"], response_length=64)
        await ready(server, model)
        first = [await ask(server, [6, 6]) for _ in range(2)]
        assert first[0].token_ids == first[1].token_ids
        prompt = [6, 6, *first[0].token_ids, 9]
        return [await ask(server, prompt) for _ in range(2)]

    answers = [tokenizer.decode(output.token_ids, skip_special_tokens=True) for output in asyncio.run(scenario())]
    assert sorted(answers) == ["b", "c"]


def test_sessions_are_forgotten_with_their_weights(given, model):
    async def scenario():
        server = given(["a", "b"], "c", response_length=64)
        await ready(server, model)
        first = (await ask(server, [6, 6])).token_ids
        await ask(server, [6, 6, *first, 9])
        await ready(server, model, step=1)
        return server._turns

    assert not asyncio.run(scenario())


def test_an_answer_is_cut_at_the_limit(given, model):
    async def scenario():
        server = given("abcdefghijkl")
        await ready(server, model)
        return await ask(server, [5, 6])

    assert len(asyncio.run(scenario()).token_ids) == 8


@pytest.mark.parametrize("lines", [[{"answer": "a"}], ["a", []], [["a", 1]], []])
def test_a_file_without_answers_or_with_a_line_that_is_none_is_refused_by_its_name(given, lines):
    with pytest.raises(DataError, match="answers.jsonl"):
        given(*lines)
