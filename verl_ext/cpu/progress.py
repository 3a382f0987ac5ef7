"""In a rehearsal, the processes of verl record their progress in files of its folder."""

import os
from pathlib import Path

FOLDER_VARIABLE = "VERL_EXT_REHEARSAL"
"""The environment variable with the folder. It is not set in other runs."""
PROMPTS = "prompts"
"""A file with a line for each dataset: its number of prompts before and after filtering."""
STARTED = "started"
"""A file that exists once the rollout has received a request."""


def record(file_name: str, line: str = "") -> None:
    """Append a line to a file if this process belongs to a rehearsal."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        with (Path(folder) / file_name).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
