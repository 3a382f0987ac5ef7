"""Copy the recipes to FOLDER/recipes: data preparation, configurations, launch scripts and evaluation."""

import argparse
import re
import shutil
from importlib.metadata import metadata
from pathlib import Path

import verl_ext
from verl_ext.errors import ConfigurationError
from verl_ext.files import say


def recipes(options: argparse.Namespace) -> int:
    """Copy the recipes, unless FOLDER is the clone that contains them."""
    source = _source()
    copy = options.folder / "recipes"
    readme = copy / "README.md"
    if copy.resolve() == source.resolve():
        say(f"{copy} is part of this clone, so nothing was copied. Start with {readme}.")
        return 0
    if copy.exists():
        raise ConfigurationError(
            f"{copy} already exists. Remove it, or use another folder: `python -m verl_ext recipes FOLDER`."
        )
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    _link_to_site(copy)
    say(f"The recipes were copied to {copy}. Start with {readme}.")
    return 0


def _source() -> Path:
    """Return the folder of the recipes, which is in the package in a wheel, and next to the package in a clone."""
    package = Path(verl_ext.__file__).parent
    in_wheel = package / "recipes"
    return in_wheel if in_wheel.is_dir() else package.parent / "recipes"


def _link_to_site(folder: Path) -> None:
    """Let links to the pages of docs/, which are not copied, point to the site."""
    project_urls = metadata("verl_ext").get_all("Project-URL", [])
    address_of_label = dict(entry.split(", ") for entry in project_urls)
    link_to_site = rf"]({address_of_label['Documentation']}/\1.html"
    for page in folder.rglob("*.md"):
        text = page.read_text("utf-8")
        linked = re.sub(r"\]\((?:\.\./)+docs/pages/([\w/]+)\.md", link_to_site, text)
        page.write_text(linked, "utf-8")
