"""The files that a command is asked to write: checked before the work begins, with clear errors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from verl_ext.errors import ConfigurationError
from verl_ext.report.plot import check_picture


def check_outputs(reads: Iterable[Path], *, plot: Path | None, html: Path | None, **others: Path | None) -> None:
    """Raise if an output cannot be written, would replace a file that the command reads, or is given twice.

    The names of the outputs are those of the options.
    """
    inputs = {path.resolve() for path in reads}
    outputs: dict[Path, str] = {}
    for option, path in (("plot", plot), ("html", html), *others.items()):
        if path is None:
            continue
        if path.is_dir():
            raise ConfigurationError(f"--{option} {path} is a folder; name a file")
        if path.resolve() in inputs:
            raise ConfigurationError(f"--{option} {path} would replace a file that this command reads: name another")
        if path.resolve() in outputs:
            first = outputs[path.resolve()]
            raise ConfigurationError(f"--{first} and --{option} both write {path}: name a file for each")
        outputs[path.resolve()] = option
    if plot is not None or html is not None:
        check_picture(plot)
