from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.cpu.test_generation import run, trainer_log_probs
from tests.facts import says
from verl_ext.cpu import generation
from verl_ext.cpu.generation import Request, Sampling, check_model
from verl_ext.errors import ConfigurationError

SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make(kind, **others):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, **others})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for parameter in model.parameters():  # far from uniform answers, so that a wrong position or mask is seen
        parameter.data.mul_(3.0)
    return model


def mixed(**settings):
    """Prompts of several lengths, 1 to 5 answers each, in an order that splits them."""
    prompts = [(5, 6, 7), (9, 8, 7, 6, 5, 4, 3), (11,), (5, 6, 7, 8)]
    numbers = [0, 1, 0, 2, 3, 1, 0, 1, 1, 3, 0, 1]
    return [Request(prompts[number], Sampling(**settings), seed) for seed, number in enumerate(numbers)]


@pytest.mark.parametrize(
    ("kind", "settings", "temperature"),
    [
        ("llama", {}, 0.0),
        ("llama", {"num_key_value_heads": 1}, 1.7),
        ("qwen2", {}, 1.0),
        ("qwen3", {}, 1.0),
        ("mistral", {"sliding_window": 200}, 1.0),
        ("phi3", {}, 1.0),
        ("gemma", {}, 1.0),
    ],
)
def test_log_probabilities_are_those_of_one_pass_without_a_cache(kind, settings, temperature):
    model = make(kind, **settings)
    requests = mixed(temperature=temperature, max_tokens=70)  # more than a block of the answers' store
    for request, completion in zip(requests, run(model, requests), strict=True):
        expected = trainer_log_probs(model, request, completion)
        assert torch.allclose(torch.tensor(completion.log_probs), expected, atol=2e-5)


@pytest.fixture(scope="module")
def llama():
    return make("llama")


def test_rows_that_end_leave_the_others_as_they_are(llama):
    requests = mixed(max_tokens=12)
    ends = tuple(range(3, 18))  # so that rows end at different steps, and whole prompts before others
    together = run(llama, requests, eos=ends)
    alone = [run(llama, [request], eos=ends)[0] for request in requests]
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    assert len({len(c.tokens) for c in together}) > 3


def test_a_prompt_is_computed_once_and_ended_rows_are_not_computed(llama, monkeypatch):
    shapes = []
    forward = llama.forward

    def counted(input_ids, **settings):
        shapes.append(tuple(input_ids.shape))
        return forward(input_ids, **settings)

    monkeypatch.setattr(llama, "forward", counted)
    run(llama, mixed(max_tokens=12), eos=tuple(range(3, 18)))
    assert shapes[0] == (4, 7)
    assert shapes[1][0] < 12
    assert all(before[0] >= after[0] for before, after in pairwise(shapes[1:]))
    assert shapes[-1][0] < shapes[1][0]


def test_prompts_are_computed_in_passes_of_bounded_size(llama, monkeypatch):
    whole = run(llama, mixed(max_tokens=6))
    monkeypatch.setattr(generation, "PASS_TOKENS", 7)
    parts = run(llama, mixed(max_tokens=6))
    assert [c.tokens for c in parts] == [c.tokens for c in whole]
    assert llama.config._attn_implementation == "sdpa"  # the model is left as it was


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("mistral", {"sliding_window": 20}, "20 tokens"),
        ("gemma2", {}, "softcap"),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, ""),
    ],
)
def test_a_model_that_needs_another_attention_is_refused(kind, settings, reason):
    with pytest.raises(ConfigurationError) as caught:
        check_model(make(kind, **settings), longest=48)
    assert reason in str(caught.value)
    assert says(str(caught.value), "plain causal attention", "Qwen3")
