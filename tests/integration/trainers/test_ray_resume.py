"""The estimators' state through the saving and loading of `RayPPOTrainer`, and the tracker it resumes from."""

from pathlib import Path

import pytest

from tests.configs import compose
from tests.facts import a_line_says, facts
from tests.integration.hadw_checkpoints import HADW, saved_state, state_after
from tests.integration.trainers.ray_runs import OwnFit, hadw_trainer
from verl_ext.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"


def save(folder: Path, step: int, *overrides: str, updates: int | None = None) -> None:
    """A run that reached a step saves it."""
    trainer = hadw_trainer(folder, *overrides)
    trainer.global_steps = trainer._verl_ext.computed_at = step
    if updates is not None:
        trainer._verl_ext.state = state_after(updates)
        trainer._verl_ext.accuracy = {"key": "acc", "threshold": None}
    trainer._save_checkpoint()


def test_the_state_comes_back_with_its_step(tmp_path: Path) -> None:
    save(tmp_path, 5, updates=9)
    assert saved_state(tmp_path, 5)["global_step"] == 5
    path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_5")
    for folder, overrides in ((tmp_path, ()), (tmp_path / "elsewhere", path)):
        resumed = hadw_trainer(folder, *overrides)
        resumed._load_checkpoint()
        assert resumed.global_steps == 5
        assert resumed._verl_ext.state == state_after(9)
    fresh = hadw_trainer(tmp_path, "trainer.resume_mode=disable")
    fresh._load_checkpoint()
    assert fresh._verl_ext.state is None


def test_the_state_of_a_run_before_another_estimator_does_not_survive_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """hadw to step 4, compose to step 6, hadw again: it must not go on with the history of step 4."""
    save(tmp_path, 4, updates=4)
    compose = hadw_trainer(
        tmp_path, "algorithm.adv_estimator=compose", "+algorithm.compose.steps=[weighted_sum,center]"
    )
    compose._load_checkpoint()
    compose.global_steps = 6
    compose._save_checkpoint()
    resumed = hadw_trainer(tmp_path)
    resumed._load_checkpoint()
    assert resumed.global_steps == 6
    assert resumed._verl_ext.state is None
    assert a_line_says(caplog.text, "WARNING", "step 6", tmp_path / "global_step_6/verl_ext.json", "starts empty")


@pytest.mark.parametrize(("text", "whole"), [("", "global_step_5"), ("7", "global_step_5"), ("", "no complete")])
def test_a_tracker_that_names_no_checkpoint_is_an_error_that_names_the_newest(
    tmp_path: Path, text: str, whole: str
) -> None:
    """verl fails on an empty one, and begins anew where the folder is gone."""
    if whole != "no complete":
        for step in (3, 5):
            save(tmp_path, step, updates=step)
    (tmp_path / TRACKER).write_text(text)
    with pytest.raises(CheckpointError, match=facts(tmp_path / TRACKER, whole, "trainer.resume_mode=disable")):
        hadw_trainer(tmp_path)._load_checkpoint()
    hadw_trainer(tmp_path, "trainer.resume_mode=disable")._load_checkpoint()


def test_a_mode_that_verl_does_not_know_is_checked_as_auto(tmp_path: Path) -> None:
    """`RayPPOTrainer` then resumes from the tracker's checkpoint."""
    save(tmp_path, 5, updates=5)
    resumed = hadw_trainer(tmp_path, "trainer.resume_mode=latest")
    resumed._load_checkpoint()
    assert resumed.global_steps == 5
    (tmp_path / "global_step_5/data.pt").unlink()
    with pytest.raises(CheckpointError, match=facts(tmp_path / TRACKER, "'5'")):
        hadw_trainer(tmp_path, "trainer.resume_mode=latest")._load_checkpoint()


def test_a_run_without_an_estimator_of_ours_touches_no_other_file_than_the_state(tmp_path: Path) -> None:
    """verl's grpo saves over an older checkpoint: until verl has written `data.pt` anew, the old one is there."""
    folder = tmp_path / "global_step_5"
    save(tmp_path, 5, updates=5)
    (tmp_path / TRACKER).write_text("5")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for keys in ((), ("+algorithm.rewards.keys=[acc]",)):
        trainer = hadw_trainer(tmp_path, "algorithm.adv_estimator=grpo", *keys)
        trainer.global_steps = 5
        seen = {}

        def state_dict(seen: dict[str, bytes] = seen) -> dict[str, int]:
            seen |= {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
            return {}

        trainer.train_dataloader.state_dict = state_dict
        trainer._save_checkpoint()
        assert before.pop("verl_ext.json", None) is None or keys == ()
        assert seen == before


class CountsBeforeItsLastSave(OwnFit):
    """Saves its last checkpoint after its loop has counted one more step, as verl-recipe's DAPO does."""

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


def counting(folder: Path) -> CountsBeforeItsLastSave:
    config = compose(*HADW, f"trainer.default_local_dir={folder}", "trainer.resume_mode=auto")
    return CountsBeforeItsLastSave(config)


def test_a_trainer_that_counts_its_step_before_its_last_save_is_resumed(tmp_path: Path) -> None:
    """Also when it is started again without a batch left; its history is that of an undisturbed run."""
    counting(tmp_path / "whole").fit(batches=4)
    wanted = saved_state(tmp_path / "whole", 5)["state"]
    folder = tmp_path / "parts"
    counting(folder).fit(batches=3)
    assert [saved_state(folder, step)["computed_at"] for step in (2, 4)] == [2, 3]
    for restart in range(3):
        again = counting(folder)
        again.fit(batches=0)
        assert again.global_steps == 5 + restart
        assert again._verl_ext.state == saved_state(folder, 4)["state"]
    counting(folder).fit(batches=1)
    assert saved_state(folder, 9)["state"] == wanted
