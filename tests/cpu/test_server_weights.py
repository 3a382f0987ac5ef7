from __future__ import annotations

import asyncio

import pytest
import torch

from tests import tiny_model
from tests.cpu.servers import ask, begin, ready, weights_of
from tests.facts import facts
from verl_ext.errors import IntegrationError


def test_it_does_not_generate_from_the_weights_it_was_born_with(make):
    async def scenario():
        await ask(make(), [5, 6, 7])

    with pytest.raises(IntegrationError, match=facts("before", "weights")):
        asyncio.run(scenario())


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


def test_an_update_without_a_step_leaves_the_version_of_the_weights(make, model):
    async def scenario():
        server = make()
        await ready(server, model, step=3)
        await ready(server, model, step=None)
        return await ask(server, [5, 6, 7])

    assert asyncio.run(scenario()).extra_fields["global_steps"] == 3


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


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [("model.norm.bias", (64,), "no such weight"), ("model.norm.weight", (65,), "shape (64,)")],
)
def test_a_weight_of_another_model_is_refused(make, name, shape, told):
    with pytest.raises(IntegrationError, match=facts(name, told)):
        asyncio.run(make().load_weights([(name, torch.zeros(shape))]))
