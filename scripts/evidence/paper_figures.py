"""Draw the papers' claims from the package's own estimators: exact numbers, no samples and no model.

    python scripts/evidence/paper_figures.py            # print the key numbers, write the pictures and their paragraphs
    python scripts/evidence/paper_figures.py --check    # write nothing; exit status 1 if a paragraph is stale

Each estimator's page in docs/pages/estimators has its picture and its paragraph between two marks. The pictures
need matplotlib, the package's extra `plot`.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from types import ModuleType

from figures import dgpo, drgrpo, gdpo, hadw

PAGES = Path(__file__).parents[2] / "docs" / "pages" / "estimators"
PICTURES = PAGES.parent / "pictures"
FIGURES: dict[str, tuple[ModuleType, tuple[float, float]]] = {
    "gdpo": (gdpo, (9.2, 5.4)),
    "dgpo": (dgpo, (9.2, 3.8)),
    "hadw": (hadw, (9.2, 7.2)),
    "drgrpo": (drgrpo, (9.2, 3.8)),
}
"""The figure of each page, and its size in inches."""
BEGIN = "<!-- Made by scripts/evidence/paper_figures.py from figures/{name}.py: change it there, then run it again. -->"
END = "<!-- End of what scripts/evidence/paper_figures.py made. -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    stale = []
    for name in FIGURES:
        text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
        new = page(name, text)
        if new != text:
            stale.append(f"{name}.md")
        if not options.check:
            (PAGES / f"{name}.md").write_text(new, encoding="utf-8")
            draw(name, PICTURES / f"paper_{name}.png")
    if stale:
        print(f"{'stale' if options.check else 'written'}: {', '.join(stale)}")
    return 1 if options.check and stale else 0


def page(name: str, text: str) -> str:
    """The page with the paragraph as it must be; prints the key numbers."""
    figure, _ = FIGURES[name]
    numbers = figure.key_numbers()
    for label, value in numbers.items():
        print(f"{name:8}{label:60}{value:10.4f}")
    begin = BEGIN.format(name=name)
    if text.count(begin) != 1 or text.count(END) != 1:
        raise SystemExit(f"{PAGES / name}.md must have these two lines once each:\n{begin}\n{END}")
    before, _, rest = text.partition(begin)
    after = rest.partition(END)[2]
    picture = f"![{figure.ALT}](../pictures/paper_{name}.png)"
    # A code span must stay on one line, because some renderers of Markdown break it.
    text = "\n".join(map(wrapped, figure.paragraph(numbers).split("\n")))
    return f"{before}{begin}\n{picture}\n\n{text}\n{END}{after}"


def wrapped(text: str) -> str:
    """A paragraph or an item of a list in lines of the page's width; a piece of code is not broken."""
    joined = "`".join(part.replace(" ", "\0") if at % 2 else part for at, part in enumerate(text.split("`")))
    indent = "  " if text.startswith("- ") else ""
    lines = textwrap.fill(joined, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")


def draw(name: str, path: Path) -> None:
    """Write the picture of a page."""
    try:
        from matplotlib.figure import Figure
        from PIL import Image
    except ImportError as error:
        raise SystemExit("the pictures need matplotlib: pip install 'matplotlib>=3.7'") from error
    module, size = FIGURES[name]
    figure = Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1)
    module.draw(figure)
    figure.savefig(path, dpi=130)
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(256)  # half the size, and no difference to see
    small.save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
