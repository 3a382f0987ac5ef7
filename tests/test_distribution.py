"""What `python -m build` makes: a wheel with all that a run needs and with the recipes, and a small sdist."""

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
README = (ROOT / "README.md").read_text(encoding="utf-8")
INSTALL = r'`(pip install "?(?:verl_ext|\.)[^`]*)`'
CLONE = re.findall(r"`git clone (\S+) && cd (\S+)`", README)
INSTALLS = re.findall(INSTALL, README)
# The files that verl imports: `verl_ext` and `verl_ext_cpu`.
PLUGINS = """
from importlib.metadata import entry_points
plugins = entry_points(group="verl.plugins")
print(plugins["verl_ext"].load().__file__, plugins["verl_ext_cpu"].load().__file__)
"""


def run(*command: object, **options) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--sdist", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (found,) = built.glob("verl_ext-*.whl")
    return found


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "verl_ext", "recipes", cwd=ROOT)
    files = {name for name in listed.splitlines() if (ROOT / name).exists()}
    assert packed == {f"verl_ext/{name}" if name.startswith("recipes/") else name for name in files}


def test_the_sdist_is_small_and_holds_no_stored_runs(built):
    (found,) = built.glob("verl_ext-*.tar.gz")
    assert found.stat().st_size < 3e6
    with tarfile.open(found) as archive:
        names = archive.getnames()
    assert any(name.endswith("/tests/test_distribution.py") for name in names)
    assert [name for name in names if "/evidence/" in name and name.endswith((".parquet", ".jsonl"))] == []


def test_the_wheel_works_in_an_environment_of_its_own(wheel, tmp_path):
    """A new environment that shares verl and what verl needs with this one, but not this package."""
    home = tmp_path / "environment"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    (packages,) = home.glob("lib/python*/site-packages")
    # A path in a .pth file adds the folder without its own .pth files: this checkout is not on the path.
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    for plugin in run(python, "-c", PLUGINS, cwd=tmp_path, env=clean).split():
        assert Path(plugin).is_relative_to(home)
    assert "gdpo" in run(home / "bin" / "verl-ext", "show", cwd=tmp_path, env=clean)
    run(home / "bin" / "verl-ext", "recipes", "mine", cwd=tmp_path, env=clean)
    arms = subprocess.run([tmp_path / "mine/recipes/gsm8k/run.sh"], capture_output=True, text=True, env=clean)
    assert "gdpo" in arms.stderr  # it can be executed, and lists the arms


@pytest.mark.parametrize("command", INSTALLS)
def test_the_readmes_command_installs_a_clone(command, tmp_path):
    """As far as pip goes without fetching or installing anything: the project in the folder, and its extras."""
    ((address, folder),) = CLONE
    assert f'\nSource = "{address}"\n' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert address.endswith(f"/{folder}")
    (tmp_path / folder).symlink_to(ROOT)
    program, action, project = shlex.split(command)
    dry = ("--dry-run", "--ignore-installed", "--no-deps", "--no-index", "--no-build-isolation", "--quiet")
    report = run(sys.executable, "-m", program, action, *dry, "--report", "-", project, cwd=tmp_path / folder)
    (found,) = json.loads(report)["install"]
    assert found["metadata"]["name"] == "verl_ext"
    assert set(found.get("requested_extras", ())) <= set(found["metadata"]["provides_extra"])


def test_the_index_shows_its_own_commands_and_not_those_of_a_clone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        description = archive.read(name).decode()
    (of_clones,) = re.findall(r"^## Install\n\n(.*)\n\n", README, re.M)
    assert "git clone" in of_clones
    assert of_clones not in description
    assert "pip install ." not in description
    assert INSTALLS == ["pip install .", 'pip install ".[cpu,plot]"']
    assert re.findall(INSTALL, description) == ["pip install verl_ext", 'pip install "verl_ext[cpu,plot]"']


def test_the_links_of_copied_recipes_lead_somewhere(tmp_path):
    assert main(["recipes", str(tmp_path)]) == 0
    (site,) = re.findall(r'^Documentation = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    pages = list(tmp_path.rglob("*.md"))
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))]
    assert any(link.startswith(site) for _, link in links)
    for page, link in links:
        here = ROOT / "docs/pages" / f"{link.removeprefix(site + '/').removesuffix('.html')}.md"
        assert (here if link.startswith(site) else page.parent / link).exists() or "://" in link.replace(site, ""), link
