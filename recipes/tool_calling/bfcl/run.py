"""Run bfcl-eval's commands (`generate`, `evaluate`, `scores`) with the handler of this recipe, and two more commands.

    python recipes/tool_calling/bfcl/run.py template data/tool_calling/train.parquet    # writes template.txt
    python recipes/tool_calling/bfcl/run.py generate --skip-server-setup --local-model-path MERGED
    python recipes/tool_calling/bfcl/run.py evaluate
    python recipes/tool_calling/bfcl/run.py correct-format result/verl-ext-tool-calling

Results, scores and the template go to BFCL_PROJECT_ROOT (default: outputs/bfcl of this repository).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

# There is no underscore, because bfcl-eval replaces it by a slash.
MODEL = "verl-ext-tool-calling"
VERSION = "2025.7.17"


def home() -> Path:
    """Return the output folder."""
    return Path(os.environ.setdefault("BFCL_PROJECT_ROOT", str(ROOT / "outputs" / "bfcl"))).resolve()


def write_template(data: Path) -> int:
    """Make the template of the system prompt from prepared training data."""
    import pyarrow.parquet

    from recipes.tool_calling.bfcl.prompt import template_of

    messages = pyarrow.parquet.read_table(data, columns=["prompt"]).slice(0, 1).to_pylist()[0]["prompt"]
    system = [message["content"] for message in messages if message["role"] == "system"]
    if len(system) != 1:
        sys.stderr.write(
            f"error: the first prompt of {data} has {len(system)} system messages, expected one. Use the train.parquet "
            "that prepare_data.py of this recipe wrote.\n"
        )
        return 1
    try:
        template = template_of(system[0])
    except ValueError as error:
        sys.stderr.write(f"error: {data}: {error}\n")
        return 1
    home().mkdir(parents=True, exist_ok=True)
    (home() / "template.txt").write_text(template, encoding="utf-8")
    print(
        f"The template was written to {home() / 'template.txt'}. Check that only the tools were replaced:\n\n{template}"
    )
    return 0


def correct_format(folder: Path) -> int:
    """Print the percentage of responses with a correct format in the results of a folder."""
    from recipes.tool_calling.bfcl.correct_format import main

    return main(folder if folder.is_absolute() or folder.exists() else home() / folder)


def bfcl(arguments: Sequence[str]) -> None:
    """Run bfcl-eval's command line, with the model of this recipe registered and selected by default."""
    home().mkdir(parents=True, exist_ok=True)
    template = home() / "template.txt"
    if arguments[:1] == ["generate"] and not template.is_file():
        sys.exit(
            f"error: {template} does not exist. Run `run.py template TRAIN.parquet`, which generates the template from "
            "the training data."
        )
    os.environ.setdefault("TOOL_CALLING_TEMPLATE", str(template))
    register()
    given = list(arguments)
    if given[:1] in (["generate"], ["evaluate"]) and "--model" not in given:
        given += ["--model", MODEL]
    from bfcl_eval.__main__ import cli

    cli(given)


def register() -> None:
    """Register the model with bfcl-eval, which must have the expected version."""
    from importlib.metadata import version

    if version("bfcl-eval") != VERSION:
        sys.exit(
            f"error: bfcl-eval {version('bfcl-eval')} is not the version of the paper (BFCL v3). Install it with "
            f"`pip install bfcl-eval=={VERSION}`."
        )
    from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING, ModelConfig

    from recipes.tool_calling.bfcl.handler import ToolCallingHandler

    MODEL_CONFIG_MAPPING[MODEL] = ModelConfig(
        model_name=MODEL,
        display_name=MODEL,
        url="https://arxiv.org/abs/2601.05242",
        org="verl_ext",
        license="apache-2.0",
        model_handler=ToolCallingHandler,
        input_price=None,
        output_price=None,
        is_fc_model=False,
        underscore_to_dot=False,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["template"] and len(sys.argv) == 3:
        sys.exit(write_template(Path(sys.argv[2])))
    if sys.argv[1:2] == ["correct-format"] and len(sys.argv) == 3:
        sys.exit(correct_format(Path(sys.argv[2])))
    if len(sys.argv) == 1 or sys.argv[1] in ("template", "correct-format"):
        sys.exit(__doc__)
    bfcl(sys.argv[1:])
