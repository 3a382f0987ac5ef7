"""The recipes' arms in verl's own pipeline, with tiny models and data, on the CPU."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import tiny_tasks
from tests.end_to_end.run import MARK, check_estimator, end_all, metrics_of
from tests.recipes.launchers import RECIPES, environment

pytestmark = pytest.mark.end_to_end
TIMEOUT = 540
SOURCES = {recipe: source for recipe, (_, _, source, _) in tiny_tasks.TASKS.items()}
KEYS = {
    "tool_calling": ("correctness", "format"),
    "gsm8k": ("correctness", "integer", "format"),
    "math": ("accuracy",),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a recipe's tiny model and data, made once."""

    def folder(recipe: str) -> Path:
        made = tmp_path_factory.getbasetemp() / f"tiny-{recipe}"
        return made if made.exists() else tiny_tasks.make(made, recipe)

    return folder


def settings(data: Path, estimator: str) -> list[str]:
    """The overrides of an arm for a tiny model on the CPU."""
    presets = "cpu" if estimator == "grpo" else f"cpu,{estimator}"
    return [
        f"verl_ext=[{presets}]",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/val.parquet",
        f"actor_rollout_ref.model.path={data}/model",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        "data.max_response_length=48",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        "trainer.total_epochs=5",
    ]


@dataclass(frozen=True)
class Done:
    """A launcher that has ended well."""

    folder: Path
    output: str

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        return metrics_of(self.folder / "metrics.jsonl")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Done]]:
    """Runs a script of the recipes to its end, and fails the test where one leaves processes behind."""
    mark = uuid.uuid4().hex
    scratch = Path(tempfile.mkdtemp(prefix="ve"))  # Ray's sockets need a short path

    def run(script: str, *arguments: str, **variables: str) -> Done:
        command = [str(RECIPES / script), *arguments, f"+ray_kwargs.ray_init._temp_dir={scratch}"]
        given = environment(**{"OUTPUT_DIR": str(tmp_path / "run"), **variables, MARK: mark})
        process = subprocess.Popen(
            command, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert process.returncode == 0, output[-6000:]
        return Done(tmp_path / "run", output)

    yield run
    left = end_all(mark)
    shutil.rmtree(scratch, ignore_errors=True)
    assert left == []


@pytest.mark.runs(2)
@pytest.mark.parametrize(
    ("recipe", "arm"),
    [
        ("tool_calling", "gdpo"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gsm8k", "gdpo"),
                ("tool_calling", "grpo"),  # verl's own, with KL in the reward, and our curves of each reward
                ("math", "dgpo"),
                ("math", "hadw"),
                ("math", "drgrpo"),
            )
        ),
    ],
)
def test_an_arm_trains_validates_saves_and_resumes(launch, tiny, recipe: str, arm: str) -> None:
    """Two steps with validation and a checkpoint, then a new start that goes on with the third."""
    given = settings(tiny(recipe), arm)
    first = launch(f"{recipe}/run.sh", arm, *given, "trainer.total_training_steps=2")
    source = SOURCES[recipe]
    assert sorted(first.metrics) == [0, 1, 2]  # 0: validation before training
    for key in KEYS[recipe]:
        for step in (1, 2):
            assert math.isfinite(first.metrics[step][f"reward/{key}/mean"]), (step, key)
        for step in (0, 2):
            assert math.isfinite(first.metrics[step][f"val-aux/{source}/{key}/mean@1"]), (step, key)
    total = sum(first.metrics[2][f"reward/{key}/mean"] for key in KEYS[recipe])
    assert total == pytest.approx(first.metrics[2]["critic/score/mean"], abs=1e-5)
    again = launch(f"{recipe}/run.sh", arm, *given, "trainer.total_training_steps=3")
    assert "setting global step to 2" in again.output
    assert 3 in again.metrics
    assert 1 not in again.metrics
    assert (again.folder / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "3"
    (kept,) = (again.folder / "earlier").iterdir()  # the metrics of the first start
    assert len(kept.read_text().splitlines()) >= 3
    if arm == "grpo":
        assert math.isfinite(again.metrics[3]["actor/reward_kl_penalty"])
    else:
        check_estimator(arm, again.metrics, steps=[3])


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_merged_and_evaluated_again(launch, tiny, tmp_path: Path) -> None:
    """From sharded checkpoint and from Hugging Face's format: the same greedy answers, and pass@k."""
    given = settings(tiny("gsm8k"), "gdpo")
    launch("gsm8k/run.sh", "gdpo", *given, "trainer.total_training_steps=2")
    checkpoint = tmp_path / "run/checkpoints/global_step_2"
    # In fp32, the precision of the run on the CPU, so that both are the same model.
    one = {"PASS_SAMPLES": "4", "EVALUATION_DIR": str(tmp_path / "one")}
    shown = launch("evaluate.sh", "gsm8k", "gdpo", str(checkpoint), *given, **one)
    found = json.loads((tmp_path / "one/summary.json").read_text())
    greedy, sampled = (found[str(tmp_path / f"one/{name}/2.jsonl")] for name in ("greedy", "sampled"))
    assert (greedy["answers"], greedy["prompts"]) == (8, 8)
    assert (sampled["answers"], sampled["prompts"]) == (32, 8)
    assert set(greedy["mean"]) >= {"correctness", "integer", "format", "score"}
    assert sorted(map(int, sampled["pass"])) == [1, 2, 4]
    assert sampled["pass"]["1"] == pytest.approx(sampled["mean"]["correctness"])
    assert "pass@4" in shown.output

    merge = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    merged = tmp_path / "merged"
    subprocess.run(
        [*merge, "--local_dir", str(checkpoint / "actor"), "--target_dir", str(merged)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    path = f"actor_rollout_ref.model.path={merged}"
    launch("evaluate.sh", "gsm8k", "gdpo", str(merged), *given, path, EVALUATION_DIR=str(tmp_path / "two"))
    (again,) = json.loads((tmp_path / "two/summary.json").read_text()).values()
    assert again["answers"] == 8
    # The merged weights are rounded to bf16, so that single answers may differ.
    assert again["mean"]["format"] == pytest.approx(greedy["mean"]["format"], abs=0.25)
