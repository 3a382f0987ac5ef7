"""Rules about the rewards of a run: the reward functions of verl_ext, names of components, and the accuracy.

verl's default trainer logs an exception of a reward function and drops the sample. With a wrong argument, it would
never fill a batch. A wrong name of a component would stop the run after the first rollout.
"""

import json
import pkgutil
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from verl_ext import rewards
from verl_ext.checks.presets import leaves, other_estimator
from verl_ext.core.batch import SCORE
from verl_ext.core.chain import Chain
from verl_ext.errors import ConfigurationError, Finding, listed, nearest, reading
from verl_ext.rewards.options import parse_options
from verl_ext.run import Run
from verl_ext.run_config import FILTER, FUNCTION, resolved, reward_module, select
from verl_ext.settings import ACCURACY_BETWEEN, ANY_REWARD, Settings

REWARD_MODEL = "reward.reward_model"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
TOOL_REWARDS = "tool_rewards"
"""The component with the rewards of executed calls, as verl's tool agent loop writes it."""
REJECTING = ("algorithm.rollout_correction.rollout_rs", "trainer.pre_advantage_hooks")
"""Settings that may clear the mask of a response; with `RayPPOTrainer`, this happens before turns can be read."""
MANAGERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("naive", "gdpo", "remote", "rate_limited"), ()),
    "dapo": ("overlong", "overlong_reward"),
}
"""The reward managers of verl, each with the components that it adds to those of the reward function."""

OLD = ("reward_model", "custom_reward_function", "sandbox_fusion")
"""The sections that older versions of verl had at the top level: `main_ppo` composes them, but does not read them."""
READS = re.compile(rf"migrate_legacy_reward_impl|config(\.|\.get\(.|\[.)({'|'.join(OLD)})\b")
"""A pattern for the source of a main that migrates these sections, or reads them."""


def scorer(config: Any) -> Any:
    """Return the options of the configured reward function if it is one of verl_ext, else None."""
    name = reward_module(config)
    if name is None:
        return None
    modules = [module.name for module in pkgutil.iter_modules(rewards.__path__)]
    module = import_module(f"{rewards.__name__}.{name}") if name in modules else None
    if module is None or not hasattr(module, "compute_score"):
        valid = [at for at in modules if hasattr(import_module(f"{rewards.__name__}.{at}"), "compute_score")]
        path, near = select(config, f"{FUNCTION}.path"), nearest(name, valid)
        hint = "" if near is None else f" (did you mean {near!r}?)"
        raise ConfigurationError(
            f"{FUNCTION}.path={path} does not work, because verl_ext has no reward function {name!r}{hint}. Set "
            f"{FUNCTION}.path=pkg://{rewards.__name__}.NAME, where NAME is one of {listed(valid)}."
        )
    with reading(f"{FUNCTION}.reward_kwargs", ConfigurationError):
        kwargs = resolved(select(config, f"{FUNCTION}.reward_kwargs")) or {}
        return parse_options(module.Options, {str(name): value for name, value in kwargs.items()})


def dropped(config: Any, mains: Iterable[str]) -> Iterator[Finding]:
    """Report each setting of `OLD` that has no effect, with the line that has, unless one of the mains reads them."""
    old = OmegaConf.to_container(OmegaConf.create({name: config.get(name) for name in OLD}))
    given = {path: value for path, value in leaves(old) if value is not None}
    if not given or "async_training" in config or any(map(READS.search, mains)):
        return
    import verl
    from verl.experimental.reward_loop import migrate_legacy_reward_impl

    # Each setting gets its own path as its value, so that its new place can be found after the migration.
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
        ignored = f"{path}={text} has no effect, because verl.trainer.main_ppo does not read it."
        if (new := moved.get(path)) is None:
            yield Finding("error", f"{ignored} No current setting of verl replaces it.", f"Remove {path}.")
        elif resolved(select(config, new)) != value:
            prefix = "" if new in known else "+"
            yield Finding("error", ignored, f"Set {shlex.quote(f'{prefix}{new}={text}')} instead.")


def mains_of_file() -> Iterator[str]:
    """Yield the sources next to the primary file's folder that name the file, such as the mains of verl's recipes."""
    hydra = HydraConfig.get()
    for source in hydra.runtime.config_sources:
        files = Path(source.path).parent.glob("*.py") if (source.provider, source.schema) == ("main", "file") else ()
        texts = (file.read_text("utf-8", "replace") for file in files)
        yield from (text for text in texts if f'"{hydra.job.config_name}"' in text)


def known_components(config: Any) -> list[str] | None:
    """Return all components of a run; None if code of neither verl_ext nor verl may add some."""
    options, manager = scorer(config), select(config, "reward.reward_manager.name") or "naive"
    of_verl = (select(config, "reward.reward_manager.source") or "register") == "register" and manager in MANAGERS
    if options is None or not of_verl or select(config, "reward.reward_model.enable"):
        return None
    return [*options.components, *MANAGERS[manager], SCORE]


def wrong_components(run: Run) -> Iterator[Finding]:
    """Reject a reward function of verl_ext that does not exist or rejects its arguments, and unknown components."""
    valid, rewards = known_components(run.config), run.settings.rewards
    wanted = [("keys", key) for key in rewards.keys or ()]
    wanted += [("accuracy_key", rewards.accuracy_key)] if rewards.accuracy_key is not None else []
    for setting, key in wanted:
        if valid is not None and key not in (*valid, TOOL_REWARDS):
            near = nearest(key, valid)
            hint = "" if near is None else f" (did you mean {near!r}?)"
            yield Finding(
                "error",
                f"algorithm.rewards.{setting} names the reward {key!r}{hint}, which "
                f"{FUNCTION}.path={run.select(f'{FUNCTION}.path')} does not return.",
                f"Use names from {listed(valid)} in algorithm.rewards.{setting}.",
            )


def lost_penalty(run: Run) -> Iterator[Finding]:
    """Reject a penalty that dapo's reward manager adds to the score if named rewards replace the score."""
    keys, weights = run.settings.rewards.keys, run.settings.rewards.weights
    added = run.select("reward.reward_manager.name") == "dapo" and run.select(f"{OVERLONG}.enable")
    if run.chain is None or keys is None or not added:
        return
    name, named = "overlong_reward", "overlong_reward" in keys
    if named and run.select(f"{OVERLONG}.log"):
        return
    lines, disable = [f"++{OVERLONG}.log=True"], f"{OVERLONG}.enable=False"
    if not named:
        lines.append(f"'++algorithm.rewards.keys=[{','.join([*keys, name])}]'")
    if not named and weights is not None:
        lines.append(f"'++algorithm.rewards.weights=[{','.join(f'{weight:g}' for weight in (*weights, 1))}]'")
    yield Finding(
        "error",
        f"{OVERLONG}.enable=True adds a penalty to the score, but algorithm.rewards.keys={[*keys]} replaces the score, "
        "so the penalty would be lost.",
        # maxrl needs rewards of at least 0.
        f"Set {disable}." if "maxrl" in run.methods else f"Set {' '.join(lines)}, or {disable}.",
    )


def negative_rewards(run: Run) -> Iterator[Finding]:
    """Reject weights or a penalty that may make the sum negative if a step after the sum needs values of at least 0."""
    if not needs_nonnegative_sum(run.chain):
        return
    needs = f"{run.name} needs rewards of at least 0"
    weights = run.settings.rewards.weights or ()
    if any(weight < 0 for weight in weights):
        yield Finding(
            "error",
            f"{needs}, but algorithm.rewards.weights={list(weights)} can make the sum of the rewards negative.",
            "Use weights of at least 0 in algorithm.rewards.weights.",
        )
    if run.select("reward.reward_manager.name") == "dapo" and run.select(f"{OVERLONG}.enable"):
        yield Finding(
            "error",
            f"{needs}, but {OVERLONG}.enable=True adds a penalty to the score, which can make the score negative.",
            f"Set {OVERLONG}.enable=False.",
        )


def needs_nonnegative_sum(chain: Chain | None) -> bool:
    """Return whether the sum of the rewards reaches a step that needs values of at least 0, such as divide_by_mean."""
    steps = () if chain is None else chain.steps
    after_sum = dropwhile(lambda step: not step.sums, steps)
    return any(step.needs_nonnegative for step in after_sum)


def lists_of_rewards(run: Run) -> Iterator[Finding]:
    """Reject per-turn rewards and rubrics in a run that does not support them."""
    rewards, rollout = run.settings.rewards, "actor_rollout_ref.rollout.multi_turn"
    names = rewards.per_turn or rewards.rubrics  # never both
    if not names:
        return
    setting = f"algorithm.rewards.{'per_turn' if rewards.per_turn else 'rubrics'}"
    where = f"{setting}={list(names)}"
    if not run.computes_advantages:
        yield Finding(
            "error",
            f"{where} has no effect on verl's {run.name}, which reads only the score.",
            f"Remove {setting}, or select an estimator of verl_ext. For example, "
            f"{other_estimator(run, 'weighted_grpo')}.",
        )
    calls = run.select(f"{rollout}.max_parallel_calls")
    if TOOL_REWARDS in (rewards.per_turn or ()) and calls != 1:
        yield Finding(
            "error",
            f"{where} needs one entry per turn, but verl writes one entry of {TOOL_REWARDS} per call, and "
            f"{rollout}.max_parallel_calls={calls} allows several calls per turn.",
            f"Set {rollout}.max_parallel_calls=1, or return verl_ext.per_turn([...]) from the reward function under "
            "another name.",
        )
    for hook in REJECTING if rewards.per_turn and run.select("trainer.use_v1") is False else ():
        if run.select(hook):
            yield Finding(
                "error",
                f"{where} does not work with {hook} while trainer.use_v1=False. This trainer may clear the mask of a "
                "response before verl_ext reads its turns.",
                f"Remove trainer.use_v1=False, or remove {hook}.",
            )
    needed = rewards.accuracy_between is not None or (run.chain is not None and run.chain.needs_accuracy)
    if needed and (key := accuracy_of(run.settings)) in names:
        yield Finding(
            "error",
            f"The accuracy must be one number per response, but the reward {key!r} is in {where}.",
            "Set ++algorithm.rewards.accuracy_key=NAME, where NAME is a reward with one number per response.",
        )
    if run.filter_metric in names:
        yield Finding(
            "error",
            f"{FILTER}.metric={run.filter_metric} must be one number per response, but it is in {where}.",
            filter_by_accuracy(run),
        )
    if run.filter_metric == ANY_REWARD:
        yield Finding("error", f"{FILTER}.metric={ANY_REWARD} does not support {where}.", filter_by_accuracy(run))
    for step in takewhile(lambda step: not step.sums, run.chain.steps if run.chain and rewards.rubrics else ()):
        if step.not_with_rubrics:
            listed_step = "compose" in run.methods
            fix = f"remove {step.name} from algorithm.compose.steps" if listed_step else other_estimator(run, "gdpo")
            yield Finding(
                "error",
                f"{where} does not work with the step {step.name} of {run.name}, because {step.not_with_rubrics}.",
                f"Return one number for each of these rewards and remove {setting}, or {fix}.",
            )


def filter_by_accuracy(run: Run) -> str:
    """Return the fix for a filter of groups that does not fit the rewards: filter by the accuracy, or not at all."""
    rewards = run.settings.rewards
    off, bounds = f"{FILTER}.enable=False", "algorithm.rewards.accuracy_between"
    if run.select("trainer.use_v1") is False:  # its trainer has no filter by the accuracy
        return f"Set {off}."
    lines, name = [f"{FILTER}.metric={ACCURACY_BETWEEN}"], ""
    if rewards.accuracy_between is None:
        lines.append(f"'++{bounds}=[0.05,0.95]'")
    if rewards.accuracy_key is None or rewards.accuracy_key in (rewards.per_turn or rewards.rubrics or ()):
        lines.append("++algorithm.rewards.accuracy_key=NAME")
        name = " NAME is the reward that is the accuracy, with one number per response."
    return f"Set {' '.join(lines)}, or {off}.{name}"


def accuracy_of(settings: Settings) -> str:
    """Return the name of the accuracy component, as far as it is known before the run."""
    return settings.rewards.accuracy_in(settings.rewards.keys or ())


def has_colocated_model(run: Run) -> bool:
    """Return whether a reward model on the training GPUs scores the responses, after all were generated."""
    enabled = bool(run.select(f"{REWARD_MODEL}.enable"))
    return enabled and not run.select(f"{REWARD_MODEL}.enable_resource_pool")


def wrong_accuracy(run: Run) -> Iterator[Finding]:
    """Reject an accuracy that must be named and is not, or that is not in [0, 1]."""
    by_estimator = run.chain is not None and run.chain.needs_accuracy
    if not by_estimator and run.settings.rewards.accuracy_between is None:
        return
    rewards, options = run.settings.rewards, scorer(run.config)
    keys, key = rewards.keys or (), accuracy_of(run.settings)
    known = () if options is None else options.accuracies
    setting, threshold = "++algorithm.rewards.accuracy_key", "++algorithm.rewards.accuracy_threshold"
    if by_estimator and rewards.accuracy_key is None and has_colocated_model(run):
        yield Finding(
            "error",
            f"{run.name} needs an accuracy. A colocated reward model ({REWARD_MODEL}.enable_resource_pool=False) "
            "writes its results into the batch like columns of the data set, so verl_ext cannot identify the accuracy.",
            f"Set {setting}=NAME, where NAME is the column with the accuracy.",
        )
        return
    if by_estimator and rewards.accuracy_key is None and key == SCORE and len(keys) > 1:
        candidates = [name for name in known if name != SCORE]
        if candidates:
            fix = f"Set {setting} to one of {listed(candidates)}."
        else:
            fix = (
                f"Set {setting}=NAME, where NAME is the reward that is the accuracy. If this reward is not in [0, 1], "
                f"also set {threshold} to the value above which a response is correct."
            )
        yield Finding(
            "error",
            f"{run.name} needs an accuracy in [0, 1], but the score is a sum of several rewards "
            f"(algorithm.rewards.keys={[*keys]}).",
            fix,
        )
        return
    of_scorer = options is not None and key in (*options.components, SCORE)
    if of_scorer and key not in known and rewards.accuracy_threshold is None:
        other = f", or set {setting} to one of {listed(known)}" if known else ""
        yield Finding(
            "error",
            f"The accuracy must be in [0, 1], but the reward {key!r} can be outside [0, 1].",
            f"Set {threshold} to the value above which a response is correct{other}.",
        )
