"""Run `check` with a command line, and read which settings its errors and warnings name.

verl is imported once. Each command runs in a child of the process by `fork`, so that it finds Hydra's state fresh.
"""

import copy
import functools
import gc
import importlib
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import pandas
import tomllib
from omegaconf import OmegaConf

import verl_ext
from same_as import renamed
from same_as.cases import Case
from same_as.command_lines import COMMANDS
from same_as.spelling import PROBES, Spelling, newest, probed

UNKNOWN_OPTION = 2
"""The exit status of argparse."""
LIMIT = 240.0
"""Seconds for one command."""
ROOTS = (
    *("algorithm", "actor_rollout_ref", "data", "trainer", "reward", "critic", "rewards", "verl_ext", "rollout"),
    *(
        "filter_groups",
        "custom_reward_function",
        "reward_model",
        "ray_kwargs",
        "gdpo",
        "hadw",
        "dgpo",
        "drgrpo",
        "actor",
    ),
)
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(ROOTS)})(?:\.[a-zA-Z_]\w*)+")
HEADING = re.compile(r"\s*\d+ (error|warning)s?\b")
REWARD = """
import re

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "unknown":
        raise NotImplementedError(f"no scorer for {data_source}")
    right = float(solution_str.strip().endswith(ground_truth))
    return {"score": right, "acc": right, "format": float(len(solution_str) < 20)}

def without_dotall(data_source, solution_str, ground_truth, extra_info=None):
    tidy = float(bool(re.fullmatch(r"<think>.*</think>.*", solution_str)))
    return {"score": tidy, "acc": float(ground_truth in solution_str), "format": tidy}

def backtracks(data_source, solution_str, ground_truth, extra_info=None):
    re.match(r"(\\d+ ?)+x", "7" * 60)
    return {"score": 1.0, "acc": 1.0, "format": 0.0}
"""


_load = OmegaConf.load
_load_once = functools.cache(_load)


def load_file(file: Any) -> Any:
    """Do what `OmegaConf.load` does, but read each file of verl's configuration once."""
    path = str(getattr(file, "name", file))
    return copy.deepcopy(_load_once(path)) if "/verl/trainer/config/" in path else _load(file)


@functools.cache
def prepare() -> None:
    """Import verl and read its configuration once, before commands are forked: that takes most of their time."""
    OmegaConf.load = load_file
    from same_as.trainers import base_config

    base_config()


def draw_case(seed: int) -> Case:
    """Return the case of a command line: the seed is its place in the list."""
    name, arguments = COMMANDS[seed]
    return Case("check", seed, overrides={"arguments": arguments}, tags=[name], batches=[])


def run_command(case: Case, spelling: Spelling, outcome: dict[str, Any]) -> None:
    """Run one command; its exit status and the settings that it names are compared."""
    prepare()
    with tempfile.TemporaryDirectory(prefix="same_as-") as name:
        folder = Path(name)
        write_files(folder)
        root = Path(verl_ext.__file__).parents[1]
        places = {"{folder}": str(folder), "{root}": str(root), "{{}}": "{}"}
        arguments = [replaced(text, places) for text in case.overrides["arguments"]]
        lacking = [feature for text in arguments for feature in features_of(text) if not spelling.knows(feature)]
        outcome["method"] = case.tags[0]
        if lacking:
            outcome |= {"end": "skipped", "text": ", ".join(lacking)}
            return
        translated = [translated_override(text, spelling) for text in arguments]
        status, text = in_child(["check", *translated], root, folder / "output.txt")
        for new, old in renamed.OPTIONS:
            if status == UNKNOWN_OPTION and new in translated:
                translated = [old if argument == new else argument for argument in translated]
                status, text = in_child(["check", *translated], root, folder / "output.txt")
        named = settings_of(text)
        outcome["batches"] = [
            {"status": status, **{kind: dict.fromkeys(sorted(paths), True) for kind, paths in named.items()}}
        ]
        outcome["output"] = text


def replaced(text: str, places: dict[str, str]) -> str:
    for place, value in places.items():
        text = text.replace(place, value)
    return text


def write_files(folder: Path) -> None:
    """Write the reward functions, the data and the checkpoint that the command lines name."""
    (folder / "reward.py").write_text(REWARD)
    content = [{"role": "user", "content": "a"}]
    for name, source in (("train", "x"), ("val", "x"), ("other", "unknown")):
        rows = [
            {"data_source": source, "prompt": content, "reward_model": {"ground_truth": str(at)}} for at in range(1, 9)
        ]
        pandas.DataFrame(rows).to_parquet(folder / f"{name}.parquet")
    finished = folder / "finished/global_step_6"
    finished.mkdir(parents=True)
    (finished / "data.pt").write_bytes(b"")
    (folder / "finished/latest_checkpointed_iteration.txt").write_text("6")


def in_child(arguments: list[str], root: Path, output: Path) -> tuple[int, str]:
    """Call the main function of the version's console script in a child; return its status and all it printed."""
    target = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]["verl-ext"]
    module, _, function = target.partition(":")
    main = getattr(importlib.import_module(module), function)
    sys.stdout.flush()
    gc.freeze()  # the child's garbage collector would else copy the whole heap of the parent
    child = os.fork()
    if child == 0:
        status = 70
        try:
            target_file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(target_file, 1)
            os.dup2(target_file, 2)
            os.chdir(output.parent)
            os.environ["COLUMNS"] = "1000"
            try:
                status = main(arguments)
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else 1
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:  # noqa: BLE001 - the child ends here
            traceback.print_exc()
        finally:
            os._exit(status)
    return _wait(child), output.read_text(errors="replace") if output.exists() else ""


def _wait(child: int) -> int:
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def settings_of(text: str) -> dict[str, set[str]]:
    r"""Return the settings that errors and warnings name, under their newest names.

    An error or a warning is a line below the heading of its kind, or a line that begins with its kind or with the type
    of an error.

    >>> settings_of("1 error\n  - algorithm.rewards.keys is missing: set data.x=1\n0 warnings")["errors"]
    {'algorithm.rewards.keys', 'data.x'}
    """
    found: dict[str, set[str]] = {"errors": set(), "warnings": set()}
    kind = None
    for line in text.splitlines():
        heading = HEADING.match(line)
        start = re.match(r"\s*(?:\[)?(error|warning)\b", line, re.IGNORECASE)
        if heading:
            kind = f"{heading[1]}s"
            continue
        if start:
            kind = f"{start[1].lower()}s"
        elif re.match(r"\w*(Error|Exception)\b", line):
            kind = "errors"
        elif not line.startswith((" ", "\t")):
            kind = None
        if kind is not None:
            found[kind] |= {_newest(path) for path in PATH.findall(line)}
    return found


def _newest(path: str) -> str:
    below = path.removeprefix("algorithm.")
    new = newest(renamed.SETTINGS, below)
    return path if new == below else f"algorithm.{new}"


def _setting_of(text: str) -> tuple[str, str, str, str] | None:
    """Return the pluses, the path below `algorithm`, and the value of an override; None for another argument."""
    found = re.match(r"(\+{0,2})(algorithm\.)([\w.]+)=(.*)", text, re.DOTALL)
    return None if found is None else (found[1], found[2], found[3], found[4])


def features_of(text: str) -> list[str]:
    """Return the features that an argument uses."""
    preset = re.fullmatch(r"\+verl_ext=(\w+)|algorithm\.adv_estimator=(\w+)", text)
    if preset:
        return [name for name in (f"method.{preset[1] or preset[2]}",) if name in PROBES]
    setting = _setting_of(text)
    if setting is None:
        return []
    _, _, path, value = setting
    found = [probed(("setting", path), path)]
    if path == "compose.steps":
        found += [probed(("step", name), f"steps.{name}") for name in re.findall(r"[a-z_]+", value)]
    return [feature for feature in found if feature in PROBES]


def translated_override(text: str, spelling: Spelling) -> str:
    """Return an argument in the vocabulary of this version."""
    setting = _setting_of(text)
    if setting is None:
        preset = re.fullmatch(r"(\+verl_ext=)(\w+)", text)
        return text if preset is None else preset[1] + spelling.spell(("method", preset[2]))[1]
    plus, section, path, value = setting
    if path == "adv_estimator":
        value = spelling.spell(("method", value))[1]
    elif path == "compose.steps":
        value = re.sub(r"[a-z_]+", lambda found: spelling.spell(("step", found[0]))[1], value)
    elif path == "rewards.conditions":
        for name in ("reward", "at_least"):
            new_name = spelling.spell(("setting", f"{path}.*.{name}"))[1].rpartition(".")[2]
            value = re.sub(rf"\b{name}\b(?=:)", new_name, value)
    else:
        value = str(spelling.spell(("value", path, value))[2])
    return f"{plus}{section}{spelling.spell(('setting', path))[1]}={value}"
