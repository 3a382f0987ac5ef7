"""Rows without advantage are left out of the update: the gradient stays, all ranks agree, and nothing is silent."""

from __future__ import annotations

import pytest
import torch

from tests.integration import updates
from verl_ext.errors import ConfigurationError, IntegrationError
from verl_ext.integration import skip
from verl_ext.integration.run import Run
from verl_ext.settings import Settings

RANKS = {"actor/update/rank_0_of_2": [1.0], "actor/update/rank_1_of_2": [1.0]}
SLOW = pytest.mark.slow
FIGURES = {"actor/update/rows_kept": [0.5], "actor/update/tokens_kept": [0.4], "actor/update/fallback": [0.0]}


def difference(gradients, reference):
    return float((gradients - reference).norm() / reference.norm())


def check_equal(found):
    """No difference is more than twice the largest of the controls, which differ in the micro-batch size only."""
    every = [case for rank in found for case in rank.values()]
    controls, kept = (
        [difference(case[kind]["gradients"], case["all"]["gradients"]) for case in every]
        for kind in ("control", "kept")
    )
    assert max(kept) <= 2 * max(controls) < 1e-5
    for case in every:
        metrics = case["kept"]["metrics"]
        assert torch.tensor(metrics["update/rows_kept"]).mean() < 0.8
        assert "update/rows_kept" not in case["all"]["metrics"]
        assert set(metrics["update/fallback"]) == {0.0}


def check_splits(found):
    """All ranks have the same number of micro-batches, none of them empty, and every live row ran."""
    for splits in zip(*found, strict=True):
        assert len({split["batches"] for split in splits}) == 1
        assert len({split["fallback"] for split in splits}) == 1
        for split in splits:
            assert len(set(split["ran"])) == len(split["ran"]) == round(split["rows_kept"] * len(split["live"]))
            assert {row for row, live in enumerate(split["live"]) if live} <= set(split["ran"])
    kept = [split["rows_kept"] for splits in found for split in splits]
    assert min(kept) < 0.2  # not all of them fell back


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("cases", [5, pytest.param(48, marks=SLOW, id="all")])
def test_gradients_are_those_of_all_rows(folder, ranks, cases):
    found = updates.run("equal", ranks, folder, cases=cases, timeout=1500)
    assert len(found[0]) >= cases
    check_equal(found)


@SLOW
@pytest.mark.parametrize("ranks", [1, 2])
def test_twenty_updates_with_adamw(folder, ranks, record_property):
    for found in updates.run("twenty", ranks, folder, timeout=600):
        assert len(found["all"]["gradients"]) == 20
        for name in ("gradients", "weights"):
            control, kept = (difference(found[kind][name], found["all"][name]) for kind in ("control", "kept"))
            record_property(name, f"kept {kept:.2e}, control {control:.2e}")
            assert kept <= 2 * control < 1e-4


@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, 50), pytest.param(2, 200, marks=SLOW), pytest.param(4, 200, marks=SLOW)]
)
def test_no_split_hangs(tmp_path, ranks, cases):
    check_splits(updates.run("splits", ranks, tmp_path, cases=cases, timeout=900))


def marked(live, *, mark=skip.SKIP, **entries):
    """Rows with a number, as the trainer sends them."""
    from verl.utils import tensordict_utils as tu

    data = updates.rows(len(live), live, seed=0, nested=True)
    data["number"] = torch.arange(len(live))
    tu.assign_non_tensor(data, **{skip.MARK: mark, "max_token_len_per_gpu": 36, **entries})
    return data


def split_by(original, data):
    """Return the numbers of the rows that reached verl's function, by call, and the figures."""
    from verl.utils import tensordict_utils as tu

    calls = []

    def prepare_micro_batches(data, dp_group=None):
        calls.append(data["number"].tolist())
        return original(data)

    skip.wrap_split(prepare_micro_batches, data=data, dp_group=None)
    return calls, tu.get_non_tensor_data(data, skip.FIGURES, None)


LIVE = [False, True, False, True, False, False, False, False]


@pytest.mark.parametrize(
    ("entries", "wanted"),
    [
        ({"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}, [1, 3]),
        ({"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 8}, [*range(8)]),
        ({"mark": skip.CHECK}, [*range(8)]),
    ],
    ids=["live", "static", "first update"],
)
def test_rows_that_reach_verl(entries, wanted):
    calls, figures = split_by(lambda data: None, marked(LIVE, **entries))
    assert calls == [wanted]
    assert (figures["rows_kept"], figures["fallback"]) == (len(wanted) / 8, 0.0)


def test_all_rows_where_verl_cannot_split_those_that_are_left():
    def fail(data):
        if len(data) < 8:
            raise ValueError("Cannot satisfy max_token_len")

    calls, figures = split_by(fail, marked(LIVE))
    assert (len(calls), calls[-1], set(figures.values())) == (2, [*range(8)], {1.0})


def test_one_row_is_left_where_none_is_live():
    calls, _ = split_by(lambda data: None, marked([False] * 8))
    assert len(calls[0]) == 1


@pytest.mark.parametrize("nested", [True, False])
def test_a_row_without_advantage_that_is_kept_has_tokens_in_the_loss(nested):
    """verl's bypass_mode raises for a micro-batch without any, and the other ranks wait for ever."""
    from verl.utils import tensordict_utils as tu

    data = updates.rows(4, [False] * 4, seed=0, nested=nested, lengths=([6] * 4, [3, 4, 5, 9]))
    for row, mask in enumerate(data["response_mask"].unbind()):
        mask.fill_(row == 2)  # the others are padding, or rejected
    tu.assign_non_tensor(data, max_token_len_per_gpu=36)
    kept = skip.rows_to_keep(data, torch.tensor([9, 10, 11, 15]), None)
    assert kept.tolist() == [False, False, True, False]


def test_data_without_the_mark_is_not_touched():
    data = marked(LIVE)
    del data[skip.MARK]
    assert split_by(lambda data: None, data) == ([[*range(8)]], None)


@pytest.mark.parametrize("dropped", [(), ("actor/update/rank_1_of_2",), tuple(RANKS)], ids=["none", "one", "all"])
def test_a_rank_that_does_not_answer_stops_the_run(dropped):
    metrics = {**RANKS, **FIGURES, "actor/pg_loss": [0.1]}
    for name in dropped:
        del metrics[name]
    if dropped:
        with pytest.raises(IntegrationError, match="rank 1" if len(dropped) == 1 else "any rank"):
            skip.take_figures(metrics)
        return
    skip.take_figures(metrics)
    figures = {name.removeprefix("actor/"): value for name, value in FIGURES.items()}
    assert metrics == {**figures, "actor/pg_loss": [0.1]}


def test_a_rank_without_the_package_is_named_and_not_waited_for(folder):
    metrics = updates.run("first", 2, folder, timeout=300)[0]
    with pytest.raises(IntegrationError, match="rank 1:"):
        skip.take_figures({f"actor/{name}": value for name, value in metrics.items()})


@pytest.mark.parametrize("asked", [True, False])
def test_the_trainer_marks_its_updates_only(asked):
    run = Run("grpo", Settings.parse({"verl_ext": {"skip_zero_advantage": asked}}), None)
    entries, marks = {"temperature": 1.0}, []

    def call():
        marks.append(entries.get(skip.MARK))
        return {**RANKS, **FIGURES}

    for _ in range(3):
        skip.update(run, entries, call, lambda metrics: metrics)
    assert marks == ([skip.CHECK, skip.SKIP, skip.SKIP] if asked else [None] * 3)
    assert entries == {"temperature": 1.0}


class Attention(torch.nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.attention_dropout = rate


@pytest.mark.parametrize("part", [torch.nn.Dropout(0.1), Attention(0.1)], ids=["module", "attention"])
def test_a_model_that_draws_random_numbers_is_refused(part):
    with pytest.raises(ConfigurationError, match="skip_zero_advantage"):
        skip.require_exact(torch.nn.Sequential(torch.nn.Linear(2, 2), part))


def test_long_rows_ask_for_no_more_micro_batches_than_rows():
    from verl.utils import tensordict_utils as tu

    data = updates.rows(8, [True] * 3 + [False] * 5, seed=0, nested=True, widths=(12, 12), lengths=([12] * 8, [12] * 8))
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=30)
    assert int(skip.rows_to_keep(data, data["input_ids"].offsets().diff(), None).sum()) == 3


def test_a_model_without_dropout_is_accepted():
    skip.require_exact(torch.nn.Sequential(torch.nn.Dropout(0.0), Attention(0.0)))
