"""The recipes' scripts in verl's pipeline, with tiny models and made-up data, on the CPU."""

import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pandas
import pytest

from recipes.quickstart import prepare_data as quickstart
from tests.end_to_end.run import MARK, end_all, metrics_of
from tests.recipes.launchers import CONFIGS, RECIPES, environment
from verl_ext.checks.judge import SUMMARY

pytestmark = pytest.mark.end_to_end
GDPO = "verl_ext=[cpu,gdpo]"
SMALL = (
    "data.train_batch_size=8",
    "data.max_prompt_length=64",
    "data.max_response_length=48",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "trainer.total_epochs=5",
    "trainer.save_freq=2",
    "trainer.test_freq=2",
)


@pytest.fixture
def launch(tmp_path):
    """Runs a script to its end, and fails the test where it leaves processes behind."""
    mark = uuid.uuid4().hex
    scratch = Path(tempfile.mkdtemp(prefix="ve"))  # Ray's sockets need a short path

    def run(script, *arguments, timeout=540, **variables):
        process = subprocess.Popen(
            [
                *([str(RECIPES / script)] if isinstance(script, str) else script),
                *arguments,
                f"+ray_kwargs.ray_init._temp_dir={scratch}",
            ],
            env=environment(**variables, **{MARK: mark}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert process.returncode == 0, output[-6000:]
        return output

    yield run
    left = end_all(mark)
    shutil.rmtree(scratch, ignore_errors=True)
    assert left == []


@pytest.fixture
def task(tmp_path):
    """The overrides that name the quickstart's task, after a short warm-up: some answers are right, so rewards vary."""
    quickstart.write(tmp_path / "data/quickstart", steps=120, train_rows=64, val_rows=8)
    return (
        "actor_rollout_ref.model.path=data/quickstart/model",
        "data.train_files=data/quickstart/train.parquet",
        "data.val_files=data/quickstart/val.parquet",
    )


def test_tool_calling_trains_validates_and_saves(launch, task, tmp_path):
    output = launch("tool_calling/run.sh", "gdpo", GDPO, *SMALL, *task, "trainer.total_training_steps=2")
    # By the driver at its start, and by the trainer before the first step.
    assert len(re.findall(SUMMARY, output)) == 2
    driver, trainer, steps = (re.search(text, output).start() for text in (SUMMARY, rf"\(.*{SUMMARY}", "step:1 "))
    assert driver < trainer < steps
    folder = tmp_path / "outputs/tool_calling/gdpo"
    keys = ("correctness", "format")
    found = metrics_of(folder / "metrics.jsonl")
    assert sorted(found) == [0, 1, 2]  # 0: validation before training
    for step, prefix, suffix in ((1, "reward", "mean"), (2, "reward", "mean"), (2, "val-aux/rlla", "mean@1")):
        assert all(math.isfinite(found[step][f"{prefix}/{key}/{suffix}"]) for key in keys)
    total = sum(found[2][f"reward/{key}/mean"] for key in keys)
    assert total == pytest.approx(found[2]["critic/score/mean"], abs=1e-5)
    assert found[2]["actor/grad_norm"] > 0
    assert (folder / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "2"


def sums(source):
    """64 sums in verl's format."""
    return pandas.DataFrame(
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{at % 10}+{at // 10}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(at % 10 + at // 10)},
            "extra_info": {"index": at},
        }
        for at in range(64)
    )


QUICKSTART = ("quickstart/gdpo", "quickstart/grpo")


@pytest.mark.slow
@pytest.mark.runs(2)
@pytest.mark.parametrize("name", [*CONFIGS, *QUICKSTART])
def test_a_config_is_rehearsed(launch, tmp_path, name):
    """It trains, saves, resumes to the same step and validates, with responses that get different rewards."""
    folder = tmp_path / "data/quickstart"
    quickstart.write(folder, steps=1, train_rows=64, val_rows=8)
    sums("openai/gsm8k").to_parquet(tmp_path / "sums.parquet")
    shown = folder / "train.parquet" if name.startswith(("tool_calling", "quickstart")) else tmp_path / "sums.parquet"
    truths = pandas.read_parquet(folder / "train.parquet").reward_model
    answers = [
        *(truth["ground_truth"] for truth in truths[:3]),
        "<think>a</think>\n<answer>7</answer>",
        "\\boxed{3}",
        "a",
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    words = ["data.max_prompt_length=512", "data.max_response_length=128", "data.train_batch_size=16"]
    words += [f"actor_rollout_ref.model.path={folder}/model", f"data.train_files={shown}", f"data.val_files={shown}"]
    words += ["actor_rollout_ref.actor.ppo_mini_batch_size=16", "algorithm.filter_groups.enable=False"]
    given = ("--config-path", str(RECIPES), "--config-name", name, "--responses", "answers.jsonl")
    output = launch([sys.executable, "-m", "verl_ext", "rehearse", *given], *words)
    stages = {line.split()[1].rstrip(":") for line in output.splitlines() if line.startswith("ok ")}
    assert stages >= {"data", "start", "train", "save", "resume", "repeat", "validate"}, output
    (folder,) = tmp_path.glob("outputs/**/rehearsal")
    whole = metrics_of(folder / "train/metrics.jsonl")
    assert sorted(whole) == [1, 2, 3]
    assert sorted(metrics_of(folder / "resume/metrics.jsonl")) == [3]
    if name == "tool_calling/gdpo":
        assert whole[3]["actor/grad_norm"] > 0
        total = sum(whole[3][f"reward/{key}/mean"] for key in ("correctness", "format"))
        assert total == pytest.approx(whole[3]["critic/score/mean"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.runs(5)
def test_a_checkpoint_is_evaluated_merged_and_evaluated_again(launch, task, tmp_path):
    """From a sharded checkpoint and from Hugging Face's format: about the same greedy answers, and pass@k."""
    settings = (GDPO, *SMALL, *task[1:])
    launch("tool_calling/run.sh", "gdpo", GDPO, *SMALL, *task, "trainer.total_training_steps=2")
    checkpoint = tmp_path / "outputs/tool_calling/gdpo/checkpoints/global_step_2"
    shown = launch("evaluate.sh", "tool_calling", "gdpo", str(checkpoint), *settings, task[0], PASS_SAMPLES="4")
    folder = tmp_path / "outputs/evaluation/tool_calling/gdpo"
    summary = json.loads((folder / "global_step_2/summary.json").read_text())
    greedy, sampled = (summary[f"{folder}/global_step_2/{name}/2.jsonl"] for name in ("greedy", "sampled"))
    assert (greedy["responses"], greedy["prompts"]) == (8, 8)
    assert (sampled["responses"], sampled["prompts"]) == (32, 8)
    assert set(greedy["mean"]) >= {"correctness", "format", "score"}
    assert sorted(map(int, sampled["pass"])) == [1, 2, 4]
    assert "pass@4" in shown

    merge = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp", "--target_dir", "merged"]
    command = [*merge, "--local_dir", checkpoint / "actor"]
    subprocess.run(command, check=True, capture_output=True, timeout=300, cwd=tmp_path)
    launch("evaluate.sh", "tool_calling", "gdpo", "merged", *settings)
    (again,) = json.loads((folder / "merged/summary.json").read_text()).values()
    assert again["responses"] == 8
    # The merged weights are rounded to bf16, so that single responses may differ.
    assert again["mean"]["format"] == pytest.approx(greedy["mean"]["format"], abs=0.25)
