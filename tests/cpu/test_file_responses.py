"""A rollout that returns the responses of a file."""

import asyncio
import json

import pytest
import torch

from tests.cpu.conftest import send_request, send_weights
from verl_ext.errors import DataError


@pytest.fixture
def run_with_responses(run_with_server, tmp_path):
    """Return a function that runs a coroutine function with a server that has these lines of responses."""

    def run(scenario, *lines, response_length=64):
        file = tmp_path / "responses.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        kwargs = {"embedded": {"responses": str(file)}}
        return run_with_server(scenario, engine_kwargs=kwargs, response_length=response_length)

    return run


def texts_of(tokenizer, outputs):
    """The texts of responses, without end tokens."""
    return [tokenizer.decode(output.token_ids, skip_special_tokens=True) for output in outputs]


def test_each_response_to_a_prompt_is_the_next_line(run_with_responses, tokenizer):
    async def send_four_requests(server):
        same_prompt = [send_request(server, [5, 6, 7]) for _ in range(3)]
        return await asyncio.gather(*same_prompt, send_request(server, [8, 9]))

    outputs = run_with_responses(send_four_requests, "abc", "d")
    assert texts_of(tokenizer, outputs) == ["abc", "d", "abc", "d"]
    for output in outputs:
        assert output.token_ids[-1] == tokenizer.eos_token_id


def test_log_probabilities_of_given_responses_are_the_models(run_with_responses, model):
    async def send_one_request(server):
        # With these settings, sampling could neither return another token than the best one, nor end.
        return await send_request(server, [5, 6, 7], top_k=1, temperature=1.0, ignore_eos=True)

    output = run_with_responses(send_one_request, "abc", "d")
    assert len(output.token_ids) == len("abc") + 1
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7, *output.token_ids]])).logits[0]
    # The logits at the last token of the prompt belong to the first token of the response.
    expected = logits[2:-1].log_softmax(-1)
    for position, token in enumerate(output.token_ids):
        assert output.log_probs[position] == pytest.approx(float(expected[position, token]), abs=1e-4)


def test_the_turns_of_a_session_are_those_of_its_line(run_with_responses, tokenizer):
    async def session(server, first_prompt):
        prompt, responses = list(first_prompt), []
        for _ in range(3):
            output = await send_request(server, prompt)
            responses.append(output)
            prompt += [*output.token_ids, 9]  # 9 is the tool's response
        return texts_of(tokenizer, responses)

    async def run_three_sessions(server):
        return await asyncio.gather(session(server, [6, 6]), session(server, [6, 6]), session(server, [8]))

    sessions = run_with_responses(run_three_sessions, ["a", "b"], "c")
    assert sorted(sessions) == [["a", "b", "b"], ["a", "b", "b"], ["c", "c", "c"]]


def test_sessions_with_equal_first_turns_continue_with_their_own_lines(run_with_responses, tokenizer):
    async def run_two_sessions(server):
        first_turns = [await send_request(server, [6, 6]) for _ in range(2)]
        assert first_turns[0].token_ids == first_turns[1].token_ids
        prompt = [6, 6, *first_turns[0].token_ids, 9]
        return [await send_request(server, prompt) for _ in range(2)]

    second_turns = run_with_responses(run_two_sessions, ["a", "b"], ["a", "c"])
    assert sorted(texts_of(tokenizer, second_turns)) == ["b", "c"]


def test_a_session_continues_with_its_longest_conversation(run_with_responses, tokenizer):
    async def run_one_session_of_two(server):
        first_turns = [await send_request(server, [6, 6]) for _ in range(2)]
        prompt = [6, 6, *first_turns[0].token_ids, 9]
        second_turn = await send_request(server, prompt)
        third_turn = await send_request(server, [*prompt, *second_turn.token_ids, 9])
        return second_turn, third_turn

    # The other session waits for its second turn, and the prompt of the third turn begins with its conversation, too.
    turns = run_with_responses(run_one_session_of_two, ["a", "b", "c"], ["a", "b", "d"])
    assert texts_of(tokenizer, turns) == ["b", "c"]


def test_new_weights_end_all_sessions(run_with_responses, model):
    async def run_session_and_send_weights(server):
        first_turn = await send_request(server, [6, 6])
        await send_request(server, [6, 6, *first_turn.token_ids, 9])
        await send_weights(server, model, step=1)
        return server._file_responses.next_turns

    assert not run_with_responses(run_session_and_send_weights, ["a", "b"], "c")


def test_a_given_response_is_truncated_at_the_limit(run_with_responses):
    output = run_with_responses(lambda server: send_request(server, [5, 6]), "abcdefghijkl", response_length=8)
    assert len(output.token_ids) == 8


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([{"answer": "a"}], id="an object"),
        pytest.param(["a", []], id="a session without turns"),
        pytest.param([["a", 1]], id="a turn that is a number"),
        pytest.param([], id="an empty file"),
    ],
)
def test_a_file_with_an_invalid_line_is_rejected_with_its_name(run_with_responses, lines):
    with pytest.raises(DataError, match="responses.jsonl"):
        run_with_responses(send_request, *lines)
