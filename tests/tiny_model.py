"""A character tokenizer and an untrained Qwen2 of about 100 thousand parameters, for runs of the real pipeline."""

from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message['role'] + '\n' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


def make_tokenizer():
    """The quickstart's tokenizer without its words, and with roles in the prompt."""
    from recipes.quickstart import prepare_data  # here: verl's reward workers load this file from other folders

    made = prepare_data.make_tokenizer(words=())
    made.chat_template = CHAT_TEMPLATE
    return made


def make_model(made, *, seed: int = 0):
    """A smaller one than the quickstart's, for that tokenizer."""
    from recipes.quickstart import prepare_data

    smaller = {"num_hidden_layers": 2, "intermediate_size": 160}
    return prepare_data.make_model(made, seed=seed, vocab_size=len(made), initializer_range=0.02, **smaller)


def save(folder: Path):
    """Write the model and its tokenizer to `folder/model`; return the tokenizer."""
    made = make_tokenizer()
    make_model(made).save_pretrained(folder / "model")
    made.save_pretrained(folder / "model")
    return made


def write(folder: Path, *, rows: int = 64) -> Path:
    """Model, tokenizer, and a training and a validation set of short prompts under `folder`."""
    import pandas

    save(folder)
    for name, count in (("train", rows), ("val", 8)):
        pandas.DataFrame(
            [
                {
                    "data_source": "letters",
                    "prompt": [{"role": "user", "content": f"{name} {number}"}],
                    "reward_model": {"style": "rule", "ground_truth": "a"},
                }
                for number in range(count)
            ]
        ).to_parquet(folder / f"{name}.parquet")
    return folder


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of the answer's characters that are the wanted one: dense, and easy to climb."""
    return {"score": solution_str.count(ground_truth) / max(1, len(solution_str)), "length": float(len(solution_str))}
