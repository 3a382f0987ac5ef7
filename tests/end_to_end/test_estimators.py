"""Each estimator in verl's own pipeline, in its own processes: rollout, reward, advantages, update, checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_model
from tests.end_to_end import run as harness

pytestmark = pytest.mark.end_to_end

KEYS = "algorithm.rewards.keys=[score,length]"
# The score is a share of characters; above 0 counts as right.
ACCURACY = "algorithm.rewards.accuracy_threshold=0"
OVERRIDES: dict[str, tuple[str, ...]] = {
    "gdpo": (KEYS,),
    "dgpo": (ACCURACY,),
    "hadw": (ACCURACY,),
    "drgrpo": (),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def ray_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray's own logs, under a short path, and away afterwards."""
    import tempfile

    folder = tempfile.mkdtemp(prefix="ve")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    yield
    shutil.rmtree(folder, ignore_errors=True)


def train(folder: Path, data: Path, name: str, *overrides: str, steps: int = 2, **given: Any) -> harness.Run:
    run = harness.start(
        folder,
        data,
        *OVERRIDES[name],
        f"algorithm.adv_estimator={name}",
        *overrides,
        steps=steps,
        configuration=f"[cpu,{name}]",
        **given,
    )
    try:
        assert run.wait(540) == 0, run.tail()
        assert run.left_behind() == []
    finally:
        run.kill()
    return run


# Without --slow test_training.py and test_recipes.py train each of them, in runs that show more than this.
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OVERRIDES))
def test_it_trains_on_verl_s_default_trainer(name: str, tmp_path: Path, data: Path) -> None:
    run = train(tmp_path, data, name)
    assert sorted(step for step in run.metrics if step) == [1, 2]
    harness.check_estimator(name, run.metrics, steps=(1, 2))
    assert len(run.column("reward/score/mean")) == 2
    assert run.column("reward/score/mean") == pytest.approx(run.column("critic/score/mean"), abs=1e-6)
    assert "advantages by verl_ext's " + name in run.log


@pytest.mark.slow
@pytest.mark.skipif(
    version("verl").startswith("0.9.0") and find_spec("flash_attn") is None,
    reason="the legacy trainer of verl 0.9.0 unpads with flash_attn's functions, on every device",
)
def test_gdpo_trains_on_the_legacy_trainer(tmp_path: Path, data: Path) -> None:
    run = train(tmp_path, data, "gdpo", "trainer.use_v1=False")
    for metric in ("reward/score/mean", "reward/length/std", "gdpo/whiten_std", "advantage/std"):
        assert len(run.column(metric)) == 2, metric
    assert run.column("reward/score/mean") == pytest.approx(run.column("critic/score/mean"), abs=1e-6)


def state(folder: Path, step: int) -> Any:
    return json.loads((folder / "checkpoints" / f"global_step_{step}" / "verl_ext.json").read_text())


def of_hadw(run: harness.Run, step: int) -> dict[str, float]:
    wanted = ("hadw/", "advantage/", "reward/")
    return {name: value for name, value in run.metrics[step].items() if name.startswith(wanted)}


@pytest.mark.slow
def test_a_run_that_was_resumed_is_the_run_that_was_not(tmp_path: Path, data: Path) -> None:
    """Four steps at once, and two, a new start, and two more: the same history, rewards and advantages."""
    saving = ("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1", "data.shuffle=False")
    whole = train(tmp_path / "whole", data, "hadw", *saving, steps=4)
    train(tmp_path / "parts", data, "hadw", *saving, "trainer.total_training_steps=2", steps=2)
    resumed = train(tmp_path / "parts", data, "hadw", *saving, "trainer.resume_mode=auto", steps=4)
    assert sorted(resumed.metrics) == [3, 4]
    for step in (3, 4):
        # The rows of a batch come in the order in which they were done, and a sum of floats depends on it.
        assert of_hadw(resumed, step) == pytest.approx(of_hadw(whole, step), rel=1e-12, abs=1e-12)
        for name in ("capability_prior", "capability_posterior", "batch_accuracy", "eta_t", "tick"):
            assert resumed.metrics[step][f"hadw/{name}"] == whole.metrics[step][f"hadw/{name}"]
    assert state(tmp_path / "parts", 4) == state(tmp_path / "whole", 4)
    assert state(tmp_path / "whole", 4)["estimators"]["hadw"]["weigh_by_history"]["ticks"] == 4
    # verl keeps the actor's last checkpoint only; our small file stays where it was written.
    kept = sorted(path.parent.name for path in (tmp_path / "whole" / "checkpoints").glob("global_step_*/actor"))
    assert kept == ["global_step_4"]
    assert state(tmp_path / "whole", 3)["global_step"] == 3


@pytest.mark.slow
def test_the_names_are_registered_in_the_worker_that_trains(tmp_path: Path, data: Path) -> None:
    (tmp_path / "spy_on_workers.py").write_text(
        "import os, pathlib\n"
        "from verl.trainer.ppo import core_algos\n"
        "found = core_algos.ADV_ESTIMATOR_REGISTRY\n"
        "names = sorted(name for name in found if found[name].__module__.startswith('verl_ext'))\n"
        "folder = pathlib.Path(__file__).parent / 'seen'\n"
        "folder.mkdir(exist_ok=True)\n"
        "command = pathlib.Path('/proc/self/cmdline').read_bytes().replace(b'\\0', b' ').decode().strip()\n"
        "(folder / str(os.getpid())).write_text(command + ': ' + ' '.join(names))\n"
    )
    train(
        tmp_path / "run",
        data,
        "drgrpo",
        "actor_rollout_ref.model.external_lib=spy_on_workers",
        steps=1,
        env={"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))},
    )
    seen = [path.read_text() for path in (tmp_path / "seen").iterdir()]
    assert any("WorkerDict" in text for text in seen), seen
    assert all(text.endswith(": compose dgpo drgrpo gdpo hadw") for text in seen), seen
