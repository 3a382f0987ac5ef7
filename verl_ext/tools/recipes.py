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
    package, copy = Path(verl_ext.__file__).parent, options.folder / "recipes"
    packed = package / "recipes"  # in a wheel; in a clone they are next to the package
    source = packed if packed.is_dir() else package.parent / "recipes"
    if copy.resolve() == source.resolve():
        say(f"{copy} is part of this clone, so nothing was copied. Start with {copy / 'README.md'}.")
        return 0
    if copy.exists():
        raise ConfigurationError(
            f"{copy} already exists. Remove it, or use another folder: `python -m verl_ext recipes FOLDER`."
        )
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    addresses = dict(line.split(", ") for line in metadata("verl_ext").get_all("Project-URL", []))
    for page in copy.rglob("*.md"):  # the pages of docs/ are not copied, so link to the site
        address = rf"]({addresses['Documentation']}/\1.html"
        page.write_text(re.sub(r"\]\((?:\.\./)+docs/pages/(\w+)\.md", address, page.read_text("utf-8")), "utf-8")
    say(f"The recipes were copied to {copy}. Start with {copy / 'README.md'}.")
    return 0
