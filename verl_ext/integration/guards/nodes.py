"""Check before training that every node of the Ray cluster has the driver's versions of this package and of verl.

verl places a run's processes on all nodes of the cluster. There they use the environment of `ray start`, not the
driver's. On a node without this package our estimators and rewards are unknown. verl reports that late, or not at all,
since it has a `gdpo` of its own.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_ext.errors import ClusterError
from verl_ext.integration.compat import hooks
from verl_ext.integration.guards import guard
from verl_ext.settings import VerlExtSettings

logger = logging.getLogger("verl_ext")

PATIENCE = 300.0
"""Seconds to wait for a node: Ray first installs the run's `runtime_env` there, which may be a pip environment."""
SLOW = 30.0
"""Seconds after which a warning names the nodes that have not answered."""
ASKED = "VERL_EXT_NODES_ASKED"
"""Environment variable of a run's processes: it is 1 if the driver has checked the nodes already."""
SWITCH = "algorithm.verl_ext.check_nodes"
CODE = "code of verl_ext"

Answer = Mapping[str, str | None] | str
"""What a node answered, or a text that says why it did not."""

# Ray jobs whose nodes this process has checked: verl checks a configuration in several places.
_asked: set[str] = set()


def check_when_ray_runs(settings: VerlExtSettings) -> None:
    """Check the nodes now if Ray runs, otherwise right after `ray.init`. The driver calls this.

    The check in the trainer is not enough: Ray may place the trainer on a node without this package.
    """
    if ray.is_initialized():
        check_in_trainer()
    else:
        hooks.wrap(ray, "init", functools.partial(wrap_init, settings=settings))


def wrap_init(original: Callable[..., Any], *, settings: VerlExtSettings) -> Callable[..., Any]:
    """`ray.init(...)`, followed by the check; the next call is verl's own again."""

    def init(*args: Any, **kwargs: Any) -> Any:
        ray.init = original
        variables = (kwargs.get("runtime_env") or {}).get("env_vars")
        if isinstance(variables, dict):
            variables[ASKED] = "1"
        result = original(*args, **kwargs)
        guard.attempt("check_nodes", settings, check)
        return result

    return init


def check_in_trainer() -> None:
    """Check the nodes unless the driver has done it."""
    if os.environ.get(ASKED) != "1":
        check()


def check(patience: float = PATIENCE) -> None:
    """Raise one error that names every node without the package, or with another version of it or of verl.

    Skip the check if Ray does not run, or if this node is the only one and its workers have our environment.
    """
    if not ray.is_initialized():
        return
    context = ray.get_runtime_context()
    nodes = usable(ray.nodes())
    if context.get_job_id() in _asked:
        return
    if {node["NodeID"] for node in nodes} <= {context.get_node_id()} and workers_have_our_environment():
        return
    began = time.monotonic()
    expected = answer()
    answers = ask(nodes, patience)
    found = [(describe(node), trouble(answers[node["NodeID"]], expected)) for node in nodes]
    lines = [f"\n  - {node}: {problem}" for node, problem in found if problem is not None]
    wanted = f"verl_ext {expected['verl_ext']} and verl {expected['verl']}"
    if lines:
        raise ClusterError(
            f"{len(lines)} of the {len(nodes)} nodes of the Ray cluster cannot take part in this run. Expected on "
            f"every node: {wanted}, as in this process, and that verl loads the plugin. Found:"
            f"{''.join(lines)}\n"
            "Install the same versions in the environment in which `ray start` is run on these nodes, or give the run "
            "a Ray runtime_env that installs the package (pip, py_modules), or remove the nodes from the cluster. If "
            f"no process of this run is placed on them, ++{SWITCH}=False skips this check"
        )
    _asked.add(context.get_job_id())
    have = "the one node has" if len(nodes) == 1 else f"all {len(nodes)} nodes have"
    logger.info("%s %s; checked in %.1f s", have, wanted, time.monotonic() - began)


def workers_have_our_environment() -> bool:
    """Whether Ray's workers on this node certainly have our environment: we are one of them, or we started Ray.

    This reads private attributes, because Ray has no public call for it. If they move, the answer is False and the
    node is asked.
    """
    worker = ray._private.worker
    if getattr(getattr(worker, "global_worker", None), "mode", None) == ray.WORKER_MODE:
        return True
    started = getattr(worker, "_global_node", None)
    return started is not None and bool(started.is_head())


def usable(nodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The alive nodes on which verl can start a process, sorted by name: each of its placements needs a CPU."""
    alive = [node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    return sorted(alive, key=lambda node: (node["NodeManagerHostname"], node["NodeManagerAddress"]))


def describe(node: Mapping[str, Any]) -> str:
    """A node in a message: host, address, Ray's id."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, node id {node['NodeID']})"


def code_in(folder: str) -> str:
    """A hash of a package's source, since two sources may have one version."""
    digest = hashlib.sha256()
    for path, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(name for name in names if name.endswith(".py")):
            full = os.path.join(path, name)
            with open(full, "rb") as file:
                content = file.read()
            digest.update(f"{os.path.relpath(full, folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def answer() -> dict[str, str | None]:
    """What each node runs in a worker process, and this process too, for the expected answer.

    It may use only Python's own modules and what `ask` sends along, because a node may lack this package.
    """
    facts: dict[str, str | None] = {}
    for name in ("verl", "verl_ext"):
        try:
            module = importlib.import_module(name)
            facts[name] = str(module.__version__)
            facts[f"{name} from"] = os.path.dirname(module.__file__ or "")
        except Exception as error:  # noqa: BLE001 - any failure is the answer
            facts[f"{name} failed"] = f"{type(error).__name__}: {error}"
    folder = facts.get("verl_ext from")
    facts[CODE] = code_in(folder) if folder else None
    plugin = sys.modules.get("verl_ext.integration.plugin")
    facts["plugin"] = None if plugin is None else str(getattr(plugin, "broken", None) or "loaded")
    facts["policy"] = os.environ.get("VERL_USE_EXTERNAL_PLUGINS")
    return facts


def trouble(answer: Answer, expected: Mapping[str, str | None]) -> str | None:
    """What is wrong with a node, or None."""
    if isinstance(answer, str):
        return answer
    problems = []
    for name in ("verl_ext", "verl"):
        if f"{name} failed" in answer:
            problems.append(f"{name} cannot be imported ({answer[f'{name} failed']})")
        elif answer[name] != expected[name]:
            problems.append(f"{name} {answer[name]} (in {answer[f'{name} from']}), expected {expected[name]}")
        elif name == "verl_ext" and answer[CODE] != expected[CODE]:
            problems.append(f"{name} {answer[name]}, but its code differs from ours (in {answer[f'{name} from']})")
    if not problems and answer["plugin"] is None:
        policy = answer["policy"]
        problems.append(
            f"verl does not load the plugin: VERL_USE_EXTERNAL_PLUGINS={policy}"
            if policy not in (None, "", "auto")
            else f"verl does not load the plugin: verl_ext is in {answer['verl_ext from']}, but no installed package "
            "has its entry point; install it there, or set VERL_USE_EXTERNAL_MODULES=verl_ext.integration.plugin"
        )
    elif not problems and answer["plugin"] != "loaded":
        problems.append(f"the plugin could not be set up: {answer['plugin']}")
    return "; ".join(problems) or None


def ask(nodes: Sequence[Mapping[str, Any]], patience: float) -> dict[str, Answer]:
    """Each node's answer, by its id. All nodes are asked at once, each in a new worker process."""
    import ray

    # Sent by name, the function would fail on a node without this package.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    # One call per process: a worker that has imported verl would hold that memory for the whole run.
    task = ray.remote(num_cpus=0, max_retries=0, max_calls=1)(answer)
    pending = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(): node
        for node in nodes
    }
    answers: dict[str, Answer] = {}

    def collect(seconds: float) -> None:
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=seconds)
        for reference in done:
            node = pending.pop(reference)
            try:
                answers[node["NodeID"]] = ray.get(reference)
            except ray.exceptions.RayError as error:
                answers[node["NodeID"]] = f"asking it failed: {type(error).__name__}: {error}".strip()

    collect(min(SLOW, patience))
    if pending:
        logger.warning("waiting for an answer from %s", ", ".join(map(describe, pending.values())))
        collect(max(0.0, patience - SLOW))
    for reference, node in pending.items():
        answers[node["NodeID"]] = (
            f"no answer within {patience:.0f} s: by then no worker process had started there, or it was still "
            "importing verl"
        )
        ray.cancel(reference, force=True)
    return answers
