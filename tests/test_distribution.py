"""The wheel has all files that a run needs and the recipes. The source distribution has no stored runs."""

import json
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from verl_ext.cli import main

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", ROOT / "docs/pages/install.md")
INSTALL = r'pip install (?:"\.\[[\w,]+\]"|\.(?= ))'
"""A command that installs the project from the current folder, with extras or without."""
INSTALL_COMMANDS = sorted({command for file in DOCUMENTS for command in re.findall(INSTALL, file.read_text("utf-8"))})
# Prints the files that verl imports as its plugins.
PRINT_PLUGINS = """
from importlib.metadata import entry_points
plugins = entry_points(group="verl.plugins")
print(plugins["verl_ext"].load().__file__, plugins["verl_ext_cpu"].load().__file__)
"""


def run(*command: object, **options) -> str:
    """Run a command that must succeed, and return its output."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> Path:
    """Return a folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--sdist", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(distributions) -> Path:
    (file,) = distributions.glob("verl_ext-*.whl")
    return file


def tracked_files(*folders: str) -> list[str]:
    """Return the paths of the files of the repository in these folders. Files that git ignores are left out."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", *folders, cwd=ROOT)
    return [name for name in listed.splitlines() if (ROOT / name).exists()]


def test_wheel_has_every_file_of_the_package_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = set(tracked_files("verl_ext"))
    recipes = {f"verl_ext/{name}" for name in tracked_files("recipes")}
    assert packed == package | recipes


def test_sdist_is_small_and_has_no_stored_runs(distributions):
    (sdist,) = distributions.glob("verl_ext-*.tar.gz")
    assert sdist.stat().st_size < 3e6
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    assert any(name.endswith("/tests/test_distribution.py") for name in names)
    evidence = [name for name in names if "/evidence/" in name]
    assert [name for name in evidence if name.endswith((".parquet", ".jsonl"))] == []


@pytest.fixture
def environment(wheel, tmp_path) -> Path:
    """Return a new environment with the wheel. It shares verl and its requirements with this environment."""
    home = tmp_path / "environment"
    venv.create(home, with_pip=False)
    install = ("-m", "pip", "--python", home / "bin" / "python", "install", "--quiet", "--no-deps", "--no-index")
    run(sys.executable, *install, wheel)
    (packages,) = home.glob("lib/python*/site-packages")
    # A path in a .pth file adds the folder without its own .pth files: this checkout is not on the path.
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


def test_wheel_works_in_a_new_environment(environment, tmp_path):
    where = {"cwd": tmp_path, "env": {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}}
    command = environment / "bin" / "verl-ext"
    plugins = run(environment / "bin" / "python", "-c", PRINT_PLUGINS, **where).split()
    assert len(plugins) == 2
    for plugin in plugins:
        assert Path(plugin).is_relative_to(environment)
    assert "gdpo" in run(command, "show", **where)

    run(command, "recipes", "mine", **where)
    script = tmp_path / "mine/recipes/gsm8k/run.sh"
    usage = subprocess.run([script], capture_output=True, text=True, env=where["env"])
    assert "gdpo" in usage.stderr  # the script can be executed, and lists the configs


def test_documents_install_the_project_with_and_without_extras():
    assert "pip install ." in INSTALL_COMMANDS
    assert len(INSTALL_COMMANDS) >= 2


@pytest.mark.parametrize("command", INSTALL_COMMANDS)
def test_install_command_of_a_document_installs_a_clone(command):
    """pip reads the project in the folder and its extras, without fetching or installing anything."""
    program, action, project = shlex.split(command)
    offline = ("--dry-run", "--ignore-installed", "--no-deps", "--no-index", "--no-build-isolation", "--quiet")
    words = (sys.executable, "-m", program, action, *offline, "--report", "-", project)
    report = json.loads(run(*words, cwd=ROOT))
    (package,) = report["install"]
    assert package["metadata"]["name"] == "verl_ext"
    assert set(package.get("requested_extras", ())) <= set(package["metadata"]["provides_extra"])


def description_of(wheel: Path) -> str:
    """Return the description that a package index shows."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def test_package_index_shows_its_own_install_command(wheel):
    description = description_of(wheel)
    assert "pip install verl_ext" in description
    assert "pip install ." not in description
    assert "In a clone of this repository" in DOCUMENTS[0].read_text("utf-8")
    assert "In a clone of this repository" not in description


def exists(link: str, page: Path, site: str) -> bool:
    """Return whether a link of a page leads to a file or to a page of the site. Other addresses are not followed."""
    if link.startswith(site):
        name = link.removeprefix(site + "/").removesuffix(".html")
        return (ROOT / "docs/pages" / f"{name}.md").exists()
    return "://" in link or (page.parent / link).exists()


def test_links_of_copied_recipes_exist(tmp_path):
    assert main(["recipes", str(tmp_path)]) == 0
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (site,) = re.findall(r'^Documentation = "(.*)"', project, re.M)
    links = []
    for page in tmp_path.rglob("*.md"):
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            links.append(link)
            assert exists(link, page, site), link
    assert any(link.startswith(site) for link in links)
