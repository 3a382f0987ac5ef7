"""A character tokenizer and an untrained Qwen2 of about 100 thousand parameters, for runs of the real pipeline."""

from __future__ import annotations

import argparse
import string
from pathlib import Path

CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message['role'] + '\n' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


def make_tokenizer():
    """One token a character, and the specials `<pad>`, `<s>`, `</s>` and `<unk>`: a Qwen2 tokenizer without merges.

    transformers reads a Qwen2 model's tokenizer as a byte-level one whatever was saved, so this is one.
    """
    from transformers import Qwen2Tokenizer

    byte_level = {" ": "\u0120", "\n": "\u010a"}
    names = ["<pad>", "<s>", "</s>", "<unk>", *(byte_level.get(character, character) for character in CHARACTERS)]
    tokenizer = Qwen2Tokenizer(
        vocab={name: number for number, name in enumerate(names)},
        merges=[],
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer, *, padded_vocabulary: int = 0, seed: int = 0):
    """A 2-layer Qwen2 with head_dim 32, which vLLM's attention on the CPU can take too."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer) + padded_vocabulary,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def write(folder: Path, *, padded_vocabulary: int = 0, rows: int = 64) -> Path:
    """Model, tokenizer, and a training and a validation set of short prompts under `folder`."""
    import pandas

    tokenizer = make_tokenizer()
    make_model(tokenizer, padded_vocabulary=padded_vocabulary).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
