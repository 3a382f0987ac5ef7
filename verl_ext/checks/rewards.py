"""Rules about the rewards of a run: the reward functions of verl_ext, names of components, and the accuracy.

verl's default trainer logs an exception of a reward function and drops the sample. With a wrong argument, it would
never fill a batch. A wrong name of a component would stop the run after the first rollout.
"""

import pkgutil
from collections.abc import Container, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import takewhile
from types import ModuleType
from typing import Any

from verl_ext import rewards as reward_functions
from verl_ext.checks.filters import filter_by_accuracy, selection_of_trainer
from verl_ext.checks.managers import MANAGER_ARGUMENTS, OVERLONG_REWARD, REWARD_MANAGERS, manager_of_verl
from verl_ext.checks.presets import other_estimator
from verl_ext.core.batch import SCORE
from verl_ext.core.chain import Chain, Step
from verl_ext.errors import ConfigurationError, Finding, explaining_errors, listed, nearest
from verl_ext.rewards.options import parse_options
from verl_ext.run import Run
from verl_ext.run_config import FILTER, FUNCTION, resolved, reward_module, select, uses_default_trainer
from verl_ext.settings import ACCURACY, ANY_REWARD, Settings

REWARD_MODEL = "reward.reward_model"
OVERLONG = f"{MANAGER_ARGUMENTS}.overlong_buffer_cfg"
TOOL_REWARDS = "tool_rewards"
"""The component with the rewards of executed calls, as verl's tool agent loop writes it."""
PARALLEL_CALLS = "actor_rollout_ref.rollout.multi_turn.max_parallel_calls"
REJECTING = ("algorithm.rollout_correction.rollout_rs", "trainer.pre_advantage_hooks")
"""Settings that may clear the mask of a response; with `RayPPOTrainer`, this happens before turns can be read."""
ACCURACY_KEY = "++algorithm.rewards.accuracy_key"
ACCURACY_THRESHOLD = "++algorithm.rewards.accuracy_threshold"


def reward_options(config: Any) -> Any:
    """Return the options of the configured reward function if it is one of verl_ext, else None.

    Raise if verl_ext has no such function, or if the function rejects its arguments.
    """
    name = reward_module(config)
    if name is None:
        return None
    modules = _reward_modules()
    if name not in modules:
        near = nearest(name, modules)
        hint = "" if near is None else f" (did you mean {near!r}?)"
        raise ConfigurationError(
            f"{FUNCTION}.path={select(config, f'{FUNCTION}.path')} does not work, because verl_ext has no reward "
            f"function {name!r}{hint}. Set {FUNCTION}.path=pkg://{reward_functions.__name__}.NAME, where NAME is one "
            f"of {listed(modules)}."
        )
    with explaining_errors(f"{FUNCTION}.reward_kwargs", ConfigurationError):
        arguments = resolved(select(config, f"{FUNCTION}.reward_kwargs")) or {}
        return parse_options(modules[name].Options, {str(key): value for key, value in arguments.items()})


def _reward_modules() -> dict[str, ModuleType]:
    """Return the modules of `verl_ext.rewards` that contain a reward function, by name."""
    names = [module.name for module in pkgutil.iter_modules(reward_functions.__path__)]
    modules = {name: import_module(f"{reward_functions.__name__}.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "compute_score")}


def known_components(config: Any) -> list[str] | None:
    """Return all components of a run; None if code of neither verl_ext nor verl may add some."""
    options = reward_options(config)
    manager = manager_of_verl(partial(select, config))
    if options is None or manager is None or select(config, f"{REWARD_MODEL}.enable"):
        return None
    return [*options.components, *manager.components, SCORE]


def unknown_components(run: Run) -> Iterator[Finding]:
    """Reject names of rewards that a reward function of verl_ext does not return.

    Raise if the function does not exist or rejects its arguments.
    """
    valid = known_components(run.config)
    if valid is None:
        return
    rewards = run.settings.rewards
    wanted = [("keys", key) for key in rewards.keys or ()]
    if rewards.accuracy_key is not None:
        wanted.append(("accuracy_key", rewards.accuracy_key))
    path = f"{FUNCTION}.path={run.select(f'{FUNCTION}.path')}"
    for setting, key in wanted:
        if key in (*valid, TOOL_REWARDS):
            continue
        near = nearest(key, valid)
        hint = "" if near is None else f" (did you mean {near!r}?)"
        yield Finding(
            "error",
            f"algorithm.rewards.{setting} names the reward {key!r}{hint}, which {path} does not return.",
            f"Use names from {listed(valid)} in algorithm.rewards.{setting}.",
        )


def adds_penalty(run: Run) -> bool:
    """Return whether dapo's reward manager adds a penalty for long responses to the score."""
    uses_dapo = manager_of_verl(run.select) is REWARD_MANAGERS["dapo"]
    return uses_dapo and bool(run.select(f"{OVERLONG}.enable"))


def lost_penalty(run: Run) -> Iterator[Finding]:
    """Reject a penalty that dapo's reward manager adds to the score if named rewards replace the score."""
    keys, weights = run.settings.rewards.keys, run.settings.rewards.weights
    if run.chain is None or keys is None or not adds_penalty(run):
        return
    is_named = OVERLONG_REWARD in keys
    if is_named and run.select(f"{OVERLONG}.log"):
        return
    lines = [f"++{OVERLONG}.log=True"]
    if not is_named:
        lines.append(f"'++algorithm.rewards.keys=[{','.join([*keys, OVERLONG_REWARD])}]'")
    if not is_named and weights is not None:
        with_one_more = ",".join(f"{weight:g}" for weight in (*weights, 1))
        lines.append(f"'++algorithm.rewards.weights=[{with_one_more}]'")
    disable = f"{OVERLONG}.enable=False"
    yield Finding(
        "error",
        f"{OVERLONG}.enable=True adds a penalty to the score, but algorithm.rewards.keys={[*keys]} replaces the score, "
        "so the penalty would be lost.",
        f"Set {disable}." if needs_nonnegative_sum(run.chain) else f"Set {' '.join(lines)}, or {disable}.",
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
    if adds_penalty(run):
        yield Finding(
            "error",
            f"{needs}, but {OVERLONG}.enable=True adds a penalty to the score, which can make the score negative.",
            f"Set {OVERLONG}.enable=False.",
        )


def needs_nonnegative_sum(chain: Chain | None) -> bool:
    """Return whether the sum of the rewards reaches a step that needs values of at least 0, such as divide_by_mean."""
    if chain is None:
        return False
    sum_and_later_steps = chain.steps[len(steps_before_sum(chain)) :]
    return any(step.needs_nonnegative for step in sum_and_later_steps)


def steps_before_sum(chain: Chain | None) -> Sequence[Step]:
    """Return the steps that work on each reward separately: those before the first step that sums the rewards.

    Without such a step, all steps do.
    """
    if chain is None:
        return ()
    return list(takewhile(lambda step: not step.sums, chain.steps))


class ListRewards:
    """The rewards of a run with a list for each response: those per turn, or the rubrics."""

    def __init__(self, settings: Settings) -> None:
        rewards = settings.rewards
        self.names = rewards.per_turn or rewards.rubrics or ()  # a run cannot have both
        self.setting = f"algorithm.rewards.{'per_turn' if rewards.per_turn else 'rubrics'}"
        """The setting that names these rewards."""
        self.where = f"{self.setting}={list(self.names)}"
        """The setting with its value, for messages."""


def lists_of_verl_estimator(run: Run) -> Iterator[Finding]:
    """Reject per-turn rewards and rubrics of an estimator of verl."""
    lists = ListRewards(run.settings)
    if lists.names and not run.computes_advantages:
        yield Finding(
            "error",
            f"{lists.where} has no effect on verl's {run.name}, which reads only the score.",
            f"Remove {lists.setting}, or select an estimator of verl_ext. For example, "
            f"{other_estimator(run, 'weighted_grpo')}.",
        )


def several_calls_per_turn(run: Run) -> Iterator[Finding]:
    """Reject the rewards of executed calls as per-turn rewards if a turn may have several calls."""
    per_turn = run.settings.rewards.per_turn or ()
    calls = run.select(PARALLEL_CALLS)
    if TOOL_REWARDS not in per_turn or calls == 1:
        return
    where = ListRewards(run.settings).where
    yield Finding(
        "error",
        f"{where} needs one entry per turn, but verl writes one entry of {TOOL_REWARDS} per call, and "
        f"{PARALLEL_CALLS}={calls} allows several calls per turn.",
        f"Set {PARALLEL_CALLS}=1, or return verl_ext.per_turn([...]) from the reward function under another name.",
    )


def unreadable_turns(run: Run) -> Iterator[Finding]:
    """Reject per-turn rewards if the trainer may clear the mask of a response before verl_ext reads its turns."""
    if not run.settings.rewards.per_turn or uses_default_trainer(run.config):
        return
    lists = ListRewards(run.settings)
    selection = selection_of_trainer(run)
    for hook in REJECTING:
        if run.select(hook):
            yield Finding(
                "error",
                f"{lists.where} does not work with {hook} while {selection}. This trainer may clear the mask of a "
                "response before verl_ext reads its turns.",
                f"Remove {selection}, or remove {hook}.",
            )


def list_as_accuracy(run: Run) -> Iterator[Finding]:
    """Reject a list as the accuracy, which must be one number per response."""
    key = accuracy_of(run.settings)
    lists = ListRewards(run.settings)
    if _needs_accuracy(run) and key in lists.names:
        yield Finding(
            "error",
            f"The accuracy must be one number per response, but the reward {key!r} is in {lists.where}.",
            f"Set {ACCURACY_KEY}=NAME, where NAME is a reward with one number per response.",
        )


def list_as_filter(run: Run) -> Iterator[Finding]:
    """Reject a filter of groups that needs one number per response."""
    lists = ListRewards(run.settings)
    if not lists.names:
        return
    metric = f"{FILTER}.metric={run.filter_metric}"
    if run.filter_metric in lists.names:
        text = f"{metric} must be one number per response, but it is in {lists.where}."
        yield Finding("error", text, filter_by_accuracy(run))
    elif run.filter_metric == ANY_REWARD:
        yield Finding("error", f"{metric} does not support {lists.where}.", filter_by_accuracy(run))


def step_without_rubrics(run: Run) -> Iterator[Finding]:
    """Reject rubrics with a step before the sum that does not support them."""
    if not run.settings.rewards.rubrics:
        return
    lists = ListRewards(run.settings)
    for step in steps_before_sum(run.chain):
        if not step.not_with_rubrics:
            continue
        change = other_estimator(run, "gdpo")
        if "compose" in run.methods:
            change = f"remove {step.name} from algorithm.compose.steps"
        yield Finding(
            "error",
            f"{lists.where} does not work with the step {step.name} of {run.name}, because {step.not_with_rubrics}.",
            f"Return one number for each of these rewards and remove {lists.setting}, or {change}.",
        )


def accuracy_of(settings: Settings) -> str:
    """Return the name of the accuracy component, as far as it is known before the run."""
    return settings.rewards.accuracy_in(settings.rewards.keys or ())


def named_accuracy(settings: Settings, names: Container[str]) -> str | None:
    """Return the accuracy among components of these names if it is named: by `accuracy_key`, or because it is `acc`.

    None if the accuracy is the only key or the score, see `RewardsSettings.accuracy_in`.
    """
    name = settings.rewards.accuracy_in(names)
    return name if name in (settings.rewards.accuracy_key, ACCURACY) else None


def _needs_accuracy(run: Run) -> bool:
    needed_by_estimator = run.chain is not None and run.chain.needs_accuracy
    return needed_by_estimator or run.settings.rewards.accuracy_between is not None


def has_colocated_model(run: Run) -> bool:
    """Return whether a reward model on the training GPUs scores the responses, after all were generated."""
    enabled = bool(run.select(f"{REWARD_MODEL}.enable"))
    return enabled and not run.select(f"{REWARD_MODEL}.enable_resource_pool")


def unnamed_accuracy(run: Run) -> Iterator[Finding]:
    """Reject an estimator that needs an accuracy if verl_ext cannot know which reward is the accuracy."""
    rewards = run.settings.rewards
    if run.chain is None or not run.chain.needs_accuracy or rewards.accuracy_key is not None:
        return
    keys = rewards.keys or ()
    if has_colocated_model(run):
        yield Finding(
            "error",
            f"{run.name} needs an accuracy. A colocated reward model ({REWARD_MODEL}.enable_resource_pool=False) "
            "writes its results into the batch like columns of the data set, so verl_ext cannot identify the accuracy.",
            f"Set {ACCURACY_KEY}=NAME, where NAME is the column with the accuracy.",
        )
    elif accuracy_of(run.settings) == SCORE and len(keys) > 1:
        options = reward_options(run.config)
        candidates = [name for name in (options.accuracies if options else ()) if name != SCORE]
        fix = (
            f"Set {ACCURACY_KEY}=NAME, where NAME is the reward that is the accuracy. If this reward is not in [0, 1], "
            f"also set {ACCURACY_THRESHOLD} to the value above which a response is correct."
        )
        if candidates:
            fix = f"Set {ACCURACY_KEY} to one of {listed(candidates)}."
        yield Finding(
            "error",
            f"{run.name} needs an accuracy in [0, 1], but the score is a sum of several rewards "
            f"(algorithm.rewards.keys={[*keys]}).",
            fix,
        )


def accuracy_outside_range(run: Run) -> Iterator[Finding]:
    """Reject a reward of verl_ext as the accuracy if it can be outside [0, 1] and no threshold is set."""
    if not _needs_accuracy(run) or run.settings.rewards.accuracy_threshold is not None or any(unnamed_accuracy(run)):
        return
    options = reward_options(run.config)
    key = accuracy_of(run.settings)
    if options is None or key in options.accuracies or key not in (*options.components, SCORE):
        return
    other = f", or set {ACCURACY_KEY} to one of {listed(options.accuracies)}" if options.accuracies else ""
    yield Finding(
        "error",
        f"The accuracy must be in [0, 1], but the reward {key!r} can be outside [0, 1].",
        f"Set {ACCURACY_THRESHOLD} to the value above which a response is correct{other}.",
    )
