"""Time the advantage computation: the estimators of verl and verl_ext on the same tensors in one process.

Masks are int64, as in verl, and bool in a second run. Each round calls every estimator once, in a new random order, so
that other load on the machine and cold caches after a slow estimator affect all estimators equally. The tables show
medians in milliseconds.

An estimator of verl_ext is too slow on int64 masks if it takes more than 1 ms longer than verl's grpo_vectorized. If
grpo_vectorized takes 5 ms or more, an estimator is too slow if it is slower at all. The script marks such an estimator
with `!` and exits with status 1. The limit applies from 1024 x 1024. `floor` is the plain torch code at the end of
verl's estimators: one `scores[:, None] * mask` and one `mask.sum(-1)`. `floor + score` adds one
`token_level_rewards.sum(-1)`.

    python scripts/bench/bench_advantage.py                 # every size, both kinds of masks
    python scripts/bench/bench_advantage.py --sizes 1024x1024 16384x1024 --masks int64 --output table.md
    python scripts/bench/bench_advantage.py --sizes 8192x1024 --masks int64 --turns 10    # per-turn rewards
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from verl_ext import per_turn
from verl_ext.registry import ADDED_ESTIMATORS

SIZES = ("1024x1024", "2048x2048", "4096x4096", "6144x6144", "8192x1024", "16384x1024", "32768x1024")
MASKS = {"int64": torch.int64, "bool": torch.bool}
GROUP = 8
OURS = tuple(name for name in ADDED_ESTIMATORS if name != "compose")
OVER_TWO = ("gd2po", "gdpo", "saw")


def algorithm(name: str, turns: int) -> DictConfig:
    """Return the section `algorithm` of a run.

    The estimators of `OVER_TWO` combine two rewards, and the others use the score. With per-turn rewards all estimators
    combine both rewards.
    """
    keys: dict[str, object] = {"rewards": {"keys": ["correctness", "format"]}} if name in OVER_TWO else {}
    if turns and name in OURS:
        keys = {"rewards": {"keys": ["correctness", "format"], "per_turn": ["format"], "accuracy_key": "acc"}}
    section = {"adv_estimator": name, "norm_adv_by_std_in_grpo": True, "use_kl_in_reward": False, **keys}
    if name == "verl gdpo":
        section["gdpo_reward_keys"] = ["correctness", "acc"]
    if name == "saw":
        section["saw"] = {"min_values": [0.0, 0.0]}
    config = {"algorithm": section, "actor_rollout_ref": {"actor": {"loss_agg_mode": "token-mean"}}}
    return OmegaConf.create(config).algorithm


def batch(rows: int, length: int, kind: torch.dtype, turns: int) -> dict[str, object]:
    """Return responses of random length in shuffled groups, scored on the last token in the mask.

    If `turns` is not 0, each response has that many turns. The rows of a group share one uid object, as after verl's
    `DataProto.repeat`.
    """
    draw = np.random.default_rng(0)
    lengths = draw.integers(length // 8, length + 1, rows)
    mask = (torch.arange(length) < torch.from_numpy(lengths)[:, None]).to(kind)
    correctness, form = draw.integers(0, 2, rows).astype(float), draw.integers(0, 2, rows).astype(float)
    for turn in range(1, turns):
        mask[torch.arange(rows), torch.from_numpy(lengths * turn // turns)] = 0
    if turns:
        form = np.array([per_turn(entries) for entries in draw.integers(0, 2, (rows, turns))], dtype=object)
    rewards = torch.zeros(rows, length)
    rewards[torch.arange(rows), torch.from_numpy(lengths) - 1] = torch.from_numpy(correctness).float()
    uids = np.repeat(np.array([f"{group:032x}" for group in range(rows // GROUP)], dtype=object), GROUP)
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": uids[draw.permutation(rows)],
        "non_tensor_batch": {"correctness": correctness, "format": form, "acc": correctness},
    }


def contenders(given: dict[str, object], turns: int) -> dict[str, Callable[[], object]]:
    """Return the functions to time, by name."""
    from verl.trainer.ppo import core_algos

    from verl_ext.advantages.data_proto import read_table
    from verl_ext.advantages.estimator import compute, computing
    from verl_ext.advantages.table import Request
    from verl_ext.registry import build
    from verl_ext.run import Run
    from verl_ext.settings import Settings

    rewards, mask, uids = given["token_level_rewards"], given["response_mask"], given["index"]
    scores = torch.rand(len(mask))
    # verl's gdpo finds the last token of a response from the width of the prompt, so the prompts are empty.
    whole = {"prompts": torch.zeros(len(mask), 0), "attention_mask": mask.long()}
    replaced = core_algos.ADV_ESTIMATOR_REGISTRY["gdpo"]
    their_gdpo = getattr(replaced, "replaced", replaced)

    def call(function: Callable[..., object], name: str, **more: object) -> Callable[[], object]:
        config = algorithm(name, turns)
        return lambda: function(token_level_rewards=rewards, response_mask=mask, index=uids, config=config, **more)

    def floor() -> None:
        scores[:, None] * mask
        mask.sum(-1)

    def floor_with_score() -> None:
        rewards.sum(-1)
        floor()

    components = given["non_tensor_batch"]
    batch = SimpleNamespace(
        batch={"response_mask": mask},
        non_tensor_batch={"uid": uids, **components},
        meta_info={"reward_extra_keys": ()},
    )

    def in_a_trainer(name: str) -> Callable[[], object]:
        """Return an estimator of verl_ext as a trainer calls it: the settings are read once per run."""
        settings = Settings.parse(OmegaConf.to_container(algorithm(name, turns)))
        run = Run(name, settings, build(name, settings))
        function = call(partial(compute, name), name)

        def step() -> object:
            with computing(run, read_table(batch, Request.of(run))):
                return function()

        return step

    return {
        "floor": floor,
        "floor + score": floor_with_score,
        "verl grpo": call(core_algos.compute_grpo_outcome_advantage, "verl grpo"),
        "verl grpo_vectorized": call(core_algos.compute_grpo_vectorized_outcome_advantage, "verl grpo_vectorized"),
        "verl gdpo": call(their_gdpo, "verl gdpo", non_tensor_batch=components, batch=whole),
        **{name: in_a_trainer(name) for name in OURS},
    }


def measure(functions: dict[str, Callable[[], object]], seconds: float, least: int, most: int) -> dict[str, float]:
    """Return the median time of each function in milliseconds. Every round calls each function once."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    order = random.Random(0)
    began = time.perf_counter()
    for done in range(most):
        if done >= least and time.perf_counter() - began > seconds:
            break
        for name, function in order.sample(list(functions.items()), len(functions)):
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def too_slow(times: dict[str, float]) -> list[str]:
    """Return the estimators of verl_ext that are too slow, from times in milliseconds."""
    other = times["verl grpo_vectorized"]
    limit = other + 1.0 if other < 5.0 else other
    return [name for name in OURS if times[name] > limit]


def table(masks: str, options: argparse.Namespace) -> tuple[list[str], bool]:
    """Print a Markdown table line by line. Return its lines, and whether an estimator was too slow."""
    lines: list[str] = []
    failed = False
    for size in options.sizes:
        rows, length = (int(number) for number in size.split("x"))
        functions = contenders(batch(rows, length, MASKS[masks], options.turns), options.turns)
        times = measure(functions, options.seconds, options.least_rounds, options.rounds)
        slow = too_slow(times) if masks == "int64" and not options.turns else []
        failed = failed or bool(slow)
        first = len(lines)
        if not lines:
            lines += [f"| {masks} masks | " + " | ".join(times) + " |", "|---|" + "---|" * len(times)]
        cells = [f"{milliseconds:.2f}{' !' if name in slow else ''}" for name, milliseconds in times.items()]
        lines.append(f"| {rows} x {length} | " + " | ".join(cells) + " |")
        print("\n".join(lines[first:]), flush=True)
    return lines, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", nargs="+", default=SIZES, metavar="ROWSxLENGTH", help="batch sizes and response lengths to time"
    )
    parser.add_argument("--masks", nargs="+", default=list(MASKS), choices=MASKS, help="types of the response mask")
    parser.add_argument(
        "--turns", type=int, default=0, help="number of turns per response, with one per-turn reward (default: none)"
    )
    parser.add_argument(
        "--seconds", type=float, default=25.0, help="time limit per size in seconds (default: %(default)s)"
    )
    parser.add_argument(
        "--least-rounds", type=int, default=21, help="minimum number of rounds per size (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=200, help="maximum number of rounds per size (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    options = parser.parse_args()

    tables, broken = zip(*(table(masks, options) for masks in options.masks), strict=True)
    print(f"Times in milliseconds, torch {torch.__version__}, {torch.get_num_threads()} threads, group size {GROUP}.")
    if options.output is not None:
        options.output.write_text("\n\n".join("\n".join(lines) for lines in tables) + "\n", encoding="utf-8")
    return 1 if any(broken) else 0


if __name__ == "__main__":
    sys.exit(main())
