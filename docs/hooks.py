"""What mkdocs adds to the pages: the repository's address and the version, formulas, and captions of pictures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]


def _read(file: str, pattern: str) -> str:
    (found,) = re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    return str(found)


def _of_the_index() -> list[tuple[str, str]]:
    """Return the substitutions of the README on the package index; the first two concern commands, the others links."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r"pattern = '(.*)', replacement = '(.*)'", project)


def on_config(config: Any) -> Any:
    """Show both in the head and the foot of each page."""
    config.repo_url = _read("pyproject.toml", r'^Source = "(.*)"')
    config.repo_name = "Source"
    config.copyright = f"verl_ext {_read('verl_ext/__init__.py', r'^__version__ = .(.*).$')}"
    fence = {"name": "math", "class": "math", "format": _formula}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """The start page is the README; what is not a page is linked to in the repository."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/pages/", "](")
    text = re.sub(r"\]\((?=docs/|recipes/|[A-Z])", f"]({config.repo_url}/blob/main/", text)
    for pattern, replacement in _of_the_index()[:2]:
        text = re.sub(pattern, replacement, text)
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """A command that is to be copied needs the address itself, and the README is the start page."""
    markdown = markdown.replace("../../README.md", "index.md")
    return markdown.replace("git clone REPOSITORY", f"git clone {config.repo_url}")


def _formula(source: str, *_: Any, **__: Any) -> str:
    """A block of LaTeX as MathML, which browsers draw without a script; its parts may stand below each other."""
    parts = (convert(part.strip(), display="block") for part in source.split("\\qquad"))
    return f'<div class="formula">{" ".join(parts)}</div>'


def on_page_content(html: str, **_: Any) -> str:
    """A picture's text below it, unless the page has one there; the picture leads to itself in full size."""
    picture = r'<p>(<img alt="([^"]*)" src="([^"]*)"[^>]*>)</p>'
    html = re.sub(rf"{picture}(?=\s*<p><em>)", r'<a href="\3">\1</a>', html)
    return re.sub(picture, r'<figure><a href="\3">\1</a><figcaption>\2</figcaption></figure>', html)
