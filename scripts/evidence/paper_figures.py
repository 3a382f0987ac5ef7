"""Draw the papers' claims from the package's own estimators: exact numbers, no samples and no model.

    python scripts/evidence/paper_figures.py    # writes the pictures and their paragraphs

Each estimator's page in docs/pages/estimators has its picture and its paragraph between two marks. The pictures
need matplotlib, the package's extra `plot`.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from types import ModuleType

from figures import dgpo, gdpo, hadw

PAGES = Path(__file__).parents[2] / "docs" / "pages" / "estimators"
PICTURES = PAGES.parent / "pictures"
FIGURES: dict[str, tuple[ModuleType, tuple[float, float]]] = {
    "gdpo": (gdpo, (9.2, 3.8)),
    "dgpo": (dgpo, (9.2, 3.8)),
    "hadw": (hadw, (9.2, 3.8)),
}
"""The figure of each page, and its size in inches."""
BEGIN = "<!-- Made by scripts/evidence/paper_figures.py from figures/{name}.py: change it there, then run it again. -->"
END = "<!-- End of what scripts/evidence/paper_figures.py made. -->"


def main() -> None:
    for name in FIGURES:
        path = PAGES / f"{name}.md"
        path.write_text(page(name, path.read_text(encoding="utf-8")), encoding="utf-8")
        draw(name, PICTURES / f"paper_{name}.png")


def page(name: str, text: str) -> str:
    """The page with the paragraph as it must be."""
    figure, _ = FIGURES[name]
    before, begin, rest = text.partition(BEGIN.format(name=name))
    _, end, after = rest.partition(END)
    picture = f"![{figure.ALT}](../pictures/paper_{name}.png)"
    # A code span must stay on one line, because some renderers of Markdown break it.
    made = "\n".join(map(wrapped, figure.paragraph().split("\n")))
    return f"{before}{begin}\n{picture}\n\n{made}\n{end}{after}"


def wrapped(text: str) -> str:
    """A paragraph or an item of a list in lines of the page's width; a piece of code is not broken."""
    joined = "`".join(part.replace(" ", "\0") if at % 2 else part for at, part in enumerate(text.split("`")))
    indent = "  " if text.startswith("- ") else ""
    lines = textwrap.fill(joined, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")


def draw(name: str, path: Path) -> None:
    """Write the picture of a page."""
    from matplotlib.figure import Figure
    from PIL import Image

    module, size = FIGURES[name]
    figure = Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1)
    module.draw(figure)
    figure.savefig(path, dpi=130)
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(256)  # half the size, and no difference to see
    small.save(path, optimize=True)


if __name__ == "__main__":
    main()
