"""What verl_ext adds to every trainer of verl: the check of the run, its state in checkpoints, the faster update.

verl chooses the class of a trainer when a run starts, and other packages may have subclasses of verl's trainers. So
verl_ext makes a subclass of the mixin and the chosen class, with the name of the chosen class.
"""

import functools
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

from verl_ext import hooks, update
from verl_ext.advantages import checkpoint, dump
from verl_ext.checks.judge import check_run, log_run
from verl_ext.errors import IntegrationError
from verl_ext.hooks import dotted_name
from verl_ext.run import Run
from verl_ext.run_config import uses_verl_ext

logger = logging.getLogger("verl_ext")
REQUIRED_METHODS = ("__init__", "_save_checkpoint", "_load_checkpoint")
"""The methods of `TrainerMixin` that every run needs, so verl's trainers must have them with the same parameters.

The other methods are for the faster update alone."""


class TrainerMixin:
    """The methods of verl's trainers to which verl_ext adds something.

    In a run that uses nothing of verl_ext, each method only calls the method of verl, with two exceptions: `__init__`
    judges the configuration by the rules for every run, and `_save_checkpoint` removes the state of an earlier run, if
    it overwrites the checkpoint of that run.
    """

    _verl_ext: Run | None = None
    """The run, or None if it uses nothing of verl_ext."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        parent: Any = super()
        self._verl_ext = prepare_run(self, config)
        parent.__init__(config, *args, **kwargs)

    def _save_checkpoint(self) -> Any:
        """Save the state of the estimator first, so that a checkpoint that verl has completed always has it."""
        parent: Any = super()
        if self._verl_ext is None or self._verl_ext.chain is None:
            checkpoint.remove_earlier_state(self)
        else:
            checkpoint.save_state(self._verl_ext)
        return parent._save_checkpoint()

    def _load_checkpoint(self) -> Any:
        """Load the state of the estimator once verl knows the step from which it resumes."""
        parent: Any = super()
        if self._verl_ext is None:
            return parent._load_checkpoint()
        checkpoint.require_complete(self._verl_ext)
        result = parent._load_checkpoint()
        checkpoint.load(self._verl_ext)
        return result

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Order the rows so that the rows of a prompt come together, if the update computes each prompt once."""
        parent: Any = super()
        balanced = parent._balance_batch(batch, metrics, *args, **kwargs)  # RayPPOTrainer's method returns nothing
        update.order_rows(self._verl_ext, batch if balanced is None else balanced, metrics)
        return balanced

    def _compute_old_log_prob(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        with update.marked(self._verl_ext, batch):
            return parent._compute_old_log_prob(batch, *args, **kwargs)

    def _compute_ref_log_prob(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        with update.marked(self._verl_ext, batch):
            return parent._compute_ref_log_prob(batch, *args, **kwargs)

    def _update_actor(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        with update.marked(self._verl_ext, batch):
            return parent._update_actor(batch, *args, **kwargs)


class UnsupportedTrainer:
    """A trainer whose methods have changed, so that `TrainerMixin` cannot be applied.

    The hook into the module of the trainer has failed. A run that uses verl_ext raises the error of the hook. Any other
    run trains as if verl_ext were not installed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        parent: Any = super()
        if uses_verl_ext(config_of_call(args, kwargs)):
            hooks.require()
        parent.__init__(*args, **kwargs)


def config_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the configuration in a call that makes a trainer: the first argument, or `config`."""
    return kwargs.get("config", args[0] if args else None)


def prepare_run(trainer: TrainerMixin, config: Any) -> Run | None:
    """Check the configuration, log what was found, and return the run. Return None if it uses nothing of verl_ext.

    Raise if the run is rejected, or if a class of the trainer overrides a method of verl without calling it with
    `super()`. Such a class would skip code of verl_ext that the run needs: see `overrides`.
    """
    run = check_run(config)
    if run is None:
        return None
    log_run(run)
    if not run.uses_verl_ext:
        return None
    run.trainer = trainer
    if run.chain is not None and run.chain.stateful:
        require_passed_on(type(trainer), TrainerMixin, ("_save_checkpoint", "_load_checkpoint"))
    if update.marks(run):
        update.require_engine()
        for verl_trainer in _trainers_of_verl(type(trainer)):
            require_same_parameters(TrainerMixin, verl_trainer, update.METHODS)
        require_passed_on(type(trainer), TrainerMixin, update.METHODS)
    dump.make_dump_dir(run)  # raise now, not at the first step
    return run


def require_same_parameters(mixin: type, verl_trainer: type, names: Iterable[str]) -> None:
    """Raise unless the class of verl has these methods of the mixin, with the same parameters."""
    for name in names:
        parameters = inspect.signature(getattr(mixin, name)).parameters.values()
        positional = [item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD]
        hooks.require_parameters(verl_trainer, name, positional)


def _trainers_of_verl(cls: type) -> list[type]:
    """Return the classes of verl among the bases of a trainer: `PPOTrainer` or `RayPPOTrainer`."""
    modules = hooks.TRAINERS.values()
    return [base for base in cls.__mro__ if base.__module__ in modules and not issubclass(base, TrainerMixin)]


@functools.cache
def with_mixin(mixin: type, cls: type) -> type:
    """Return a subclass of the mixin and the class, with the name of the class: always the same one for a class."""
    if issubclass(cls, mixin):
        return cls
    attributes = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (mixin, cls), attributes)


def require_passed_on(cls: type, mixin: type, names: Iterable[str]) -> None:
    """Raise if a class before the mixin overrides one of these methods and does not call the overridden method.

    The code of a method decides. If it contains the name of the overridden method, it counts as a call. The code of
    functions that a decorator or a closure holds is read as well. If no code can be read, log a warning.
    """
    before_mixin = cls.__mro__[: cls.__mro__.index(mixin)]
    for base in before_mixin:
        for name in names:
            if name in vars(base):
                _require_call_of_overridden(base, name)


def _require_call_of_overridden(cls: type, name: str) -> None:
    """Raise if the code of a method does not use the method's own name. Warn if its code cannot be read."""
    functions = _functions_in(vars(cls)[name])
    if not functions:
        logger.warning(
            "%s.%s is not a Python function, so verl_ext cannot check that it calls the method that it "
            "overrides. If it does not, verl_ext's code in that method is skipped. Add a call of super().%s.",
            *(dotted_name(cls), name, name),
        )
    elif not any(_mentions(function.__code__, name) for function in functions):
        raise IntegrationError(
            f"{dotted_name(cls)}.{name} does not call the method that it overrides, so verl_ext's code in that "
            f"method would be skipped. Add a call of super().{name}."
        )


def _functions_in(method: Any) -> list[FunctionType]:
    """Return the Python functions of a method: the method itself, and functions in its decorators or partial object."""
    functions: list[FunctionType] = []
    seen: dict[int, Any] = {}  # by id, and with the object, so that no other object gets the same id
    waiting = [method]
    while waiting:
        item = waiting.pop()
        # `callable` is False for these two descriptors, which Python calls through the class.
        is_method = callable(item) or isinstance(item, functools.partialmethod | classmethod)
        if not is_method or isinstance(item, type) or id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, FunctionType):
            functions.append(item)
        waiting += _held_by(item)
    return functions


def _held_by(item: Any) -> Iterator[Any]:
    """Yield the objects in a callable: its attributes, the variables of its closure, the arguments of a partial."""
    yield from getattr(item, "__dict__", {}).values()  # `__wrapped__` of functools.wraps is one of them
    if isinstance(item, functools.partial | functools.partialmethod):
        yield item.func
        yield from item.args
        yield from item.keywords.values()
    elif isinstance(item, MethodType):
        yield item.__func__
        yield item.__self__
    elif isinstance(item, classmethod | staticmethod):
        yield item.__func__
    elif isinstance(item, FunctionType):
        for cell in item.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # a variable that has no value yet
                continue


def _mentions(code: CodeType, name: str) -> bool:
    """Return whether a function, or a function in it, uses a name: as an attribute, or as text for `getattr`."""
    if name in code.co_names or name in code.co_consts:
        return True
    inner_functions = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return any(_mentions(inner, name) for inner in inner_functions)
