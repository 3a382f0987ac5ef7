"""Time the advantage step: verl's estimators against this package's, on the same tensors, in one process.

The estimators run in turn, round after round in another order, so that what else the machine does, and the caches that
a slow one leaves behind, meet all of them alike; the table shows medians.

The floor is what no estimator can avoid: one `scores[:, None] * mask` and one `mask.sum(-1)`, and one
`token_level_rewards.sum(-1)` where the estimator reads the score. An estimator of ours is marked with `!`, and the
script fails, if it takes more than 1.2 times the floor plus a microsecond a row, is slower than verl's
grpo_vectorized, or not ten times as fast as verl's gdpo.

    python scripts/bench_advantage.py                 # every size: minutes, 12 GB
    python scripts/bench_advantage.py --sizes 1024x1024 8192x1024 --output table.md
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

SIZES = ("1024x1024", "8192x1024", "32768x1024", "4096x4096", "8192x8192")
GROUP = 8
OURS = ("drgrpo", "gdpo", "dgpo", "hadw")
READS_SCORE = {"drgrpo", "dgpo", "hadw"}


def algorithm(name: str) -> DictConfig:
    """A run's `algorithm` section: gdpo over two rewards, the others over the score."""
    keys = {"rewards": {"keys": ["correctness", "format"]}} if name == "gdpo" else {}
    theirs = {"gdpo_reward_keys": ["correctness", "format"]} if name == "verl gdpo" else {}
    section = {"adv_estimator": name, "norm_adv_by_std_in_grpo": True, "use_kl_in_reward": False, **keys, **theirs}
    config = {"algorithm": section, "actor_rollout_ref": {"actor": {"loss_agg_mode": "token-mean"}}}
    return OmegaConf.create(config).algorithm


def batch(rows: int, length: int) -> dict[str, object]:
    """Responses of random length in shuffled groups, scored on the last token that counts."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(length // 8, length + 1, rows)
    mask = (torch.arange(length) < torch.from_numpy(lengths)[:, None]).float()
    correctness, form = draw.integers(0, 2, rows).astype(float), draw.integers(0, 2, rows).astype(float)
    rewards = torch.zeros(rows, length)
    rewards[torch.arange(rows), torch.from_numpy(lengths) - 1] = torch.from_numpy(correctness).float()
    uids = np.array([f"{group:032x}" for group in range(rows // GROUP) for _ in range(GROUP)], dtype=object)
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": uids[draw.permutation(rows)],
        "non_tensor_batch": {"correctness": correctness, "format": form, "acc": correctness},
    }


def contenders(given: dict[str, object]) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    from verl.trainer.ppo import core_algos

    from verl_ext.integration.registry import estimator_function

    rewards, mask, uids = given["token_level_rewards"], given["response_mask"], given["index"]
    scores = torch.rand(len(mask))
    # verl's gdpo finds the response's last token by the prompt's width: prompts of no tokens leave the mask itself.
    whole = {"prompts": torch.zeros(len(mask), 0), "attention_mask": mask.long()}
    replaced = core_algos.ADV_ESTIMATOR_REGISTRY["gdpo"]
    their_gdpo = getattr(replaced, "replaced", replaced)

    def call(function: Callable[..., object], name: str, **more: object) -> Callable[[], object]:
        config = algorithm(name)
        return lambda: function(token_level_rewards=rewards, response_mask=mask, index=uids, config=config, **more)

    def floor() -> None:
        scores[:, None] * mask
        mask.sum(-1)

    def floor_with_score() -> None:
        rewards.sum(-1)
        floor()

    components = given["non_tensor_batch"]
    return {
        "floor": floor,
        "floor + score": floor_with_score,
        "verl grpo": call(core_algos.compute_grpo_outcome_advantage, "verl grpo"),
        "verl grpo_vectorized": call(core_algos.compute_grpo_vectorized_outcome_advantage, "verl grpo_vectorized"),
        "verl gdpo": call(their_gdpo, "verl gdpo", non_tensor_batch=components, batch=whole),
        **{name: call(estimator_function(name), name, non_tensor_batch=components) for name in OURS},
    }


def measure(functions: dict[str, Callable[[], object]], seconds: float, most: int) -> dict[str, float]:
    """Median milliseconds of each, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    order = random.Random(0)
    began = time.perf_counter()
    while len(times["floor"]) < 5 or (time.perf_counter() - began < seconds and len(times["floor"]) < most):
        for name, function in order.sample(list(functions.items()), len(functions)):
            # verl's slow ones need no more than a few rounds.
            if name.startswith("verl") and sum(times[name]) > seconds / 6 and len(times[name]) >= 3:
                continue
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="ROWSxLENGTH")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for each size")
    parser.add_argument("--rounds", type=int, default=200, help="most rounds for each size")
    parser.add_argument("--output", type=Path, help="write the table here as well")
    options = parser.parse_args()

    lines: list[str] = []
    failed = False
    for size in options.sizes:
        rows, length = (int(number) for number in size.split("x"))
        found = measure(contenders(batch(rows, length)), options.seconds, options.rounds)
        if not lines:
            lines += ["| rows x length | " + " | ".join(found) + " |", "|---|" + "---|" * len(found)]
        cells = []
        for name, milliseconds in found.items():
            over = False
            if name in OURS:
                budget = 1.2 * found["floor + score" if name in READS_SCORE else "floor"] + rows * 1e-3
                over = (
                    milliseconds > budget
                    or milliseconds > found["verl grpo_vectorized"]
                    or 10 * milliseconds > found["verl gdpo"]
                )
            failed = failed or over
            cells.append(f"{milliseconds:.2f}{' !' if over else ''}")
        lines.append(f"| {size.replace('x', ' x ')} | " + " | ".join(cells) + " |")
        print("\n".join(lines[-1:] if len(lines) > 3 else lines), flush=True)
    print(f"milliseconds, torch {torch.__version__}, {torch.get_num_threads()} threads, groups of {GROUP}")
    if options.output is not None:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
