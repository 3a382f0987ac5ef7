"""Scale a run down for a rehearsal: its models, and its configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_ext.checks.on_cpu import TRAINER_MODE
from verl_ext.conf import PRESET_FOLDER, read_yaml
from verl_ext.errors import ConfigurationError, explaining_errors

SMALL_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    # Mixtures of experts name their sizes differently.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
"""Sizes of the small model, under the names of transformers' configurations."""
MAX_RESPONSES = 4
"""The largest number of responses per prompt in a rehearsal."""
MAX_RESPONSE_LENGTH = 64
"""The largest response length without --responses: a model with random weights hardly ever generates the end token."""


def scale_down_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `config.json` of a model with the same architecture and vocabulary, but with 2 small layers.

    >>> scale_down_model({"hidden_size": 896, "num_attention_heads": 14, "vocab_size": 151936})
    {'hidden_size': 64, 'num_attention_heads': 4, 'vocab_size': 151936}
    """
    small = {name: SMALL_SIZES.get(name, value) for name, value in config.items()}
    small.pop("quantization_config", None)
    layer_types = config.get("layer_types")
    if layer_types:
        small["layer_types"] = [layer_types[0], layer_types[-1]]
    return small


def make_model(config: Any, section: str, folder: Path) -> Any:
    """Write a small model with random weights and the run's tokenizer to `folder`; return the tokenizer.

    `section` is the part of the configuration about the model, for example `critic.model`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from verl_ext.cpu.generation import check_model

    settings = OmegaConf.select(config, section)
    trusted = {"trust_remote_code": bool(settings.get("trust_remote_code"))}
    fix = f"Set {section}.path to a model whose configuration and tokenizer are on this machine or can be downloaded."
    with explaining_errors(f"{section}.path={settings.path}", ConfigurationError, fix=fix):
        model_config = AutoConfig.from_pretrained(settings.get("hf_config_path") or settings.path, **trusted)
        tokenizer = AutoTokenizer.from_pretrained(settings.get("tokenizer_path") or settings.path, **trusted)
        if hasattr(model_config, "vision_config") or hasattr(model_config, "audio_config"):
            raise ConfigurationError(
                f"{section}.path={settings.path} reads images or audio, but rehearse supports only text models. Set "
                f"{section}.path to a text model."
            )
        small_config = type(model_config).from_dict(scale_down_model(model_config.to_dict()))
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small_config, dtype=torch.float32, **trusted)
        check_model(model)
    fix = "Set trainer.default_local_dir to a folder with enough free space."
    with explaining_errors(f"The folder {folder} of trainer.default_local_dir", ConfigurationError, "written", fix):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return tokenizer


def scale_down_run(user_config: Any, folder: Path, responses: Path | None) -> tuple[Any, list[str]]:
    """Return the configuration of the rehearsal, and the settings of the run that the rehearsal leaves out."""
    engine = user_config.actor_rollout_ref.actor.strategy
    if engine not in ("fsdp", "fsdp2"):
        raise ConfigurationError(
            f"rehearse does not support the engine {engine}. Set model_engine=dp and remove the settings of {engine}."
        )
    changes = read_yaml(Path(__file__).with_name("rehearsal.yaml"))
    config = OmegaConf.create(OmegaConf.to_container(user_config))
    left_out = _switch_off(config, changes["left_out"])
    # Before other sections change: the reward may refer to them, for example to the run's response length.
    OmegaConf.resolve(config.reward)
    config = OmegaConf.merge(config, read_yaml(PRESET_FOLDER / "cpu.yaml"), changes["replaced"])
    if OmegaConf.select(config, TRAINER_MODE) == "separate_async":
        config = OmegaConf.merge(config, changes["instead_of_separate_async"])
    config.actor_rollout_ref.model.path = f"{folder}/model"
    config.critic.model.path = f"{folder}/critic"
    rollout = config.actor_rollout_ref.rollout
    rollout.n = min(rollout.n, MAX_RESPONSES)
    if responses is None:
        config.data.max_response_length = min(config.data.max_response_length, MAX_RESPONSE_LENGTH)
    else:
        rollout.engine_kwargs = {"embedded": {"responses": str(responses.resolve())}}
    return config, left_out


def _switch_off(config: Any, values_when_off: Mapping[str, Any]) -> list[str]:
    """Switch settings off in place; return those that were on, as `path=value`."""
    left_out = []
    for path, value_when_off in values_when_off.items():
        value = OmegaConf.select(config, path)
        if value not in (None, value_when_off):
            left_out.append(f"{path}={value}")
            OmegaConf.update(config, path, value_when_off)
    return left_out
