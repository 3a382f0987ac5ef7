"""States in a checkpoint that are damaged or incomplete."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.facts import facts
from tests.integration.hadw_checkpoints import state_after
from verl_ext import Step
from verl_ext.advantages import checkpoint
from verl_ext.core.chain import Chain
from verl_ext.errors import CheckpointError
from verl_ext.registry import build
from verl_ext.run import Run
from verl_ext.settings import Settings


class CountBatches(Step):
    """A custom step whose state is the number of batches."""

    name = "count_batches"

    def init(self) -> dict[str, int]:
        return {"batches": 0}


def hadw_run(folder: Path, *custom_steps: Step) -> Run:
    """Return a run of hadw at step 7, with custom steps after those of hadw."""
    settings = Settings.parse({"rewards": {"keys": ["acc"], "accuracy_key": "acc"}})
    config = SimpleNamespace(trainer=SimpleNamespace(default_local_dir=str(folder), resume_mode="auto"))
    trainer = SimpleNamespace(global_steps=7, config=config)
    steps = build("hadw", settings).steps
    return Run("hadw", settings, Chain((*steps, *custom_steps)), trainer=trainer, computed_at=7)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of a checkpoint of hadw at step 7."""
    run = hadw_run(tmp_path)
    run.state = state_after(updates=3)
    run.accuracy = {"key": "acc", "threshold": None}
    checkpoint.save_state(run)
    return tmp_path / "global_step_7" / checkpoint.FILE


@pytest.mark.parametrize("computed_at", [None, "7"])
def test_a_step_of_the_last_batch_that_is_no_number_is_an_error(computed_at: Any, file: Path) -> None:
    content = json.loads(file.read_text()) | {"computed_at": computed_at}
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=facts(file, "cannot be read", "computed_at", "delete the file")):
        checkpoint.load(hadw_run(file.parents[1]))


def test_a_custom_step_without_a_saved_state_is_a_warning(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = hadw_run(file.parents[1], CountBatches())
    with caplog.at_level(logging.WARNING):
        checkpoint.load(run)
    assert run.state == state_after(updates=3)
    (warning,) = [record.message for record in caplog.records]
    assert "'count_batches'" in warning
    assert "starts empty" in warning
    assert str(file) in warning


def test_a_complete_state_is_loaded_without_a_warning(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        checkpoint.load(hadw_run(file.parents[1]))
    assert not caplog.records
