"""verl's own actor in processes of this test: its FSDP2 engine on the CPU, one process a rank.

`python -m tests.integration.updates RANK RANKS FOLDER TASK CASES` is one rank; `run` starts them all.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl_ext.cpu import patches
from verl_ext.integration.skip import CHECK, FIGURES, MARK, SKIP

WIDTHS = (12, 24)
"""Widths of prompts and responses."""
VOCABULARY = range(3, 100)


def run(task: str, ranks: int, folder: Path, *, cases: int = 1000, timeout: float) -> list[Any]:
    """Return what each rank wrote; a group that hangs is ended, and fails."""
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    group = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(rank), str(ranks), str(folder), task, str(cases)],
            env=environment,
            stdout=(folder / f"log-{rank}.txt").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]
    try:
        codes = [process.wait(timeout) for process in group]
    finally:
        for process in group:
            process.kill()
    logs = "\n".join((folder / f"log-{rank}.txt").read_text()[-3000:] for rank in range(ranks))
    assert codes == [0] * ranks, logs
    return [torch.load(folder / f"{task}-{rank}.pt", weights_only=False) for rank in range(ranks)]


class Actor:
    """verl's worker for the actor, without Ray."""

    def __init__(self, model: str, *, sgd: bool = False) -> None:
        """`sgd`: not with AdamW, which blows rounding up where a gradient is small."""
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.config import TrainingWorkerConfig
        from verl.workers.engine_workers import TrainingWorker

        from tests.integration.configs import compose

        self.config = compose(
            "+verl_ext=cpu",
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.rollout.max_num_seqs=1",
        ).actor_rollout_ref
        actor = omega_conf_to_dataclass(self.config.actor)
        self.worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=omega_conf_to_dataclass(self.config.model),
                engine_config=actor.engine,
                optimizer_config=actor.optim,
                checkpoint_config=actor.checkpoint,
            )
        )
        self.worker.reset()
        self.engine = self.worker.engine
        if sgd:
            self.engine.optimizer = torch.optim.SGD(self.engine.module.parameters(), lr=1.0)
        self.weights = [parameter.detach().clone() for parameter in self.engine.module.parameters()]

    def train(self, data: Any, loss: dict[str, Any], mark: str | None, **entries: Any) -> dict[str, Any]:
        """Train from the first weights; return the gradient of each mini-batch, the last weights, and the metrics."""
        gradients: list[torch.Tensor] = []
        step = type(self.engine).optimizer_step

        def optimizer_step() -> Any:
            gradients.append(whole(parameter.grad for parameter in self.engine.module.parameters()))
            return step(self.engine)

        self.engine.optimizer_step = optimizer_step
        _, metrics = self.timed(data, loss, mark, **entries)
        weights = whole(parameter.detach() for parameter in self.engine.module.parameters())
        return {"gradients": torch.stack(gradients), "weights": weights, "metrics": metrics}

    def timed(self, data: Any, loss: dict[str, Any], mark: str | None, **entries: Any) -> tuple[float, dict[str, Any]]:
        """Train from the first weights; return the seconds, and the metrics."""
        from verl.utils import tensordict_utils as tu
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.utils.losses import ppo_loss

        for parameter, first in zip(self.engine.module.parameters(), self.weights, strict=True):
            parameter.data.copy_(first)
        self.engine.optimizer.state.clear()
        config = self.config.actor.copy()
        config.merge_with(loss)
        self.worker.set_loss_fn(partial(ppo_loss, config=omega_conf_to_dataclass(config)))
        usual = {"temperature": 1.0, "calculate_entropy": False, "dataloader_kwargs": {"shuffle": True}, "seed": 1}
        tu.assign_non_tensor(data, **{**usual, **entries})
        if mark is not None:
            tu.assign_non_tensor(data, **{MARK: mark})
        begin = time.perf_counter()
        output = self.worker.train_mini_batch(data)
        return time.perf_counter() - begin, dict(tu.get(output, "metrics"))


def whole(parts: Iterable[Any]) -> torch.Tensor:
    """Collect the shards of all ranks."""
    return torch.cat([part.full_tensor().flatten() for part in parts])


def rows(
    count: int,
    live: list[bool],
    *,
    seed: int,
    nested: bool,
    widths: tuple[int, int] = WIDTHS,
    lengths: tuple[list[int], list[int]] | None = None,
) -> Any:
    """A rank's rows as its worker gets them: padded from RayPPOTrainer, nested from the default trainer.

    `lengths` are those of the prompts and of the responses; by default they are drawn.
    """
    from verl.utils import attention_utils
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    patches.padding(attention_utils)  # for a process that is not switched to the CPU
    random = torch.Generator().manual_seed(seed)
    if lengths is None:
        prompts, answers = (torch.randint(width // 3, width + 1, (count,), generator=random) for width in widths)
    else:
        prompts, answers = map(torch.tensor, lengths)
        widths = (max(lengths[0]), max(lengths[1]))
    width = sum(widths)
    place = torch.arange(width)
    attention = (place >= widths[0] - prompts[:, None]) & (place < widths[0] + answers[:, None])
    ids = torch.randint(VOCABULARY.start, VOCABULARY.stop, (count, width), generator=random) * attention
    mask = attention[:, widths[0] :].float()
    advantages = torch.randn(count, generator=random) * torch.tensor(live)
    old = -4.6 + 0.2 * torch.randn(mask.shape, generator=random)
    data = tu.get_tensordict(
        {
            "input_ids": ids,
            "attention_mask": attention.long(),
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "prompts": ids[:, : widths[0]],
            "responses": ids[:, widths[0] :],
            "response_mask": mask,
            "old_log_probs": old * mask,
            "advantages": advantages[:, None] * mask,
        },
        {},
    )
    data = left_right_2_no_padding(data)
    if nested:
        for name in ("responses", "response_mask", "loss_mask", "old_log_probs", "advantages"):
            parts = [row[: int(length)] for row, length in zip(data[name], answers, strict=True)]
            data[name] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        parts = [row[widths[0] - int(length) :] for row, length in zip(data["prompts"], prompts, strict=True)]
        data["prompts"] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        del data["attention_mask"], data["max_response_len"]
    return data


LOSSES = {
    "token-mean": {"loss_agg_mode": "token-mean"},
    "seq-mean-token-mean": {"loss_agg_mode": "seq-mean-token-mean"},
    "seq-mean-token-sum-norm": {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": WIDTHS[1]},
}
COUNT = 32
"""Rows of a rank."""


def equal(rank: int, ranks: int, folder: Path, cases: int) -> Any:
    """The full product: gradients of all rows, of all in other micro-batches, and of those with an advantage."""
    actor = Actor(str(folder / "model"), sgd=True)
    product = list(itertools.product(LOSSES, ("vanilla", "gspo"), (True, False), (1, 4), (1, 2)))
    found = {}
    for number in range(0, len(product), max(1, len(product) // cases)):
        name, loss, dynamic, batches, epochs = product[number]
        options = {**LOSSES[name], "policy_loss": {"loss_mode": loss}}
        found[product[number]] = three(actor, (rank, ranks, number), options, dynamic, batches, epochs)
    return found


def twenty(rank: int, ranks: int, folder: Path, _cases: int) -> Any:
    """20 updates with AdamW: 4 mini-batches, 5 times."""
    return three(Actor(str(folder / "model")), (rank, ranks, 0), {}, True, 4, 5)


def three(actor: Actor, place: tuple[int, int, int], options: Any, dynamic: bool, batches: int, epochs: int) -> Any:
    """Train on all rows, on all of them in other micro-batches, and on those that are kept."""
    rank, ranks, number = place
    # Rank 0 has few live rows, so that it must fill up.
    live = [(row * 7 + number) % 10 < (2 if rank == 0 and ranks > 1 else 4) for row in range(COUNT)]
    total = COUNT * ranks // batches
    shared = {
        "mini_batch_size": total,
        "global_batch_size": total,
        "epochs": epochs,
        "use_dynamic_bsz": dynamic,
        "micro_batch_size_per_gpu": 4,
        "max_token_len_per_gpu": 128,
    }
    other = {**shared, "micro_batch_size_per_gpu": 1, "max_token_len_per_gpu": sum(WIDTHS)}
    results = {}
    for kind, mark, entries in (("all", None, shared), ("control", None, other), ("kept", SKIP, shared)):
        data = rows(COUNT, live, seed=100 * number + rank, nested=number % 2 == 0)
        results[kind] = actor.train(data, options, mark, **entries)
    return results


def shared(_rank: int, _ranks: int, folder: Path, _cases: int) -> Any:
    """Four prompts with 8 answers each, by verl's engine, by it in other micro-batches, and with each prompt once."""
    sys.path.insert(0, "scripts/evidence")
    actor = Actor(str(folder / "model"), sgd=True)
    prompts = [length for length in (5, 12, 8, 9) for _ in range(8)]
    answers = [1 + (row * 7) % 24 for row in range(COUNT)]

    def trained(**entries: Any) -> dict[str, Any]:
        data = rows(COUNT, [row % 3 > 0 for row in range(COUNT)], seed=0, nested=True, lengths=(prompts, answers))
        for name in ("prompts", "input_ids"):
            parts = data[name].unbind()
            for row, length in enumerate(prompts):
                parts[row][:length] = parts[row - row % 8][:length]
        return actor.train(
            data,
            {"entropy_coeff": 0.1},
            None,
            **entries,
            mini_batch_size=COUNT,
            global_batch_size=COUNT,
            epochs=1,
            calculate_entropy=True,
            dataloader_kwargs={"shuffle": False},
        )

    found = {
        "all": trained(use_dynamic_bsz=True, max_token_len_per_gpu=128),
        "control": trained(use_dynamic_bsz=True, max_token_len_per_gpu=64),
    }
    import shared_update  # noqa: F401 - replaces the engine's methods

    # Half of a prompt's answers in a micro-batch, and those of two prompts.
    for size in (4, 16):
        found[f"once-{size}"] = trained(use_dynamic_bsz=False, micro_batch_size_per_gpu=size)
    return found


def first(rank: int, ranks: int, folder: Path, _cases: int) -> Any:
    """The metrics of a first update in which the last rank runs verl without this package."""
    from verl.workers.engine.fsdp import transformer_impl

    if rank == ranks - 1:
        for owner, name in (
            (transformer_impl, "prepare_micro_batches"),
            (transformer_impl.FSDPEngine, "forward_backward_batch"),
        ):
            setattr(owner, name, getattr(owner, name).__wrapped__)
    entries = {"mini_batch_size": 8 * ranks, "global_batch_size": 8 * ranks, "max_token_len_per_gpu": 128, "epochs": 1}
    data = rows(8, [True, *[rank == 0] * 7], seed=rank, nested=True)
    return Actor(str(folder / "model")).timed(data, {}, CHECK, use_dynamic_bsz=True, **entries)[1]


def splits(rank: int, ranks: int, _folder: Path, cases: int) -> Any:
    """Random splits by verl's own function: for each, the number of micro-batches, and the rows that ran."""
    import torch.distributed as dist
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.fsdp import transformer_impl

    dist.init_process_group("gloo", init_method=os.environ["DIST_INIT_METHOD"], rank=rank, world_size=ranks)
    found = []
    for number in range(min(200, cases)):
        shared, own = (torch.Generator().manual_seed(seed) for seed in (number, 1000 * (rank + 1) + number))
        dynamic, size = (int(torch.randint(2, (1,), generator=shared)) for _ in range(2))
        count = 4 * (2 + size + number % 5)
        share = (0.0, 1 / count, 0.2, 1.0)[int(torch.randint(4, (1,), generator=own))]
        live = (torch.rand(count, generator=own) <= share).tolist() if share else [False] * count
        data = rows(count, live, seed=number * ranks + rank, nested=bool(size))
        data["number"] = torch.arange(count)
        limit = (36, 40, 60, 200)[number % 4]
        tu.assign_non_tensor(
            data,
            **{MARK: SKIP, "use_dynamic_bsz": bool(dynamic), "max_token_len_per_gpu": limit},
            micro_batch_size_per_gpu=1 << number % 3,
        )
        batches, _ = transformer_impl.prepare_micro_batches(data=data, dp_group=dist.group.WORLD)
        ran = sorted(int(row) for batch in batches for row in batch["number"])
        found.append({"batches": len(batches), "ran": ran, "live": live, **tu.get_non_tensor_data(data, FIGURES, None)})
        assert all(len(batch) for batch in batches)
    return found


TASKS = {"equal": equal, "twenty": twenty, "shared": shared, "first": first, "splits": splits}

if __name__ == "__main__":
    rank, ranks, cases = (int(sys.argv[place]) for place in (1, 2, 5))
    folder, task = Path(sys.argv[3]), sys.argv[4]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="", MASTER_PORT="0")
    os.environ["DIST_INIT_METHOD"] = f"file://{folder}/{task}-{ranks}"
    result = TASKS[task](rank, ranks, folder, cases)
    torch.save(result, folder / f"{task}-{rank}.pt")
