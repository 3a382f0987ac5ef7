"""Write the pages of docs/pages that are made from the code: settings, command line, Python API and methods.

    python scripts/quality/make_docs.py            # write the pages
    python scripts/quality/make_docs.py --check    # write nothing; exit status 1 if a page is stale

The pages need neither verl nor the packages of docs/, and do not depend on the version of Python.
`scripts/quality/generated_pages/` has a module for each page.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from generated_pages import api, command_line, methods, settings
from generated_pages.markdown import page_text

PAGES = Path(__file__).parents[2] / "docs/pages"
BLOCKS_OF_PAGE: Mapping[str, Callable[[], Iterator[str]]] = {
    "reference/settings.md": settings.blocks,
    "reference/cli.md": command_line.blocks,
    "reference/api.md": api.blocks,
    "methods/index.md": methods.blocks,
}


def main() -> int:
    """Write the pages that differ from the files, or only report them with `--check`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with status 1 if a page is stale")
    options = parser.parse_args()
    any_stale = False
    for name, blocks in BLOCKS_OF_PAGE.items():
        path = PAGES / name
        text = page_text(blocks())
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        any_stale = True
        if not options.check:
            path.write_text(text, encoding="utf-8")
        print(f"{name} {'is stale' if options.check else 'was written'}")
    return 1 if any_stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
