"""verl's two trainers without workers, and how a case runs through them."""

import functools
import json
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import numpy as np
import pyarrow.parquet
import torch
import transfer_queue
from omegaconf import OmegaConf, open_dict
from verl import DataProto
from verl.trainer.ppo import ray_trainer, v1
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from same_as.cases import WIDTH, Case, Rows
from same_as.spelling import Spelling
from same_as.store import Store, in_this_process

PARTITION = "train"
NAME = "same_as"
"""The name under which the default trainer without workers is registered."""


class Workers:
    """In place of the group of actors, for checkpoints."""

    world_size = 1

    def save_checkpoint(self, *_args: Any, **_kwargs: Any) -> None: ...

    def load_checkpoint(self, *_args: Any, **_kwargs: Any) -> None: ...


class Dataloader:
    """In place of the training data, for checkpoints."""

    def __len__(self) -> int:
        return 1000

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _state: Any) -> None: ...


@v1.register_trainer(NAME)
class DefaultWithoutWorkers(PPOTrainer):
    """verl's default trainer with what its advantage step and its checkpoints read."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.global_steps = 1
        self.actor_rollout_wg, self.train_dataloader = Workers(), Dataloader()

    def on_step_end(self) -> None: ...

    def on_sample_end(self) -> None: ...


class WithoutWorkers:
    """Over `RayPPOTrainer` or a subclass: no data, no workers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, None, {Role.ActorRollout: None}, None)
        self.prepare()

    def prepare(self) -> None:
        self.global_steps = 1
        self.use_critic = False
        self.actor_rollout_wg, self.train_dataloader = Workers(), Dataloader()

    def _create_dataloader(self, *_args: Any, **_kwargs: Any) -> None: ...

    def _init_dump_executor(self) -> None: ...

    def advantages(self, data: DataProto) -> DataProto:
        """Do what verl's `fit` does before the update of the actor."""
        algorithm = self.config.algorithm
        if algorithm.use_kl_in_reward:
            data, self.kl_metrics = ray_trainer.apply_kl_penalty(
                data, kl_ctrl=self.kl_ctrl_in_reward, kl_penalty=algorithm.kl_penalty
            )
        else:
            self.kl_metrics = {}
            data.batch["token_level_rewards"] = data.batch["token_level_scores"]
        return ray_trainer.compute_advantage(
            data,
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=self.config.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
            config=algorithm,
        )

    def logged(self, data: DataProto) -> dict[str, Any]:
        return {**self.kl_metrics, **ray_trainer.compute_data_metrics(batch=data, use_critic=False)}

    def step(self, data: DataProto) -> tuple[DataProto, dict[str, Any]]:
        data = self.advantages(data)
        return data, self.logged(data)


class RayWithoutWorkers(WithoutWorkers, ray_trainer.RayPPOTrainer):
    """`RayPPOTrainer`, as the module has it after plugins are loaded, without workers."""


# Configurations.


@functools.cache
def base_config() -> bytes:
    """Compose verl's configuration as its command line does, and pickle it: that is copied ten times as fast."""
    overrides = (
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.n_gpus_per_node=1",
        f"data.max_response_length={WIDTH}",
    )
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides=list(overrides))
    OmegaConf.set_struct(config, False)
    return pickle.dumps(config)


def config_of(method: str, algorithm: Mapping[str, Any], overrides: Mapping[str, Any], folder: Path) -> Any:
    """Return verl's whole configuration for a case, with its checkpoints and dumps in a folder."""
    config = pickle.loads(base_config())
    with open_dict(config):
        config.trainer.default_local_dir = str(folder / "checkpoints")
        config.algorithm = OmegaConf.merge(config.algorithm, _with_folder(algorithm, folder), {"adv_estimator": method})
        for path, value in overrides.items():
            OmegaConf.update(config, path, value, force_add=True)
    return config


def _with_folder(value: Any, folder: Path) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_folder(item, folder) for key, item in value.items()}
    return str(folder / "dumps") if value == "DUMPS" else value


# Batches.


def put_rows(store: Store, rows: Rows) -> Any:
    """Put a batch into verl's queue, as its agent loop and its reward manager do; return its names."""
    tags = [{"is_padding": True} if prompt < 0 else {"is_padding": False} for prompt in rows.prompt]
    fields = []
    for row, mask in enumerate(rows.mask):
        score, info = rows.results[rows.trajectory(row)]
        scores = torch.zeros(len(mask))
        scores[-1] = score
        fields.append(
            {
                "uid": rows.uids[row],
                "data_source": rows.source[rows.prompt[row]],
                "response_mask": torch.from_numpy(mask.copy()),
                "responses": torch.ones(len(mask), dtype=torch.int64),
                "rm_scores": scores,
                "extra_fields": {"reward_extra_info": dict(info), "tool_rewards": [1.0]},
                "token_level_scores_process": torch.from_numpy(rows.process[row]).float(),
                "old_log_probs": torch.from_numpy(rows.log_probs[row]).float(),
                "ref_log_prob": torch.zeros(len(mask)),
                "rollout_log_probs": torch.from_numpy(rows.rollout_log_probs[row]).float(),
                **{name: values[rows.trajectory(row)] for name, values in rows.columns.items()},
            }
        )
    store.put(rows.keys, PARTITION, fields, tags)
    return transfer_queue.KVBatchMeta(keys=rows.keys, tags=tags, partition_id=PARTITION)


def data_of(rows: Rows) -> DataProto:
    """Return a batch as `RayPPOTrainer` has it."""
    size = len(rows.prompt)

    def padded(values: list[np.ndarray], kind: Any) -> torch.Tensor:
        field = torch.zeros(size, WIDTH, dtype=kind)
        for row, value in enumerate(values):
            field[row, : len(value)] = torch.from_numpy(np.array(value)).to(kind)
        return field

    scores = []
    for row, mask in enumerate(rows.mask):
        values = np.zeros(len(mask))
        values[-1] = rows.results[rows.trajectory(row)][0]
        scores.append(values)
    real = padded([np.ones(len(mask)) for mask in rows.mask], torch.int64)
    tensors = {
        "response_mask": padded(rows.mask, torch.int64),
        "token_level_scores": padded(scores, torch.float32),
        "token_level_scores_process": padded(rows.process, torch.float32),
        "old_log_probs": padded(rows.log_probs, torch.float32),
        "ref_log_prob": torch.zeros(size, WIDTH),
        "prompts": torch.ones(size, 2, dtype=torch.int64),
        "responses": torch.ones(size, WIDTH, dtype=torch.int64),
        "attention_mask": torch.cat([torch.ones(size, 2, dtype=torch.int64), real], dim=1),
    }
    infos = [rows.results[rows.trajectory(row)][1] for row in range(size)]
    returned = list(dict.fromkeys(name for info in infos for name in info))
    columns: dict[str, list[Any]] = {"uid": rows.uids, "data_source": [rows.source[prompt] for prompt in rows.prompt]}
    for name, values in rows.columns.items():
        columns[name] = [values[rows.trajectory(row)] for row in range(size)]
    for name in returned:
        columns[name] = [info.get(name) for info in infos]
    data = DataProto.from_dict(tensors=tensors, non_tensors={name: column(values) for name, values in columns.items()})
    data.meta_info["reward_extra_keys"] = returned
    return data


def column(values: list[Any]) -> np.ndarray:
    """Return a column as verl makes it: numbers if all are numbers, else objects."""
    numbers = all(isinstance(value, int | float | bool) for value in values)
    return np.array(values) if numbers else np.array([*values, None], dtype=object)[:-1]


# Runs.


class Run:
    """One case in one trainer: its configuration, its folder and the trainer."""

    def __init__(self, case: Case, spelling: Spelling, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.method, self.algorithm = spelling.translate(case.method, case.algorithm)
        self.spelling = spelling
        self.trainer = self.start({})

    def start(self, changed: Mapping[str, Any]) -> Any:
        """Start a trainer; `changed` are sections of `algorithm` of a resumed run."""
        merged = {**self.case.algorithm}
        for section, given in changed.items():
            merged[section] = {**merged.get(section, {}), **given}
        return self.trainer_of(*self.spelling.translate(self.case.method, merged))

    def trainer_of(self, method: str, algorithm: Mapping[str, Any]) -> Any:
        """Return a trainer of the case's kind, with its folder of checkpoints."""
        overrides = dict(self.case.overrides)
        if self.case.trainer == "ray":
            overrides["trainer.use_v1"] = False
            return RayWithoutWorkers(config_of(method, algorithm, overrides, self.folder))
        return v1.get_trainer_cls(NAME)(config_of(method, algorithm, overrides, self.folder))

    def resume(self) -> None:
        """Go on with a new trainer from the last checkpoint."""
        self.trainer = self.start(self.case.after_resume)
        self.trainer._load_checkpoint()

    def overwrite(self, number: int) -> Any:
        """Let a run of verl's `grpo` save over a checkpoint; return what is left of the state in it."""
        other = self.trainer_of("grpo", {})
        other.global_steps = number
        other._save_checkpoint()
        return saved_state(self.folder / "checkpoints" / f"global_step_{number}")

    def step(self, number: int, rows: Rows) -> dict[str, Any]:
        """Compute a batch and return what is compared."""
        self.trainer.global_steps = number
        result = self._ray_step(rows) if self.case.trainer == "ray" else self._default_step(rows)
        if self.case.stateful:
            self.trainer._save_checkpoint()
            result["state"] = saved_state(self.folder / "checkpoints" / f"global_step_{number}")
        return result

    def _ray_step(self, rows: Rows) -> dict[str, Any]:
        data, metrics = self.trainer.step(data_of(rows))
        fields = {name: list(data.batch[name].numpy()) for name in ("advantages", "returns")}
        fields |= token_scores({name: list(data.batch[name]) for name in data.batch.keys()})  # noqa: SIM118 - a TensorDict
        return {**fields, "metrics": metrics}

    def _default_step(self, rows: Rows) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        with in_this_process() as store:
            batch = put_rows(store, rows)
            dropped = None
            if self.case.kind == "filter":
                dropped, batch = self._filtered(rows, batch)
            if len(batch.keys):
                self.trainer._compute_advantage(batch, metrics)
            stored = [store.rows[PARTITION][key] for key in batch.keys]
        fields: dict[str, Any] = {}
        if stored:
            fields = {name: [row[name].numpy() for row in stored] for name in ("advantages", "returns")}
            fields |= token_scores({name: [row[name] for row in stored] for name in stored[0]})
        return {**fields, "metrics": metrics} | ({} if dropped is None else {"dropped": dropped})

    def _filtered(self, rows: Rows, batch: Any) -> tuple[Any, Any]:
        """Let the replay buffer drop groups; return what it dropped, and the batch of the others."""
        uids = sorted({uid for uid in rows.uids if not uid.startswith("pad")})
        tags = [{"is_prompt": True, "status": "finished", "global_steps": 1} for _ in uids]
        transfer_queue.kv_batch_put(keys=uids, partition_id=PARTITION, tags=tags)
        padding = [key for key in rows.keys if key.startswith("pad")]
        transfer_queue.kv_clear(partition_id=PARTITION, keys=padding)
        buffer = self.trainer.replay_buffer
        buffer._sync_metadata_from_transfer_queue()
        found, counts = buffer._dapo_filtered_keys(PARTITION)
        kept = [at for at, uid in enumerate(rows.uids) if uid not in found and not uid.startswith("pad")]
        left = SimpleNamespace(keys=[batch.keys[at] for at in kept], tags=[batch.tags[at] for at in kept])
        meta = transfer_queue.KVBatchMeta(keys=left.keys, tags=left.tags, partition_id=PARTITION)
        return {"uids": sorted(found), "counts": sorted(map(list, counts.items()))}, meta


def token_scores(fields: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return the fields `token_level_scores_<key>` that the trainer may have written."""
    return {
        name: [np.asarray(row) for row in values]
        for name, values in fields.items()
        if name.startswith("token_level_scores_")
    }


def saved_state(folder: Path) -> Any:
    """Read the JSON files of a checkpoint, without the version of the package."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        content.pop("verl_ext", None)
        found[path.name] = content
    return list(found.values())


def read_dumps(folder: Path) -> list[dict[str, Any]]:
    """Read the parquet files of dumps in the order of their names."""
    return [pyarrow.parquet.read_table(path).to_pydict() for path in sorted(folder.rglob("*.parquet"))]


def run_trainer(case: Case, spelling: Spelling, outcome: dict[str, Any]) -> None:
    """Run the batches of a case one after the other; append to `outcome["batches"]`."""
    with tempfile.TemporaryDirectory(prefix="same_as-") as name:
        folder = Path(name)
        run = Run(case, spelling, folder)
        try:
            for number, rows in enumerate(case.batches, start=1):
                outcome["batches"].append(run.step(number, rows))
                if number == case.resume_after:
                    run.resume()
            if case.kind == "resume":
                outcome["batches"][-1]["left by another run"] = run.overwrite(len(case.batches))
        finally:
            outcome["dumps"] = read_dumps(folder / "dumps")
