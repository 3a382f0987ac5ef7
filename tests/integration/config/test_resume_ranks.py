"""A checkpoint that another number of ranks wrote is refused before anything is built."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path

import pytest

from tests.facts import facts, says
from tests.integration.configs import compose
from verl_ext.errors import ConfigurationError
from verl_ext.integration.config.checks import check_run

HADW = "algorithm.adv_estimator=hadw"
ALL = ("model", "optim", "extra_state")


def written(home: Path, ranks: int, *, step: int = 4, part: str = "actor", kinds: tuple[str, ...] = ALL) -> Path:
    """A checkpoint as verl writes it, as far as its names go, made the current one."""
    folder = home / f"global_step_{step}"
    (folder / part).mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        for rank in range(ranks):
            (folder / part / f"{kind}_world_size_{ranks}_rank_{rank}.pt").touch()
    (home / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


def start(home: Path, per_node: int, *overrides: str, nodes: int = 1, estimator: str = HADW) -> None:
    run = (f"trainer.default_local_dir={home}", f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={per_node}")
    check_run(compose(estimator, *run, *overrides))


def test_the_names_are_those_that_verl_writes_and_reads() -> None:
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    for method in (FSDPCheckpointManager.save_checkpoint, FSDPCheckpointManager.load_checkpoint):
        for kind in ALL:
            assert f"{kind}_world_size_{{self.world_size}}_rank_{{self.rank}}.pt" in inspect.getsource(method)


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (2, 1), (2, 4), (3, 3)])
def test_both_numbers_and_what_to_set_are_said(tmp_path: Path, nodes: int, per_node: int) -> None:
    folder = written(tmp_path, 4)
    with pytest.raises(ConfigurationError) as caught:
        start(tmp_path, per_node, nodes=nodes)
    said = str(caught.value)
    for part in (
        f"{folder}/actor was written with world size 4",
        f"this run has world size {nodes * per_node}",
        f"trainer.nnodes={nodes}",
        f"trainer.n_gpus_per_node={per_node}",
        "trainer.resume_mode=disable",
        "trainer.default_local_dir",
    ):
        assert part in said


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (2, 2), (4, 1)])
def test_the_same_number_may_be_spread_over_other_nodes(tmp_path: Path, nodes: int, per_node: int) -> None:
    written(tmp_path, 4)
    start(tmp_path, per_node, nodes=nodes)


def test_the_checkpoint_is_the_one_that_verl_would_take(tmp_path: Path) -> None:
    old, new = written(tmp_path, 2, step=3), written(tmp_path, 4)
    start(tmp_path, 4)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(ConfigurationError, match=facts("world size 2", "world size 4")):
        start(tmp_path, 4)
    path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={new}")
    start(tmp_path / "elsewhere", 4, *path)
    with pytest.raises(ConfigurationError, match=facts("world size 2", "world size 4")):
        start(tmp_path / "elsewhere", 4, path[0], f"trainer.resume_from_path={old}")
    start(tmp_path, 4, "trainer.resume_mode=disable")


def test_a_relative_folder_is_that_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "runs", 1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=facts("world size 1")):
        start(Path("runs"), 2)


def test_the_critic_is_looked_at_where_there_is_one(tmp_path: Path) -> None:
    written(tmp_path, 2)
    written(tmp_path, 4, part="critic")
    start(tmp_path, 2)
    with pytest.raises(ConfigurationError, match=facts("critic", "world size 4")):
        start(tmp_path, 2, "critic.enable=True")


def test_only_what_the_run_would_load_counts(tmp_path: Path) -> None:
    written(tmp_path, 2, kinds=("model",))
    written(tmp_path, 4, kinds=("optim", "extra_state"))
    with pytest.raises(ConfigurationError, match=facts("world size 4")):
        start(tmp_path, 2)
    start(tmp_path, 2, "actor_rollout_ref.actor.checkpoint.load_contents=[model]")


@pytest.mark.parametrize("tracker", ["", "four", "9", None])
def test_without_a_checkpoint_to_look_at_nothing_is_said(tmp_path: Path, tracker: str | None) -> None:
    written(tmp_path, 4)
    path = tmp_path / "latest_checkpointed_iteration.txt"
    path.unlink() if tracker is None else path.write_text(tracker)
    start(tmp_path, 2)


def test_an_empty_tracker_means_the_highest_whole_checkpoint(tmp_path: Path) -> None:
    for step, ranks in ((9, 2), (10, 4)):
        (written(tmp_path, ranks, step=step) / "data.pt").write_text("x")
    (written(tmp_path, 2, step=11) / "data.pt").touch()  # killed before it was whole
    written(tmp_path, 2, step=12)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("\n")
    start(tmp_path, 4)
    with pytest.raises(ConfigurationError, match=facts("global_step_10", "world size 4")):
        start(tmp_path, 2)


def test_the_critic_of_gae_needs_no_switch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path, 2)
    written(tmp_path, 4, part="critic")
    with caplog.at_level(logging.WARNING, "verl_ext"):
        start(tmp_path, 2, estimator="algorithm.adv_estimator=gae")
    assert says(caplog.text, "critic", "world size 4")


def test_a_checkpoint_of_megatron_s_is_none_of_ours(tmp_path: Path) -> None:
    folder = written(tmp_path, 0)
    (folder / "actor" / "dist_ckpt").mkdir()
    start(tmp_path, 2)


def test_under_an_estimator_of_verl_s_it_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path, 4)
    with caplog.at_level(logging.WARNING, "verl_ext"):
        start(tmp_path, 2, estimator="algorithm.adv_estimator=grpo")
    assert says(caplog.text, "world size 4")
