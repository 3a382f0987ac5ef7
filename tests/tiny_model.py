"""A character tokenizer and an untrained Qwen2 of about 100 thousand parameters, for runs of the real pipeline."""

from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message['role'] + '\n' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


def make_tokenizer():
    """Return the quickstart's tokenizer without its words, and with roles in the prompt."""
    from recipes.quickstart import prepare_data  # here: verl's reward workers load this file from other folders

    tokenizer = prepare_data.make_tokenizer(words=())
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer, *, seed: int = 0):
    """Return a smaller model than the quickstart's, for this tokenizer."""
    from recipes.quickstart import prepare_data

    sizes = {"num_hidden_layers": 2, "intermediate_size": 160, "vocab_size": len(tokenizer)}
    return prepare_data.make_model(tokenizer, seed=seed, initializer_range=0.02, **sizes)


def save(folder: Path):
    """Write a model and its tokenizer to `folder/model`, and return the tokenizer."""
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return tokenizer


def row_of(prompt: str) -> dict:
    """Return a row of data."""
    return {
        "data_source": "letters",
        "prompt": [{"role": "user", "content": prompt}],
        "reward_model": {"style": "rule", "ground_truth": "a"},
    }


def write(folder: Path, *, rows: int = 64) -> Path:
    """Write a model, a training set and a validation set of short prompts, and return their folder."""
    import pandas

    save(folder)
    for name, count in (("train", rows), ("val", 8)):
        table = pandas.DataFrame([row_of(f"{name} {number}") for number in range(count)])
        table.to_parquet(folder / f"{name}.parquet")
    return folder


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the fraction of characters that are the ground truth. This reward is dense and easy to increase."""
    length = len(solution_str)
    return {"score": solution_str.count(ground_truth) / max(1, length), "length": float(length)}
