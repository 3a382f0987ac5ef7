"""The documents: generated pages are fresh, links lead somewhere, and the contributor's page works as it is written."""

import importlib.util
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.calls import metrics_of
from verl_ext import __version__
from verl_ext.cli import main
from verl_ext.core import step_lists, steps
from verl_ext.methods import simple
from verl_ext.registry import ADDED_ESTIMATORS, ESTIMATORS

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "pages"
TEXTS = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in (*PAGES.rglob("*.md"), ROOT / "README.md")
}


def test_the_generated_pages_are_fresh():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/quality/make_docs.py", "--check"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nrun python scripts/quality/make_docs.py"


def test_every_setting_has_a_description():
    rows = re.findall(r"^\| `(\w+)` \| `.*?` \|(.*)\|$", TEXTS[Path("docs/pages/settings.md")], re.MULTILINE)
    assert len(rows) > 30
    assert [name for name, description in rows if not description.strip()] == []


def missing_lines(name: str) -> list[str]:
    """What the documents lack of an estimator: the file, and the line to add."""
    page, found = f"estimators/{name}.md", []
    if not (PAGES / page).exists():
        found.append(f"docs/pages/{page} is missing: write it, with the formula and the settings")
    for file, line in (
        ("README.md", f"| [`{name}`](docs/pages/{page}) | the method and its paper | in one line |"),
        ("docs/mkdocs.yml", f"      - {name}: {page}"),
    ):
        if line.split(" | ")[0] not in (ROOT / file).read_text(encoding="utf-8"):
            found.append(f"{file} does not name it: add `{line}` beside those of the other estimators")
    return found


def test_every_estimator_has_a_page_and_the_lines_that_lead_to_it():
    missing = {
        name: missing_lines(name) for name in sorted(set(ADDED_ESTIMATORS) - {"compose", *simple.SIMPLE_METHODS})
    }
    lines = [f"{name}: {text}" for name, texts in missing.items() for text in texts]
    assert not lines, "\n".join(["an estimator is not in the documents:", *lines])


@pytest.mark.parametrize("path", TEXTS, ids=str)
def test_links_to_files_lead_somewhere(path):
    text = re.sub(r"`[^`\n]*`", "", TEXTS[path])
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert ((ROOT / path).parent / target).exists(), target


SEARCHPATH = 'hydra: {searchpath: ["pkg://verl.trainer.config"]}'
FILES = [
    (path, block)
    for path, text in TEXTS.items()
    for block in re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)
    if "defaults:" in block
]


@pytest.mark.parametrize(("path", "block"), FILES, ids=lambda value: str(value)[:40])
def test_a_file_of_the_pages_is_accepted(path, block, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(block if SEARCHPATH in block else f"{SEARCHPATH}\n{block}")
    assert len(FILES) > 6
    completed = ["actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.use_dynamic_bsz=True"]
    completed = [] if path.name == "README.md" else completed
    assert main(["check", "--config", str(tmp_path / "run.yaml"), *completed]) == 0
    assert "0 warnings" in capsys.readouterr().out


def test_the_version_and_the_address_are_the_same_everywhere():
    (source,) = re.findall(r'^Source = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    place = source.removeprefix("https://github.com/")
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "CITATION.cff")}
    texts["Dockerfile"] = (ROOT / "recipes/cluster/Dockerfile").read_text(encoding="utf-8")
    assert {
        found for text in texts.values() for found in re.findall(r"github(?:usercontent)?\.com/([^/]+/[^/\"]+)", text)
    } == {place}
    assert f"version: {__version__}\n" in texts["CITATION.cff"]
    assert f'=={__version__}"' in texts["Dockerfile"]


def test_the_contributors_page_draws_the_layers_of_the_contract():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (layers,) = re.findall(r"^layers = \[\n(.*?)^\]", project, re.M | re.S)
    assert "\n".join(re.findall('"(.*)"', layers)) in TEXTS[Path("docs/pages/contributing.md")]


def test_the_estimator_of_the_page_about_adding_one_works(monkeypatch):
    page = TEXTS[Path("docs/pages/add_estimator.md")]
    step, method, test = map(textwrap.dedent, re.findall(r"^    ```python\n(.*?)^    ```", page, re.M | re.S))
    names = {**vars(steps), "__name__": "verl_ext.core.steps"}
    exec(step, names)
    monkeypatch.setitem(step_lists.STEPS, "scale_by_range", names["ScaleByRange"])
    methods = dict(simple.SIMPLE_METHODS)
    names = {**vars(simple), "ScaleByRange": names["ScaleByRange"], "SIMPLE_METHODS": methods}
    exec(method, names)
    monkeypatch.setitem(ESTIMATORS, "midrange", methods["midrange"])
    exec(test, names)
    names["test_rewards_are_scaled_by_half_of_their_range"]()


def test_the_page_of_metrics_has_the_names_that_a_run_logs():
    config = {"rewards": {"keys": ["hard", "easy"], "conditions": {"easy": {"reward": "hard", "at_least": 1}}}}
    columns = {"score": [2.0, 1.0], "hard": [1.0, 0.0], "easy": [1.0, 1.0]}
    logged = set(metrics_of("gdpo", [2.0, 1.0], ["a", "a"], config=config, components=columns))
    for name in ("dgpo", "hadw"):
        logged |= set(metrics_of(name, [1.0, 0.0], ["a", "a"], config={}))
    page = TEXTS[Path("docs/pages/metrics.md")]
    cells = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    names = [name for cell in cells for name in re.findall("`([^`]+)`", cell)]
    either = [re.sub(r"\{([^}]+)\}", lambda braces: f"({braces[1].replace(',', '|')})", name) for name in names]
    patterns = [name.replace("<key>", "[^/]+") for name in either]
    named = re.compile(f"((gdpo|dgpo|hadw)/)?({'|'.join(patterns)})")
    assert [name for name in sorted(logged) if not named.fullmatch(name)] == []


DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.md")])
SHELLS = ("bash", "sh", "console")


def unquoted(command: str) -> list[str]:
    """Words that set something to a list outside quotes, which zsh takes for a pattern of file names.

    >>> unquoted("python -m x a.b=[c,d] 'e=[f]'  # it's k=[v]")
    ['a.b=[c,d]']
    """
    without_comments = re.sub(r"(^|\s)#.*$", "", command, flags=re.M)
    return re.findall(r"\S*=\[\S*", re.sub(r"'[^']*'|\"[^\"]*\"", "", without_comments))


def commands(text: str) -> list[str]:
    """Blocks in a shell's language."""
    return [block for shell, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.M | re.S) if shell in SHELLS]


def test_lists_on_command_lines_are_quoted() -> None:
    found = {path: commands(path.read_text(encoding="utf-8")) for path in DOCUMENTS}
    assert sum(map(len, found.values())) > 20
    assert [(path, word) for path, texts in found.items() for text in texts for word in unquoted(text)] == []


INSTALL = r'`(pip install "?(?:verl_ext|\.)[^`]*)`'


def test_the_start_page_of_the_site_has_the_commands_of_the_index(monkeypatch) -> None:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    monkeypatch.setattr(hooks, "File", SimpleNamespace(generated=lambda _config, _name, content: content))
    (page,) = hooks.on_files([], config=SimpleNamespace(repo_url="ADDRESS"))
    assert re.findall(INSTALL, TEXTS[Path("README.md")]) == ["pip install .", 'pip install ".[cpu,plot]"']
    assert re.findall(INSTALL, page) == ["pip install verl_ext", 'pip install "verl_ext[cpu,plot]"']
    assert "git clone" not in page
