r"""Time the actor's update with and without `algorithm.verl_ext.skip_zero_advantage`: verl's FSDP2 engine on the CPU.

Each batch is trained on whole and on the rows that are kept, in random order. A batch is drawn, in groups of 8 of which
some have no advantage, or has the lengths and the groups of a step that a run stored (`trainer.rollout_data_dir`). The
goal for the ratio of the two times is the share of the tokens that are kept, plus 10 %.

    python scripts/bench/bench_update.py                                # the quickstart's tiny model, two minutes
    python scripts/bench/bench_update.py --model outputs/real/base --tokens 910 \
        --rollouts outputs/real/gsm8k/runs/gdpo-seed-1/rollouts --steps 16 30
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="", MASTER_PORT="0")
os.environ.update(VERL_PLATFORM="cpu", CUDA_VISIBLE_DEVICES="")
sys.path.insert(0, str(Path(__file__).parents[2]))

from recipes.quickstart import prepare_data
from tests.integration.updates import Actor, rows
from verl_ext.integration.skip import SKIP
from verl_ext.tools import picture

GROUP = 8


class Times(NamedTuple):
    """An update of all rows, and one of the rows that are kept."""

    name: str
    live: float
    """Share of the rows that have an advantage."""
    tokens: float
    """Share of the tokens that are kept."""
    everything: float
    """Seconds."""
    kept: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder; the quickstart's model by default")
    parser.add_argument("--tokens", type=int, default=1024, help="of a micro-batch")
    drawn = parser.add_argument_group("drawn batches")
    drawn.add_argument(
        "--shares", type=float, nargs="+", default=[1.0, 0.6, 0.4, 0.2], help="of groups with advantages"
    )
    drawn.add_argument("--rows", type=int, default=256, help="responses of an update, a multiple of 8")
    drawn.add_argument("--widths", type=int, nargs=2, default=[96, 160], help="longest prompt and longest response")
    drawn.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", type=Path, help="draw the ratios into this file (needs the extra [plot])")
    stored = parser.add_argument_group("stored batches")
    stored.add_argument("--rollouts", type=Path, help="the folder that a run wrote, one file a step")
    stored.add_argument("--steps", type=int, nargs=2, default=[1, 10], metavar=("FIRST", "LAST"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DIST_INIT_METHOD"] = f"file://{folder}/group"
        model = options.model
        if model is None:
            model, tokenizer = Path(folder) / "model", prepare_data.make_tokenizer()
            prepare_data.make_model(tokenizer, seed=0).save_pretrained(model)
            tokenizer.save_pretrained(model)
        actor = Actor(str(model))
        times = stored_batches(actor, model, options) if options.rollouts else drawn_batches(actor, options)
    print("| batch | rows live | tokens kept | all rows, s | kept rows, s | ratio | goal |")
    print("|---|---|---|---|---|---|---|")
    for row in times:
        print(
            f"| {row.name} | {row.live:.0%} | {row.tokens:.1%} | {row.everything:.2f} | {row.kept:.2f} "
            f"| {row.kept / row.everything:.3f} | {row.tokens + 0.1:.3f} |"
        )
    everything, kept = (sum(values) for values in zip(*[row[-2:] for row in times], strict=True))
    print(f"all batches: {everything:.1f} s, {kept:.1f} s, ratio {kept / everything:.3f}")
    if options.plot:
        draw(times, options.plot)


def draw(times: list[Times], path: Path) -> None:
    """Draw the ratio of the two times of each batch over the share of its tokens that are kept."""
    figure = picture.new_figure(5.0, 3.8, 1)
    ax = figure.add_subplot()
    ax.plot([0, 1], [0, 1], color="0.6", label="time falls as the tokens do")
    ax.plot([0, 0.9], [0.1, 1], color="0.6", linestyle="--", label="the goal: 10 % above")
    ratios = [row.kept / row.everything for row in times]
    ax.plot([row.tokens for row in times], ratios, "o", color=picture.COLOURS[0], label="a batch")
    picture.dress(ax, "Time of the update without the rows of advantage 0", "time, as a share of that of all rows")
    ax.set_xlabel("tokens kept, as a share of all")
    ax.legend(frameon=False)
    figure.savefig(path, dpi=130)


def drawn_batches(actor: Actor, options: argparse.Namespace) -> list[Times]:
    """Return the medians of some rounds for each share of live groups."""
    groups = options.rows // GROUP

    def measured(share: float, seed: int) -> Times:
        draw = random.Random(seed)
        alive = draw.sample(range(groups), max(1, round(share * groups)))
        live = [row // GROUP in alive for row in range(options.rows)]
        return measure(actor, options, f"{share:.0%}", live, seed, widths=tuple(options.widths))

    measured(1.0, 0)  # warm up
    rounds = [[measured(share, seed + 1) for seed in range(options.rounds)] for share in options.shares]
    return [
        Times(times[0].name, *(statistics.median(values) for values in list(zip(*times, strict=True))[1:]))
        for times in rounds
    ]


def stored_batches(actor: Actor, model: Path, options: argparse.Namespace) -> list[Times]:
    """Return the times for each stored step: its lengths, and its groups whose scores vary; the tokens are drawn."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    times = []
    for step in range(options.steps[0], options.steps[1] + 1):
        lines = (options.rollouts / f"{step}.jsonl").read_text(encoding="utf-8").splitlines()
        samples = [json.loads(line) for line in lines]
        scores: dict[str, set[float]] = {}
        for sample in samples:
            scores.setdefault(sample["input"], set()).add(sample["score"])
        live = [len(scores[sample["input"]]) > 1 for sample in samples]
        # The end of an answer is a token that the file lacks.
        lengths = tuple(
            [
                len(tokenizer(sample[name], add_special_tokens=False)["input_ids"]) + (name == "output")
                for sample in samples
            ]
            for name in ("input", "output")
        )
        if not times:
            measure(actor, options, "warm up", live, step, lengths=lengths)
        times.append(measure(actor, options, f"step {step}", live, step, lengths=lengths))
    return times


def measure(actor: Actor, options: argparse.Namespace, name: str, live: list[bool], seed: int, **sizes: Any) -> Times:
    """Train on one batch, on all its rows and on those that are kept."""
    count = len(live)
    seconds, tokens = {}, 0.0
    for mark in random.Random(seed).sample([None, SKIP], 2):
        seconds[mark], metrics = actor.timed(
            rows(count, live, seed=seed, nested=True, **sizes),
            {},
            mark,
            mini_batch_size=count,
            global_batch_size=count,
            epochs=1,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=options.tokens,
        )
        if mark is not None:
            tokens = metrics["update/tokens_kept"][0]
    return Times(name, sum(live) / count, tokens, seconds[None], seconds[SKIP])


if __name__ == "__main__":
    main()
