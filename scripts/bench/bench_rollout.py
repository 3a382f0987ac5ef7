"""Tokens a second of the embedded rollout and of transformers' `generate`, on one model, in one run.

    python scripts/bench/bench_rollout.py --model outputs/real/gsm8k/model

Each round draws new prompts and asks both engines in turn, so that a slow minute of the machine hits both. The
table has the medians of the rounds. Every answer has the full length, so that the engines do the same work.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

PROMPTS = 4
LENGTHS = range(120, 181)
Engine = Callable[[Sequence[Sequence[int]], int, int], None]
"""Continues each prompt `n` times by a number of tokens."""


def embedded(path: str, dtype: torch.dtype) -> Engine:
    """The rollout of `+verl_ext=cpu`."""
    from verl_ext.cpu.generation import Request, Sampling, generate

    model = load(path, dtype)

    def run(prompts: Sequence[Sequence[int]], n: int, tokens: int) -> None:
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        requests = [Request(prompt, sampling, seed) for seed, prompt in enumerate(p for p in prompts for _ in range(n))]
        completions = generate(model, requests, eos=(), abort=threading.Event())
        counted(sum(len(completion.tokens) for completion in completions), len(requests) * tokens)

    return run


def transformers(path: str, dtype: torch.dtype) -> Engine:
    """transformers' `generate` on the left-padded batch."""
    model = load(path, dtype)

    def run(prompts: Sequence[Sequence[int]], n: int, tokens: int) -> None:
        width = max(len(prompt) for prompt in prompts)
        rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts for _ in range(n)]
        masks = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts for _ in range(n)]
        with torch.inference_mode():
            output = model.generate(
                torch.tensor(rows),
                attention_mask=torch.tensor(masks),
                do_sample=True,
                top_k=0,
                max_new_tokens=tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        counted(output[:, width:].numel(), len(rows) * tokens)

    return run


ENGINES = {"embedded": embedded, "transformers": transformers}


def load(path: str, dtype: torch.dtype) -> Any:
    """The model with the trainer's attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()


def counted(found: int, expected: int) -> None:
    """Raise if an engine did less than it was asked to."""
    if found != expected:
        raise RuntimeError(f"{found} tokens came back, {expected} were asked for")


def measure(engines: dict[str, Engine], *, n: int, tokens: int, rounds: int, vocabulary: int) -> dict[str, float]:
    """Median tokens a second of each engine."""
    draw = random.Random(n)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        prompts = [[draw.randrange(vocabulary) for _ in range(draw.choice(LENGTHS))] for _ in range(PROMPTS)]
        for name, run in engines.items():
            start = time.perf_counter()
            run(prompts, n, tokens)
            speeds[name].append(PROMPTS * n * tokens / (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in speeds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model folder")
    parser.add_argument("--n", nargs="+", type=int, default=[1, 8, 16, 48], help="answers a prompt")
    parser.add_argument("--tokens", nargs="+", type=int, default=[48, 256], help="tokens an answer")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of torch")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(
        f"{PROMPTS} prompts of {LENGTHS[0]} to {LENGTHS[-1]} tokens, {torch.get_num_threads()} threads, tokens a second"
    )
    print("| dtype | n | tokens | " + " | ".join(ENGINES) + " | embedded by transformers |")
    print("|---|---|---|" + "---|" * (len(ENGINES) + 1))
    for dtype in options.dtypes:
        engines = {name: make(options.model, getattr(torch, dtype)) for name, make in ENGINES.items()}
        measure(engines, n=1, tokens=2, rounds=1, vocabulary=1000)  # the first call of each is slower
        for tokens in options.tokens:
            for n in options.n:
                found = measure(engines, n=n, tokens=tokens, rounds=options.rounds, vocabulary=1000)
                ratio = found["embedded"] / found["transformers"]
                cells = [*(f"{speed:.0f}" for speed in found.values()), f"{ratio:.2f}"]
                print(f"| {dtype} | {n} | {tokens} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
