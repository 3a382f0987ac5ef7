"""`verl-ext check --try-reward`: what a reward function returns, before anything else is loaded."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest

from verl_ext.cli import main

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=1.0):
    if solution_str == "raise":
        raise KeyError("boom")
    right = float(solution_str == ground_truth)
    nothing = None if not solution_str else float("nan")
    rare = {"rare": 1.0} if right else {}
    return rare | {"score": 2 * right, "correct": right, "format": bonus, "nothing": nothing, "long": 10**400}

async def later(**given):
    return compute_score(**given)

def reads_the_rollout(data_source, solution_str, ground_truth, extra_info):
    given = [extra_info["num_turns"], extra_info["max_global_steps"], len(extra_info["rollout_reward_scores"])]
    return {"score": 0.0, "correct": float(min(given) == 0), "format": 1.0}

def leaves(**given):
    raise SystemExit(0)

def finds_nothing(**given):
    return next(iter([]))

def returns_a_coroutine(**given):
    return later(**given)

def turns(data_source, solution_str, ground_truth, extra_info, plain=False):
    entries = [float(word == ground_truth) for word in solution_str.split()]
    return {"score": 0.0, "correct": 0.0, "format": entries if plain else str(entries)}

def returns(score=None, **given):
    odd = {"infinity": float("inf"), "float32": __import__("numpy").float32(1), "long": 10**400}
    return {"score": odd.get(score, score), "correct": 1.0, "format": 1.0}
"""


@pytest.fixture
def tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Exit status and output of one call on two rows."""
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "answers.txt").write_text("2\nraise\n")
    rows = [{"data_source": "x", "prompt": [], "reward_model": {"ground_truth": str(at)}} for at in (1, 2, 3)]
    pandas.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    given = [
        *("check", "+verl_ext=gdpo", "actor_rollout_ref.rollout.n=8", f"data.train_files={tmp_path}/train.parquet"),
        *(f"reward.custom_reward_function.path={tmp_path}/reward.py", "--try-reward", "--rows", "2"),
    ]

    def run(*arguments: str) -> tuple[int, str]:
        status = main([*given, *arguments])
        return status, capsys.readouterr().out

    return run


@pytest.mark.parametrize("function", ["compute_score", "later"])
def test_it_prints_what_the_components_are(tried, function: str) -> None:
    status, out = tried(
        "algorithm.rewards.keys=[correct,format]",
        f"reward.custom_reward_function.name={function}",
        "+reward.custom_reward_function.reward_kwargs.bonus=3",
    )
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ")}
    assert status == 0
    assert "2 rows" in out
    assert "4 answers" in out
    assert "0 to 1" in lines["correct"]
    assert "3 to 3" in lines["format"]
    assert "4 NaN, missing or no number" in lines["nothing"]
    assert "4 NaN, missing or no number" in lines["long"]
    assert "'correct'" in lines["in"]
    assert "'score'" not in lines["in"]


def test_a_misspelt_key_and_an_exception_are_refused(tried, tmp_path: Path) -> None:
    status, out = tried("algorithm.rewards.keys=[corect,format]", "--answers", str(tmp_path / "answers.txt"))
    assert status == 1
    assert "'corect'" in out
    assert "'correct'" in out
    assert "row 1, the answer of the file: scoring raises KeyError" in out
    assert "0 errors" not in out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("algorithm.rewards.keys=[correct,nothing]",), "is missing or None"),
        (("algorithm.rewards.keys=[correct,rare]",), "is missing or None"),
        (("algorithm.adv_estimator=hadw", "algorithm.rewards.accuracy_key=corect"), "'corect'"),
        (("algorithm.adv_estimator=hadw",), "accuracy must lie in [0, 1], but 'score'"),
        (
            (
                *("algorithm.adv_estimator=maxrl", "algorithm.rewards.keys=[correct,format]"),
                "+reward.custom_reward_function.reward_kwargs.bonus=-0.5",
            ),
            "found -0.5 for uid 'row 0, an empty answer'",
        ),
        (
            (
                "algorithm.adv_estimator=grpo",
                "algorithm.filter_groups.enable=True",
                "algorithm.filter_groups.metric=accuracy_between",
                "algorithm.rewards.accuracy_between=[0.1,0.9]",
                "algorithm.rewards.accuracy_key=corect",
            ),
            "'corect'",
        ),
    ],
)
def test_what_would_end_the_run_is_refused(tried, arguments: tuple[str, ...], word: str) -> None:
    status, out = tried(*arguments)
    assert status == 1
    assert word in out


def test_what_the_reward_manager_adds_is_not_missing(tried) -> None:
    cfg = "reward.reward_kwargs.overlong_buffer_cfg"
    dapo = ("reward.reward_manager.name=dapo", f"+{cfg}={{enable:True,log:True,len:4,penalty_factor:1.0}}")
    dapo += ("+reward.reward_kwargs.max_resp_len=16",)
    status, out = tried("algorithm.rewards.keys=[correct,overlong_reward]", *dapo)
    assert status == 0, out


FUNCTION = "reward.custom_reward_function"


def test_the_function_is_called_as_the_run_calls_it(tried) -> None:
    status, out = tried("algorithm.rewards.keys=[correct,format]", f"{FUNCTION}.name=reads_the_rollout")
    assert status == 0, out


@pytest.mark.parametrize("score", ["null", "'1.0'", "infinity", "[1.0]", "float32", "long"])
def test_a_score_that_verl_cannot_store_is_refused(tried, score: str) -> None:
    kwargs = f"+{FUNCTION}.reward_kwargs.score={score}"
    status, out = tried("algorithm.rewards.keys=[correct,format]", f"{FUNCTION}.name=returns", kwargs)
    assert status == 1
    assert "the score is" in out
    assert "0 errors" not in out


@pytest.mark.parametrize("function", ["leaves", "finds_nothing", "returns_a_coroutine"])
def test_what_verl_does_not_await_or_survive_is_refused(tried, function: str) -> None:
    assert tried("algorithm.rewards.keys=[correct,format]", f"{FUNCTION}.name={function}")[0] == 1


def test_no_row_is_no_trial(tried, capsys: pytest.CaptureFixture[str]) -> None:
    assert tried("algorithm.rewards.keys=[correct,format]", "--rows", "0")[0] == 1


def test_a_run_that_only_a_reward_model_scores_has_no_function_to_try(tried) -> None:
    status, out = tried("reward.custom_reward_function.path=null", "reward.reward_model.enable=True")
    assert status == 1
    assert "NotImplementedError" not in out


def test_rewards_by_turn_are_shown_and_a_plain_list_is_refused(tried, tmp_path: Path) -> None:
    (tmp_path / "answers.txt").write_text("1 0 1\n2 2\n")
    given = ("algorithm.rewards.keys=[correct,format]", "algorithm.rewards.by_turn=[format]")
    given += ("reward.custom_reward_function.name=turns", "--answers", str(tmp_path / "answers.txt"))
    status, out = tried(*given)
    assert status == 0, out
    (line,) = (line for line in out.splitlines() if line.strip().startswith("format"))
    assert "by turn, 0 to 3 entries" in line
    assert "0 to 1" in line
    status, out = tried(*given, "+reward.custom_reward_function.reward_kwargs.plain=True")
    assert status == 1
    assert "by_turn([...])" in out
