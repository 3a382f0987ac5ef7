"""The rows of a rank are split into micro-batches: which rows run, and equally many micro-batches on all ranks."""

import pytest

from tests.update import rank_tasks as tasks
from tests.update.verl_actor import random_rows, remove_from_loss
from verl_ext.update import split
from verl_ext.update.split import RowLengths

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, 50), pytest.param(2, 200, marks=SLOW), pytest.param(4, 200, marks=SLOW)]
)
def test_random_splits_never_let_a_rank_wait(tmp_path, ranks, cases):
    """All ranks have equally many micro-batches, none of them empty. Every row with a gradient runs once."""
    splits_of_ranks = tasks.run_on_ranks(tasks.random_splits, ranks, tmp_path, cases=cases)
    for splits in zip(*splits_of_ranks, strict=True):
        assert len({len(found.micro_batches) for found in splits}) == 1
        for found in splits:
            assert_complete(found)
    metrics = [found.metrics for splits in splits_of_ranks for found in splits]
    assert min(values["rows_kept"] for values in metrics) < 0.2
    assert max(values.get("prompt_tokens_saved", 0) for values in metrics) > 0.2
    assert max(values.get("prompts_recomputed", 0) for values in metrics) > 0


def assert_complete(found: tasks.Split) -> None:
    """Fail unless each row that must run does so once, within the limit, and verl can restore the order."""
    assert found.within_limit
    assert all(found.micro_batches)  # none is empty
    rows_that_ran = [row for rows in found.micro_batches for row in rows]
    assert len(set(rows_that_ran)) == len(rows_that_ran)
    assert len(rows_that_ran) == round(found.metrics["rows_kept"] * len(found.must_run))
    rows_that_must_run = {row for row, must_run in enumerate(found.must_run) if must_run}
    assert rows_that_must_run <= set(rows_that_ran)
    # As many micro-batches as possible have a token in the loss.
    micro_batches_with_tokens = 0
    for rows in found.micro_batches:
        if any(found.has_tokens[row] for row in rows):
            micro_batches_with_tokens += 1
    assert micro_batches_with_tokens == min(len(found.micro_batches), sum(found.has_tokens))
    places = [place for places in found.places for place in places]
    rows_in_order = sorted(rows_that_ran)
    assert [rows_in_order[place] for place in places] == rows_that_ran


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "padded"])
def test_row_without_tokens_in_the_loss_has_no_gradient_and_comes_last(nested):
    lengths = ([6, 6, 6, 6], [3, 4, 5, 9])  # prompts and responses
    data = random_rows(4, [True, True, False, True], seed=0, nested=nested, lengths=lengths)
    remove_from_loss(data, rows=(0, 1, 3))  # as padding, or rejected; only row 2 has tokens, but no advantage
    row_lengths = split.read_lengths(data, share=False)
    with_gradient, others = split.rows_with_gradient(data, row_lengths, skip=True)
    assert with_gradient == []
    assert others == [2, 0, 1, 3]  # the row with tokens first, then by length
    with_gradient, others = split.rows_with_gradient(data, row_lengths, skip=False)
    assert with_gradient == [2]
    assert others == [0, 1, 3]


@pytest.mark.parametrize(
    ("limit", "parts"),
    [
        (100, [[0, 1, 2]]),
        (14, [[0, 1], [2]]),  # 10 + 2 + 2 = 14
        (13, [[0], [1], [2]]),
        (5, [[0], [1], [2]]),  # a row is never divided
    ],
)
def test_prompt_above_the_limit_is_divided_with_the_prompt_in_each_part(limit, parts):
    lengths = RowLengths(prompt_ids=[0, 0, 0], prompt_tokens=[10, 10, 10], response_tokens=[2, 2, 2])
    assert split.divide_prompt([0, 1, 2], lengths, limit) == parts


def test_metrics_compare_what_ran_with_all_rows():
    """Two prompts of 10 tokens with two responses of 5 tokens each. Row 3 is skipped."""
    lengths = RowLengths(prompt_ids=[0, 0, 1, 1], prompt_tokens=[10] * 4, response_tokens=[5] * 4)
    metrics = split.metrics_of(lengths, [[0], [1, 2]], share=True)
    assert metrics == {
        "rows_kept": 3 / 4,
        "tokens_kept": 45 / 60,
        "prompt_tokens_saved": 0.0,  # prompt 0 is computed in both micro-batches
        "prompts_recomputed": 1.0,
    }
    metrics = split.metrics_of(lengths, [[0, 1], [2]], share=True)
    assert metrics["prompt_tokens_saved"] == pytest.approx(10 / 45)
    assert metrics["prompts_recomputed"] == 0.0
