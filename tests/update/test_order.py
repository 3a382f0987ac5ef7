"""The trainer orders rows so that whole prompts come to a rank and a mini-batch."""

import random

import pytest

from tests.facts import facts
from verl_ext.errors import IntegrationError
from verl_ext.update.order import Row, order


@pytest.fixture(params=range(5))
def draw(request):
    """Return a generator of random numbers."""
    return random.Random(request.param)


@pytest.fixture(params=[1, 2, 4])
def ranks(request):
    return request.param


def test_every_rank_gets_equally_many_rows_and_each_row_once(draw, ranks):
    rows, size = random_rows(draw, ranks)
    rows_of_ranks, _ = order(rows, ranks=ranks, mini_batch=size * ranks)
    assert sorted(row for rows_of_rank in rows_of_ranks for row in rows_of_rank) == list(range(len(rows)))
    assert {len(rows_of_rank) for rows_of_rank in rows_of_ranks} == {len(rows) // ranks}


def test_count_of_divided_prompts_is_that_of_prompts_in_several_mini_batches(draw, ranks):
    rows, size = random_rows(draw, ranks)
    rows_of_ranks, divided = order(rows, ranks=ranks, mini_batch=size * ranks)
    prompts = {(row.uid, row.prompt_tokens) for row in rows}
    mini_batches_of_prompts = set()
    for rank, rows_of_rank in enumerate(rows_of_ranks):
        for place, number in enumerate(rows_of_rank):
            row = rows[number]
            mini_batches_of_prompts.add((row.uid, row.prompt_tokens, rank, place // size))
    assert len(mini_batches_of_prompts) - len(prompts) == divided


def test_prompts_that_fit_stay_whole_and_ranks_get_similar_tokens(draw, ranks):
    _, size = random_rows(draw, ranks)
    rows_per_prompt = 4
    rows = []
    for number in range(3 * size * ranks):
        prompt = number // rows_per_prompt
        rows.append(Row(prompt, 20 + prompt, 1 + number % 7))
    rows_of_ranks, divided = order(rows, ranks=ranks, mini_batch=size * ranks)
    assert divided == 0
    prompt_tokens = []
    for rows_of_rank in rows_of_ranks:
        first_rows = rows_of_rank[::rows_per_prompt]
        prompt_tokens.append(sum(rows[number].prompt_tokens for number in first_rows))
    assert max(prompt_tokens) < 1.2 * min(prompt_tokens)


def test_rows_that_ranks_cannot_share_equally_are_rejected():
    with pytest.raises(IntegrationError, match=facts("3", "2", "algorithm.verl_ext.share_prompts=False")):
        order([Row("a", 5, 1)] * 3, ranks=2, mini_batch=2)


def random_rows(draw: random.Random, ranks: int) -> tuple[list[Row], int]:
    """Return rows for three mini-batches, and the rows of a mini-batch on one rank."""
    size = draw.choice([4, 8, 12])
    count = 3 * size * ranks
    prompts = max(1, count // 4)
    rows = [Row(draw.randrange(prompts), draw.choice([30, 31]), draw.randrange(1, 40)) for _ in range(count)]
    return rows, size
