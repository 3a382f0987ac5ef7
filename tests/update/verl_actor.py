"""verl's own actor without Ray (its FSDP engine, on the CPU or on a GPU), and random rows for its update."""

import time
from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface

from recipes.quickstart import prepare_data
from verl_ext.cpu.patches import pad_without_flash_attn
from verl_ext.update.split import read_lengths

GPU = torch.cuda.is_available()
FLASH_OF_TORCH = "flash_of_torch"
"""The name of `attend_row_by_row` among transformers' attention functions."""
ON_GPU = (
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.use_torch_compile=False",  # it compiles anew for new sizes
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.rollout.name=vllm",
    f"++actor_rollout_ref.model.override_config.attn_implementation={FLASH_OF_TORCH}",
)
WIDTHS = (12, 24)
"""The largest numbers of tokens of a prompt and of a response."""
VOCABULARY = range(3, 100)
SHAPES = {
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "qwen2.5-1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}
"""The sizes of published models, for models with random weights."""
OF_EACH_SHAPE = {"vocab_size": 151936, "max_position_embeddings": 4096, "initializer_range": 0.02}


@lru_cache(maxsize=1)
def row_ends(position_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return 0 and where each row ends, and the tokens of the longest row. A row begins at position 0."""
    begins = (position_ids.flatten() == 0).nonzero().flatten()
    ends = torch.cat([begins, begins.new_tensor([position_ids.numel()])]).int()
    return ends, int(ends.diff().max())


def attend_row_by_row(_module, query, key, value, _mask, *, position_ids, scaling, **_) -> Any:
    """Compute what flash-attn computes for verl's rows without padding, with torch's build of it."""
    ends, longest = row_ends(position_ids)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # each [token, head, size]
    out = torch.ops.aten._flash_attention_forward(
        query, key, value, ends, ends, longest, longest, 0.0, True, False, scale=scaling
    )
    return out[0][None], None


AttentionInterface.register(FLASH_OF_TORCH, attend_row_by_row)


def configuration(model: str, *overrides: str, gpu: bool = GPU) -> Any:
    """Return the section `actor_rollout_ref` of verl's configuration."""
    from tests.configs import compose

    platform = ON_GPU if gpu else ("+verl_ext=cpu",)
    return compose(
        *platform,
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.max_num_seqs=1",
        *overrides,
    ).actor_rollout_ref


def write_random_model(folder: Path, shape: str | None = None) -> None:
    """Write a model with random weights of a shape in bf16, or the model of the quickstart, and its tokenizer."""
    tokenizer = prepare_data.make_tokenizer()
    if shape is None:
        model = prepare_data.make_model(tokenizer)
    else:
        with torch.device("cuda" if GPU else "cpu"):
            model = prepare_data.make_model(tokenizer, **SHAPES[shape], **OF_EACH_SHAPE).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Actor:
    """verl's worker for the actor, without Ray."""

    def __init__(self, model: str, *overrides: str, sgd: bool = False) -> None:
        """Load the model. `sgd` replaces AdamW, which enlarges rounding errors of small gradients."""
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
        self.initial_weights = [parameter.detach().clone() for parameter in self.engine.module.parameters()]

    def set_attention(self, name: str) -> None:
        """Choose the model's function of attention: another one sums in another order, as packing does."""
        self.engine.module.config._attn_implementation = name

    def pad(self, padded: bool) -> None:
        """Choose whether verl's own passes are padded."""
        object.__setattr__(self.worker.model_config, "use_remove_padding", not padded)

    def train(self, data: Any, loss: dict[str, Any], *marks: str, **entries: Any) -> dict[str, Any]:
        """Train from the initial weights. Return the gradient of each mini-batch, the last weights, and the metrics."""
        gradients: list[torch.Tensor] = []
        original_step = type(self.engine).optimizer_step

        def recording_step() -> Any:
            of_parameters = [parameter.grad for parameter in self.engine.module.parameters()]
            gradients.append(gather(gradient for gradient in of_parameters if gradient is not None))
            return original_step(self.engine)

        self.engine.optimizer_step = recording_step
        _, metrics = self.timed(data, loss, *marks, **entries)
        weights = gather(parameter.detach() for parameter in self.engine.module.parameters())
        return {"gradients": torch.stack(gradients), "weights": weights, "metrics": metrics}

    def timed(self, data: Any, loss: dict[str, Any], *marks: str, **entries: Any) -> tuple[float, dict[str, Any]]:
        """Train from the initial weights. Return the seconds (without a GPU those of the CPU) and the metrics."""
        from verl.utils import tensordict_utils as tu
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.utils.losses import ppo_loss

        for parameter, initial in zip(self.engine.module.parameters(), self.initial_weights, strict=True):
            parameter.data.copy_(initial)
        self.engine.optimizer.state.clear()
        config = self.config.actor.copy()
        config.merge_with(loss)
        self.worker.set_loss_fn(partial(ppo_loss, config=omega_conf_to_dataclass(config)))
        defaults = {"temperature": 1.0, "calculate_entropy": False, "dataloader_kwargs": {"shuffle": False}, "seed": 1}
        tu.assign_non_tensor(data, **(defaults | entries | dict.fromkeys(marks, True)))
        begin = clock()
        output = self.worker.train_mini_batch(data)
        seconds = clock() - begin
        return seconds, dict(tu.get(output, "metrics"))

    def infer(self, data: Any, *marks: str, **entries: Any) -> dict[str, list[torch.Tensor]]:
        """Return the log-probabilities and the entropies of the response tokens of each row.

        With FSDP1 on two ranks, the root of the model stays unsharded after this pass. The next `train` or `timed`
        would not begin with the initial weights.
        """
        from verl.utils import tensordict_utils as tu

        defaults = {"temperature": 0.7, "calculate_entropy": True, "compute_loss": False, "use_dynamic_bsz": True}
        tu.assign_non_tensor(data, **(defaults | entries | dict.fromkeys(marks, True)))
        output = self.worker.infer_batch(data)
        response_tokens = read_lengths(data, share=False).response_tokens
        results: dict[str, list[torch.Tensor]] = {}
        for name in ("log_probs", "entropy"):
            rows = output[name].unbind()
            # verl keeps a value at the token before the one that it is about.
            results[name] = [row[-count - 1 : -1] for row, count in zip(rows, response_tokens, strict=True)]
        return results


def clock() -> float:
    """Return seconds; without a GPU those of this process, because others run at the same time."""
    if not GPU:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def gather(parameters: Iterable[Any]) -> torch.Tensor:
    """Return the values in one vector: those of all ranks with FSDP2, and those of this rank with FSDP1."""
    tensors = [value.full_tensor() if isinstance(value, DTensor) else value for value in parameters]
    return torch.cat([tensor.flatten().cpu() for tensor in tensors])


def random_rows(count, has_advantage, *, seed, nested, widths=WIDTHS, lengths=None, group=1) -> Any:
    """Return rows of a rank as its worker gets them: nested from the default trainer, padded from RayPPOTrainer.

    `lengths` are the tokens of the prompts and of the responses; by default they are random, at most `widths`. Every
    `group` consecutive rows share a prompt. Rows without advantage have advantage 0 on all tokens.
    """
    from verl.utils import attention_utils
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    pad_without_flash_attn(attention_utils)  # for a process that is not switched to the CPU
    random = torch.Generator().manual_seed(seed)
    if lengths is None:
        prompt_tokens, response_tokens = (
            torch.randint(width // 3, width + 1, (count,), generator=random) for width in widths
        )
    else:
        prompt_tokens, response_tokens = map(torch.tensor, lengths)
        widths = (max(lengths[0]), max(lengths[1]))
    prompt_width, response_width = widths
    first_row_of_prompt = torch.arange(count) // group * group
    prompt_tokens = prompt_tokens[first_row_of_prompt]
    # Prompts are padded on the left, responses on the right.
    column = torch.arange(prompt_width + response_width)
    begins = prompt_width - prompt_tokens[:, None]
    ends = prompt_width + response_tokens[:, None]
    attention = (column >= begins) & (column < ends)
    ids = torch.randint(VOCABULARY.start, VOCABULARY.stop, attention.shape, generator=random) * attention
    ids[:, :prompt_width] = ids[first_row_of_prompt, :prompt_width]
    response_mask = attention[:, prompt_width:].float()
    advantages = torch.randn(count, generator=random) * torch.tensor(has_advantage)
    old_log_probs = -4.6 + 0.2 * torch.randn(response_mask.shape, generator=random)
    data = tu.get_tensordict(
        {
            "input_ids": ids,
            "attention_mask": attention.long(),
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "prompts": ids[:, :prompt_width],
            "responses": ids[:, prompt_width:],
            "response_mask": response_mask,
            "old_log_probs": old_log_probs * response_mask,
            "advantages": advantages[:, None] * response_mask,
        },
        {},
    )
    data = left_right_2_no_padding(data)
    if nested:
        for name in ("responses", "response_mask", "loss_mask", "old_log_probs", "advantages"):
            data[name] = nest([row[:end] for row, end in zip(data[name], response_tokens.tolist(), strict=True)])
        begin_of_prompt = (prompt_width - prompt_tokens).tolist()
        data["prompts"] = nest([row[begin:] for row, begin in zip(data["prompts"], begin_of_prompt, strict=True)])
        del data["attention_mask"], data["max_response_len"]
    return data


def nest(rows: list[torch.Tensor]) -> torch.Tensor:
    """Return rows of different lengths as one nested tensor."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def remove_from_loss(data: Any, rows: Iterable[int]) -> None:
    """Set the response mask of some rows to 0, as of padding. Advantages stay, as those of verl's gae do."""
    for row, mask in enumerate(data["response_mask"].unbind()):
        if row in rows:
            mask.zero_()
