from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.cpu.generation import Request, Sampling, generate, truncate

EOS = 2


def run(model, requests, *, eos=(EOS,), abort=None):
    return generate(model, requests, eos=eos, abort=abort or threading.Event())


def requests_of(count, **settings):
    return [Request(tuple(range(5, 8 + row)), Sampling(**settings), seed=row) for row in range(count)]


def trainer_log_probs(model, request, completion):
    """The log-probabilities as a trainer computes them: one pass over the whole sequence, without padding or cache."""
    sequence = torch.tensor([[*request.prompt, *completion.tokens]])
    with torch.no_grad():
        logits = model(sequence).logits[0, len(request.prompt) - 1 : -1].float()
    if request.sampling.temperature:
        logits = logits / request.sampling.temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]


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


def test_an_end_token_is_kept_and_ends_its_row_only(model):
    ends = tuple(range(3, 53))  # half of the vocabulary, so that rows end early at different lengths
    completions = run(model, requests_of(8, max_tokens=10), eos=ends)
    for completion in completions:
        assert not completion.aborted
        assert not any(token in ends for token in completion.tokens[:-1])
        assert completion.tokens[-1] in ends or len(completion.tokens) == 10
    assert len({len(c.tokens) for c in completions}) > 1


def test_an_abort_returns_what_there_is_and_leaves_a_row_that_has_ended_complete(model):
    abort = threading.Event()
    abort.set()  # seen after the first token
    requests = [Request((5, 6, 7), Sampling(max_tokens=limit, ignore_eos=True), seed=3) for limit in (6, 1)]
    cut, done = run(model, requests, abort=abort)
    assert (cut.aborted, done.aborted) == (True, False)
    assert len(cut.tokens) == len(cut.log_probs) == 1
    assert cut.tokens == run(model, requests[:1])[0].tokens[:1]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(1, 12),
    top_p=st.floats(0.05, 1.0, exclude_max=True),
)
def test_truncation_keeps_what_transformers_keeps(seed, top_k, top_p):
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(seed)) * 3
    expected = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, logits))
    found = truncate(logits, torch.tensor([top_k] * 3), torch.tensor([top_p] * 3))
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.equal(found[~found.isinf()], logits[~found.isinf()])


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}])
def test_a_truncated_row_draws_only_what_is_kept_beside_rows_that_take_every_token(narrow, model):
    request = Request((5, 6, 7), Sampling(max_tokens=4, ignore_eos=True, **narrow), seed=0)
    for requests in ([request], [*requests_of(3, max_tokens=4), request]):
        assert run(model, requests)[-1].log_probs == [0.0] * 4  # one possible token: log 1
