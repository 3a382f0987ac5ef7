"""Time the actor's update with and without `algorithm.verl_ext.skip_zero_advantage`: verl's FSDP2 engine on the CPU.

Each round draws new responses, in groups of 8 of which some have no advantage, and trains on all of them and on those
that are kept, in random order. The table has the medians of the rounds. The goal for the ratio of the two times is the
share of the tokens that are kept, plus 10 %.

    python scripts/bench/bench_update.py                                # the quickstart's tiny model, two minutes
    python scripts/bench/bench_update.py --model outputs/real/base --rows 32 --tokens 910 --rounds 2
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="", MASTER_PORT="0")
os.environ.update(VERL_PLATFORM="cpu", CUDA_VISIBLE_DEVICES="")
sys.path.insert(0, str(Path(__file__).parents[2]))

from recipes.quickstart import prepare_data
from tests.integration.updates import Actor, rows
from verl_ext.integration.skip import SKIP

GROUP = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder; the quickstart's model by default")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[1.0, 0.6, 0.4, 0.2], help="of groups with advantages"
    )
    parser.add_argument("--rows", type=int, default=256, help="responses of an update, a multiple of 8")
    parser.add_argument("--widths", type=int, nargs=2, default=[96, 160], help="longest prompt and longest response")
    parser.add_argument("--tokens", type=int, default=1024, help="of a micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DIST_INIT_METHOD"] = f"file://{folder}/group"
        model = options.model
        if model is None:
            model, tokenizer = Path(folder) / "model", prepare_data.make_tokenizer()
            prepare_data.make_model(tokenizer, seed=0).save_pretrained(model)
            tokenizer.save_pretrained(model)
        actor = Actor(str(model))
        measure(actor, options, share=1.0, seed=0)  # warm up
        print("| groups with advantages | tokens kept | all rows, s | kept rows, s | ratio | goal |")
        print("|---|---|---|---|---|---|")
        for share in options.shares:
            rounds = [measure(actor, options, share=share, seed=seed + 1) for seed in range(options.rounds)]
            everything, kept, tokens = (statistics.median(values) for values in zip(*rounds, strict=True))
            ratio = statistics.median(kept / everything for everything, kept, _ in rounds)
            print(f"| {share:.0%} | {tokens:.1%} | {everything:.2f} | {kept:.2f} | {ratio:.3f} | {tokens + 0.1:.3f} |")


def measure(actor: Actor, options: argparse.Namespace, *, share: float, seed: int) -> tuple[float, float, float]:
    """Return the seconds of an update of all rows, those of the rows kept, and the share of tokens kept."""
    groups = options.rows // GROUP
    draw = random.Random(seed)
    alive = draw.sample(range(groups), max(1, round(share * groups)))
    live = [row // GROUP in alive for row in range(options.rows)]
    seconds, tokens = {}, 0.0
    for mark in draw.sample([None, SKIP], 2):
        seconds[mark], metrics = actor.timed(
            rows(options.rows, live, seed=seed, nested=True, widths=tuple(options.widths)),
            {},
            mark,
            mini_batch_size=options.rows,
            global_batch_size=options.rows,
            epochs=1,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=options.tokens,
        )
        if mark is not None:
            tokens = metrics["update/tokens_kept"][0]
    return seconds[None], seconds[SKIP], tokens


if __name__ == "__main__":
    main()
