"""What the command prints, draws and refuses."""

from __future__ import annotations

import html.parser
import itertools
import subprocess
import sys

import pytest

from tests.compare import made
from tests.facts import a_line_says, says
from verl_ext.cli import main

pytest.importorskip("pyarrow")


@pytest.fixture
def printed(capsys):
    def compare(*arguments, status=0):
        assert main(["compare", *map(str, arguments)]) == status
        written = capsys.readouterr()
        return written.err if status else written.out

    return compare


@pytest.fixture
def rollouts(tmp_path):
    return made.write(tmp_path / "rollouts", made.entries(1), made.entries(2))


def test_every_line_fits_a_terminal_and_all_tables_are_there(printed, rollouts):
    text = printed(rollouts, "gdpo", "dgpo", "hadw", "gdpo algorithm.gdpo.scale=mad", made.KEYS, "--top", "2")
    assert max(map(len, text.splitlines())) <= 120
    assert "24 trajectories in 6 groups of 4, steps 1 to 2, 2 batches" in text
    for expected in ("dead groups", "rank correlation", "right  form", "accuracy of the prompt (acc)", "characters"):
        assert expected in text
    assert text.count("furthest from grpo") >= 4
    assert "gdpo scale=mad" in text
    assert "xxxxx" in text
    assert "prompt: what is " in text


def test_settings_may_come_after_options_as_with_verl(printed, rollouts):
    before = printed(rollouts, "gdpo", made.KEYS, "--top", "0")
    assert printed(rollouts, "--top", "0", "gdpo", made.KEYS) == before
    assert printed(rollouts, "gdpo", "--top", "0", made.KEYS) == before
    assert "furthest from grpo" not in before


def test_a_reward_named_accuracy_is_the_accuracy_only_if_a_setting_says_so(printed, tmp_path):
    lines = [line | {"accuracy": line["form"], "score": line["right"]} for line in made.entries(1)]
    rollouts = made.write(tmp_path / "rollouts", made.without(lines, "acc"))
    assert "accuracy of the prompt (score)" in printed(rollouts, "dgpo")
    assert "accuracy of the prompt (accuracy)" in printed(rollouts, "dgpo", "algorithm.rewards.accuracy_key=accuracy")


def test_a_reward_named_total_is_not_taken_for_the_sum_of_a_dump(printed, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    table = pq.read_table(next(made.dump(tmp_path, 1).glob("*.parquet")))
    renamed = [name.replace("/right", "/total") for name in table.column_names]
    pq.write_table(table.rename_columns(renamed), tmp_path / "advantages-00000001-000.parquet")
    text = printed(tmp_path, "drgrpo", "algorithm.rewards.keys=[total,form]", "algorithm.rewards.weights=[2.0,1.0]")
    assert "`score` is the weighted sum of the rewards" in text
    assert "Against grpo on score" in text


def test_the_picture_and_the_page(printed, rollouts, tmp_path):
    pytest.importorskip("matplotlib")
    hostile = [line | {"output": "<script>alert(1)</script>\x1b[31m $x$"} for line in made.entries(1)]
    made.write(rollouts, hostile)
    picture = tmp_path / "a\x1b[31m.png"
    text = printed(rollouts, "gdpo", "dgpo", made.KEYS, "--plot", picture, "--html", tmp_path / "a.html")
    assert a_line_says(text, f"{tmp_path}/a\\x1b[31m.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "a.html").read_text()
    assert "<script>" not in page
    assert "\x1b" not in page
    assert 'src="http' not in page
    assert "&lt;script&gt;alert(1)" in page
    html.parser.HTMLParser().feed(page)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_percentages_in_the_picture_do_not_overlap(count, printed, rollouts, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, dpi: figures.append(self))
    variants = ["gdpo", "dgpo", "hadw", "drgrpo", "gdpo algorithm.gdpo.scale=mad"][:count]
    printed(rollouts, *variants, made.KEYS, "--plot", tmp_path / "a.png")
    (figure,) = figures
    figure.draw_without_rendering()
    (ax,) = [ax for ax in figure.axes if ax.get_title().startswith("Share of groups")]
    for text in ax.texts:
        text.set_text("100%")
    boxes = sorted((text.get_window_extent() for text in ax.texts), key=lambda box: box.x0)
    assert len(boxes) == 3 * (count + 1)
    assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(boxes))
    assert max(text.get_window_extent().y1 for text in ax.texts) <= ax.bbox.y1


@pytest.mark.parametrize("option", ["--html", "--output"])
def test_an_output_cannot_replace_the_rollouts(option, printed, rollouts):
    file = next(rollouts.glob("*.jsonl"))
    before = file.read_bytes()
    for given in (rollouts, file):
        assert says(printed(given, "gdpo", made.KEYS, option, file, status=1), option, file.name)
    assert file.read_bytes() == before


def test_two_outputs_cannot_be_one_file(printed, rollouts, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "out/a"
    said = printed(rollouts, "gdpo", made.KEYS, "--html", file, "--output", file, status=1)
    assert says(said, "--html", "--output", file)
    assert not file.parent.exists()


def test_an_output_cannot_replace_a_dump(printed, tmp_path):
    file = next(made.dump(tmp_path, 1).glob("*.parquet"))
    assert says(printed(tmp_path, "gdpo", made.KEYS, "--output", file, status=1), "--output", file.name)


def test_dumps_have_no_text_and_say_whose_they_are(printed, tmp_path):
    text = printed(made.dump(tmp_path, 1, 2), "gdpo", made.KEYS)
    assert "the run's estimator: dgpo" in text
    assert "length in tokens" in text
    assert "prompt: " not in text
    assert "answer" not in text


def test_one_reward_only_is_said_with_the_others_that_could_be_named(printed, rollouts, tmp_path):
    assert "right, form" in printed(rollouts, "dgpo")
    alone = made.write(tmp_path / "alone", made.without(made.entries(), "right", "form", "acc"))
    text = printed(alone, "dgpo", "algorithm.rewards.accuracy_threshold=2.5")
    assert "one reward only" in text


def test_a_score_that_is_not_the_sum_is_said(printed, rollouts, tmp_path):
    weighted = [made.KEYS, "algorithm.rewards.weights=[2,1]"]
    assert "score is not right + form in 33.3% of trajectories" in printed(rollouts, "dgpo", made.KEYS)
    assert "score is not" not in printed(rollouts, "dgpo", *weighted)


def test_without_an_accuracy_prompts_are_sorted_by_score(printed, tmp_path):
    folder = made.write(tmp_path / "r", made.without(made.entries(), "acc"))
    text = printed(folder, "drgrpo")
    assert "mean score of the prompt" in text
    assert "accuracy_key" in text
    assert "accuracy of the prompt (right)" in printed(folder, "drgrpo", "algorithm.rewards.accuracy_key=right")


def test_torn_lines_are_counted_and_the_rest_is_used(printed, tmp_path):
    folder = made.write(tmp_path / "r", made.entries())
    with (folder / "1.jsonl").open("a") as file:
        file.write('[1]\n\n{"input": "x", "outp')
    text = printed(folder, "dgpo")
    assert "2 unreadable line(s) left out" in text
    assert "12 trajectories" in text


def test_no_uid_no_step_and_rewards_that_are_missing_are_said(printed, tmp_path):
    lines = made.without(made.entries(), "uid", "step")
    lines[3] = lines[3] | {"right": None}
    del lines[5]["form"]
    text = printed(made.write(tmp_path / "r", lines, name="7"), "gdpo", made.KEYS)
    assert "12 lines have no uid" in text
    assert "12 lines have no step" in text
    assert "step 7" in text
    assert "right is missing from 1 of 12 lines" in text
    assert "form is missing from 1 of 12 lines" in text
    assert "step 0" in printed(made.write(tmp_path / "s", lines, name="all"), "gdpo", made.KEYS)


def test_prompts_with_one_answer_are_said(printed, tmp_path):
    single = [line for row, line in enumerate(made.entries()) if row % 4 == 0 or row > 7]
    text = printed(made.write(tmp_path / "r", single), "dgpo")
    assert "groups of 1 to 4" in text
    assert "2 of 3 groups have one trajectory" in text


REFUSED = [
    ([], ("gdpo",)),
    ([made.KEYS], ("dgpo",)),
    (["gdop"], ("did you mean 'gdpo'",)),
    (["gdpo", "algorithm.rewards.keys=[rihgt,form]"], ("did you mean 'right'",)),
    (["gdpo", "algorithm.rewards.keys=[right,gts]"], ("is not a number",)),
    (["gdpo"], ("'right', 'form'",)),
    (["gdpo algorithm.gdpo.scael=mad", made.KEYS], ("scael",)),
    (["dgpo", "algorithm.gdpo.scale=mad"], ("algorithm.gdpo.scale=mad",)),
    (["gdpo algorithm.dgpo.dqw=False", "dgpo", made.KEYS], ("algorithm.dgpo.dqw=False",)),
    (["dgpo", "algorithm.verl_ext.dump_dir=x"], ("dump_dir",)),
    (["dgpo", "dgpo"], ("twice",)),
    (["grpo"], ("leave it out",)),
    (["dgpo", "algorithm.use_kl_in_reward=True"], ("use_kl_in_reward",)),
    (["[weigh_and_sum,center]"], ("center",)),
    (["[centre,weigh_and_sum,whiten]"], ("algorithm.rewards.keys",)),
    (["[weigh_and_sum,tests.integration.own_steps:Broken]"], ("Broken",)),
    (["dgpo", "algorithm.rewards.accuracy_key=score"], ("accuracy_threshold",)),
    (["dgpo", "--length", "tokns"], ("'right'",)),
    (["dgpo", "--top", "-1"], ("--top",)),
    (["dgpo", "--plot", "a.xyz"], (".xyz",)),
    (["[weigh_and_sum,centre"], ("[weigh_and_sum,centre'", "bracket", "[a,b]")),
    (["dgpo", "algorithm.rewards.keys=[right"], ("'algorithm.rewards.keys=[right'", "bracket", "[a,b]")),
    (["weigh_and_sum,centre]"], ("'weigh_and_sum,centre]'", "'drgrpo'", "[...]")),
    (["dgpo", "algorithm.rewards.keys=a=b=c"], ("'algorithm.rewards.keys=a=b=c'", "KEY=VALUE")),
    # As a training has it.
    (["+verl_ext=gdpo"], ("by its name alone", "'gdpo'", "'+verl_ext=gdpo'")),
    (["dgpo", "algorithm.adv_estimator=grpo"], ("by its name alone", "'algorithm.adv_estimator=grpo'")),
    (["+verl_ext=cpu"], ("'dgpo', 'drgrpo'", "'+verl_ext=cpu'")),
]


@pytest.mark.parametrize(("arguments", "told"), REFUSED)
def test_mistakes_are_refused_with_what_is_valid(arguments, told, printed, rollouts):
    assert says(printed(rollouts, *arguments, status=1), *told)


def broken(**changes):
    return [line | changes for line in made.entries()]


FILES = {
    "no score": (made.without(made.entries(), "score"), ("'right'", "line 1", "trainer.rollout_data_dir")),
    "a metrics log": ([{"step": 1, "data": {}}], ("'data'", "line 1", "trainer.rollout_data_dir")),
    "a step that is none": (broken(step="one"), ("'one'", "line 1")),
    "neither uid nor input": (made.without(made.entries(), "uid", "input"), ("'gts'", "line 1")),
    "a reward that is text": (broken(right="yes"), ("'yes'", "line 1", "algorithm.rewards.keys")),
    "a huge reward": (broken(right=1e31), ("p0-1",)),
    "the score alone": (
        made.without(made.entries(), "right", "form", "acc"),
        ("trainer.validation_data_dir", "algorithm.verl_ext.dump_dir", "'score'"),
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_no_rollouts_are_refused(case, printed, tmp_path):
    lines, expected = FILES[case]
    assert says(printed(made.write(tmp_path / "r", lines, name="1"), "gdpo", made.KEYS, status=1), *expected)


def test_a_folder_without_rollouts_or_with_two_kinds_or_with_torn_lines_alone(printed, tmp_path):
    assert "*.jsonl" in printed(tmp_path, "dgpo", status=1)
    assert "does not exist" in printed(tmp_path / "none", "dgpo", status=1)
    (tmp_path / "1.jsonl").write_text('{"inp')
    assert "1 unreadable line" in printed(tmp_path, "dgpo", status=1)
    (tmp_path / "1.jsonl").write_text("")
    assert "1.jsonl" in printed(tmp_path, "dgpo", status=1)
    made.dump(tmp_path, 1)
    assert "folder of its own" in printed(tmp_path, "dgpo", status=1)
    assert "--length" in printed(tmp_path / "advantages-00000001-000.parquet", "dgpo", "--length", "n", status=1)


def test_the_folder_of_a_run_names_its_subfolders_that_hold_rollouts(printed, tmp_path):
    made.write(tmp_path, [{"step": 1, "data": {}}], name="metrics")  # the run's log
    assert "compare " not in printed(tmp_path, "dgpo", status=1)
    for name in ("a run/dump", "too/far/down/below"):
        (tmp_path / name).mkdir(parents=True)
        made.dump(tmp_path / name, 1)
    made.write(tmp_path / "rollouts", made.entries())
    made.write(tmp_path / "other run", [{"step": 1, "data": {}}], name="metrics")
    error = printed(tmp_path, "dgpo", status=1)
    assert a_line_says(error, f"python -m verl_ext compare '{tmp_path}/a run/dump'")
    assert a_line_says(error, f"python -m verl_ext compare {tmp_path}/rollouts")
    assert error.count("compare ") == 2
    assert "12 trajectories" in printed(made.dump(tmp_path, 1), "dgpo")  # beside the log


def test_nothing_of_verl_is_imported(rollouts):
    program = (
        "import sys; from verl_ext.cli import main; main(sys.argv[1:]); "
        "print('LOADED', {'verl', 'ray', 'torch', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "compare", rollouts, "dgpo"], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "LOADED set()", done.stdout + done.stderr
