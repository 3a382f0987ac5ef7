"""Scale a run down for a rehearsal: its models, and its configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_ext.conf import PRESET_FOLDER, read_yaml
from verl_ext.errors import ConfigurationError, explaining_errors

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
SMALL |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4)
SMALL |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts_per_tok": 2}
SMALL |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
"""Sizes of the small model, under the names of transformers' configurations."""


def cut_down(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `config.json` of a model with the same architecture and vocabulary, but with 2 small layers.

    >>> cut_down({"hidden_size": 896, "num_attention_heads": 14, "vocab_size": 151936})
    {'hidden_size': 64, 'num_attention_heads': 4, 'vocab_size': 151936}
    """
    small: dict[str, Any] = {name: size for name, size in SMALL.items() if name in config}
    if kinds := config.get("layer_types"):
        small["layer_types"] = [kinds[0], kinds[-1]]
    return {name: value for name, value in {**config, **small}.items() if name != "quantization_config"}


def make_model(config: Any, place: str, folder: Path) -> Any:
    """Write a small model with random weights and the run's tokenizer to `folder`; return the tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from verl_ext.cpu.generation import check_model

    model = OmegaConf.select(config, place)
    trusted = {"trust_remote_code": bool(model.get("trust_remote_code"))}
    fix = f"Set {place}.path to a model whose configuration and tokenizer are on this machine or can be downloaded."
    with explaining_errors(f"{place}.path={model.path}", ConfigurationError, fix=fix):
        given = AutoConfig.from_pretrained(model.get("hf_config_path") or model.path, **trusted)
        tokenizer = AutoTokenizer.from_pretrained(model.get("tokenizer_path") or model.path, **trusted)
        if hasattr(given, "vision_config") or hasattr(given, "audio_config"):
            raise ConfigurationError(
                f"{place}.path={model.path} reads images or audio, but rehearse supports only text models. Set "
                f"{place}.path to a text model."
            )
        small = type(given).from_dict(cut_down(given.to_dict()))
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(small, dtype=torch.float32, **trusted)
        check_model(made)
    fix = "Set trainer.default_local_dir to a folder with enough free space."
    with explaining_errors(f"The folder {folder} of trainer.default_local_dir", ConfigurationError, "written", fix):
        made.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return tokenizer


def rehearsed(config: Any, folder: Path, responses: Path | None) -> tuple[Any, list[str]]:
    """Return the configuration of the rehearsal, and the settings of the run that it does not cover."""
    engine = config.actor_rollout_ref.actor.strategy
    if engine not in ("fsdp", "fsdp2"):
        raise ConfigurationError(
            f"rehearse does not support the engine {engine}. Set model_engine=dp and remove the settings of {engine}."
        )
    layer = read_yaml(Path(__file__).with_name("rehearsal.yaml"))
    config = OmegaConf.create(OmegaConf.to_container(config))
    left_out = []
    for path, value in layer["left_out"].items():
        if (given := OmegaConf.select(config, path)) not in (None, value):
            left_out.append(f"{path}={given}")
            OmegaConf.update(config, path, value)
    OmegaConf.resolve(config.reward)
    apart = OmegaConf.select(config, "trainer.v1.trainer_mode") == "separate_async"
    presets = [read_yaml(PRESET_FOLDER / f"{name}.yaml") for name in ("cpu", "separate_async")[: 1 + apart]]
    config = OmegaConf.merge(config, *presets, layer["replaced"])
    rollout = config.actor_rollout_ref.rollout
    rollout.n = min(rollout.n, 4)
    config.actor_rollout_ref.model.path, config.critic.model.path = f"{folder}/model", f"{folder}/critic"
    if responses is None:  # a model with random weights hardly ever generates the end token
        config.data.max_response_length = min(config.data.max_response_length, 64)
    else:
        rollout.engine_kwargs = {"embedded": {"responses": str(responses.resolve())}}
    return config, left_out
