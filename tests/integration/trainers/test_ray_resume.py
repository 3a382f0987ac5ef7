"""The state of an estimator through the saving and loading of `RayPPOTrainer`, and the tracker of its checkpoints."""

from pathlib import Path
from typing import Any

import pytest

from tests.configs import compose
from tests.facts import a_line_says, facts
from tests.integration.hadw_checkpoints import HADW, saved_state, state_after
from tests.integration.trainers.ray_runs import OwnFit, hadw_trainer
from verl_ext.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"


def save(folder: Path, step: int, *overrides: str, updates: int | None = None) -> None:
    """Save the checkpoint of a run at a step, whose state is that after a number of updates."""
    trainer = hadw_trainer(folder, *overrides)
    trainer.global_steps = trainer._verl_ext.computed_at = step
    if updates is not None:
        trainer._verl_ext.state = state_after(updates)
        trainer._verl_ext.accuracy = {"key": "acc", "threshold": None}
    trainer._save_checkpoint()


def resume(folder: Path, *overrides: str) -> Any:
    """Return a trainer that has resumed from its checkpoint."""
    trainer = hadw_trainer(folder, *overrides)
    trainer._load_checkpoint()
    return trainer


def test_a_state_is_resumed_with_its_step(tmp_path: Path) -> None:
    save(tmp_path, 5, updates=9)
    assert saved_state(tmp_path, 5)["global_step"] == 5
    resumed = resume(tmp_path)
    assert resumed.global_steps == 5
    assert resumed._verl_ext.state == state_after(9)


def test_a_state_is_resumed_from_a_path(tmp_path: Path) -> None:
    save(tmp_path, 5, updates=9)
    path = f"trainer.resume_from_path={tmp_path}/global_step_5"
    resumed = resume(tmp_path / "elsewhere", "trainer.resume_mode=resume_path", path)
    assert resumed.global_steps == 5
    assert resumed._verl_ext.state == state_after(9)


def test_a_run_that_does_not_resume_has_no_state(tmp_path: Path) -> None:
    save(tmp_path, 5, updates=9)
    trainer = resume(tmp_path, "trainer.resume_mode=disable")
    assert trainer._verl_ext.state is None


def test_a_history_does_not_survive_a_run_of_another_estimator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """hadw trains to step 4, compose to step 6, and hadw resumes. It must not continue the history of step 4."""
    save(tmp_path, 4, updates=4)
    steps = "+algorithm.compose.steps=[weighted_sum,center]"
    compose_trainer = resume(tmp_path, "algorithm.adv_estimator=compose", steps)
    compose_trainer.global_steps = 6
    compose_trainer._save_checkpoint()
    resumed = resume(tmp_path)
    assert resumed.global_steps == 6
    assert resumed._verl_ext.state is None
    assert a_line_says(caplog.text, "WARNING", "step 6", tmp_path / "global_step_6/verl_ext.json", "starts empty")


@pytest.mark.parametrize(
    ("saved_steps", "tracker", "newest"),
    [((3, 5), "", "global_step_5"), ((3, 5), "7", "global_step_5"), ((), "", "no complete")],
    ids=["empty tracker", "missing checkpoint", "no checkpoint"],
)
def test_a_tracker_of_no_checkpoint_is_an_error_that_names_the_newest(
    tmp_path: Path, saved_steps: tuple[int, ...], tracker: str, newest: str
) -> None:
    """verl fails on an empty tracker. If the folder does not exist, verl starts over."""
    for step in saved_steps:
        save(tmp_path, step, updates=step)
    path = tmp_path / TRACKER
    path.write_text(tracker)
    with pytest.raises(CheckpointError, match=facts(path, newest, "trainer.resume_mode=disable")):
        resume(tmp_path)
    resume(tmp_path, "trainer.resume_mode=disable")


def test_a_mode_that_verl_does_not_know_is_checked_as_auto(tmp_path: Path) -> None:
    """With such a mode, `RayPPOTrainer` resumes from the checkpoint of the tracker."""
    save(tmp_path, 5, updates=5)
    resumed = resume(tmp_path, "trainer.resume_mode=latest")
    assert resumed.global_steps == 5
    (tmp_path / "global_step_5/data.pt").unlink()
    with pytest.raises(CheckpointError, match=facts(tmp_path / TRACKER, "'5'")):
        resume(tmp_path, "trainer.resume_mode=latest")


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("overrides", [("~algorithm.rewards",), ()], ids=["without verl_ext", "named rewards"])
def test_verls_grpo_removes_only_the_state_from_an_older_checkpoint(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """The state is removed before verl writes `data.pt`. Until then, the older `data.pt` stays."""
    folder = tmp_path / "global_step_5"
    save(tmp_path, 5, updates=5)
    (tmp_path / TRACKER).write_text("5")
    expected = files_in(folder)
    del expected["verl_ext.json"]
    files_before_data = {}

    def state_dict() -> dict[str, int]:
        files_before_data.update(files_in(folder))
        return {}

    trainer = hadw_trainer(tmp_path, "algorithm.adv_estimator=grpo", *overrides)
    trainer.global_steps = 5
    trainer.train_dataloader.state_dict = state_dict
    trainer._save_checkpoint()
    assert files_before_data == expected


class CountsBeforeItsLastSave(OwnFit):
    """A trainer that saves its last checkpoint after it has counted one more step, as verl-recipe's DAPO."""

    def fit(self, batches: int) -> None:
        self.global_steps = 0
        self._load_checkpoint()
        self.global_steps += 1
        for _ in range(batches):
            computed = self.advantages()
            if self.global_steps % 2 == 0:
                self._save_checkpoint()
            self.logged(computed)
            self.global_steps += 1
        self._save_checkpoint()


def train(folder: Path, *, batches: int) -> CountsBeforeItsLastSave:
    """Resume from a folder and train on a number of batches."""
    config = compose(*HADW, f"trainer.default_local_dir={folder}", "trainer.resume_mode=auto")
    trainer = CountsBeforeItsLastSave(config)
    trainer.fit(batches)
    return trainer


def test_a_trainer_that_counts_before_its_last_save_is_resumed(tmp_path: Path) -> None:
    """It may also start again without a batch left. Its history is that of an uninterrupted run."""
    train(tmp_path / "uninterrupted", batches=4)
    expected = saved_state(tmp_path / "uninterrupted", 5)["state"]
    folder = tmp_path / "interrupted"
    train(folder, batches=3)
    assert saved_state(folder, 2)["computed_at"] == 2
    assert saved_state(folder, 4)["computed_at"] == 3
    for restart in range(3):
        resumed = train(folder, batches=0)
        assert resumed.global_steps == 5 + restart
        assert resumed._verl_ext.state == saved_state(folder, 4)["state"]
    train(folder, batches=1)
    assert saved_state(folder, 9)["state"] == expected
