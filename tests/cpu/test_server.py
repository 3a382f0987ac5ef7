from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from tests import tiny_model
from verl_ext.cpu import server as server_module
from verl_ext.cpu.server import EmbeddedServer, sampling_from
from verl_ext.errors import ConfigurationError, IntegrationError

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
CONFIG = SimpleNamespace(
    dtype="float32", seed=7, prompt_length=16, response_length=8, max_model_len=None, max_num_seqs=64, ignore_eos=False
)


@pytest.fixture
def make(tiny, monkeypatch):
    """A server without Ray; verl's model configuration is reduced to what the server reads."""
    from transformers import AutoConfig

    monkeypatch.setattr(server_module, "omega_conf_to_dataclass", lambda config: config)
    hf_config = AutoConfig.from_pretrained(tiny / "model", attn_implementation="sdpa")

    def build(replica_rank=0, eos=None, pad=True, **settings):
        tokenizer = tiny_model.make_tokenizer()
        if not pad:
            tokenizer.pad_token = None
        generation_config = None if eos is None else SimpleNamespace(eos_token_id=eos)
        model_config = SimpleNamespace(tokenizer=tokenizer, hf_config=hf_config, generation_config=generation_config)
        return EmbeddedServer(SimpleNamespace(**{**vars(CONFIG), **settings}), model_config, replica_rank)

    return build


def weights_of(model):
    """As the trainer sends them: a tied output layer comes once."""
    return [(name, tensor) for name, tensor in model.named_parameters()]


async def ready(server, model, step=0):
    await server.load_weights(weights_of(model))
    await server.finish_weights(step)


def ask(server, prompt, **settings):
    return asyncio.ensure_future(server.generate(prompt, {**PARAMS, **settings}, "id"))


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


def test_requests_of_one_burst_share_a_batch_and_carry_the_step(make, model, batches):
    async def scenario():
        server = make()
        await ready(server, model, step=3)
        return await asyncio.gather(*(ask(server, [5, 6, 7 + row]) for row in range(5)))

    outputs = asyncio.run(scenario())
    assert [len(batch) for batch in batches] == [5]
    assert {output.stop_reason for output in outputs} == {"completed"}
    assert {output.extra_fields["global_steps"] for output in outputs} == {3}
    assert all(len(output.token_ids) == len(output.log_probs) for output in outputs)


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


def test_a_batch_holds_no_more_than_max_num_seqs(make, model):
    async def scenario():
        server = make(max_num_seqs=2)
        await ready(server, model)
        return await asyncio.gather(*(ask(server, [5, 6, 7 + row]) for row in range(5)))

    assert len(asyncio.run(scenario())) == 5


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


def test_log_probabilities_are_given_where_they_are_asked_for(make, model):
    async def scenario():
        server = make()
        await ready(server, model)
        return await asyncio.gather(ask(server, [5, 6, 7]), ask(server, [5, 6, 7], logprobs=False))

    asked, unasked = asyncio.run(scenario())
    assert len(asked.log_probs) == len(asked.token_ids)
    assert unasked.log_probs is None


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


def test_an_abort_cuts_the_running_batch_and_the_continuation_matches(make, model, monkeypatch):
    async def scenario():
        server = make(response_length=4000, prompt_length=16)
        await ready(server, model)
        running = ask(server, [5, 6, 7], max_tokens=4000, ignore_eos=True)
        await asyncio.sleep(0.5)
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


def test_an_abort_returns_when_the_running_batch_has_ended(make, model):
    async def scenario():
        server = make(response_length=4000)
        await ready(server, model)
        running = ask(server, [5, 6, 7], max_tokens=4000, ignore_eos=True)
        await asyncio.sleep(0.5)
        await server.abort_all_requests()
        await server.resume_generation()  # at once: it must not undo the abort
        return await running

    assert asyncio.run(scenario()).stop_reason == "aborted"


def test_an_abort_while_a_request_waits_for_the_weights_holds_it(make, model):
    async def scenario():
        server = make()
        await ready(server, model)
        async with server._busy:  # as while weights are loaded
            held = ask(server, [5, 6, 7])
            await asyncio.sleep(0.1)
            aborting = asyncio.ensure_future(server.abort_all_requests())
            await asyncio.sleep(0)
        await aborting
        await asyncio.sleep(0.1)
        waiting = not held.done()
        await server.resume_generation()
        return waiting, await held

    waiting, output = asyncio.run(scenario())
    assert waiting
    assert output.stop_reason == "completed"


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


def test_it_does_not_generate_from_the_weights_it_was_born_with(make):
    async def scenario():
        await ask(make(), [5, 6, 7])

    with pytest.raises(IntegrationError, match="before it received weights"):
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

    with pytest.raises(IntegrationError, match="before it received weights"):
        asyncio.run(scenario())


def test_an_incomplete_set_of_weights_is_refused_by_name(make, model):
    async def scenario():
        server = make()
        await server.load_weights(weights_of(model)[:-1])
        await server.finish_weights(0)

    with pytest.raises(IntegrationError, match=r"without \['model.norm.weight'\]"):
        asyncio.run(scenario())


def test_an_update_without_a_step_leaves_the_version_of_the_weights(make, model):
    async def scenario():
        server = make()
        await ready(server, model, step=3)
        await ready(server, model, step=None)
        return await ask(server, [5, 6, 7])

    assert asyncio.run(scenario()).extra_fields["global_steps"] == 3


def test_what_an_incomplete_update_brought_does_not_count_for_the_next(make, model):
    async def scenario():
        server = make()
        for part in (weights_of(model)[:-1], weights_of(model)[-1:]):
            await server.load_weights(part)
            with pytest.raises(IntegrationError, match="without"):
                await server.finish_weights(0)

    asyncio.run(scenario())


def test_weights_wait_for_the_end_of_the_running_batch(make, model, tokenizer):
    other = tiny_model.make_model(tokenizer, seed=1)

    async def scenario():
        server = make(response_length=200)
        await ready(server, model)
        running = ask(server, [5, 6, 7], max_tokens=200, ignore_eos=True)
        await asyncio.sleep(0.2)
        await ready(server, other)
        return running.done(), await running

    done, output = asyncio.run(scenario())
    assert done
    assert len(output.token_ids) == 200


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [("model.norm.bias", (64,), "has no such weight"), ("model.norm.weight", (65,), r"has shape \(64,\)")],
)
def test_a_weight_of_another_model_is_refused(make, name, shape, message):
    with pytest.raises(IntegrationError, match=message):
        asyncio.run(make().load_weights([(name, torch.zeros(shape))]))


def test_images_are_refused(make, model):
    async def scenario():
        server = make()
        await ready(server, model)
        await server.generate([5], dict(PARAMS), "id", image_data=[object()])

    with pytest.raises(ConfigurationError, match=r"text only.*image_data"):
        asyncio.run(scenario())


@pytest.mark.parametrize(("configured", "expected"), [(None, {2}), (9, {2, 9}), ([2, 7, 8], {2, 7, 8})])
def test_the_end_tokens_are_the_tokenizers_and_the_generation_configs(make, configured, expected):
    assert set(make(eos=configured)._eos) == expected


def test_the_model_is_as_configured_evaluates_and_has_no_generation_settings_of_its_own(make):
    from transformers import GenerationConfig

    model = make(dtype="bfloat16")._model
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert model.generation_config == GenerationConfig()


def test_a_tokenizer_without_a_padding_token_pads_with_its_end_token(make):
    assert make(pad=False)._pad == 2


def test_an_unknown_sampling_parameter_is_refused_with_the_valid_ones():
    with pytest.raises(ConfigurationError, match=r"unknown sampling parameter 'min_p'.*'temperature'"):
        sampling_from({"min_p": 0.1}, prompt_length=3, config=CONFIG)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, found 1.5"),
    ],
)
def test_settings_out_of_range_are_refused(params, message):
    with pytest.raises(ConfigurationError, match=message):
        sampling_from(params, prompt_length=3, config=CONFIG)


@pytest.mark.parametrize("configured", [False, True])
def test_the_end_token_is_ignored_where_the_request_or_else_the_configuration_says_so(configured):
    config = SimpleNamespace(**{**vars(CONFIG), "ignore_eos": configured})
    assert sampling_from({}, prompt_length=3, config=config).ignore_eos is configured
    assert sampling_from({"ignore_eos": not configured}, prompt_length=3, config=config).ignore_eos is not configured


def test_greedy_knows_no_truncation():
    found = sampling_from({"temperature": 0, "top_k": 1, "top_p": 0.5}, prompt_length=3, config=CONFIG)
    assert (found.temperature, found.top_k, found.top_p) == (0.0, -1, 1.0)


def test_max_model_len_bounds_the_answer_and_refuses_a_prompt_without_room():
    config = SimpleNamespace(**{**vars(CONFIG), "max_model_len": 12})
    assert sampling_from({}, prompt_length=10, config=config).max_tokens == 2  # 12 - 10
    assert sampling_from({"max_tokens": 8}, prompt_length=10, config=config).max_tokens == 2
    with pytest.raises(ConfigurationError, match="a prompt of 12 tokens leaves no room in max_model_len=12"):
        sampling_from({}, prompt_length=12, config=config)


def test_a_repetition_penalty_is_refused():
    with pytest.raises(ConfigurationError, match="repetition_penalty"):
        sampling_from({"repetition_penalty": 1.1}, prompt_length=3, config=CONFIG)


@pytest.mark.parametrize(
    ("params", "prompt_length", "expected"),
    [
        ({}, 3, 8),  # response_length 8, however short the prompt
        ({}, 16, 8),  # prompt_length 16 + response_length 8 - 16 = 8
        ({}, 20, 4),  # 16 + 8 - 20 = 4: a prompt over its length takes from the response
        ({}, 30, 1),  # never less than 1
        ({"max_tokens": 3}, 16, 3),
        ({"max_new_tokens": 5}, 16, 5),
    ],
)
def test_the_limit_follows_verls_rules(params, prompt_length, expected):
    assert sampling_from(params, prompt_length=prompt_length, config=CONFIG).max_tokens == expected
