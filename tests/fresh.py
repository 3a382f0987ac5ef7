"""A program in an interpreter that has seen neither verl nor this package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run(
    code: str,
    *arguments: str,
    module: bool = False,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run `python -c CODE`, or with `module` `python -m CODE`, in this environment or the one given."""
    command = [sys.executable, "-m" if module else "-c", code, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
