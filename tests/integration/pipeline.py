"""Run verl's V1 trainer in this process, on a real Ray cluster, without a model.

These parts are real: Ray, TransferQueue, the reward workers, the agent-loop workers, the replay buffer, padding and
load balance. The trainer's `fit` is real, too, with its advantages, metrics, loggers and checkpoints.

These parts are scripted: the responses (`scripted_responses.Client`), the log-probabilities, and the update of the
actor, which records its batch.
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

WORKED_EXAMPLE = {
    "A": ["axxx", "cx", "dxx", "d"],
    "B": ["ax", "bx", "axxxx", "cxx"],
    "C": ["dxx", "cxx", "dxx", "d"],
}
"""The responses to each prompt in the worked example of the specification.

Accuracy [1000 | 1110 | 0000], format [1100 | 1011 | 0100], lengths [4231 | 2253 | 3331].
"""
SCENES: dict[str, dict[str, list[str]]] = {
    "worked": WORKED_EXAMPLE,
    "pair": {name: WORKED_EXAMPLE[name] for name in ("A", "B")},
    "several": WORKED_EXAMPLE,
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
    # `conflict`: the score is always 1 although both rewards vary. `dead`: no reward varies. `live`: the rewards vary.
    "filtered": {
        "conflict": ["b", "c", "b", "c"],
        "dead": ["a", "a", "a", "a"],
        "live": ["a", "d", "d", "d"],
    },
    # All sessions of a prompt fail.
    "gone": {"A": ["a", "d", "d", "d"], "B": ["!", "!", "!", "!"]},
    # The reward function returns no accuracy for `o`.
    "other keys": {"A": ["a", "d", "d", "o"], "B": ["a", "a", "d", "d"]},
}
"""The responses to each prompt of a scene."""


def value_by_response(scene: str, *values_by_prompt: Sequence[float]) -> dict[tuple[str, str], float]:
    """Return a value for each prompt and response of a scene, given one row of values per prompt."""
    values = {}
    for (prompt, responses), row in zip(SCENES[scene].items(), values_by_prompt, strict=True):
        arrived = [response for response in responses if response != scripted_responses.FAILING]
        for response, value in zip(arrived, row, strict=True):
            values[prompt, response] = value
    return values


@dataclass
class Update:
    """The batch of an update of the actor, with one entry per row."""

    keys: list[str]
    tags: list[dict[str, Any]]
    prompts: list[str]
    responses: list[str]
    advantages: list[torch.Tensor]

    @property
    def padding(self) -> list[bool]:
        return [bool(tag.get("is_padding", False)) for tag in self.tags]

    def last_outputs(self) -> list[int]:
        """Return the row of the last output of each session, without padding."""
        rows = []
        for row, key in enumerate(self.keys):
            session, index = key.rsplit("_", 1)
            key_of_next_output = f"{session}_{int(index) + 1}"
            if key_of_next_output not in self.keys and not self.padding[row]:
                rows.append(row)
        return rows

    def advantage(self, row: int) -> float:
        """Return the advantage of a row, which must be the same on all its tokens."""
        (value,) = set(self.advantages[row].tolist())
        return value

    def advantage_by_response(self) -> dict[tuple[str, str], float]:
        """Return the advantage by prompt and response. Equal responses to a prompt must have equal advantages."""
        advantages: dict[tuple[str, str], float] = {}
        for row in self.last_outputs():
            value = self.advantage(row)
            first_value = advantages.setdefault((self.prompts[row], self.responses[row]), value)
            assert first_value == value
        return advantages


class Recording:
    """A mixin for verl's trainer without worker groups. Its log-probabilities are constant, and it records updates."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.updates: list[Update] = []
        self.replay_buffer.poll_interval = 0.05
        # With two ranks, verl distributes the rows by load, which changes their order.
        self.actor_rollout_wg = mock.Mock(spec=["save_checkpoint", "load_checkpoint"], _dispatch_info={"actor": [0, 1]})

    def prepare(self, before_advantage: Callable[[Any], None] | None) -> None:
        """Do the rest of verl's `init`, in its order."""
        self.before_advantage = before_advantage
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=())
        self._load_checkpoint()

    def on_step_end(self) -> None:
        """Send no weights."""

    def on_sample_end(self) -> None:
        """Put no servers to sleep."""

    def _get_n_gpus_for_throughput(self) -> int:
        return 1

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self._write_log_probs(batch, "old_log_probs", -0.1)
        if self.before_advantage is not None:
            self.before_advantage(batch)
        return batch

    def _compute_ref_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self._write_log_probs(batch, "ref_log_prob", -0.3)
        return batch

    def _write_log_probs(self, batch: Any, name: str, log_prob: float) -> None:
        """Write the same log-probability for every response token into the queue."""
        mask = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        padded = torch.full((len(batch.keys), 64), log_prob)
        nested = response_to_nested(padded, mask["response_mask"])
        fields = TensorDict({name: nested}, batch_size=len(batch.keys))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
        prompts = []
        for messages in data["raw_prompt"]:
            last_word = messages[-1]["content"].split()[-1]
            prompts.append(last_word)
        responses = [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in data["responses"].unbind()]
        advantages = list(data["advantages"].unbind())
        self.updates.append(Update(list(batch.keys), list(batch.tags), prompts, responses, advantages))
        return batch


def recording_class(cls: type[PPOTrainer] = PPOTrainer) -> type[Any]:
    """Return a concrete subclass of `cls` that records updates, as verl would choose it if it were registered."""
    recording = type(f"Recording{cls.__name__}", (Recording, cls), {})
    with mock.patch.dict(trainer_base.TRAINER_REGISTRY, recording=recording):
        return v1.get_trainer_cls("recording")


@dataclass
class Result:
    """A run that has ended."""

    trainer: Any
    metrics: dict[int, dict[str, float]]
    """The metrics of each step."""

    @property
    def updates(self) -> list[Update]:
        return self.trainer.updates


class Pipeline:
    """The workers, which all runs of a test session share, and a method that runs the trainer."""

    def __init__(self, folder: Path, tiny: Path) -> None:
        self.folder = folder
        self.tiny = tiny
        tokenizer = tiny_model.make_tokenizer()
        agent_loop = f"{scripted_responses.__name__}.{scripted_responses.SeveralOutputs.__qualname__}"
        (folder / "agents.yaml").write_text(f"- name: several_outputs\n  _target_: {agent_loop}\n")
        script = {}
        for scene in SCENES:
            script.update(self.write_scene(scene, tokenizer))
        config = self.config("worked")
        tq.init(config.transfer_queue)
        self.rewards = RewardLoopManager(config)
        self.agents = AgentLoopManagerTQ.create(
            config=config,
            llm_client=scripted_responses.Client(script, failing=tokenizer.encode(scripted_responses.FAILING)),
            teacher_client=None,
            reward_loop_worker_handles=self.rewards.reward_loop_worker_handles,
        )

    def write_scene(self, scene: str, tokenizer: Any) -> dict[tuple[int, ...], list[list[int]]]:
        """Write the data set of a scene. Return the tokens of the responses by the tokens of the prompt."""
        script = {}
        rows = []
        for name, responses in SCENES[scene].items():
            messages = [{"role": "user", "content": f"{scene} {name}"}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            script[tuple(prompt)] = [tokenizer.encode(text) for text in responses]
            row = {
                "data_source": "digits" if (scene, name) == ("pair", "B") else "letters",
                "prompt": messages,
                "reward_model": {"style": "rule", "ground_truth": ""},
                "agent_name": "several_outputs" if scene == "several" else "single_turn_agent",
            }
            rows.append(row)
        pandas.DataFrame(rows).to_parquet(self.folder / f"{scene}.parquet")
        return script

    def config(self, scene: str, *overrides: str, prompts: int | None = None) -> Any:
        """Return verl's configuration for a scene.

        `prompts` is the number of prompts of a batch, by default all prompts of the scene.
        """
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
            "actor_rollout_ref.rollout.name=vllm",  # only a name, because no server is started
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
        """Run verl's `fit`. `before_advantage` is called with each batch before its advantages are computed."""
        self.clear()  # a run that failed may have left rows
        log = self.folder / "metrics.jsonl"
        with mock.patch.dict(os.environ, VERL_FILE_LOGGER_PATH=str(log)):
            config = self.config(scene, *overrides, prompts=prompts)
            trainer = recording_class(cls)(config)
            trainer.prepare(before_advantage)
            trainer.fit(self.agents)
        return Result(trainer, metrics_of(log))

    def clear(self) -> None:
        """Empty verl's queue."""
        for partition, keys in (tq.kv_list() or {}).items():
            if keys:
                tq.kv_clear(partition_id=partition, keys=list(keys))

    @contextmanager
    def empty_queue(self) -> Iterator[None]:
        """Empty the queue before and after a block."""
        self.clear()
        yield
        self.clear()

    def close(self) -> None:
        tq.close()
