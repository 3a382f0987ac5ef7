"""The scripts of the recipes in verl's pipeline on the CPU, with tiny models and synthetic data."""

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
    """Return a function that runs a command and returns its output. After the test, no process may be left."""
    mark = uuid.uuid4().hex
    ray_folder = Path(tempfile.mkdtemp(prefix="ve"))  # Ray's sockets need a short path

    def run(*command, timeout=540, **variables):
        process = subprocess.Popen(
            [*map(str, command), f"+ray_kwargs.ray_init._temp_dir={ray_folder}"],
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
    remaining_processes = end_all(mark)
    shutil.rmtree(ray_folder, ignore_errors=True)
    assert remaining_processes == []


@pytest.fixture
def task(tmp_path):
    """Return the overrides of the quickstart's task. After a short warm-up, some responses are correct."""
    quickstart.write(tmp_path / "data/quickstart", steps=120, train_rows=64, val_rows=8)
    return (
        "actor_rollout_ref.model.path=data/quickstart/model",
        "data.train_files=data/quickstart/train.parquet",
        "data.val_files=data/quickstart/val.parquet",
    )


def assert_score_is_sum_of_rewards(metrics):
    total = metrics["reward/correctness/mean"] + metrics["reward/format/mean"]
    assert total == pytest.approx(metrics["critic/score/mean"], abs=1e-5)


def test_tool_calling_trains_validates_and_saves(launch, task, tmp_path):
    output = launch(RECIPES / "tool_calling/run.sh", "gdpo", GDPO, *SMALL, *task, "trainer.total_training_steps=2")
    # The driver logs the summary when it starts. The trainer logs it before the first step.
    assert len(re.findall(SUMMARY, output)) == 2
    of_driver = re.search(SUMMARY, output).start()
    of_trainer = re.search(rf"\(.*{SUMMARY}", output).start()
    first_step = re.search("step:1 ", output).start()
    assert of_driver < of_trainer < first_step

    folder = tmp_path / "outputs/tool_calling/gdpo"
    metrics = metrics_of(folder / "metrics.jsonl")
    assert sorted(metrics) == [0, 1, 2]  # 0 is the validation before training
    for key in ("correctness", "format"):
        assert math.isfinite(metrics[1][f"reward/{key}/mean"])
        assert math.isfinite(metrics[2][f"reward/{key}/mean"])
        assert math.isfinite(metrics[2][f"val-aux/rlla/{key}/mean@1"])
    assert_score_is_sum_of_rewards(metrics[2])
    assert metrics[2]["actor/grad_norm"] > 0
    assert (folder / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "2"


def gsm8k_sums():
    """Return 64 sums as rows of GSM8K in verl's format."""
    rows = []
    for index in range(64):
        first, second = index % 10, index // 10
        row = {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{first}+{second}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(first + second)},
            "extra_info": {"index": index},
        }
        rows.append(row)
    return pandas.DataFrame(rows)


@pytest.fixture
def quickstart_folder(tmp_path):
    """Return the folder of the quickstart's data and of its model, which has hardly been trained."""
    folder = tmp_path / "data/quickstart"
    quickstart.write(folder, steps=1, train_rows=64, val_rows=8)
    return folder


@pytest.fixture
def responses_file(tmp_path, quickstart_folder):
    """Write responses for a rehearsal: three correct ones of the quickstart, and some in other answer templates."""
    rewards = pandas.read_parquet(quickstart_folder / "train.parquet").reward_model
    ground_truths = [reward["ground_truth"] for reward in rewards[:3]]
    responses = [*ground_truths, "<think>a</think>\n<answer>7</answer>", "\\boxed{3}", "a"]
    path = tmp_path / "responses.jsonl"
    path.write_text("".join(json.dumps(response) + "\n" for response in responses))
    return path


QUICKSTART = ("quickstart/gdpo", "quickstart/grpo")
STAGES = {"data", "start", "train", "save", "resume", "repeat", "validate"}


@pytest.mark.slow
@pytest.mark.runs(2)
@pytest.mark.parametrize("name", [*CONFIGS, *QUICKSTART])
def test_a_config_is_rehearsed(launch, tmp_path, quickstart_folder, responses_file, name):
    """The rehearsal trains, saves, resumes with the same step and validates. Responses receive different rewards."""
    if name.startswith(("tool_calling", "quickstart")):
        data = quickstart_folder / "train.parquet"
    else:
        data = tmp_path / "sums.parquet"
        gsm8k_sums().to_parquet(data)
    rehearse = [sys.executable, "-m", "verl_ext", "rehearse", "--config-path", RECIPES, "--config-name", name]
    output = launch(
        *rehearse,
        "--responses",
        responses_file,
        "data.max_prompt_length=512",
        "data.max_response_length=128",
        "data.train_batch_size=16",
        f"actor_rollout_ref.model.path={quickstart_folder}/model",
        f"data.train_files={data}",
        f"data.val_files={data}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "algorithm.filter_groups.enable=False",
    )
    passed_stages = {line.split()[1].rstrip(":") for line in output.splitlines() if line.startswith("ok ")}
    assert passed_stages >= STAGES, output
    (folder,) = tmp_path.glob("outputs/**/rehearsal")
    metrics = metrics_of(folder / "train/metrics.jsonl")
    assert sorted(metrics) == [1, 2, 3]
    assert sorted(metrics_of(folder / "resume/metrics.jsonl")) == [3]
    if name == "tool_calling/gdpo":
        assert metrics[3]["actor/grad_norm"] > 0
        assert_score_is_sum_of_rewards(metrics[3])


@pytest.mark.slow
@pytest.mark.runs(5)
def test_a_checkpoint_is_evaluated_merged_and_evaluated_again(launch, task, tmp_path):
    """The sharded checkpoint and the merged one have about the same greedy responses. The first has a pass@k, too."""
    model, *data = task
    settings = (GDPO, *SMALL, *data)
    launch(RECIPES / "tool_calling/run.sh", "gdpo", GDPO, *SMALL, *task, "trainer.total_training_steps=2")
    evaluate = [RECIPES / "evaluate.sh", "tool_calling", "gdpo"]
    checkpoint = tmp_path / "outputs/tool_calling/gdpo/checkpoints/global_step_2"
    output = launch(*evaluate, checkpoint, *settings, model, PASS_SAMPLES="4")
    folder = tmp_path / "outputs/evaluation/tool_calling/gdpo"
    summary = json.loads((folder / "global_step_2/summary.json").read_text())
    greedy = summary[f"{folder}/global_step_2/greedy/2.jsonl"]
    assert greedy["responses"] == 8
    assert greedy["prompts"] == 8
    assert set(greedy["mean"]) >= {"correctness", "format", "score"}
    sampled = summary[f"{folder}/global_step_2/sampled/2.jsonl"]
    assert sampled["responses"] == 32
    assert sampled["prompts"] == 8
    assert sorted(map(int, sampled["pass"])) == [1, 2, 4]
    assert "pass@4" in output

    merge = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp", "--target_dir", "merged"]
    command = [*merge, "--local_dir", checkpoint / "actor"]
    subprocess.run(command, check=True, capture_output=True, timeout=300, cwd=tmp_path)
    launch(*evaluate, "merged", *settings)
    (merged,) = json.loads((folder / "merged/summary.json").read_text()).values()
    assert merged["responses"] == 8
    # The merged weights are rounded to bf16, so that single responses may differ.
    assert merged["mean"]["format"] == pytest.approx(greedy["mean"]["format"], abs=0.25)
