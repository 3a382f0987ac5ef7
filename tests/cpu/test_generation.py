import threading
from itertools import pairwise

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.facts import says
from verl_ext.cpu.generation import Request, Sampling, check_model, generate
from verl_ext.errors import ConfigurationError

EOS = 2


def run(model, requests, *, eos=(EOS,), abort=None):
    return generate(model, requests, eos=eos, abort=abort or threading.Event())


def requests_of(count, **settings):
    return [Request(tuple(range(5, 8 + row)), Sampling(**settings), seed=row) for row in range(count)]


def test_greedy_takes_the_most_probable_token_beside_rows_that_sample(model):
    prompt = (5, 6, 7)
    greedy = Request(prompt, Sampling(temperature=0.0, max_tokens=5, ignore_eos=True), seed=0)
    tokens = run(model, [*requests_of(3, max_tokens=5), greedy])[-1].tokens
    sequence = list(prompt)
    for token in tokens:
        with torch.no_grad():
            assert token == int(model(torch.tensor([sequence])).logits[0, -1].argmax())
        sequence.append(token)


def test_first_tokens_follow_the_models_distribution(model):
    prompt, count = (5, 6, 7), 4000
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    drawn = run(model, [Request(prompt, Sampling(max_tokens=1), seed) for seed in range(count)])
    frequency = torch.bincount(torch.tensor([c.tokens[0] for c in drawn]), minlength=len(expected)) / count
    # A frequency of p has the standard deviation sqrt(p (1 - p) / n); 100 tokens stay within 4.5 of them
    # but for one run in 1500 (and the seeds are fixed).
    assert bool(((frequency - expected).abs() < 4.5 * (expected * (1 - expected) / count).sqrt()).all())


def test_an_abort_returns_what_there_is_and_leaves_a_row_that_has_ended_complete(model):
    abort = threading.Event()
    abort.set()  # seen after the first token
    requests = [Request((5, 6, 7), Sampling(max_tokens=limit, ignore_eos=True), seed=3) for limit in (6, 1)]
    cut, done = run(model, requests, abort=abort)
    assert (cut.aborted, done.aborted) == (True, False)
    assert len(cut.tokens) == len(cut.log_probs) == 1
    assert cut.tokens == run(model, requests[:1])[0].tokens[:1]


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}])
def test_a_truncated_row_draws_only_what_is_kept_beside_rows_that_take_every_token(narrow, model):
    request = Request((5, 6, 7), Sampling(max_tokens=4, ignore_eos=True, **narrow), seed=0)
    for requests in ([request], [*requests_of(3, max_tokens=4), request]):
        assert run(model, requests)[-1].log_probs == [0.0] * 4  # one possible token: log 1


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
    model = AutoModelForCausalLM.from_config(config).eval()
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
        ("mistral", {"sliding_window": 20}, 1.0),
        ("phi3", {}, 1.0),
        ("gemma2", {"sliding_window": 20}, 1.0),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, 1.0),
    ],
)
def test_log_probabilities_are_those_of_one_pass_without_a_cache(kind, settings, temperature):
    model = make(kind, **settings)
    requests = mixed(temperature=temperature, max_tokens=70)
    for request, completion in zip(requests, run(model, requests), strict=True):
        sequence = torch.tensor([[*request.prompt, *completion.tokens]])
        with torch.no_grad():
            logits = model(sequence).logits[0, len(request.prompt) - 1 : -1].float() / (temperature or 1.0)
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(completion.log_probs), expected, atol=2e-5)


@pytest.fixture(scope="module")
def llama():
    return make("llama")


def test_an_end_token_is_kept_and_ends_its_row_and_leaves_the_others_as_they_are(llama):
    requests = mixed(max_tokens=12)
    ends = tuple(range(3, 18))  # so that rows end at different steps, and whole prompts before others
    together = run(llama, requests, eos=ends)
    alone = [run(llama, [request], eos=ends)[0] for request in requests]
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    assert len({len(c.tokens) for c in together}) > 3
    for completion in together:
        assert not completion.aborted
        assert not any(token in ends for token in completion.tokens[:-1])
        assert completion.tokens[-1] in ends or len(completion.tokens) == 12


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


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}), ("rwkv", {}), ("falcon_h1", {})],
)
def test_a_model_whose_layers_keep_anything_but_keys_and_values_is_refused(kind, settings):
    with pytest.raises(ConfigurationError) as caught:
        check_model(make(kind, **settings))
    assert says(str(caught.value), "keys and values", "plain causal attention", "Qwen3")
