"""verl's V1 trainer in this process, on a real Ray cluster, without a model.

Real: Ray, TransferQueue, the reward workers, the agent-loop workers and what they do to a response, the replay buffer,
padding and load balance, the trainer's `fit` with its advantages, metrics, loggers and checkpoints. Made up: the
answers (`scripted_responses.Client`), log-probabilities, and the actor's update, which records what it is given.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pandas
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.experimental.reward_loop import RewardLoopManager
from verl.trainer.ppo import v1
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.workers.utils.padding import response_to_nested

from tests import tiny_model
from tests.configs import compose
from tests.end_to_end.run import metrics_of
from tests.integration import scripted_responses

# Answers to each prompt. `worked` is the example of the specification: accuracy [1000 | 1110 | 0000], format
# [1100 | 1011 | 0100], lengths [4231 | 2253 | 3331]; `pair` is its first two groups.
WORKED = {
    "A": ["axxx", "cx", "dxx", "d"],
    "B": ["ax", "bx", "axxxx", "cxx"],
    "C": ["dxx", "cxx", "dxx", "d"],
}
SCENES: dict[str, dict[str, list[str]]] = {
    "worked": WORKED,
    "pair": {name: WORKED[name] for name in "AB"},
    "several": WORKED,
    # Two batches of two groups: accuracy [1000, 1110], then [1000, 1111].
    "history": {
        "1A": ["a", "d", "d", "d"],
        "1B": ["a", "a", "a", "d"],
        "2A": ["a", "d", "d", "d"],
        "2B": ["a", "a", "a", "a"],
    },
    # Sessions that fail leave groups of 4, 2 and 1.
    "uneven": {
        "A": ["axxx", "cx", "dxx", "d"],
        "B": ["ax", "!", "cxxxx", "!"],
        "C": ["cxx", "!", "!", "!"],
    },
    # A group whose score is 1 throughout although both rewards vary, one in which nothing varies, one that varies.
    "filtered": {
        "conflict": ["b", "c", "b", "c"],
        "dead": ["a", "a", "a", "a"],
        "live": ["a", "d", "d", "d"],
    },
    # A prompt all of whose sessions fail.
    "gone": {"A": ["a", "d", "d", "d"], "B": ["!", "!", "!", "!"]},
    # The reward function forgets the accuracy of `o`.
    "other keys": {"A": ["a", "d", "d", "o"], "B": ["a", "a", "d", "d"]},
}


def answers_to(scene: str, *values: Sequence[float]) -> dict[tuple[str, str], float]:
    """A value for each answer to each prompt of a scene."""
    return {
        (prompt, answer): value
        for (prompt, answers), row in zip(SCENES[scene].items(), values, strict=True)
        for answer, value in zip((a for a in answers if a != scripted_responses.FAILING), row, strict=True)
    }


@dataclass
class Update:
    """What the actor's update is given; one entry a row."""

    keys: list[str]
    tags: list[dict[str, Any]]
    prompts: list[str]
    answers: list[str]
    advantages: list[torch.Tensor]

    @property
    def padding(self) -> list[bool]:
        return [bool(tag.get("is_padding", False)) for tag in self.tags]

    def rows(self) -> list[int]:
        """Rows which are no padding, and of each session the last."""
        found = []
        for row, key in enumerate(self.keys):
            session, index = key.rsplit("_", 1)
            later = f"{session}_{int(index) + 1}" in self.keys
            if not later and not self.padding[row]:
                found.append(row)
        return found

    def advantage(self, row: int) -> float:
        """The one number on all tokens of a row."""
        (value,) = set(self.advantages[row].tolist())
        return value

    def by_answer(self) -> dict[tuple[str, str], float]:
        """Advantage by prompt and answer: equal answers to a prompt have equal ones."""
        found: dict[tuple[str, str], float] = {}
        for row in self.rows():
            value = self.advantage(row)
            assert found.setdefault((self.prompts[row], self.answers[row]), value) == value
        return found


class Recording:
    """Over a trainer class of verl: no worker groups, made-up log-probabilities, and an update which takes notes."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.updates: list[Update] = []
        self.replay_buffer.poll_interval = 0.05
        # Two ranks: the batch is dealt out by load, which changes its order.
        self.actor_rollout_wg = mock.Mock(spec=["save_checkpoint", "load_checkpoint"], _dispatch_info={"actor": [0, 1]})

    def prepare(self, before_advantage: Callable[[Any], None] | None) -> None:
        """The rest of verl's `init`, in its order."""
        self.before_advantage = before_advantage
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=())
        self._load_checkpoint()

    def on_step_end(self) -> None:
        """No weights to send."""

    def on_sample_end(self) -> None:
        """No servers to put to sleep."""

    def _get_n_gpus_for_throughput(self) -> int:
        return 1

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return self._put(batch, "old_log_probs", -0.1)

    def _compute_ref_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return self._put(batch, "ref_log_prob", -0.3)

    def _put(self, batch: Any, name: str, log_prob: float) -> Any:
        mask = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        rows = torch.full((len(batch.keys), 64), log_prob)
        fields = TensorDict({name: response_to_nested(rows, mask["response_mask"])}, batch_size=len(batch.keys))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        if name == "old_log_probs" and self.before_advantage is not None:
            self.before_advantage(batch)
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
        answers = [self.tokenizer.decode(row, skip_special_tokens=True) for row in data["responses"].unbind()]
        self.updates.append(
            Update(
                keys=list(batch.keys),
                tags=list(batch.tags),
                prompts=[messages[-1]["content"].split()[-1] for messages in data["raw_prompt"]],
                answers=answers,
                advantages=list(data["advantages"].unbind()),
            )
        )
        return batch


def recording(cls: type[PPOTrainer] = PPOTrainer) -> type[Any]:
    """A concrete trainer class over `cls`, as verl would get it if it were registered."""
    chosen = type(f"Recording{cls.__name__}", (Recording, cls), {})
    with mock.patch.dict(trainer_base.TRAINER_REGISTRY, recording=chosen):
        return v1.get_trainer_cls("recording")


@dataclass
class Result:
    """A run that is over."""

    trainer: Any
    metrics: dict[int, dict[str, float]]

    @property
    def updates(self) -> list[Update]:
        return self.trainer.updates


class Pipeline:
    """The workers, which all runs of a test session share, and the runs."""

    def __init__(self, folder: Path, tiny: Path) -> None:
        self.folder, self.tiny = folder, tiny
        tokenizer = tiny_model.make_tokenizer()
        (folder / "agents.yaml").write_text(
            f"- name: several_outputs\n  _target_: {scripted_responses.__name__}.{scripted_responses.SeveralOutputs.__qualname__}\n"
        )
        answers = {}
        for scene, prompts in SCENES.items():
            rows = []
            for name, texts in prompts.items():
                messages = [{"role": "user", "content": f"{scene} {name}"}]
                prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                answers[tuple(prompt)] = [tokenizer.encode(text) for text in texts]
                rows.append(
                    {
                        "data_source": "digits" if (scene, name) == ("pair", "B") else "letters",
                        "prompt": messages,
                        "reward_model": {"style": "rule", "ground_truth": ""},
                        "agent_name": "several_outputs" if scene == "several" else "single_turn_agent",
                    }
                )
            pandas.DataFrame(rows).to_parquet(folder / f"{scene}.parquet")
        config = self.config("worked")
        tq.init(config.transfer_queue)
        self.rewards = RewardLoopManager(config)
        self.agents = AgentLoopManagerTQ.create(
            config=config,
            llm_client=scripted_responses.Client(answers, failing=tokenizer.encode(scripted_responses.FAILING)),
            teacher_client=None,
            reward_loop_worker_handles=self.rewards.reward_loop_worker_handles,
        )

    def config(self, scene: str, *overrides: str, prompts: int | None = None) -> Any:
        """verl's configuration for a scene; with `prompts` fewer than the scene's, one batch after the other."""
        count = len(SCENES[scene]) if prompts is None else prompts
        return compose(
            f"data.train_files={self.folder}/{scene}.parquet",
            f"data.val_files={self.folder}/{scene}.parquet",
            f"data.train_batch_size={count}",
            "data.max_prompt_length=64",
            "data.max_response_length=12",
            "data.shuffle=False",
            "data.dataloader_num_workers=0",
            f"actor_rollout_ref.model.path={self.tiny}/model",
            "actor_rollout_ref.rollout.name=vllm",  # a name only: no server is started
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.rollout.agent.num_workers=1",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={self.folder}/agents.yaml",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={count}",
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
            f"reward.custom_reward_function.path={scripted_responses.__file__}",
            "reward.num_workers=1",
            "transfer_queue.enable=True",
            "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
            "trainer.logger=[file]",
            "trainer.val_before_train=False",
            "trainer.n_gpus_per_node=1",
            "trainer.total_training_steps=1",
            "trainer.total_epochs=100",
            "trainer.resume_mode=disable",
            f"trainer.default_local_dir={self.folder}/checkpoints",
            *overrides,
        )

    def run(
        self,
        scene: str,
        *overrides: str,
        prompts: int | None = None,
        cls: type[PPOTrainer] = PPOTrainer,
        before_advantage: Callable[[Any], None] | None = None,
    ) -> Result:
        """Train, as far as there is anything to train."""
        self.clear()  # what a run that failed has left
        log = self.folder / "metrics.jsonl"
        with mock.patch.dict(os.environ, VERL_FILE_LOGGER_PATH=str(log)):
            trainer = recording(cls)(self.config(scene, *overrides, prompts=prompts))
            trainer.prepare(before_advantage)
            trainer.fit(self.agents)
        return Result(trainer, metrics_of(log))

    def clear(self) -> None:
        """Empty verl's queue."""
        for partition, keys in (tq.kv_list() or {}).items():
            if keys:
                tq.kv_clear(partition_id=partition, keys=list(keys))

    @contextmanager
    def empty(self) -> Iterator[None]:
        """An empty queue for a block."""
        self.clear()
        yield
        self.clear()

    def close(self) -> None:
        tq.close()
