r"""Time the actor update with four variants: verl, skip_zero_advantage, share_prompts, and both settings.

verl's FSDP2 engine trains on a GPU if there is one, and otherwise on the CPU. It trains on each batch with all variants
in random order. Times on the CPU are CPU time of the process in seconds. On a GPU the variant `verl` uses torch's build
of flash attention and the log-probabilities of verl_ext. A fifth variant on the GPU, `plain`, is verl without
flash-attn: padded, with a loop over tokens.

A batch is random, in groups of 8 of which some have zero variance, or it has the lengths and the groups of a step that
a run stored (`trainer.rollout_data_dir`). The tokens are random in both cases. The goal for the ratio of a time to
verl's time is the fraction of the tokens that are computed, plus 15 percentage points.

    python scripts/bench/bench_update.py                                # the quickstart's tiny model, two minutes
    python scripts/bench/bench_update.py --model outputs/real/base --tokens 910 \
        --rollouts outputs/real/gsm8k/runs/gdpo-seed-1/rollouts --steps 16 30
    python scripts/bench/bench_update.py --shape qwen2.5-1.5b --tokens 16384 --widths 204 160 --shares 0.5    # on a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="", MASTER_PORT="0")
if not torch.cuda.is_available():
    os.environ.update(VERL_PLATFORM="cpu")
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.update.verl_actor import FLASH_OF_TORCH, GPU, SHAPES, Actor, random_rows, write_random_model
from verl_ext.tools.report.plot import COLORS
from verl_ext.update import SHARE_MARK, SKIP_MARK, engine

GROUP = 8
WAYS = {"verl": (), "skip": (SKIP_MARK,), "share": (SHARE_MARK,), "both": (SKIP_MARK, SHARE_MARK)}
WAYS |= {"plain": ()} if GPU else {}


class Times(NamedTuple):
    """The measurements of the updates on one batch."""

    name: str
    live: float
    """Fraction of the rows with a nonzero advantage."""
    seconds: dict[str, float]
    """Time by variant."""
    tokens: dict[str, float]
    """Fraction of the tokens that are computed, by variant."""
    memory: dict[str, float]
    """Peak memory of the process or of the GPU during the update in GB, by variant."""


def main(arguments: list[str] | None = None, actor: Actor | None = None) -> list[Times]:
    """Print a table and return its rows. Without an `actor`, create one from the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--model", type=Path, help="folder of the model (default: the quickstart's model)")
    models.add_argument("--shape", choices=SHAPES, help="random weights with the shape of this model, for a GPU")
    parser.add_argument(
        "--tokens", type=int, default=1024, help="maximum number of tokens per micro-batch (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds per batch (default: %(default)s)")
    drawn = parser.add_argument_group("random batches")
    drawn.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[1.0, 0.6, 0.4, 0.2],
        help="fractions of groups with nonzero variance (default: %(default)s)",
    )
    drawn.add_argument(
        "--rows", type=int, default=256, help="number of responses per update, a multiple of 8 (default: %(default)s)"
    )
    drawn.add_argument(
        "--widths",
        type=int,
        nargs=2,
        default=[96, 160],
        metavar=("PROMPT", "RESPONSE"),
        help="maximum number of tokens of a prompt and of a response (default: %(default)s)",
    )
    parser.add_argument("--plot", type=Path, help="file for a plot of the ratios (needs the extra [plot])")
    stored = parser.add_argument_group("stored batches")
    stored.add_argument("--rollouts", type=Path, help="trainer.rollout_data_dir of a run, with one file per step")
    stored.add_argument(
        "--steps",
        type=int,
        nargs=2,
        default=[1, 10],
        metavar=("FIRST", "LAST"),
        help="first and last step to read (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DIST_INIT_METHOD"] = f"file://{folder}/group"
        model = options.model
        if model is None:
            model = Path(folder) / "model"
            write_random_model(model, options.shape)
        actor = actor or Actor(str(model))
        # Warm up with a whole micro-batch, so that no variant includes the time of the first memory allocation.
        count = max(1, options.tokens // (GROUP * sum(options.widths))) * GROUP
        measure(actor, options, "warm up", [True] * count, 0, widths=tuple(options.widths))
        times = stored_batches(actor, model, options) if options.rollouts else drawn_batches(actor, options)
    print(f"| batch | nonzero advantages | verl, s | {' | '.join([*WAYS][1:])} | peak GB by variant |")
    print("|---|---|---|" + "---|" * len(WAYS))
    for row in times:
        cells = (f"{row.seconds[way] / row.seconds['verl']:.3f} of {row.tokens[way]:.3f}" for way in [*WAYS][1:])
        peaks = " ".join(f"{row.memory[way]:.2f}" for way in WAYS)
        print(f"| {row.name} | {row.live:.0%} | {row.seconds['verl']:.2f} | {' | '.join(cells)} | {peaks} |")
    total = {way: sum(row.seconds[way] for row in times) for way in WAYS}
    print("All batches:", ", ".join(f"{way} {t:.1f} s, ratio {t / total['verl']:.3f}" for way, t in total.items()))
    if options.plot:
        draw(times, options.plot)
    return times


def draw(times: list[Times], path: Path) -> None:
    """Plot the ratio of the times of each batch against the fraction of its tokens that are computed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 3.8), layout="constrained")
    ax = figure.add_subplot()
    ax.plot([0, 1], [0, 1], color="0.6", label="time proportional to tokens")
    ax.plot([0, 0.85], [0.15, 1], color="0.6", linestyle="--", label="goal: 15 points above")
    for way, color in zip([*WAYS][1:], COLORS, strict=False):
        ratios = [row.seconds[way] / row.seconds["verl"] for row in times]
        ax.plot([row.tokens[way] for row in times], ratios, "o", color=color, label=way)
    ax.set_title("Time of the actor update by computed tokens")
    ax.set(xlabel="fraction of tokens computed", ylabel="time relative to verl")
    ax.legend(frameon=False)
    figure.savefig(path, dpi=130)


def drawn_batches(actor: Actor, options: argparse.Namespace) -> list[Times]:
    """Return the medians over rounds for each fraction of groups with nonzero variance."""
    groups = options.rows // GROUP

    def measured(share: float, seed: int) -> Times:
        draw = random.Random(seed)
        alive = draw.sample(range(groups), max(1, round(share * groups)))
        live = [row // GROUP in alive for row in range(options.rows)]
        return measure(actor, options, f"{share:.0%}", live, seed, widths=tuple(options.widths))

    rounds = [[measured(share, seed + 1) for seed in range(options.rounds)] for share in options.shares]
    return [median(times) for times in rounds]


def median(times: list[Times]) -> Times:
    """Return the medians over rounds."""
    name, live, *columns = zip(*times, strict=True)
    return Times(name[0], live[0], *({way: statistics.median(t[way] for t in c) for way in WAYS} for c in columns))


def stored_batches(actor: Actor, model: Path, options: argparse.Namespace) -> list[Times]:
    """Return the times for each stored step, with its lengths, its groups with nonzero variance, and random tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    times = []
    for step in range(options.steps[0], options.steps[1] + 1):
        lines = (options.rollouts / f"{step}.jsonl").read_text(encoding="utf-8").splitlines()
        samples = sorted(map(json.loads, lines), key=lambda sample: sample["input"])
        scores: dict[str, set[float]] = {}
        for sample in samples:
            scores.setdefault(sample["input"], set()).add(sample["score"])
        live = [len(scores[sample["input"]]) > 1 for sample in samples]
        # The file does not contain the end token of a response.
        lengths = tuple(
            [
                len(tokenizer(sample[name], add_special_tokens=False)["input_ids"]) + (name == "output")
                for sample in samples
            ]
            for name in ("input", "output")
        )
        batch = partial(measure, actor, options, f"step {step}", live, lengths=lengths)
        times.append(median([batch(seed) for seed in range(options.rounds)]))
    return times


def measure(actor: Actor, options: argparse.Namespace, name: str, live: list[bool], seed: int, **sizes: Any) -> Times:
    """Train on one batch with each variant, in random order."""
    count = len(live)
    found = Times(name, sum(live) / count, {}, {}, {})
    for way in random.Random(seed).sample([*WAYS], len(WAYS)):
        if GPU:
            actor.set_attention("sdpa" if way == "plain" else FLASH_OF_TORCH)
            actor.pad(way == "plain")
        with engine.computing(actor.engine, share=False) if GPU and way == "verl" else nullcontext():
            begin_peak()
            found.seconds[way], metrics = actor.timed(
                random_rows(count, live, seed=seed, nested=True, group=GROUP, **sizes),
                {},
                *WAYS[way],
                mini_batch_size=count,
                global_batch_size=count,
                epochs=1,
                use_dynamic_bsz=True,
                max_token_len_per_gpu=options.tokens,
            )
        found.memory[way] = peak()
        kept, saved = (metrics.get(f"actor/{key}", [0.0])[0] for key in ("tokens_kept", "prompt_tokens_saved"))
        found.tokens[way] = (kept or 1.0) * (1 - saved)
    return found


def begin_peak() -> None:
    """Reset the peak memory to the current memory use."""
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> float:
    """Return the peak memory in GB."""
    if GPU:
        return torch.cuda.max_memory_allocated() / 2**30
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 2**20


if __name__ == "__main__":
    main()
