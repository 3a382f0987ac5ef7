"""The recipes' own launchers in verl's own pipeline: tiny models and the quickstart's data, on the CPU."""

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
from typing import Any

import pytest

from tests.end_to_end.run import MARK, check_estimator, end_all, metrics_of
from tests.recipes.launchers import RECIPES, environment
from verl_ext.cpu.tiny.make import Recipe, make
from verl_ext.cpu.tiny.task import Example, Task

pytestmark = pytest.mark.end_to_end
TIMEOUT = 540

# A few steps of warm-up: answers that are right now and then, so that rewards vary.
WARM_UP = {"tools": 120, "sums": 150}
SMALL = {
    "DEVICE": "cpu",
    "TRAIN_BATCH_SIZE": "8",
    "SAMPLES": "4",
    "MAX_PROMPT_LENGTH": "64",
    "MAX_RESPONSE_LENGTH": "48",
    "SAVE_FREQ": "2",
    "TEST_FREQ": "2",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny task, made once."""
    import torch

    def folder(task: str) -> Path:
        made = tmp_path_factory.getbasetemp() / f"tiny-{task}"
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        make(made, Recipe(task, WARM_UP[task], train_rows=64, val_rows=8))
        torch.set_num_threads(threads)
        return made

    return folder


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
        folder = Path(variables.get("OUTPUT_DIR", tmp_path / "run"))
        given = environment(**SMALL, **{"OUTPUT_DIR": str(folder), **variables, MARK: mark})
        process = subprocess.Popen(
            command, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert process.returncode == 0, output[-6000:]
        return Done(folder, output)

    yield run
    left = end_all(mark)
    shutil.rmtree(scratch, ignore_errors=True)
    assert left == []


def check_training(
    launch: Callable[..., Done], recipe: str, keys: tuple[str, ...], source: str, *arguments: str, **variables: str
) -> Done:
    """Two steps with validation and a checkpoint, then a new start that goes on with the third."""
    first = launch(f"{recipe}/run.sh", *arguments, "trainer.total_training_steps=2", **variables)
    assert sorted(first.metrics) == [0, 1, 2]  # 0: validation before training
    for step in (1, 2):
        for key in keys:
            assert math.isfinite(first.metrics[step][f"reward/{key}/mean"]), (step, key)
        assert math.isfinite(first.metrics[step]["actor/grad_norm"])
    total = sum(first.metrics[2][f"reward/{key}/mean"] for key in keys)
    assert total == pytest.approx(first.metrics[2]["critic/score/mean"], abs=1e-5)
    for step in (0, 2):
        for key in keys:
            assert math.isfinite(first.metrics[step][f"val-aux/{source}/{key}/mean@1"]), (step, key)
    again = launch(f"{recipe}/run.sh", *arguments, "trainer.total_training_steps=3", **variables)
    assert "setting global step to 2" in again.output
    assert 3 in again.metrics
    assert 1 not in again.metrics
    assert (again.folder / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "3"
    # The metrics of the first start are kept.
    (kept,) = (again.folder / "earlier").iterdir()
    assert len(kept.read_text().splitlines()) >= 3
    return again


def of(folder: Path) -> dict[str, str]:
    """The variables that name a tiny task's model and data."""
    return {"MODEL_PATH": f"{folder}/model", "DATA_DIR": str(folder), "VAL_FILES": f"{folder}/val.parquet"}


@pytest.mark.runs(2)
def test_tool_calling_trains_validates_saves_and_resumes(launch: Callable[..., Done], tiny: Any) -> None:
    done = check_training(
        launch, "tool_calling", ("correctness", "format"), "rlla", MINI_BATCH_SIZE="4", **of(tiny("tools"))
    )
    check_estimator("gdpo", done.metrics, steps=[3])


@pytest.mark.slow
def test_gsm8k_trains_validates_saves_and_resumes(launch: Callable[..., Done], tiny: Any) -> None:
    done = check_training(
        launch, "gsm8k", ("correctness", "integer", "format"), "openai/gsm8k", **of(tiny("sums")), EPOCHS="5"
    )
    check_estimator("gdpo", done.metrics, steps=[3])
    assert "actor/kl_loss" in done.metrics[3]


# The published baseline: verl's own grpo with KL in the reward, and our curves of each reward.
@pytest.mark.slow
def test_the_published_grpo_arm_trains(launch: Callable[..., Done], tiny: Any) -> None:
    done = check_training(
        launch,
        "tool_calling",
        ("correctness", "format"),
        "rlla",
        ALGORITHM="grpo",
        MINI_BATCH_SIZE="4",
        **of(tiny("tools")),
    )
    assert math.isfinite(done.metrics[3]["actor/reward_kl_penalty"])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dgpo", "hadw", "drgrpo"])
def test_maths_trains_validates_saves_and_resumes(launch: Callable[..., Done], tmp_path: Path, algorithm: str) -> None:
    from verl_ext.cpu.tiny.sums import draw

    def boxed(rng: Any) -> Example:
        """A sum of the tiny task, answered in a box."""
        example = draw(rng)
        total = example.ground_truth.removeprefix("#### ")
        return Example(example.messages, total, rf"\boxed{{{total}}}")

    task = Task(
        name="boxed",
        data_source="HuggingFaceH4/MATH-500",
        draw=boxed,
        words=("\\boxed{",),
        reward="verl_ext.rewards.boxed_math",
        keys=("accuracy",),
        accuracy_threshold=None,
        warm_up_steps=1,
        prompt_length=24,
        response_length=16,
        learning_rate=1e-4,
    )
    write_task(tmp_path / "tiny", task)
    check_training(
        launch,
        "math",
        ("accuracy",),
        "HuggingFaceH4/MATH-500",
        ALGORITHM=algorithm,
        EPOCHS="5",
        MINI_BATCH_SIZE="8",
        **of(tmp_path / "tiny"),
    )


def write_task(folder: Path, task: Task) -> None:
    """A tiny task's folder for a task which is not one of the package's."""
    import pandas

    from verl_ext.cpu.tiny.make import rows
    from verl_ext.cpu.tiny.model import make_model, warm_up
    from verl_ext.cpu.tiny.tokenizer import make_tokenizer

    tokenizer = make_tokenizer(task.words)
    model = make_model(tokenizer, seed=0)
    warm_up(model, task, tokenizer, steps=300, seed=0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for split, count in (("train", 64), ("val", 8)):
        pandas.DataFrame(rows(task, count, seed=f"{split}-0")).to_parquet(folder / f"{split}.parquet")


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_merged_and_evaluated_again(
    launch: Callable[..., Done], tiny: Any, tmp_path: Path
) -> None:
    """From sharded checkpoint and from Hugging Face's format: the same greedy answers, and pass@k."""
    task = of(tiny("sums"))
    launch("gsm8k/run.sh", "trainer.total_training_steps=2", **task)
    checkpoint = tmp_path / "run/checkpoints/global_step_2"
    evaluate = {**task, "EVALUATION_DIR": str(tmp_path / "one")}
    # In fp32, the precision of the run on the CPU, so that both are the same model.
    shown = launch("evaluate.sh", "gsm8k", CHECKPOINT=str(checkpoint), PASS_SAMPLES="4", **evaluate)
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
    launch("evaluate.sh", "gsm8k", **{**evaluate, "MODEL_PATH": str(merged), "EVALUATION_DIR": str(tmp_path / "two")})
    (again,) = json.loads((tmp_path / "two/summary.json").read_text()).values()
    assert again["answers"] == 8
    # The merged weights are rounded to bf16, so that single answers may differ.
    assert again["mean"]["format"] == pytest.approx(greedy["mean"]["format"], abs=0.25)
