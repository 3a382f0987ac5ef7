"""Hooks of mkdocs: pages from files outside docs/pages, links into the repository, formulas, captions of pictures."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = "docs/pages"
FILE_OF_PAGE = {
    "index.md": "README.md",
    "recipes.md": "recipes/README.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
}
"""The pages that are made from files outside docs/pages. Paths of files are relative to the root of the repository."""
PAGE_OF_FILE = {file: page for page, file in FILE_OF_PAGE.items()}
SEARCH_BOOST = {"choose.md": 2, "reference/api.md": 0.2, "reference/glossary.md": 0.5}
"""Factors for the rank of a page in the search. The docstrings of the API have many words of other pages."""
SEARCH_TAGS = {"reference/metrics.md": ["zero_variance_group_fraction", "contribution"]}
"""Words for which a page comes first in the search."""
LINK = r"(?<=\]\()([^)#\s]+)(?=[)#])"
"""The target of a Markdown link or picture, without the anchor."""


def _read(file: str, pattern: str) -> str:
    (found,) = re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    return str(found)


def on_config(config: Any) -> Any:
    """Show the repository's address and the version on each page, and convert blocks in the language `math`."""
    config.repo_url = _read("pyproject.toml", r'^Source = "(.*)"')
    config.repo_name = "Source"
    config.edit_uri = f"edit/main/{PAGES}/"
    config.copyright = f"verl_ext {_read('verl_ext/__init__.py', r'^__version__ = .(.*).$')}"
    fence = {"name": "math", "class": "math", "format": _formula}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages that are made from files outside docs/pages."""
    for page, file in FILE_OF_PAGE.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_pre_page(page: Any, *, config: Any, **_: Any) -> Any:
    """Let the edit link of a page that is made from another file lead to this file."""
    file = FILE_OF_PAGE.get(page.file.src_uri)
    if file is not None:
        page.edit_url = f"{config.repo_url}/edit/main/{file}"
    return page


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Set the rank of a page in the search. Let links lead to pages of the site, or else to the repository."""
    uri = page.file.src_uri
    page.meta["search"] = {"boost": SEARCH_BOOST.get(uri, 1)}
    page.meta["tags"] = SEARCH_TAGS.get(uri, [])
    source = FILE_OF_PAGE.get(uri, f"{PAGES}/{uri}")
    return re.sub(LINK, lambda link: _target_on_site(link[1], source, uri, config.repo_url), markdown)


def _target_on_site(target: str, source: str, page: str, repository: str) -> str:
    """Return the target on the site of a link from the file `source`, which is shown as `page`."""
    if "://" in target:
        return target
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    target_page = PAGE_OF_FILE.get(path)
    if path.startswith(f"{PAGES}/"):
        target_page = path.removeprefix(f"{PAGES}/")
    if target_page is None:
        return f"{repository}/blob/main/{path}"
    return posixpath.relpath(target_page, posixpath.dirname(page) or ".")


def _formula(source: str, *_: Any, **__: Any) -> str:
    r"""Return a block of LaTeX as MathML, which browsers draw without a script. The line may be broken at `\qquad`."""
    parts = (convert(part.strip(), display="block") for part in source.split("\\qquad"))
    return f'<div class="formula">{" ".join(parts)}</div>'


def on_page_content(html: str, **_: Any) -> str:
    """Show the text of a picture below it, unless a caption follows. The picture links to its full size."""
    picture = r'<p>(<img alt="([^"]*)" src="([^"]*)"[^>]*>)</p>'
    html = re.sub(rf"{picture}(?=\s*<p><em>)", r'<a href="\3">\1</a>', html)
    return re.sub(picture, r'<figure><a href="\3">\1</a><figcaption>\2</figcaption></figure>', html)
