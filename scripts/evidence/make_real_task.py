"""Prepare a real task for RL without an accelerator: SmolLM2-135M-Instruct, a data set, and an SFT warm start.

    python scripts/evidence/make_real_task.py gsm8k                    # data from the Hugging Face Hub
    python scripts/evidence/make_real_task.py gsm8k --data ~/gsm8k     # data from a folder
    python scripts/evidence/make_real_task.py tools --start scarce     # data from the wheel bfcl-eval

This takes about 15 minutes on two cores. An existing base model, data set, model or set of samples is reused.

Licenses: the model Apache-2.0 (Hugging Face), GSM8K MIT (OpenAI), BFCL Apache-2.0. None of them is part of this
project.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet
from real import data, tools
from real.cold_start import examples, prompt_ids, sample, token_ids, train
from real.model import END, fetch, load, save
from tqdm import tqdm

from verl_ext.files import replacing
from verl_ext.rewards import gsm8k, tool_calling

REWARDS = {"gsm8k": gsm8k.compute_score, "tools": tool_calling.compute_score}
STEPS = {"gsm8k": 60, "tools": 20}
ANSWER_TOKENS = {"gsm8k": 160, "tools": tools.ANSWER_TOKENS}
ANSWERS = {"gsm8k": {1.0: 1, 0.7: 1}, "tools": {1.0: 8, 0.0: 1}}
"""After the warm start: number of responses to each prompt of val.parquet, by temperature. 0 is greedy."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=REWARDS, help="task to prepare")
    parser.add_argument(
        "--folder", type=Path, help="output folder (default: outputs/real/gsm8k or outputs/real/tools-<start>)"
    )
    parser.add_argument("--data", type=Path, help="folder with the data of gsm8k (default: the Hugging Face Hub)")
    parser.add_argument(
        "--start",
        choices=tools.FORMS,
        default="mixed",
        help="response formats in the warm start of tools (default: %(default)s)",
    )
    return parser.parse_args()


def write_json(path: Path, content: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def rows(path: Path) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return read


def prepare(folder: Path, chosen: argparse.Namespace) -> None:
    """Write the data. The prompts and responses of tools are limited in length by the tokenizer of `base`."""
    if chosen.task == "gsm8k":
        print(data.write(folder, chosen.data))
        return
    _, tokenizer = load(folder / "base")

    def lengths(row: Mapping[str, Any]) -> tuple[int, int]:
        answer = token_ids(tokenizer, row["reward_model"]["ground_truth"] + END)
        return len(prompt_ids(tokenizer, row["prompt"])), len(answer)

    print(tools.write(folder, chosen.start, lengths))


def cold_start(folder: Path, task: str) -> None:
    """Fine-tune `base` into `model`, and write the losses to losses.json."""
    model, tokenizer = load(folder / "base")
    learnt = train(model, examples(tokenizer, rows(folder / "cold_start.parquet")), STEPS[task], 1e-4)
    write_json(folder / "losses.json", list(tqdm(learnt, "SFT warm start", STEPS[task])))
    save(model, tokenizer, folder / "model")


def judge(folder: Path, task: str) -> dict[str, Any]:
    """Return the responses to each prompt in order, and their rewards, by temperature."""
    model, tokenizer = load(folder / "model")
    found: dict[str, Any] = {}
    for temperature, number in tqdm(ANSWERS[task].items(), desc="Sampling", unit="temperature"):
        asked = [row for row in rows(folder / "val.parquet") for _ in range(number)]
        prompts = [prompt_ids(tokenizer, row["prompt"]) for row in asked]
        answers = sample(model, tokenizer, prompts, temperature=temperature, max_tokens=ANSWER_TOKENS[task], seed=0)
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        scores = [
            {
                **REWARDS[task](row["data_source"], text, row["reward_model"]["ground_truth"]),
                "ended": answer[-1] == tokenizer.eos_token_id,
                "tokens": len(answer),
            }
            for row, text, answer in zip(asked, texts, answers, strict=True)
        ]
        means = {key: sum(score[key] for score in scores) / len(scores) for key in scores[0]}
        found[str(temperature)] = {"means": means, "answers": texts, "scores": scores}
    return found


def main() -> None:
    chosen = options()
    folder = chosen.folder or Path("outputs/real") / (f"tools-{chosen.start}" if chosen.task == "tools" else "gsm8k")
    folder.mkdir(parents=True, exist_ok=True)
    print(__doc__.strip().splitlines()[-1], flush=True)
    if not (folder / "base").is_dir():
        fetch(folder / "base")
    if not (folder / "prepared.json").is_file():
        prepare(folder, chosen)
    if not (folder / "model").is_dir():
        cold_start(folder, chosen.task)
    if not (folder / "samples.json").is_file():
        write_json(folder / "samples.json", judge(folder, chosen.task))
    for temperature, samples in json.loads((folder / "samples.json").read_text(encoding="utf-8")).items():
        means = ", ".join(f"{key} {value:.3f}" for key, value in samples["means"].items())
        print(f"{folder / 'model'}, {len(samples['answers'])} responses at temperature {temperature}: {means}")


if __name__ == "__main__":
    main()
