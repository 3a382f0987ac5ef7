"""methods/index.md: the methods with their pages, papers and steps, from the registry of methods."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generated_pages.markdown import anchor, table
from verl_ext.core.chain import Chain
from verl_ext.core.step_lists import as_list
from verl_ext.methods import METHODS
from verl_ext.registry import build
from verl_ext.settings import Settings
from verl_ext.tools.show import as_text

FOLDER = Path(__file__).parents[3] / "docs/pages/methods"
REQUIRED_SETTINGS = {"saw": {"min_values": [-3.0, 0.0]}}
"""Example values of settings that have no default, by method."""

SAME_SECTION = {"grpo": "weighted_grpo"}
"""Methods that more.md describes in the section of another method, by the name of this method."""

INTRODUCTION = """
# Methods

A method is an advantage estimator that you select with `algorithm.adv_estimator`. To find the method that fits your
rewards, see [Choose a method](../choose.md).
"""

STEPS = """
## Steps

Each method is a list of [steps](compose.md), and `python -m verl_ext show METHOD` explains them. These lists have
default settings. [More methods](more.md) has those of other methods. To change a step, copy its list to the command:
`algorithm.adv_estimator=compose '+algorithm.compose.steps=[...]'`. A list does not contain the loss that a preset sets:
with the list of `drgrpo`, also set its [loss](drgrpo.md).
"""


def blocks() -> Iterator[str]:
    """Yield the blocks of the page."""
    names = sorted(METHODS)
    yield INTRODUCTION
    yield table(["method", "paper", "what it does"], [_row(name) for name in names])
    yield STEPS
    yield table(["method", "steps"], [(f"`{name}`", _steps(name)) for name in names if _has_own_list(name)])


def _row(name: str) -> tuple[str, str, str]:
    method = METHODS[name]
    return f"[`{name}`]({_page(name)})", paper_link(method.paper), method.summary


def _has_own_list(name: str) -> bool:
    """Return whether this page shows the steps of a method, because more.md does not."""
    return name != "compose" and not _page(name).startswith("more.md")


def _page(name: str) -> str:
    """Return where a method is described: its own page, or the section of more.md with the same name.

    A missing section is no error here. tests/test_docs.py reports it.
    """
    own_page = f"{name}.md"
    if (FOLDER / own_page).exists():
        return own_page
    section = SAME_SECTION.get(name, name)
    more = (FOLDER / "more.md").read_text(encoding="utf-8")
    for heading in re.findall(r"^## (.*)$", more, re.MULTILINE):
        if _letters(heading) == _letters(section):
            return f"more.md#{anchor(heading)}"
    return f"more.md#{section}"


def _letters(name: str) -> str:
    """Return the letters of a name, by which `liteppo` is found under the heading "Lite PPO"."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def paper_link(paper: str) -> str:
    """Return the title of a paper as a link to arXiv, without sections and equations.

    >>> paper_link("GDPO, arXiv 2601.05242, section 3"), paper_link("A blog post")
    ('[GDPO](https://arxiv.org/abs/2601.05242)', 'A blog post')
    """
    title, number = split_paper(paper)
    return f"[{title}](https://arxiv.org/abs/{number})" if number else title


def split_paper(paper: str) -> tuple[str, str]:
    """Return the title and the arXiv number of a paper. The number is empty if the paper has none.

    >>> split_paper("GDPO, arXiv 2601.05242, section 3")
    ('GDPO', '2601.05242')
    """
    match = re.match(r"(.*), arXiv (\d+\.\d+)", paper)
    return (match[1], match[2]) if match else (paper, "")


def _steps(name: str) -> str:
    return f"`{as_text(as_list(chain_of(name)))}`"


def chain_of(name: str, **algorithm: Any) -> Chain:
    """Return the chain of a method with default settings, apart from these entries of `algorithm`."""
    return build(name, Settings.parse({**REQUIRED_SETTINGS, **algorithm}))
