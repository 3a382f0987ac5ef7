"""The embedded rollout's server as verl calls it: batches of requests, aborts, new weights."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from tests import tiny_model
from tests.cpu.conftest import ROLLOUT_CONFIG, SAMPLING_PARAMS, send_request, send_weights, start_generating
from tests.facts import facts
from verl_ext.cpu import rollout
from verl_ext.cpu.rollout import sampling_from
from verl_ext.errors import ConfigurationError, IntegrationError


@pytest.fixture
def batches(monkeypatch):
    """The prompts of every batch that is generated."""
    prompts_of_batches = []
    original_generate = rollout.generate

    def record_batch(model, requests, **settings):
        prompts_of_batches.append([request.prompt for request in requests])
        return original_generate(model, requests, **settings)

    monkeypatch.setattr(rollout, "generate", record_batch)
    return prompts_of_batches


def test_requests_of_one_burst_share_batches_of_max_num_seqs(run_with_server, batches):
    async def send_burst(server):
        return await asyncio.gather(*(send_request(server, [5, 6, 7 + row]) for row in range(5)))

    outputs = run_with_server(send_burst, max_num_seqs=3)
    assert [len(batch) for batch in batches] == [3, 2]
    assert {output.stop_reason for output in outputs} == {"completed"}


def test_a_response_has_the_step_of_its_weights_and_log_probabilities_if_requested(run_with_server):
    async def send_two_requests(server):
        without, with_log_probs = (send_request(server, [5, 6], logprobs=wanted) for wanted in (False, True))
        return await without, await with_log_probs

    without, with_log_probs = run_with_server(send_two_requests, step=3)
    assert without.extra_fields["global_steps"] == with_log_probs.extra_fields["global_steps"] == 3
    assert without.log_probs is None
    assert len(with_log_probs.log_probs) == len(with_log_probs.token_ids) > 0


def test_a_batch_waits_for_the_end_of_a_burst_and_is_sorted_by_prompt(run_with_server, batches, monkeypatch):
    monkeypatch.setattr(rollout, "QUIET_SECONDS", 0.5)

    async def send_slow_burst(server):  # longer than the quiet time, but with shorter pauses
        responses = []
        for token in (9, 7, 8):
            responses.append(send_request(server, [5, 6, token]))
            await asyncio.sleep(0.3)
        await asyncio.gather(*responses)

    run_with_server(send_slow_burst)
    assert batches == [[(5, 6, 7), (5, 6, 8), (5, 6, 9)]]


@pytest.fixture
def group_of_responses(make_server, model):
    """Return a function that returns the tokens of four responses to a prompt, sampled by a new server."""

    def sample(replica_rank=0, steps=(1,), seed=7):
        async def scenario():
            server = make_server(replica_rank, seed=seed)
            for step in steps:
                await send_weights(server, model, step)
                outputs = await asyncio.gather(*(send_request(server, [5, 6, 7]) for _ in range(4)))
            return [tuple(output.token_ids) for output in outputs]

        return asyncio.run(scenario())

    return sample


def test_equal_runs_sample_equal_responses_and_those_of_a_group_differ(group_of_responses):
    responses = group_of_responses()
    assert responses == group_of_responses()
    assert len(set(responses)) == 4


def test_a_resumed_run_samples_the_same_responses(group_of_responses):
    assert group_of_responses(steps=(1,)) == group_of_responses(steps=(0, 1))


@pytest.mark.parametrize("change", [{"replica_rank": 1}, {"steps": (2,)}, {"seed": 8}], ids=["rank", "step", "seed"])
def test_responses_differ_between_ranks_steps_and_seeds(change, group_of_responses):
    assert group_of_responses() != group_of_responses(**change)


def test_a_caller_that_has_gone_does_not_end_the_server(make_server, model):
    async def scenario():
        server = make_server()
        canceled, failed = send_request(server, [5, 6, 7]), send_request(server, [5, 6, 8])
        await asyncio.sleep(0)
        canceled.cancel()
        with pytest.raises(IntegrationError):  # there are no weights yet
            await asyncio.wait_for(failed, 10)
        await send_weights(server, model)
        return await asyncio.wait_for(send_request(server, [5, 6, 7]), 30)

    assert asyncio.run(scenario()).stop_reason == "completed"


def test_an_abort_interrupts_the_running_batch(run_with_server):
    async def abort_running_batch(server):
        response = await start_generating(server, [5, 6, 7], max_tokens=4000, ignore_eos=True)
        await server.abort_all_requests()
        return await response

    # The tiny model's 256 positions do not bound rotary embeddings, so it can run on until the abort.
    interrupted = run_with_server(abort_running_batch, response_length=4000)
    assert interrupted.stop_reason == "aborted"
    assert 0 < len(interrupted.token_ids) == len(interrupted.log_probs) < 4000


def test_requests_during_a_pause_wait_until_generation_resumes(run_with_server):
    async def send_during_pause(server):
        await server.abort_all_requests()
        response = send_request(server, [5, 6, 7], max_tokens=3, ignore_eos=True)
        await asyncio.sleep(0.2)
        was_waiting = not response.done()
        await server.resume_generation()
        return was_waiting, await response

    was_waiting, output = run_with_server(send_during_pause)
    assert was_waiting
    assert output.stop_reason == "completed"
    assert len(output.token_ids) == 3


def test_an_interrupted_response_can_be_continued(run_with_server):
    async def interrupt_and_continue(server):
        response = await start_generating(server, [5, 6, 7], max_tokens=4000, ignore_eos=True)
        await server.abort_all_requests()
        interrupted = await response
        continuation = send_request(server, [5, 6, 7, *interrupted.token_ids], max_tokens=3, ignore_eos=True)
        await server.resume_generation()
        return await continuation

    output = run_with_server(interrupt_and_continue, response_length=4000)
    assert output.stop_reason == "completed"
    assert len(output.token_ids) == 3


def test_a_rejecting_server_returns_requests_until_generation_resumes(run_with_server, batches):
    async def reject_two_requests(server):
        await server.abort_all_requests()
        before = send_request(server, [5, 6, 7])
        await asyncio.sleep(0.1)
        await server.abort_all_requests(reject_request=True)
        during = await send_request(server, [5, 6, 8])
        rejected = [await before, during]
        await server.resume_generation()
        return rejected, await send_request(server, [5, 6, 9])

    rejected, output = run_with_server(reject_two_requests)
    for rejected_output in rejected:
        assert rejected_output.stop_reason == "aborted"
        assert rejected_output.token_ids == []
    assert output.stop_reason == "completed"
    assert batches == [[(5, 6, 9)]]  # a rejected request is not generated later


def test_images_are_rejected(make_server):
    with pytest.raises(ConfigurationError, match="image_data"):
        asyncio.run(make_server().generate([5], dict(SAMPLING_PARAMS), "id", image_data=[object()]))


@pytest.mark.parametrize(("configured", "expected"), [(None, {2}), ([2, 7, 8], {2, 7, 8})])
def test_end_tokens_are_those_of_tokenizer_and_generation_config(make_server, configured, expected):
    assert set(make_server(eos=configured)._end_tokens) == expected


@pytest.mark.parametrize(
    ("params", "named"),
    [({"min_p": 0.1}, ("'min_p'", "'temperature'")), ({"repetition_penalty": 1.1}, ("repetition_penalty=1.1",))],
)
def test_a_sampling_parameter_without_effect_is_rejected(params, named):
    with pytest.raises(ConfigurationError, match=facts(*named)):
        sampling_from(params, prompt_length=3, config=ROLLOUT_CONFIG)


@pytest.mark.parametrize(
    ("params", "prompt_length", "max_model_len", "expected"),
    [
        pytest.param({}, 3, None, 8, id="response_length, however short the prompt"),
        pytest.param({}, 20, None, 4, id="a prompt over its length takes from the response: 16 + 8 - 20"),
        pytest.param({}, 30, None, 1, id="never less than 1"),
        pytest.param({"max_tokens": 3}, 16, None, 3, id="max_tokens"),
        pytest.param({}, 10, 12, 2, id="max_model_len: 12 - 10"),
    ],
)
def test_the_limit_of_a_response_follows_verls_rules(params, prompt_length, max_model_len, expected):
    config = SimpleNamespace(**{**vars(ROLLOUT_CONFIG), "max_model_len": max_model_len})
    assert sampling_from(params, prompt_length=prompt_length, config=config).max_tokens == expected


def test_weights_arrive_exactly_and_change_the_responses(run_with_server, tokenizer):
    other_model = tiny_model.make_model(tokenizer, seed=1)

    async def change_weights(server):
        before = await send_request(server, [5, 6, 7])
        await send_weights(server, other_model)
        return server, before, await send_request(server, [5, 6, 7])

    server, before, after = run_with_server(change_weights)
    for name, tensor in other_model.state_dict().items():
        assert torch.equal(server._parameters[name], tensor), name
    assert before.token_ids != after.token_ids


def test_nothing_is_generated_during_an_update_of_the_weights(run_with_server, model):
    async def generate_after_first_bucket(server):
        first_bucket = list(model.named_parameters())[:1]
        await server.load_weights(first_bucket)
        await send_request(server, [5, 6, 7])

    with pytest.raises(IntegrationError, match="weights"):
        run_with_server(generate_after_first_bucket)


def test_an_incomplete_update_is_rejected_and_does_not_count_for_the_next(make_server, model):
    *all_but_last, last = model.named_parameters()

    async def send_two_incomplete_updates():
        server = make_server()
        for sent, missing in ((all_but_last, [last]), ([last], all_but_last)):
            names = [name for name, _ in missing]
            await server.load_weights(sent)
            with pytest.raises(IntegrationError, match=facts(len(sent), *names)):
                await server.finish_weights(0)

    asyncio.run(send_two_incomplete_updates())


def test_weights_wait_for_the_end_of_the_running_batch(run_with_server, tokenizer):
    other_model = tiny_model.make_model(tokenizer, seed=1)

    async def send_weights_during_batch(server):
        response = await start_generating(server, [5, 6, 7], max_tokens=200, ignore_eos=True)
        await send_weights(server, other_model)
        return response.done(), await response

    was_done, output = run_with_server(send_weights_during_batch, response_length=200)
    assert was_done
    assert len(output.token_ids) == 200


@pytest.mark.parametrize(
    ("name", "named"),
    [
        pytest.param("model.norm.weight", "[64]", id="another size"),
        pytest.param("model.norm.bias", "actor_rollout_ref.model.path", id="another name"),
    ],
)
def test_a_weight_of_another_model_is_rejected(make_server, name, named):
    with pytest.raises(RuntimeError, match=facts(name, named)):
        asyncio.run(make_server().load_weights([(name, torch.zeros(65))]))
