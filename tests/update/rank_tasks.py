"""Tasks for verl's own actor in processes of their own, one for each rank.

`run_on_ranks` starts them. `python -m tests.update.rank_tasks RANK RANKS FOLDER TASK CASES STRATEGY` is one rank. A
task is a function of this file that returns what the test reads.
"""

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy

from tests import fresh, fsdp1_on_cpu
from tests.update.verl_actor import WIDTHS, Actor, random_rows, remove_from_loss
from verl_ext.errors import IntegrationError
from verl_ext.update import SHARE_MARK, SKIP_MARK, split
from verl_ext.update.rule import EXACT
from verl_ext.update.split import entry, read_lengths

COUNT = 32
"""Rows of a rank."""
MARKS = {
    "verl": (),
    "control": (),
    "skip": (SKIP_MARK,),
    "share": (SHARE_MARK,),
    "both": (SKIP_MARK, SHARE_MARK),
}
"""How an update is computed. `control` is verl's own engine, which sums in another order."""
LOSSES = {
    "token-mean": {"loss_agg_mode": "token-mean"},
    "seq-mean-token-mean": {"loss_agg_mode": "seq-mean-token-mean"},
    "seq-mean-token-sum-norm": {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": WIDTHS[1]},
}
ONE_UPDATE = {"mini_batch_size": COUNT, "global_batch_size": COUNT, "epochs": 1, "use_dynamic_bsz": True}


@dataclass(frozen=True)
class Rank:
    """One process of a task."""

    number: int
    ranks: int
    folder: Path
    cases: int
    """The largest number of cases that a task computes."""
    strategy: str
    """verl's setting `actor.strategy`."""

    @property
    def model(self) -> str:
        return str(self.folder / "model")

    def actor(self, model: str, *overrides: str, sgd: bool = False) -> Actor:
        """Return the actor of this rank."""
        actor = Actor(model, f"actor_rollout_ref.actor.strategy={self.strategy}", *overrides, sgd=sgd)
        module = actor.engine.module
        if self.strategy == "fsdp2":
            assert isinstance(module, FSDPModule)
        else:
            assert isinstance(module, FullyShardedDataParallel)
            is_sharded = module.sharding_strategy is ShardingStrategy.FULL_SHARD
            assert is_sharded == (self.ranks > 1)  # torch does not shard on one rank
        return actor


def run_on_ranks(
    task: Callable[[Rank], Any], ranks: int, folder: Path, *, cases: int = 1000, strategy: str = "fsdp2"
) -> list[Any]:
    """Return the result of each rank. Ranks that do not end in time are killed, and the test fails."""
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    logs = [folder / f"log-{rank}.txt" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        arguments = (__name__, str(rank), str(ranks), str(folder), task.__name__, str(cases), strategy)
        processes.append(fresh.start(*arguments, module=True, environment=environment, out=log, err=log))
    try:
        for process in processes:
            process.join(fresh.TIMEOUT)
        exit_codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert exit_codes == [0] * ranks, "\n".join(log.read_text()[-3000:] for log in logs)
    return [torch.load(folder / f"{task.__name__}-{rank}.pt", weights_only=False) for rank in range(ranks)]


@dataclass(frozen=True)
class UpdateCase:
    """A case of `gradients_of_each_way`."""

    aggregation: str
    loss: str
    dynamic: bool
    mini_batches: int
    epochs: int

    @property
    def options(self) -> dict[str, Any]:
        return {**LOSSES[self.aggregation], "policy_loss": {"loss_mode": self.loss}}


def gradients_of_cases(rank: Rank) -> dict[UpdateCase, Any]:
    """Return the results of an update for a product of losses and batches, by verl's engine and with each setting."""
    actor = rank.actor(rank.model, sgd=True)
    product = itertools.product(LOSSES, ("vanilla", "gspo"), (True, False), (1, 4), (1, 2))
    cases = [UpdateCase(*values) for values in product]
    stride = max(1, len(cases) // rank.cases)
    return {
        cases[number]: gradients_of_each_way(actor, rank, cases[number], number)
        for number in range(0, len(cases), stride)
    }


def twenty_updates(rank: Rank) -> Any:
    """Return the results of 20 updates with AdamW: 4 mini-batches, 5 times."""
    case = UpdateCase("token-mean", "vanilla", dynamic=True, mini_batches=4, epochs=5)
    return gradients_of_each_way(rank.actor(rank.model), rank, case, 0)


def gradients_of_each_way(actor: Actor, rank: Rank, case: UpdateCase, number: int) -> dict[str, Any]:
    """Return the results of training in each way of `MARKS` that supports the case."""
    is_short_of_rows = rank.number == 0 and rank.ranks > 1  # this rank must add rows that would be skipped
    tenths_with_advantage = 2 if is_short_of_rows else 4
    has_advantage = [(row * 7 + number) % 10 < tenths_with_advantage for row in range(COUNT)]
    rows_of_mini_batch = COUNT * rank.ranks // case.mini_batches
    entries = {
        "mini_batch_size": rows_of_mini_batch,
        "global_batch_size": rows_of_mini_batch,
        "epochs": case.epochs,
        "use_dynamic_bsz": case.dynamic,
    }
    results = {}
    for way, marks in MARKS.items():
        if SHARE_MARK in marks and not case.dynamic:
            continue
        # With groups of 6, the rows of some prompts are in two mini-batches.
        nested = number % 2 == 0
        data = random_rows(COUNT, has_advantage, seed=100 * number + rank.number, nested=nested, group=6)
        if way == "control":
            actor.set_attention("eager")
            entries |= {"micro_batch_size_per_gpu": 1, "max_token_len_per_gpu": sum(WIDTHS)}
        else:
            actor.set_attention("sdpa")
            entries |= {"micro_batch_size_per_gpu": 4, "max_token_len_per_gpu": 128}
        results[way] = actor.train(data, case.options, *marks, **entries)
    return results


def gradients_of_losses(rank: Rank) -> dict[tuple[str, str], Any]:
    """Return gradients for each supported loss: only rank 0 has advantages, no rank a token in its last prompt."""
    correction = "+actor_rollout_ref.actor.policy_loss.rollout_correction={rollout_is:token}"  # for bypass_mode
    actor = rank.actor(rank.model, correction, sgd=True)
    rows = 12 * rank.ranks
    entries = {"mini_batch_size": rows, "global_batch_size": rows, "epochs": 1, "use_dynamic_bsz": True}
    gradients = {}
    for loss in EXACT:
        for way in ("verl", "skip", "share", "both"):
            data = random_rows(12, [rank.number == 0] * 12, seed=rank.number, nested=True, group=6)
            remove_from_loss(data, range(6, 12))
            limit = 1000 if way == "verl" else 128
            options = {"policy_loss": {"loss_mode": loss}}
            trained = actor.train(data, options, *MARKS[way], **entries, max_token_len_per_gpu=limit)
            gradients[loss, way] = trained["gradients"]
    return gradients


@dataclass(frozen=True)
class Split:
    """What `wrap_prepare` made of random rows on one rank."""

    micro_batches: list[list[int]]
    """The rows of each micro-batch."""
    places: list[list[int]]
    """The places that verl got for them."""
    has_tokens: list[bool]
    """Whether a row has tokens in the loss."""
    must_run: list[bool]
    """Whether a row has a gradient."""
    within_limit: bool
    metrics: dict[str, float]


def random_splits(rank: Rank) -> list[Split]:
    """Split random rows into micro-batches. All ranks have the same settings, and rows of their own."""
    import torch.distributed as dist

    from verl_ext.update import engine

    engine.install()
    dist.init_process_group("gloo", init_method=os.environ["DIST_INIT_METHOD"], rank=rank.number, world_size=rank.ranks)
    return [random_split(rank, number) for number in range(min(200, rank.cases))]


def random_split(rank: Rank, number: int) -> Split:
    """Return the split of one batch of random rows."""
    import torch.distributed as dist
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.fsdp import transformer_impl

    random_of_all = torch.Generator().manual_seed(number)
    random_of_rank = torch.Generator().manual_seed(1000 * (rank.number + 1) + number)
    wants_skip, share, nested = (bool(torch.randint(2, (1,), generator=random_of_all)) for _ in range(3))
    skip = wants_skip or not share
    dynamic = share or number % 3 != 0
    token_limit = (36, 40, 60, 200)[number % 4]

    count = 4 * (2 + nested + number % 5)
    probability = (0.0, 1 / count, 0.2, 1.0)[int(torch.randint(4, (1,), generator=random_of_rank))]
    has_advantage = [False] * count
    if probability > 0:
        has_advantage = (torch.rand(count, generator=random_of_rank) <= probability).tolist()
    group = 1 + int(torch.randint(9, (1,), generator=random_of_rank))
    seed = number * rank.ranks + rank.number
    data = random_rows(count, has_advantage, seed=seed, nested=nested, group=group)
    has_tokens = [row // 4 != number % 7 for row in range(count)]
    remove_from_loss(data, [row for row in range(count) if not has_tokens[row]])
    data["number"] = torch.arange(count)
    tu.assign_non_tensor(
        data,
        **{SKIP_MARK: skip, SHARE_MARK: share},
        use_dynamic_bsz=dynamic,
        max_token_len_per_gpu=token_limit,
        micro_batch_size_per_gpu=1 << number % 3,
    )

    batches, places = transformer_impl.prepare_micro_batches(data=data, dp_group=dist.group.WORLD)
    tokens_of_batches = []
    for batch in batches:
        lengths = read_lengths(batch, share=share)
        tokens_of_batches.append(lengths.tokens_shared(lengths.rows))
    must_run = [has_tokens[row] and (has_advantage[row] or not skip) for row in range(count)]
    return Split(
        micro_batches=[batch["number"].tolist() for batch in batches],
        places=places,
        has_tokens=has_tokens,
        must_run=must_run,
        within_limit=max(tokens_of_batches) <= token_limit or not dynamic,
        metrics=entry(data, split.METRICS_KEY),
    )


def model_layouts() -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Return small models of transformers, and what they change in verl's configuration."""
    import transformers as t

    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    model = "actor_rollout_ref.model"
    window = {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0}
    torch.manual_seed(0)
    return {
        "llama": (t.LlamaForCausalLM(t.LlamaConfig(**sizes, tie_word_embeddings=False)), ()),
        "qwen2": (t.Qwen2ForCausalLM(t.Qwen2Config(**sizes, tie_word_embeddings=True)), ()),
        "checkpointed": (
            t.Qwen3ForCausalLM(t.Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True)),
            (f"{model}.enable_gradient_checkpointing=True",),
        ),
        "lora": (
            t.LlamaForCausalLM(t.LlamaConfig(**sizes, tie_word_embeddings=True)),
            (f"{model}.lora_rank=4", f"{model}.target_modules=all-linear"),
        ),
        "window": (t.Qwen2ForCausalLM(t.Qwen2Config(**sizes, **window)), ()),
    }


def write_model(folder: Path, name: str, model: Any) -> str:
    """Write a model, with the tokenizer of the tiny one, and return its folder."""
    path = folder / name
    shutil.copytree(folder / "model", path, dirs_exist_ok=True)
    model.save_pretrained(path)
    return str(path)


def results_of_models(rank: Rank) -> dict[str, Any]:
    """Return for each model the gradients of an update and the results of a pass, or the error."""
    results: dict[str, Any] = {}
    for name, (model, overrides) in model_layouts().items():
        actor = rank.actor(write_model(rank.folder, name, model), *overrides, sgd=True)
        results[name] = {}
        for way in ("verl", "control", "share"):
            marks = MARKS[way]
            limit = 36 if way == "control" else 128
            actor.set_attention("eager" if way == "control" else "sdpa")
            data, other_data = (random_rows(COUNT, [True] * COUNT, seed=7, nested=True, group=5) for _ in range(2))
            try:
                trained = actor.train(data, {}, *marks, **ONE_UPDATE, temperature=0.7, max_token_len_per_gpu=limit)
                inferred = actor.infer(other_data, *marks, max_token_len_per_gpu=limit)
            except IntegrationError as error:
                results[name][way] = str(error)
            else:
                results[name][way] = {"gradients": trained["gradients"], **inferred}
    return results


def count_plans(rank: Rank) -> dict[str, int]:
    """Count what an update of two layers with gradient checkpointing computes."""
    from transformers import AttentionInterface
    from verl.workers.engine.fsdp import transformer_impl

    from verl_ext.update import pack

    model, overrides = model_layouts()["checkpointed"]
    actor = rank.actor(write_model(rank.folder, "plans", model), *overrides)
    first, second = (random_rows(COUNT, [True] * COUNT, seed=7, nested=True, group=5) for _ in range(2))
    actor.timed(first, {}, SHARE_MARK, **ONE_UPDATE, max_token_len_per_gpu=128)  # checks the first pass

    keys_seen_by_layers = []
    plans_made = []
    micro_batches = []
    original_attend, original_pack = pack.attend, pack.pack
    original_prepare = transformer_impl.prepare_micro_batches

    def attend(*arguments: Any, plan: Any, **options: Any) -> Any:
        keys_seen_by_layers.append(plan.keys)
        return original_attend(*arguments, plan=plan, **options)

    def record_pack(data: Any) -> Any:
        plans_made.append(original_pack(data))
        return plans_made[-1]

    def prepare(*arguments: Any, **options: Any) -> Any:
        batches, places = original_prepare(*arguments, **options)
        micro_batches.extend(batches)
        return batches, places

    AttentionInterface.register(pack.ATTENTION, attend)
    pack.pack = record_pack
    transformer_impl.prepare_micro_batches = prepare
    actor.timed(second, {}, SHARE_MARK, **ONE_UPDATE, max_token_len_per_gpu=128)
    return {
        "micro_batches": len(micro_batches),
        "plans": len(plans_made),
        "calls_of_layers": len(keys_seen_by_layers),
        "different_plans_seen": len({id(keys) for keys in keys_seen_by_layers}),
    }


def config_of_checkpoint(rank: Rank) -> dict[str, Any]:
    """Return the configuration of the model in a checkpoint that is saved after an update with `share_prompts`."""
    actor = rank.actor(rank.model)
    data = random_rows(COUNT, [True] * COUNT, seed=7, nested=True, group=5)
    actor.timed(data, {}, SHARE_MARK, **ONE_UPDATE, max_token_len_per_gpu=128)
    actor.worker.save_checkpoint(str(rank.folder / "checkpoint"))
    config: dict[str, Any] = json.loads((rank.folder / "checkpoint/huggingface/config.json").read_text())
    return config


def error_of_wrong_attention(rank: Rank) -> str:
    """Return the error of each rank if the attention of the last rank is wrong for one token in a hundred."""
    from verl_ext.update import pack

    actor = rank.actor(rank.model)
    original = pack.scaled_dot_product_attention
    number_of_response = itertools.count()

    def wrong_attention(query: Any, key: Any, value: Any, *, attn_mask: Any = None, **options: Any) -> Any:
        is_response = attn_mask is not None
        if is_response and rank.number == rank.ranks - 1 and next(number_of_response) % 8 == 0:
            attn_mask = attn_mask.clone()
            attn_mask[1, :3] = False  # the second token of the response does not see the prompt's first three
        return original(query, key, value, attn_mask=attn_mask, **options)

    pack.scaled_dot_product_attention = wrong_attention
    data = random_rows(8, [True] * 8, seed=rank.number, nested=True, group=8, lengths=([9] * 8, [13] * 8))
    try:
        actor.infer(data, SHARE_MARK, max_token_len_per_gpu=200)
    except IntegrationError as error:
        return str(error)
    return ""


def main() -> None:
    """Run one rank of a task, and write its result."""
    torch.set_num_threads(1)  # the ranks share the cores
    number, ranks, folder, task, cases, strategy = sys.argv[1:]
    os.environ.update(RANK=number, WORLD_SIZE=ranks, MASTER_ADDR="", MASTER_PORT="0")
    os.environ["DIST_INIT_METHOD"] = f"file://{folder}/{task}-{ranks}"
    if strategy == "fsdp":
        fsdp1_on_cpu.allow()
    result = globals()[task](Rank(int(number), int(ranks), Path(folder), int(cases), strategy))
    torch.save(result, Path(folder) / f"{task}-{number}.pt")


if __name__ == "__main__":
    # Results hold classes of this module under its name, not under `__main__`, so that the test can read them.
    from tests.update import rank_tasks

    rank_tasks.main()
