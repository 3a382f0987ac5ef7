import asyncio
from types import SimpleNamespace

import pytest
import torch

from tests import tiny_model
from tests.cpu.conftest import CONFIG, PARAMS, ask, begin, ready
from tests.facts import facts
from verl_ext.cpu import server as server_module
from verl_ext.cpu.server import sampling_from
from verl_ext.errors import ConfigurationError, IntegrationError


@pytest.fixture
def batches(monkeypatch):
    """The prompts of every batch that is generated."""
    seen = []
    original = server_module.generate

    def counted(model, requests, **settings):
        seen.append([request.prompt for request in requests])
        return original(model, requests, **settings)

    monkeypatch.setattr(server_module, "generate", counted)
    return seen


def test_requests_of_one_burst_share_batches_of_max_num_seqs_and_carry_the_step(served, batches):
    async def burst(server):
        return await asyncio.gather(*(ask(server, [5, 6, 7 + row], logprobs=row > 0) for row in range(5)))

    outputs = served(burst, step=3, max_num_seqs=3)
    assert [len(batch) for batch in batches] == [3, 2]
    assert {output.stop_reason for output in outputs} == {"completed"}
    assert {output.extra_fields["global_steps"] for output in outputs} == {3}
    assert outputs[0].log_probs is None  # not asked for
    assert all(len(output.token_ids) == len(output.log_probs) for output in outputs[1:])


def test_a_batch_waits_for_the_last_of_a_burst_and_does_not_show_the_order_of_arrival(served, batches, monkeypatch):
    monkeypatch.setattr(server_module, "QUIET_SECONDS", 0.5)

    async def burst(server):
        asked = []
        for token in (9, 7, 8):
            asked.append(ask(server, [5, 6, token]))
            await asyncio.sleep(0.02)
        await asyncio.gather(*asked)

    served(burst)
    assert batches == [[(5, 6, 7), (5, 6, 8), (5, 6, 9)]]


def test_equal_runs_draw_equal_tokens_and_a_groups_members_differ(make, model):
    def drawn(replica_rank=0, steps=(1,), seed=7):
        async def scenario():
            server = make(replica_rank, seed=seed)
            for step in steps:
                await ready(server, model, step)
                outputs = await asyncio.gather(*(ask(server, [5, 6, 7]) for _ in range(4)))
            return [tuple(output.token_ids) for output in outputs]

        return asyncio.run(scenario())

    first = drawn()
    assert first == drawn()
    assert first == drawn(steps=(0, 1))  # not a resumed run
    assert len(set(first)) == 4
    for other in ({"replica_rank": 1}, {"steps": (2,)}, {"seed": 8}):
        assert first != drawn(**other)


def test_a_caller_that_has_gone_does_not_end_the_server(make, model):
    async def scenario():
        server = make()
        gone, failed = ask(server, [5, 6, 7]), ask(server, [5, 6, 8])  # no weights yet: the batch fails
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(IntegrationError):
            await asyncio.wait_for(failed, 10)
        await ready(server, model)
        return await asyncio.wait_for(ask(server, [5, 6, 7]), 30)

    assert asyncio.run(scenario()).stop_reason == "completed"


def test_an_abort_cuts_the_running_batch_and_the_continuation_matches(served):
    async def scenario(server):
        running = await begin(server, [5, 6, 7], max_tokens=4000, ignore_eos=True)
        await server.abort_all_requests()
        cut = await running
        # Held while generation is paused, taken up when it resumes.
        held = ask(server, [5, 6, 7, *cut.token_ids], max_tokens=3, ignore_eos=True)
        await asyncio.sleep(0.2)
        waiting = not held.done()
        await server.resume_generation()
        return cut, waiting, await held

    # The tiny model's 256 positions do not bound rotary embeddings, so it can run on until the abort.
    cut, waiting, rest = served(scenario, response_length=4000)
    assert cut.stop_reason == "aborted"
    assert 0 < len(cut.token_ids) == len(cut.log_probs) < 4000
    assert waiting
    assert rest.stop_reason == "completed"
    assert len(rest.token_ids) == 3


def test_a_rejecting_server_sends_requests_back_until_it_resumes(served, batches):
    async def scenario(server):
        await server.abort_all_requests()
        held = ask(server, [5, 6, 7])
        await asyncio.sleep(0.1)
        await server.abort_all_requests(reject_request=True)
        late = await ask(server, [5, 6, 8])
        early = await held
        await server.resume_generation()
        return early, late, await ask(server, [5, 6, 9])

    *back, after = served(scenario)
    assert [(output.stop_reason, output.token_ids) for output in back] == [("aborted", [])] * 2
    assert batches == [[(5, 6, 9)]]  # what was sent back is not generated after all
    assert after.stop_reason == "completed"


def test_images_are_refused(make):
    with pytest.raises(ConfigurationError, match="image_data"):
        asyncio.run(make().generate([5], dict(PARAMS), "id", image_data=[object()]))


@pytest.mark.parametrize(("configured", "expected"), [(None, {2}), ([2, 7, 8], {2, 7, 8})])
def test_the_end_tokens_are_the_tokenizers_and_the_generation_configs(make, configured, expected):
    assert set(make(eos=configured)._eos) == expected


@pytest.mark.parametrize(
    ("params", "named"),
    [({"min_p": 0.1}, ("'min_p'", "'temperature'")), ({"repetition_penalty": 1.1}, ("repetition_penalty=1.1",))],
)
def test_a_sampling_parameter_that_would_have_no_effect_is_refused(params, named):
    with pytest.raises(ConfigurationError, match=facts(*named)):
        sampling_from(params, prompt_length=3, config=CONFIG)


@pytest.mark.parametrize(
    ("params", "prompt_length", "longest", "expected"),
    [
        ({}, 3, None, 8),  # response_length 8, however short the prompt
        ({}, 20, None, 4),  # 16 + 8 - 20 = 4: a prompt over its length takes from the response
        ({}, 30, None, 1),  # never less than 1
        ({"max_tokens": 3}, 16, None, 3),
        ({}, 10, 12, 2),  # 12 - 10
    ],
)
def test_the_limit_follows_verls_rules(params, prompt_length, longest, expected):
    config = SimpleNamespace(**{**vars(CONFIG), "max_model_len": longest})
    assert sampling_from(params, prompt_length=prompt_length, config=config).max_tokens == expected


def test_weights_arrive_exactly_and_change_what_is_drawn(served, tokenizer):
    other = tiny_model.make_model(tokenizer, seed=1)

    async def scenario(server):
        before = await ask(server, [5, 6, 7])
        await ready(server, other)
        return server, before, await ask(server, [5, 6, 7])

    server, before, after = served(scenario)
    for name, tensor in other.state_dict().items():
        assert torch.equal(server._parameters[name], tensor), name
    assert before.token_ids != after.token_ids


def test_nothing_is_generated_between_the_parts_of_an_update(served, model):
    async def scenario(server):
        await server.load_weights(list(model.named_parameters())[:1])
        await ask(server, [5, 6, 7])

    with pytest.raises(IntegrationError, match="weights"):
        served(scenario)


def test_an_incomplete_update_is_refused_by_name_and_does_not_count_for_the_next(make, model):
    async def scenario():
        server = make()
        *first, last = model.named_parameters()
        for part, missing in ((first, [last]), ([last], first)):
            await server.load_weights(part)
            with pytest.raises(IntegrationError, match=facts(len(part), *(name for name, _ in missing))):
                await server.finish_weights(0)

    asyncio.run(scenario())


def test_weights_wait_for_the_end_of_the_running_batch(served, tokenizer):
    other = tiny_model.make_model(tokenizer, seed=1)

    async def scenario(server):
        running = await begin(server, [5, 6, 7], max_tokens=200, ignore_eos=True)
        await ready(server, other)
        return running.done(), await running

    done, output = served(scenario, response_length=200)
    assert done
    assert len(output.token_ids) == 200


@pytest.mark.parametrize(
    ("name", "named"), [("model.norm.weight", "[64]"), ("model.norm.bias", "actor_rollout_ref.model.path")]
)
def test_a_weight_of_another_model_is_refused(make, name, named):
    with pytest.raises(RuntimeError, match=facts(name, named)):
        asyncio.run(make().load_weights([(name, torch.zeros(65))]))
