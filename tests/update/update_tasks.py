"""Updates by verl's own actor in processes of this test, one a rank.

`python -m tests.update.update_tasks RANK RANKS FOLDER TASK CASES` is one rank; `run` starts them all.
"""

import itertools
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from tests import fresh
from tests.update.updates import WIDTHS, Actor, no_tokens, rows
from verl_ext.errors import IntegrationError
from verl_ext.update import SHARE_MARK, SKIP_MARK, split
from verl_ext.update.rule import EXACT
from verl_ext.update.split import entry, row_lengths


def run(task: str, ranks: int, folder: Path, *, cases: int = 1000) -> list[Any]:
    """Return what each rank wrote; a group that hangs is ended, and fails."""
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    logs = [folder / f"log-{rank}.txt" for rank in range(ranks)]
    group = [
        fresh.start(
            *(__name__, str(rank), str(ranks), str(folder), task, str(cases)),
            module=True,
            environment=environment,
            out=log,
            err=log,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for process in group:
            process.join(fresh.TIMEOUT)
        codes = [process.exitcode for process in group]
    finally:
        for process in group:
            process.kill()
    assert codes == [0] * ranks, "\n".join(log.read_text()[-3000:] for log in logs)
    return [torch.load(folder / f"{task}-{rank}.pt", weights_only=False) for rank in range(ranks)]


LOSSES = {
    "token-mean": {"loss_agg_mode": "token-mean"},
    "seq-mean-token-mean": {"loss_agg_mode": "seq-mean-token-mean"},
    "seq-mean-token-sum-norm": {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": WIDTHS[1]},
}
COUNT = 32
"""Rows of a rank."""


def equal(rank: int, ranks: int, folder: Path, cases: int) -> Any:
    """Gradients over a product of losses and batches, by verl's engine and with each setting."""
    actor = Actor(str(folder / "model"), sgd=True)
    product = list(itertools.product(LOSSES, ("vanilla", "gspo"), (True, False), (1, 4), (1, 2)))
    found = {}
    for number in range(0, len(product), max(1, len(product) // cases)):
        name, loss, dynamic, batches, epochs = product[number]
        options = {**LOSSES[name], "policy_loss": {"loss_mode": loss}}
        found[product[number]] = every_way(actor, (rank, ranks, number), options, dynamic, batches, epochs)
    return found


def twenty(rank: int, ranks: int, folder: Path, _cases: int) -> Any:
    """20 updates with AdamW: 4 mini-batches, 5 times."""
    return every_way(Actor(str(folder / "model")), (rank, ranks, 0), {}, True, 4, 5)


WAYS = {"all": (), "control": (), "skip": (SKIP_MARK,), "share": (SHARE_MARK,), "both": (SKIP_MARK, SHARE_MARK)}


def every_way(actor: Actor, place: tuple[int, int, int], options: Any, dynamic: bool, batches: int, epochs: int) -> Any:
    """Train on all rows, on all of them with other sums in verl's own engine, and with each setting."""
    rank, ranks, number = place
    # Rank 0 has few live rows, so that it must fill up.
    live = [(row * 7 + number) % 10 < (2 if rank == 0 and ranks > 1 else 4) for row in range(COUNT)]
    total = COUNT * ranks // batches
    usual = {
        "mini_batch_size": total,
        "global_batch_size": total,
        "epochs": epochs,
        "use_dynamic_bsz": dynamic,
        "micro_batch_size_per_gpu": 4,
        "max_token_len_per_gpu": 128,
    }
    other = {"micro_batch_size_per_gpu": 1, "max_token_len_per_gpu": sum(WIDTHS)}
    results = {}
    for way, marks in WAYS.items():
        if dynamic or SHARE_MARK not in marks:
            # Of 6 rows of a prompt some are in another mini-batch.
            data = rows(COUNT, live, seed=100 * number + rank, nested=number % 2 == 0, group=6)
            actor.attend_by("eager" if way == "control" else "sdpa")
            results[way] = actor.train(data, options, *marks, **{**usual, **(other if way == "control" else {})})
    return results


def losses(rank: int, ranks: int, folder: Path, _cases: int) -> Any:
    """Gradients with each loss that is allowed: only rank 0 has live rows, and no rank a token in its last prompt."""
    correction = "+actor_rollout_ref.actor.policy_loss.rollout_correction={rollout_is:token}"  # for bypass_mode
    actor, found = Actor(str(folder / "model"), correction, sgd=True), {}
    usual = {"mini_batch_size": 12 * ranks, "global_batch_size": 12 * ranks, "epochs": 1, "use_dynamic_bsz": True}
    for loss, way in itertools.product(EXACT, WAYS.keys() - {"control"}):
        data = rows(12, [rank == 0] * 12, seed=rank, nested=True, group=6)
        no_tokens(data, range(6, 12))
        limit = {"max_token_len_per_gpu": 1000 if way == "all" else 128}
        options = {"policy_loss": {"loss_mode": loss}}
        found[loss, way] = actor.train(data, options, *WAYS[way], **usual, **limit)["gradients"]
    return found


def splits(rank: int, ranks: int, _folder: Path, cases: int) -> Any:
    """Random splits: for each, the number of micro-batches, and the rows that ran."""
    import torch.distributed as dist
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.fsdp import transformer_impl

    from verl_ext.update import engine

    engine.install()
    dist.init_process_group("gloo", init_method=os.environ["DIST_INIT_METHOD"], rank=rank, world_size=ranks)
    found = []
    for number in range(min(200, cases)):
        shared, own = (torch.Generator().manual_seed(seed) for seed in (number, 1000 * (rank + 1) + number))
        skip, share, size = (int(torch.randint(2, (1,), generator=shared)) for _ in range(3))
        count = 4 * (2 + size + number % 5)
        chance = (0.0, 1 / count, 0.2, 1.0)[int(torch.randint(4, (1,), generator=own))]
        empty = [row for row in range(count) if row // 4 == number % 7]
        live = (torch.rand(count, generator=own) <= chance).tolist() if chance else [False] * count
        group = 1 + int(torch.randint(9, (1,), generator=own))
        data = rows(count, live, seed=number * ranks + rank, nested=bool(size), group=group)
        no_tokens(data, empty)
        data["number"] = torch.arange(count)
        marks = [name for name, wanted in ((SKIP_MARK, skip or not share), (SHARE_MARK, share)) if wanted]
        limit = (36, 40, 60, 200)[number % 4]
        tu.assign_non_tensor(
            data,
            **{**dict.fromkeys(marks, True), "use_dynamic_bsz": bool(share or number % 3)},
            max_token_len_per_gpu=limit,
            micro_batch_size_per_gpu=1 << number % 3,
        )
        batches, places = transformer_impl.prepare_micro_batches(data=data, dp_group=dist.group.WORLD)
        ran = [batch["number"].tolist() for batch in batches]
        largest = max(row_lengths(batch, share=bool(share)).packed(range(len(batch))) for batch in batches)
        counted = [row not in empty for row in range(count)]
        live = [row and (alive or SKIP_MARK not in marks) for row, alive in zip(counted, live, strict=True)]
        report = {"ran": ran, "places": places, "live": live, "counted": counted}
        fits = largest <= limit or not entry(data, "use_dynamic_bsz")
        found.append({**report, "fits": fits, **entry(data, split.FIGURES)})
    return found


def layouts() -> dict[str, Any]:
    """Models of transformers in miniature, and what is changed in verl's configuration."""
    import transformers as t

    small = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    model = "actor_rollout_ref.model"
    torch.manual_seed(0)
    return {
        "llama": (t.LlamaForCausalLM(t.LlamaConfig(**small, tie_word_embeddings=False)), ()),
        "qwen2": (t.Qwen2ForCausalLM(t.Qwen2Config(**small, tie_word_embeddings=True)), ()),
        "checkpointed": (
            t.Qwen3ForCausalLM(t.Qwen3Config(**small, head_dim=16, tie_word_embeddings=True)),
            (f"{model}.enable_gradient_checkpointing=True",),
        ),
        "lora": (
            t.LlamaForCausalLM(t.LlamaConfig(**small, tie_word_embeddings=True)),
            (f"{model}.lora_rank=4", f"{model}.target_modules=all-linear"),
        ),
        "window": (
            t.Qwen2ForCausalLM(
                t.Qwen2Config(**small, use_sliding_window=True, sliding_window=128, max_window_layers=0)
            ),
            (),
        ),
    }


def written(folder: Path, name: str, model: Any) -> str:
    """Write a model, with the tokenizer of the tiny one, and return its folder."""
    path = folder / name
    shutil.copytree(folder / "model", path, dirs_exist_ok=True)
    model.save_pretrained(path)
    return str(path)


def models(_rank: int, _ranks: int, folder: Path, _cases: int) -> Any:
    """For each layout the gradients of an update and the results of a pass, or the error."""
    found: dict[str, Any] = {}
    usual = {**ONE_UPDATE, "temperature": 0.7}
    for name, (model, overrides) in layouts().items():
        actor = Actor(written(folder, name, model), *overrides, sgd=True)
        found[name] = {}
        for way, marks, limit in (("all", (), 128), ("control", (), 36), ("share", (SHARE_MARK,), 128)):
            actor.attend_by("eager" if way == "control" else "sdpa")
            data = [rows(COUNT, [True] * COUNT, seed=7, nested=True, group=5) for _ in range(2)]
            try:
                trained = actor.train(data[0], {}, *marks, **usual, max_token_len_per_gpu=limit)
                report = actor.infer(data[1], *marks, max_token_len_per_gpu=limit)
            except IntegrationError as error:
                found[name][way] = str(error)
            else:
                found[name][way] = {"gradients": trained["gradients"], **report}
    return found


ONE_UPDATE = {"mini_batch_size": COUNT, "global_batch_size": COUNT, "epochs": 1, "use_dynamic_bsz": True}


def plans(_rank: int, _ranks: int, folder: Path, _cases: int) -> Any:
    """How often an update plans its attention, how many plans its layers see, and how often they are computed.

    The model computes its layers again in the backward pass. Then its configuration in a checkpoint.
    """
    from transformers import AttentionInterface

    from verl_ext.update import pack

    planned: list[Any] = []
    seen: list[Any] = []
    batches: list[Any] = []

    def recorded(function: Any, into: list[Any], what: Any) -> Any:
        def record(*values: Any, **named: Any) -> Any:
            result = function(*values, **named)
            into.append(what(result, named))
            return result

        return record

    model, overrides = layouts()["checkpointed"]
    actor = Actor(written(folder, "plans", model), *overrides)
    data = [rows(COUNT, [True] * COUNT, seed=7, nested=True, group=5) for _ in range(2)]
    actor.timed(data[0], {}, SHARE_MARK, **ONE_UPDATE, max_token_len_per_gpu=128)  # with the test of the first pass
    attend = recorded(pack.attend, seen, lambda _result, named: named["plan"].keys)
    AttentionInterface.register(pack.ATTENTION, attend)
    pack.pack = recorded(pack.pack, planned, lambda result, _named: result)
    split.same_number = recorded(split.same_number, batches, lambda result, _named: len(result))
    actor.timed(data[1], {}, SHARE_MARK, **ONE_UPDATE, max_token_len_per_gpu=128)
    report = {"planned": len(planned), "layers": len(seen), "seen": len({id(keys) for keys in seen})}
    actor.worker.save_checkpoint(str(folder / "checkpoint"))
    config = json.loads((folder / "checkpoint/huggingface/config.json").read_text())
    return {**report, "micro-batches": sum(batches), "config": config}


def wrong(rank: int, ranks: int, folder: Path, _cases: int) -> Any:
    """The error of each rank where the attention of the last one is wrong for one token in a hundred."""
    from verl_ext.update import pack

    actor, right, masks = Actor(str(folder / "model")), pack.scaled_dot_product_attention, itertools.count()

    def attend(query: Any, key: Any, value: Any, *, attn_mask: Any = None, **options: Any) -> Any:
        if attn_mask is not None and rank == ranks - 1 and next(masks) % 8 == 0:  # in one answer of each layer
            attn_mask = attn_mask.clone()
            attn_mask[1, :3] = False  # the second token of the answer does not see the prompt's first three
        return right(query, key, value, attn_mask=attn_mask, **options)

    pack.scaled_dot_product_attention = attend
    data = rows(8, [True] * 8, seed=rank, nested=True, group=8, lengths=([9] * 8, [13] * 8))
    try:
        actor.infer(data, SHARE_MARK, max_token_len_per_gpu=200)
    except IntegrationError as error:
        return str(error)
    return ""


TASKS = {task.__name__: task for task in (equal, twenty, splits, models, wrong, losses, plans)}

if __name__ == "__main__":
    torch.set_num_threads(1)  # the ranks share the cores
    rank, ranks, cases = (int(sys.argv[place]) for place in (1, 2, 5))
    folder, task = Path(sys.argv[3]), sys.argv[4]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="", MASTER_PORT="0")
    os.environ["DIST_INIT_METHOD"] = f"file://{folder}/{task}-{ranks}"
    result = TASKS[task](rank, ranks, folder, cases)
    torch.save(result, folder / f"{task}-{rank}.pt")
