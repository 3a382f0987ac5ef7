"""Rules about the rewards of a run: the scorers of this package, names of components, and the accuracy.

verl's default trainer logs an exception of a reward function and drops the sample: with a wrong argument it would never
fill a batch. A wrong name of a component would end the run after the first rollout.
"""

import json
import pkgutil
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from verl_ext import rewards
from verl_ext.checks.presets import leaves
from verl_ext.core.batch import SCORE
from verl_ext.errors import ConfigurationError, Finding, listed, reading, unknown
from verl_ext.registry import INSTALLED
from verl_ext.rewards.options import parse_options
from verl_ext.run_config import FILTER, FUNCTION, RunConfig, own_scorer, resolved, select
from verl_ext.settings import ACCURACY_BETWEEN, ANY_REWARD, Settings

REWARD_MODEL = "reward.reward_model"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
TOOL_REWARDS = "tool_rewards"
"""The rewards of executed calls, as verl's tool agent loop writes them."""
REJECTING = ("algorithm.rollout_correction.rollout_rs", "trainer.pre_advantage_hooks")
"""What may empty the mask of a response before the estimator; `RayPPOTrainer` has it done before turns can be read."""
MANAGERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("naive", "gdpo", "remote", "rate_limited"), ()),
    "dapo": ("overlong", "overlong_reward"),
}
"""verl's own reward managers, with the components that each adds to those of the reward function."""

OLD = ("reward_model", "custom_reward_function", "sandbox_fusion")
"""The sections that verl once had at the top of a configuration: `main_ppo` composes them, and reads none."""
READS = re.compile(rf"migrate_legacy_reward_impl|config(\.|\.get\(.|\[.)({'|'.join(OLD)})\b")
"""What the source of a main has that migrates these sections, or reads them."""


def scorer(config: Any) -> Any:
    """Return the options of the configured reward function if it is one of ours, else None."""
    name = own_scorer(config)
    if name is None:
        return None
    valid = sorted(module.name for module in pkgutil.iter_modules(rewards.__path__))
    module = import_module(f"{rewards.__name__}.{name}") if name in valid else None
    if module is None or not hasattr(module, "compute_score"):
        path = select(config, f"{FUNCTION}.path")
        raise ConfigurationError(f"{FUNCTION}.path={path}: {unknown('reward module', name, valid)}")
    with reading(f"{FUNCTION}.reward_kwargs", ConfigurationError):
        kwargs = resolved(select(config, f"{FUNCTION}.reward_kwargs")) or {}
        return parse_options(module.Options, {str(name): value for name, value in kwargs.items()})


def dropped(config: Any, mains: Iterable[str]) -> Iterator[str]:
    """Yield each setting of `OLD` that has no effect, with the line that has, unless one of the mains reads them."""
    old = OmegaConf.to_container(OmegaConf.create({name: config.get(name) for name in OLD}))
    given = {path: value for path, value in leaves(old) if value is not None}
    if not given or "async_training" in config or any(map(READS.search, mains)):
        return
    import verl
    from verl.experimental.reward_loop import migrate_legacy_reward_impl

    # Each setting has its own path as value, so that it is known again in its new place.
    probe = OmegaConf.load(Path(verl.__file__).with_name("trainer") / "config/legacy_reward_impl.yaml")
    probe.reward = OmegaConf.to_container(config.get("reward") or OmegaConf.create())
    known = dict(leaves(OmegaConf.to_container(probe.reward), "reward"))
    for path in given:
        OmegaConf.update(probe, path, path, force_add=True)
    migrated = leaves(OmegaConf.to_container(migrate_legacy_reward_impl(probe).reward), "reward")
    moved = {f"{value}": path for path, value in migrated}
    for path, written in given.items():
        value = written if (read := resolved(select(config, path))) is None else read
        plain = isinstance(value, str) and re.fullmatch(r"[\w./:-]+", value)
        text = value if plain else json.dumps(value, ensure_ascii=False)  # as Hydra reads it
        lost = f"verl.trainer.main_ppo does not read {path}={text}"
        if (new := moved.get(path)) is None:
            yield f"{lost}, which has no place any more: remove it"
        elif resolved(select(config, new)) != value:
            yield f"{lost}: write {shlex.quote(('' if new in known else '+') + f'{new}={text}')}"


def mains_of_file() -> Iterator[str]:
    """The sources beside the folder of the primary file that name it, such as the mains of verl's recipes."""
    hydra = HydraConfig.get()
    for source in hydra.runtime.config_sources:
        files = Path(source.path).parent.glob("*.py") if (source.provider, source.schema) == ("main", "file") else ()
        texts = (file.read_text("utf-8", "replace") for file in files)
        yield from (text for text in texts if f'"{hydra.job.config_name}"' in text)


def known_components(config: Any) -> list[str] | None:
    """Return all components of a run; None if code that is not ours or verl's may add some."""
    options, manager = scorer(config), select(config, "reward.reward_manager.name") or "naive"
    of_verl = (select(config, "reward.reward_manager.source") or "register") == "register" and manager in MANAGERS
    if options is None or not of_verl or select(config, "reward.reward_model.enable"):
        return None
    return [*options.components, *MANAGERS[manager], SCORE]


def wrong_components(run: RunConfig) -> Iterator[Finding]:
    """A scorer of this package that does not exist, or refuses its arguments; a component that the run cannot have."""
    valid, rewards = known_components(run.config), run.settings.rewards
    wanted = [("keys", key) for key in rewards.keys or ()]
    wanted += [("accuracy_key", rewards.accuracy_key)] if rewards.accuracy_key is not None else []
    for setting, key in wanted:
        if valid is not None and key not in (*valid, TOOL_REWARDS):
            message = f"{unknown('reward component', key, valid)}, of {FUNCTION}.path={run.select(f'{FUNCTION}.path')}"
            yield Finding(f"algorithm.rewards.{setting}: {message}")


def lost_penalty(run: RunConfig) -> Iterator[Finding]:
    """A penalty that dapo's reward manager adds to the score, which named rewards leave out."""
    keys = run.settings.rewards.keys
    added = run.select("reward.reward_manager.name") == "dapo" and run.select(f"{OVERLONG}.enable")
    counted = keys is None or ("overlong_reward" in keys and run.select(f"{OVERLONG}.log"))
    if run.chain is not None and added and not counted:
        yield Finding(
            f"{OVERLONG}.enable=True adds a penalty to the score, which algorithm.rewards.keys leaves out: add "
            f"overlong_reward to the keys and set {OVERLONG}.log=True, or remove algorithm.rewards.keys"
        )


def negative_rewards(run: RunConfig) -> Iterator[Finding]:
    """Weights or a penalty that may make the rewards of maxrl negative."""
    needs, weights = "maxrl needs rewards of at least 0", run.settings.rewards.weights or ()
    if run.chain is None or "maxrl" not in run.used:
        return
    if any(weight < 0 for weight in weights):
        yield Finding(
            f"{needs}, which algorithm.rewards.weights={list(weights)} may make negative: give weights of at least 0"
        )
    if run.select("reward.reward_manager.name") == "dapo" and run.select(f"{OVERLONG}.enable"):
        yield Finding(f"{needs}, and a penalty makes them negative: set {OVERLONG}.enable=False")


def lists_of_rewards(run: RunConfig) -> Iterator[Finding]:
    """Rewards by turn or by item in a run that cannot take them."""
    rewards, rollout = run.settings.rewards, "actor_rollout_ref.rollout.multi_turn"
    names = rewards.per_turn or rewards.rubrics  # never both
    if not names:
        return
    where = f"algorithm.rewards.{'per_turn' if rewards.per_turn else 'rubrics'}={list(names)}"
    if not run.computes:
        yield Finding(
            f"{where} has no effect on verl's {run.name}: set algorithm.adv_estimator to one of {listed(INSTALLED)}"
        )
    if TOOL_REWARDS in (rewards.per_turn or ()) and run.select(f"{rollout}.max_parallel_calls") != 1:
        yield Finding(
            f"{where}: verl writes {TOOL_REWARDS} for each call, which is one for each turn only with "
            f"{rollout}.max_parallel_calls=1: set it, or return per_turn([...]) from the reward function"
        )
    for setting in REJECTING if rewards.per_turn and run.select("trainer.use_v1") is False else ():
        if run.select(setting):
            yield Finding(f"{where}: this trainer reads turns after {setting} has cut them: remove one of the two")
    needed = rewards.accuracy_between is not None or (run.chain is not None and run.chain.needs_accuracy)
    if needed and (key := accuracy_of(run.settings)) in names:
        yield Finding(f"{where}: the accuracy {key!r} is one number a response: set algorithm.rewards.accuracy_key")
    if run.filter in names:
        yield Finding(f"{FILTER}.metric={run.filter} is a list, of {where}: set {FILTER}.metric={ACCURACY_BETWEEN}")
    if run.filter == ANY_REWARD:
        yield Finding(f"{FILTER}.metric={ANY_REWARD} does not know {where}: set {FILTER}.metric={ACCURACY_BETWEEN}")
    for step in takewhile(lambda step: not step.sums, run.chain.steps if run.chain and rewards.rubrics else ()):
        if step.not_with_rubrics:
            yield Finding(
                f"{where} does not work with the step {step.name} of {run.name}: {step.not_with_rubrics}; "
                "remove one of the two"
            )


def accuracy_of(settings: Settings) -> str:
    """Return the component that is the accuracy, as far as it is known before the run."""
    return settings.rewards.accuracy_in(settings.rewards.keys or ())


def has_colocated_model(run: RunConfig) -> bool:
    """Return whether a reward model on the GPUs of the training scores the responses, after all were generated."""
    enabled = bool(run.select(f"{REWARD_MODEL}.enable"))
    return enabled and not run.select(f"{REWARD_MODEL}.enable_resource_pool")


def wrong_accuracy(run: RunConfig) -> Iterator[Finding]:
    """An accuracy that must be named and is not, or one that does not lie in [0, 1]."""
    by_estimator = run.chain is not None and run.chain.needs_accuracy
    if not by_estimator and run.settings.rewards.accuracy_between is None:
        return
    rewards, options = run.settings.rewards, scorer(run.config)
    keys, key = rewards.keys or (), accuracy_of(run.settings)
    known = () if options is None else options.accuracies
    if by_estimator and rewards.accuracy_key is None and has_colocated_model(run):
        yield Finding(
            f"{run.name} needs an accuracy. A colocated reward model ({REWARD_MODEL}.enable_resource_pool=False) "
            "writes its results into the batch like columns of the data set, so verl_ext cannot tell which of them is "
            "the accuracy. Set algorithm.rewards.accuracy_key=... to its name"
        )
        return
    if by_estimator and rewards.accuracy_key is None and key == SCORE and len(keys) > 1:
        candidates = listed(name for name in known if name != SCORE) if known else "one of your components"
        yield Finding(
            f"{run.name} needs an accuracy, and the score of several rewards is none: set "
            f"algorithm.rewards.accuracy_key=... ({candidates}), and algorithm.rewards.accuracy_threshold=... if it "
            "does not lie in [0, 1]"
        )
        return
    of_scorer = options is not None and key in (*options.components, SCORE)
    if of_scorer and key not in known and rewards.accuracy_threshold is None:
        yield Finding(
            f"the accuracy {key!r} does not lie in [0, 1]: set algorithm.rewards."
            f"accuracy_threshold=..., above which it is right, or accuracy_key=... (in [0, 1]: {listed(known)})"
        )
