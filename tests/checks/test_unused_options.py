"""Options of a trial that have no effect are reported."""

import pytest

from tests.facts import a_line_says
from verl_ext.cli import main

RUN = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.use_dynamic_bsz=True")


@pytest.mark.parametrize("option", [("--responses", "/nonexistent"), ("--answer-template", "nobraces")])
def test_an_option_of_the_trial_without_a_trial_is_warned_of(capsys, option):
    assert main(["check", *RUN, *option]) == 0
    output = capsys.readouterr().out
    assert a_line_says(output, "warning", option[0], "has no effect", "Add --try-reward")


def test_more_responses_than_rows_are_a_note(try_reward, tmp_path):
    (tmp_path / "answers.jsonl").write_text('"1"\n"2"\n"3"\n')
    arguments = ("--responses", str(tmp_path / "answers.jsonl"))
    status, output = try_reward(*arguments)  # tries two of the three rows
    assert status == 0
    assert a_line_says(output, "note", "3 responses", "2 rows", "--rows=3")
    assert not a_line_says(try_reward(*arguments, "--rows", "3")[1], "note", "--responses has")


def test_more_responses_than_the_data_has_rows_are_a_note(try_reward, tmp_path):
    (tmp_path / "answers.jsonl").write_text('"1"\n"2"\n"3"\n"4"\n')
    _, output = try_reward("--responses", str(tmp_path / "answers.jsonl"), "--rows", "8")
    assert a_line_says(output, "note", "4 responses", "3 rows", "one response for each row")
