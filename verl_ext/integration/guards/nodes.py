"""Whether every node of the Ray cluster has this package as we have it, asked before training starts.

verl spreads a run's processes over the cluster, where they have the environment of `ray start`, not the driver's. On a
node without the package they know neither our estimators nor our rewards, and verl says so late or, since it has a
`gdpo` of its own, not at all.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_ext.errors import ClusterError
from verl_ext.integration.compat import hooks
from verl_ext.integration.guards import guard
from verl_ext.settings import VerlExtSettings

logger = logging.getLogger("verl_ext")

PATIENCE = 300.0
"""Seconds for a node to answer: Ray first installs the run's `runtime_env` there, which may be a pip environment."""
SLOW = 30.0
"""Seconds after which the log names the nodes that are waited for."""
ASKED = "VERL_EXT_NODES_ASKED"
"""Environment variable of a run's processes: the driver asks, so that they need not."""
SWITCH = "algorithm.verl_ext.check_nodes"
CODE = "code of verl_ext"

Answer = Mapping[str, str | None] | str
"""What a node said; a text where it could not say anything."""

# Ray jobs whose nodes this process has asked: verl checks a configuration in several places.
_asked: set[str] = set()


def check_when_ray_runs(settings: VerlExtSettings) -> None:
    """In the driver, which has not started Ray yet: check right after it has.

    Not in the trainer alone: Ray may put the trainer itself on a node where nothing of this package is.
    """
    import ray

    if ray.is_initialized():
        check_in_trainer()
    else:
        hooks.wrap(ray, "init", functools.partial(wrap_init, settings=settings))


def wrap_init(original: Callable[..., Any], *, settings: VerlExtSettings) -> Callable[..., Any]:
    """`ray.init(...)` with the check after it, for one call."""

    def init(*args: Any, **kwargs: Any) -> Any:
        import ray

        ray.init = original
        variables = (kwargs.get("runtime_env") or {}).get("env_vars")
        if isinstance(variables, dict):
            variables[ASKED] = "1"
        result = original(*args, **kwargs)
        guard.attempt("check_nodes", settings, check)
        return result

    return init


def check_in_trainer() -> None:
    """Check, unless the driver that started this process has."""
    if os.environ.get(ASKED) != "1":
        check()


def check(patience: float = PATIENCE) -> None:
    """Raise one error that names every node which lacks the package, or has it or verl in another version.

    Nothing is asked where there is no cluster, or none beside the node that we are on, where workers are as we are.
    """
    import ray

    if not ray.is_initialized():
        return
    context = ray.get_runtime_context()
    nodes = usable(ray.nodes())
    if context.get_job_id() in _asked:
        return
    if {node["NodeID"] for node in nodes} <= {context.get_node_id()} and workers_have_our_environment():
        return
    began = time.monotonic()
    expected = versions()
    answers = ask(nodes, patience)
    lines = [
        f"\n  - {describe(node)}: {problem}"
        for node in nodes
        for problem in [trouble(answers[node["NodeID"]], expected)]
        if problem is not None
    ]
    if lines:
        raise ClusterError(
            f"{len(lines)} of the {len(nodes)} nodes of the Ray cluster cannot take part in this run. Expected on "
            f"every node: {_said(expected)}, as here, and that verl loads the plugin. Found:{''.join(lines)}\n"
            "Install the same versions in the environment from which `ray start` is run on these nodes, or give the "
            "run a Ray runtime_env which brings the package (pip, py_modules), or take the nodes out of the cluster. "
            f"If nothing of this run is placed on them, ++{SWITCH}=False starts it without asking"
        )
    _asked.add(context.get_job_id())
    have = "the one node has" if len(nodes) == 1 else f"all {len(nodes)} nodes have"
    logger.info("%s %s; asked in %.1f s", have, _said(expected), time.monotonic() - began)


def workers_have_our_environment() -> bool:
    """Whether Ray's workers on this node are sure to be as this process is: it is one, or it has started Ray.

    Ray says neither in public; where it keeps what is looked at elsewhere one day, the node is asked.
    """
    import ray

    worker = ray._private.worker
    if getattr(getattr(worker, "global_worker", None), "mode", None) == ray.WORKER_MODE:
        return True
    started = getattr(worker, "_global_node", None)
    return started is not None and bool(started.is_head())


def usable(nodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The alive nodes on which verl can start a process, by name: each of its placements asks for a CPU."""
    found = [node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    return sorted(found, key=lambda node: (str(node.get("NodeManagerHostname")), node["NodeManagerAddress"]))


def describe(node: Mapping[str, Any]) -> str:
    """A node as its owner knows it: host, address, Ray's id."""
    return f"{node.get('NodeManagerHostname') or 'node'} ({node['NodeManagerAddress']}, node id {node['NodeID']})"


def versions() -> dict[str, str]:
    """What every node should have: what this process has."""
    import verl

    import verl_ext

    code = fingerprint()(os.path.dirname(verl_ext.__file__))
    return {"verl_ext": verl_ext.__version__, "verl": verl.__version__, CODE: code}


def _said(expected: Mapping[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in expected.items() if name != CODE)


def fingerprint() -> Callable[[str], str]:
    """What tells two sources apart that call themselves the same version; made anew as `question` is."""

    def code_in(folder: str) -> str:
        import hashlib
        import os

        found = hashlib.sha256()
        for path, folders, names in os.walk(folder):
            folders.sort()
            for name in sorted(name for name in names if name.endswith(".py")):
                full = os.path.join(path, name)
                with open(full, "rb") as file:
                    content = file.read()
                found.update(f"{os.path.relpath(full, folder)} {len(content)}\n".encode() + content)
        return found.hexdigest()

    return code_in


def question() -> Callable[[], dict[str, str | None]]:
    """What a worker process is asked.

    Made anew by each call: Ray sends such a function whole, where it would send one of a module by name and fail on a
    node that does not have the module.
    """
    code_in, code = fingerprint(), CODE

    def answer() -> dict[str, str | None]:
        import importlib
        import os
        import sys

        found: dict[str, str | None] = {}
        for name in ("verl", "verl_ext"):
            try:
                module = importlib.import_module(name)
                found[name] = str(module.__version__)
                found[f"{name} from"] = os.path.dirname(module.__file__ or "")
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
                found[f"{name} failed"] = f"{type(error).__name__}: {error}"
        folder = found.get("verl_ext from")
        found[code] = code_in(folder) if folder else None
        plugin = sys.modules.get("verl_ext.integration.plugin")
        found["plugin"] = None if plugin is None else str(getattr(plugin, "broken", None) or "loaded")
        found["policy"] = os.environ.get("VERL_USE_EXTERNAL_PLUGINS")
        return found

    return answer


def trouble(answer: Answer, expected: Mapping[str, str]) -> str | None:
    """What is wrong with a node, None if nothing is."""
    if isinstance(answer, str):
        return answer
    problems = []
    for name in ("verl_ext", "verl"):
        if f"{name} failed" in answer:
            problems.append(f"{name} cannot be imported ({answer[f'{name} failed']})")
        elif answer[name] != expected[name]:
            problems.append(f"{name} {answer[name]} (in {answer[f'{name} from']}), expected {expected[name]}")
        elif name == "verl_ext" and answer[CODE] != expected[CODE]:
            problems.append(f"{name} {answer[name]} with other code than here (in {answer[f'{name} from']})")
    if not problems and answer["plugin"] is None:
        policy = answer["policy"]
        problems.append(
            f"verl does not load the plugin: VERL_USE_EXTERNAL_PLUGINS={policy}"
            if policy not in (None, "", "auto")
            else f"verl does not load the plugin: verl_ext is in {answer['verl_ext from']}, and no installed package "
            "brings its entry point; install it there, or set VERL_USE_EXTERNAL_MODULES=verl_ext.integration.plugin"
        )
    elif not problems and answer["plugin"] != "loaded":
        problems.append(f"the plugin could not set itself up: {answer['plugin']}")
    return "; ".join(problems) or None


def ask(nodes: Sequence[Mapping[str, Any]], patience: float) -> dict[str, Answer]:
    """Each node's answer, by its id; all are asked at once, each in a worker process of its own."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # One call a process: one that has imported verl for this would keep its memory for the whole run.
    task = ray.remote(num_cpus=0, max_retries=0, max_calls=1)(question())
    pending = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(): node
        for node in nodes
    }
    answers: dict[str, Answer] = {}
    _collect(pending, answers, min(SLOW, patience))
    if pending:
        logger.warning("waiting for an answer of %s", ", ".join(map(describe, pending.values())))
        _collect(pending, answers, max(0.0, patience - SLOW))
    for reference, node in pending.items():
        answers[node["NodeID"]] = (
            f"no answer within {patience:.0f} s: no worker process started there in this time, or importing verl took "
            "longer"
        )
        ray.cancel(reference, force=True)
    return answers


def _collect(pending: dict[Any, Mapping[str, Any]], answers: dict[str, Answer], patience: float) -> None:
    """Move what arrives in time from `pending` to `answers`."""
    import ray

    done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=patience)
    for reference in done:
        try:
            answers[pending[reference]["NodeID"]] = ray.get(reference)
        except ray.exceptions.RayError as error:
            answers[pending[reference]["NodeID"]] = f"it could not be asked: {type(error).__name__}: {error}".strip()
        del pending[reference]
