from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from tests import tiny_model
from tests.cpu.servers import CONFIG, PARAMS, ask, begin, ready, weights_of
from tests.facts import facts
from verl_ext.cpu import server as server_module
from verl_ext.cpu.server import sampling_from
from verl_ext.errors import ConfigurationError, IntegrationError


def test_requests_of_one_burst_share_a_batch_and_carry_the_step(make, model, batches):
    async def scenario():
        server = make()
        await ready(server, model, step=3)
        return await asyncio.gather(*(ask(server, [5, 6, 7 + row], logprobs=row > 0) for row in range(5)))

    outputs = asyncio.run(scenario())
    assert [len(batch) for batch in batches] == [5]
    assert {output.stop_reason for output in outputs} == {"completed"}
    assert {output.extra_fields["global_steps"] for output in outputs} == {3}
    assert outputs[0].log_probs is None  # not asked for
    assert all(len(output.token_ids) == len(output.log_probs) for output in outputs[1:])


def test_a_batch_waits_for_the_last_of_a_burst_and_does_not_show_the_order_of_arrival(
    make, model, batches, monkeypatch
):
    monkeypatch.setattr(server_module, "QUIET_SECONDS", 0.5)

    async def scenario():
        server = make()
        await ready(server, model)
        asked = []
        for token in (9, 7, 8):
            asked.append(ask(server, [5, 6, token]))
            await asyncio.sleep(0.02)
        await asyncio.gather(*asked)

    asyncio.run(scenario())
    assert batches == [[(5, 6, 7), (5, 6, 8), (5, 6, 9)]]


def test_a_batch_holds_no_more_than_max_num_seqs(make, model, batches):
    async def scenario():
        server = make(max_num_seqs=2)
        await ready(server, model)
        return await asyncio.gather(*(ask(server, [5, 6, 7 + row]) for row in range(5)))

    assert len(asyncio.run(scenario())) == 5
    assert [len(batch) for batch in batches] == [2, 2, 1]


def test_equal_runs_draw_equal_tokens_and_a_groups_members_differ(make, model):
    async def scenario(replica_rank=0, step=1, seed=7):
        server = make(replica_rank, seed=seed)
        await ready(server, model, step)
        outputs = await asyncio.gather(*(ask(server, [5, 6, 7]) for _ in range(4)))
        return [tuple(output.token_ids) for output in outputs]

    first = asyncio.run(scenario())
    assert first == asyncio.run(scenario())
    assert len(set(first)) == 4
    assert first != asyncio.run(scenario(replica_rank=1))
    assert first != asyncio.run(scenario(step=2))
    assert first != asyncio.run(scenario(seed=8))


def test_draws_after_an_update_depend_on_the_step_and_not_on_what_was_drawn_before(make, model):
    async def scenario(steps):
        server = make()
        for step in steps:
            await ready(server, model, step)
            output = await ask(server, [5, 6, 7])
        return output.token_ids

    assert asyncio.run(scenario([1, 2])) == asyncio.run(scenario([2]))  # a run, and the same run resumed


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


def test_an_abort_cuts_the_running_batch_and_the_continuation_matches(make, model):
    async def scenario():
        server = make(response_length=4000, prompt_length=16)
        await ready(server, model)
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
    cut, waiting, rest = asyncio.run(scenario())
    assert cut.stop_reason == "aborted"
    assert 0 < len(cut.token_ids) == len(cut.log_probs) < 4000
    assert waiting
    assert rest.stop_reason == "completed"
    assert len(rest.token_ids) == 3


def test_a_rejecting_server_sends_requests_back_until_it_resumes(make, model, batches):
    async def scenario():
        server = make()
        await ready(server, model)
        await server.abort_all_requests()
        held = ask(server, [5, 6, 7])
        await asyncio.sleep(0.1)
        await server.abort_all_requests(reject_request=True)
        late = await ask(server, [5, 6, 8])
        early = await held
        await server.resume_generation()
        return early, late, await ask(server, [5, 6, 9])

    early, late, after = asyncio.run(scenario())
    assert (early.stop_reason, early.token_ids) == ("aborted", [])
    assert (late.stop_reason, late.token_ids) == ("aborted", [])
    assert batches == [[(5, 6, 9)]]  # what was sent back is not generated after all
    assert after.stop_reason == "completed"


def test_images_are_refused(make):
    with pytest.raises(ConfigurationError, match="text.*image_data"):
        asyncio.run(make().generate([5], dict(PARAMS), "id", image_data=[object()]))


@pytest.mark.parametrize(("configured", "expected"), [(None, {2}), ([2, 7, 8], {2, 7, 8})])
def test_the_end_tokens_are_the_tokenizers_and_the_generation_configs(make, configured, expected):
    assert set(make(eos=configured)._eos) == expected


@pytest.mark.parametrize(
    ("params", "told"),
    [({"min_p": 0.1}, ("'min_p'", "'temperature'")), ({"repetition_penalty": 1.1}, ("repetition_penalty",))],
)
def test_a_sampling_parameter_that_would_have_no_effect_is_refused(params, told):
    with pytest.raises(ConfigurationError, match=facts(*told)):
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


def test_weights_arrive_exactly_and_change_what_is_drawn(make, model, tokenizer):
    other = tiny_model.make_model(tokenizer, seed=1)

    async def scenario():
        server = make()
        await ready(server, model)
        before = await ask(server, [5, 6, 7])
        await ready(server, other)
        return server, before, await ask(server, [5, 6, 7])

    server, before, after = asyncio.run(scenario())
    for name, tensor in other.state_dict().items():
        assert torch.equal(server._parameters[name], tensor), name
    assert before.token_ids != after.token_ids


def test_nothing_is_generated_between_the_parts_of_an_update(make, model):
    async def scenario():
        server = make()
        await ready(server, model)
        await server.load_weights(weights_of(model)[:1])
        await ask(server, [5, 6, 7])

    with pytest.raises(IntegrationError, match=facts("before", "weights")):
        asyncio.run(scenario())


def test_an_incomplete_update_is_refused_by_name_and_does_not_count_for_the_next(make, model):
    async def scenario():
        server = make()
        *first, last = weights_of(model)
        for part, told in ((first, f"not {[last[0]]}"), ([last], "not [")):
            await server.load_weights(part)
            with pytest.raises(IntegrationError, match=facts(told)):
                await server.finish_weights(0)

    asyncio.run(scenario())


def test_weights_wait_for_the_end_of_the_running_batch(make, model, tokenizer):
    other = tiny_model.make_model(tokenizer, seed=1)

    async def scenario():
        server = make(response_length=200)
        await ready(server, model)
        running = await begin(server, [5, 6, 7], max_tokens=200, ignore_eos=True)
        await ready(server, other)
        return running.done(), await running

    done, output = asyncio.run(scenario())
    assert done
    assert len(output.token_ids) == 200


def test_a_weight_of_another_model_is_refused(make):
    with pytest.raises(IntegrationError, match=facts("model.norm.weight", "shape (64,)")):
        asyncio.run(make().load_weights([("model.norm.weight", torch.zeros(65))]))
