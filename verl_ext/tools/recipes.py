"""Copy the recipes to FOLDER/recipes: data preparation, configurations, launchers, evaluation of the papers' runs."""

import argparse
import re
import shutil
from importlib.metadata import metadata
from pathlib import Path

import verl_ext
from verl_ext.errors import ConfigurationError
from verl_ext.files import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="the working folder by default")


def recipes(options: argparse.Namespace) -> int:
    """Copy them."""
    package, copy = Path(verl_ext.__file__).parent, options.folder / "recipes"
    packed = package / "recipes"  # in a wheel; a clone has them beside the package
    source = packed if packed.is_dir() else package.parent / "recipes"
    if copy.resolve() == source.resolve():
        say(f"{copy} is part of this clone, so nothing is copied: begin with README.md")
        return 0
    if copy.exists():
        raise ConfigurationError(f"{copy} is there already: remove it, or name another folder, as in `recipes FOLDER`")
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    addresses = dict(line.split(", ") for line in metadata("verl_ext").get_all("Project-URL", []))
    for page in copy.rglob("*.md"):  # the pages of docs/ are not copied
        address = rf"]({addresses['Documentation']}/\1.html"
        page.write_text(re.sub(r"\]\((?:\.\./)+docs/pages/(\w+)\.md", address, page.read_text("utf-8")), "utf-8")
    say(f"{copy}: begin with README.md")
    return 0
