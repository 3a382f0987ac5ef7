"""The state of an estimator through the saving and loading of verl's default trainer."""

from pathlib import Path

import pytest

from tests.integration.hadw_checkpoints import saved_state, train_hadw
from tests.integration.pipeline import Pipeline, Result

HISTORY = ("capability_prior", "capability_posterior", "batch_accuracy", "eta_t", "updates")


def assert_same_step(resumed: Result, uninterrupted: Result, step: int) -> None:
    """Compare the history exactly, and other metrics up to the order of the rows in a sum."""
    metrics = resumed.metrics[step]
    expected = uninterrupted.metrics[step]
    for name in HISTORY:
        assert metrics[f"hadw/{name}"] == expected[f"hadw/{name}"], name
    for name in expected:
        if name.startswith(("hadw/", "advantage/")):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-12, abs=1e-12), name


def updates_of(result: Result) -> int:
    """Return the number of updates in the history at the end of a run."""
    state = result.trainer._verl_ext.state
    return int(state["weight_by_history"]["updates"])


@pytest.fixture(scope="module")
def uninterrupted(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """Return a run of four steps, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return train_hadw(pipeline, folder, 4), folder


def test_a_resumed_run_continues_with_the_same_numbers(
    pipeline: Pipeline, tmp_path: Path, uninterrupted: tuple[Result, Path]
) -> None:
    expected, folder_of_expected = uninterrupted
    train_hadw(pipeline, tmp_path, 2)
    resumed = train_hadw(pipeline, tmp_path, 4, "trainer.resume_mode=auto")
    assert sorted(resumed.metrics) == [3, 4]
    for step in (3, 4):
        assert_same_step(resumed, expected, step)
    assert saved_state(tmp_path, 4) == saved_state(folder_of_expected, 4)
    assert updates_of(resumed) == 4


def test_a_run_resumes_from_an_earlier_checkpoint_by_its_path(
    pipeline: Pipeline, tmp_path: Path, uninterrupted: tuple[Result, Path]
) -> None:
    expected, folder_of_expected = uninterrupted
    path = f"trainer.resume_from_path={folder_of_expected}/global_step_1"
    resumed = train_hadw(pipeline, tmp_path, 2, "trainer.resume_mode=resume_path", path)
    assert sorted(resumed.metrics) == [2]
    assert_same_step(resumed, expected, 2)


def test_a_subclass_with_its_own_checkpoints_keeps_the_state(pipeline: Pipeline, tmp_path: Path) -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    class OwnCheckpoints(PPOTrainer):
        """A trainer whose methods do not call `super`."""

        def _save_checkpoint(self) -> None:
            (tmp_path / "own.txt").write_text(str(self.global_steps))

        def _load_checkpoint(self) -> None:
            path = tmp_path / "own.txt"
            self.global_steps = int(path.read_text()) if path.exists() else 0

    train_hadw(pipeline, tmp_path, 1, "trainer.resume_mode=auto", cls=OwnCheckpoints)
    resumed = train_hadw(pipeline, tmp_path, 2, "trainer.resume_mode=auto", cls=OwnCheckpoints)
    assert updates_of(resumed) == 2
