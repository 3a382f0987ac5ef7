"""verl's own actor without Ray, its FSDP2 engine on the CPU or on a GPU, and rows for its update."""

import time
from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any

import torch
from transformers import AttentionInterface

from verl_ext.cpu.patches import pad_without_flash_attn
from verl_ext.update.split import row_lengths

GPU = torch.cuda.is_available()
ROWS_IN_TURN = "rows_in_turn"
ON_GPU = (
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.use_torch_compile=False",  # it compiles anew for new sizes
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.rollout.name=vllm",
    f"++actor_rollout_ref.model.override_config.attn_implementation={ROWS_IN_TURN}",
)


@lru_cache(maxsize=1)
def ends_of_rows(position_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """0 and where each row ends, and the longest: a row begins at position 0."""
    begins = (position_ids.flatten() == 0).nonzero().flatten()
    ends = torch.cat([begins, begins.new_tensor([position_ids.numel()])]).int()
    return ends, int(ends.diff().max())


def rows_in_turn(_module, query, key, value, _mask, *, position_ids, scaling, **_) -> Any:
    """What flash-attn computes for verl's rows without padding, by torch's build of it."""
    ends, most = ends_of_rows(position_ids)
    parts = (x[0].transpose(0, 1) for x in (query, key, value))
    out = torch.ops.aten._flash_attention_forward(*parts, ends, ends, most, most, 0.0, True, False, scale=scaling)
    return out[0][None], None


AttentionInterface.register(ROWS_IN_TURN, rows_in_turn)

WIDTHS = (12, 24)
"""Widths of prompts and responses."""
VOCABULARY = range(3, 100)


def configuration(model: str, *overrides: str, gpu: bool = GPU) -> Any:
    """The actor's."""
    from tests.configs import compose

    return compose(
        *(ON_GPU if gpu else ("+verl_ext=cpu",)),
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.max_num_seqs=1",
        *overrides,
    ).actor_rollout_ref


class Actor:
    """verl's worker for the actor, without Ray."""

    def __init__(self, model: str, *overrides: str, sgd: bool = False) -> None:
        """`sgd`: not with AdamW, which blows rounding up where a gradient is small."""
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.config import TrainingWorkerConfig
        from verl.workers.engine_workers import TrainingWorker

        from verl_ext.update import engine

        self.config = configuration(model, *overrides)
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
        engine.install()
        self.engine = self.worker.engine
        if sgd:
            self.engine.optimizer = torch.optim.SGD(self.engine.module.parameters(), lr=1.0)
        self.weights = [parameter.detach().clone() for parameter in self.engine.module.parameters()]

    def attend_by(self, name: str) -> None:
        """Choose the model's function of attention: another one sums in another order, as packing does."""
        self.engine.module.config._attn_implementation = name

    def pad(self, padded: bool) -> None:
        """Choose whether verl's own passes are padded."""
        object.__setattr__(self.worker.model_config, "use_remove_padding", not padded)

    def train(self, data: Any, loss: dict[str, Any], *marks: str, **entries: Any) -> dict[str, Any]:
        """Train from the first weights; return the gradient of each mini-batch, the last weights, and the metrics."""
        gradients: list[torch.Tensor] = []
        step = type(self.engine).optimizer_step

        def optimizer_step() -> Any:
            grads = (parameter.grad for parameter in self.engine.module.parameters())
            gradients.append(whole(grad for grad in grads if grad is not None))
            return step(self.engine)

        self.engine.optimizer_step = optimizer_step
        _, metrics = self.timed(data, loss, *marks, **entries)
        weights = whole(parameter.detach() for parameter in self.engine.module.parameters())
        return {"gradients": torch.stack(gradients), "weights": weights, "metrics": metrics}

    def timed(self, data: Any, loss: dict[str, Any], *marks: str, **entries: Any) -> tuple[float, dict[str, Any]]:
        """Train from the first weights; return the seconds, without a GPU those of the CPU, and the metrics."""
        from verl.utils import tensordict_utils as tu
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.utils.losses import ppo_loss

        for parameter, first in zip(self.engine.module.parameters(), self.weights, strict=True):
            parameter.data.copy_(first)
        self.engine.optimizer.state.clear()
        config = self.config.actor.copy()
        config.merge_with(loss)
        self.worker.set_loss_fn(partial(ppo_loss, config=omega_conf_to_dataclass(config)))
        usual = {"temperature": 1.0, "calculate_entropy": False, "dataloader_kwargs": {"shuffle": False}, "seed": 1}
        tu.assign_non_tensor(data, **{**usual, **entries, **dict.fromkeys(marks, True)})
        begin = clock()
        output = self.worker.train_mini_batch(data)
        return clock() - begin, dict(tu.get(output, "metrics"))

    def infer(self, data: Any, *marks: str, **entries: Any) -> dict[str, list[torch.Tensor]]:
        """Return the log-probabilities and the entropy of each row's answer."""
        from verl.utils import tensordict_utils as tu

        usual = {"temperature": 0.7, "calculate_entropy": True, "compute_loss": False, "use_dynamic_bsz": True}
        tu.assign_non_tensor(data, **{**usual, **entries, **dict.fromkeys(marks, True)})
        output, sizes = self.worker.infer_batch(data), row_lengths(data, share=False).answer
        names = ("log_probs", "entropy")
        return {name: [row[-n - 1 : -1] for row, n in zip(output[name].unbind(), sizes, strict=True)] for name in names}


def clock() -> float:
    """Seconds; without a GPU those of this process, because others run beside it."""
    if not GPU:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def whole(parts: Iterable[Any]) -> torch.Tensor:
    """Collect the shards of all ranks."""
    return torch.cat([part.full_tensor().flatten().cpu() for part in parts])


def rows(count, live, *, seed, nested, widths=WIDTHS, lengths=None, group=1) -> Any:
    """A rank's rows as its worker gets them: padded from RayPPOTrainer, nested from the default trainer.

    `lengths` are those of the prompts and of the responses; by default they are drawn. Each `group` rows in turn share
    a prompt.
    """
    from verl.utils import attention_utils
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    pad_without_flash_attn(attention_utils)  # for a process that is not switched to the CPU
    random = torch.Generator().manual_seed(seed)
    if lengths is None:
        prompts, answers = (torch.randint(width // 3, width + 1, (count,), generator=random) for width in widths)
    else:
        prompts, answers = map(torch.tensor, lengths)
        widths = (max(lengths[0]), max(lengths[1]))
    prompt = torch.arange(count) // group * group
    prompts = prompts[prompt]
    width = sum(widths)
    place = torch.arange(width)
    attention = (place >= widths[0] - prompts[:, None]) & (place < widths[0] + answers[:, None])
    ids = torch.randint(VOCABULARY.start, VOCABULARY.stop, (count, width), generator=random) * attention
    ids[:, : widths[0]] = ids[prompt, : widths[0]]
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


def no_tokens(data: Any, rows: Iterable[int]) -> None:
    """Take all tokens of some rows out of the loss, as padding has none; verl's gae leaves their advantages."""
    for row, mask in enumerate(data["response_mask"].unbind()):
        mask.mul_(row not in rows)
