"""The documents: every method is documented, links lead to files and headings, and the examples of the pages work."""

import importlib.util
import re
import shlex
import subprocess
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from markdown.extensions.toc import slugify

from tests.calls import metrics_of
from verl_ext import __version__
from verl_ext.cli import main
from verl_ext.core import step_lists, steps
from verl_ext.methods import METHODS, simple
from verl_ext.registry import ESTIMATORS

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "pages"
FOLDERS = ("docs", "recipes", "scripts", "tests")
TEXTS = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in (*PAGES.rglob("*.md"), ROOT / "README.md")
}
NAVIGATION = (ROOT / "docs/mkdocs.yml").read_text(encoding="utf-8")


def missing_documentation(name: str) -> list[str]:
    """Return what the documents lack of a method: a row of the overview, a page or a section, or a line to add."""
    overview = TEXTS[Path("docs/pages/methods/index.md")]
    row = re.search(rf"^\| \[`{name}`\]\(([^)#]+)#?([^)]*)\) \|", overview, re.MULTILINE)
    if row is None:
        return ["docs/pages/methods/index.md has no row for it: run python scripts/quality/make_docs.py"]
    file, section = row.groups()
    page = f"methods/{file}"
    if section and section not in anchors(TEXTS[Path("docs/pages", page)]):
        return [f"docs/pages/{page} has no section for it: write one, or a page docs/pages/methods/{name}.md"]
    if f": {page}\n" not in NAVIGATION:
        return [f"docs/mkdocs.yml does not name its page: add `      - {name}: {page}` to `Methods`"]
    return []


def anchors(page: str) -> list[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall("^#+ (.*)$", page, re.MULTILINE)
    return [slugify(heading, "-") for heading in headings]


def test_every_estimator_has_a_page_and_links_to_it():
    for name in METHODS:
        assert missing_documentation(name) == [], name


def test_missing_documentation_of_an_estimator_is_reported(monkeypatch):
    assert "has no row" in missing_documentation("midrange")[0]
    monkeypatch.setitem(TEXTS, Path("docs/pages/methods/more.md"), "# More methods")
    assert "has no section" in missing_documentation("dvao")[0]
    monkeypatch.setitem(globals(), "NAVIGATION", NAVIGATION.replace("methods/gdpo.md", "gdpo.md"))
    assert "does not name its page" in missing_documentation("gdpo")[0]


DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])


def links_of(document: Path) -> list[tuple[str, str]]:
    """Return the links of a document to files and headings of this repository, each as its path and its anchor."""
    text_without_code = re.sub(r"`[^`\n]*`", "", document.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text_without_code)
    return [(path, anchor) for path, anchor in links if "://" not in path]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(document):
    for path, anchor in links_of(document):
        target = document.parent / path if path else document
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{path}#{anchor}"


SEARCHPATH = 'hydra: {searchpath: ["pkg://verl.trainer.config"]}'


def configuration_files() -> list[tuple[Path, str]]:
    """Return each block of the pages that is a whole configuration file, with the path of its page."""
    files = []
    for path, text in TEXTS.items():
        blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)
        files += [(path, block) for block in blocks if "defaults:" in block]
    return files


FILES = configuration_files()


def test_the_pages_have_configuration_files():
    assert len(FILES) > 6


@pytest.mark.parametrize(("path", "block"), FILES, ids=lambda value: str(value)[:40])
def test_configuration_file_of_a_page_has_no_findings(path, block, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(block if SEARCHPATH in block else f"{SEARCHPATH}\n{block}")
    # The file of gpu.md is complete. The others leave out what they do not explain.
    usual_settings = ["actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.use_dynamic_bsz=True"]
    overrides = [] if path.name == "gpu.md" else usual_settings
    assert main(["check", "--config", str(file), *overrides]) == 0
    assert "0 warnings" in capsys.readouterr().out


def test_version_and_repository_are_the_same_everywhere():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    dockerfile = (ROOT / "recipes/cluster/Dockerfile").read_text(encoding="utf-8")
    (source,) = re.findall(r'^Source = "(.*)"', project, re.M)
    repository = source.removeprefix("https://github.com/")
    for text in (project, citation, dockerfile):
        repositories = re.findall(r"github(?:usercontent)?\.com/([^/]+/[^/\"]+)", text)
        assert set(repositories) <= {repository}
    assert f"version: {__version__}\n" in citation
    assert f'=={__version__}"' in dockerfile


def test_contributing_page_shows_the_layers_of_the_contract():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (contract,) = re.findall(r"^layers = \[\n(.*?)^\]", project, re.M | re.S)
    layers = re.findall('"(.*)"', contract)
    assert "\n".join(layers) in TEXTS[Path("docs/pages/contributing.md")]


def test_estimator_of_the_page_on_adding_one_works(monkeypatch):
    page = TEXTS[Path("docs/pages/add_method.md")]
    blocks = re.findall(r"^    ```python\n(.*?)^    ```", page, re.M | re.S)
    step_code, method_code, test_code = [textwrap.dedent(block) for block in blocks]

    steps_module = {**vars(steps), "__name__": "verl_ext.core.steps"}
    exec(step_code, steps_module)
    step_class = steps_module["ScaleByRange"]
    monkeypatch.setitem(step_lists.STEPS, "scale_by_range", step_class)

    methods = dict(simple.SIMPLE_METHODS)
    simple_module = {**vars(simple), "ScaleByRange": step_class, "SIMPLE_METHODS": methods}
    exec(method_code, simple_module)
    monkeypatch.setitem(ESTIMATORS, "midrange", methods["midrange"])

    exec(test_code, simple_module)
    simple_module["test_rewards_are_scaled_by_half_of_their_range"]()


def pattern_of_metric(name: str) -> str:
    """Return a regular expression for a name of the page, such as `reward/<key>/{mean,std}`.

    >>> pattern_of_metric("reward/<key>/{mean,std}")
    'reward/[^/]+/(mean|std)'
    """
    with_alternatives = re.sub(r"\{([^}]+)\}", lambda braces: f"({braces[1].replace(',', '|')})", name)
    return with_alternatives.replace("<key>", "[^/]+")


def logged_metrics() -> set[str]:
    """Return the names of the metrics of gdpo with a conditioned reward, of dgpo and of hadw."""
    rewards = {"keys": ["hard", "easy"], "conditions": {"easy": {"reward": "hard", "at_least": 1}}}
    columns = {"score": [2.0, 1.0], "hard": [1.0, 0.0], "easy": [1.0, 1.0]}
    uids = ["a", "a"]
    of_gdpo = metrics_of("gdpo", columns["score"], uids, config={"rewards": rewards}, components=columns)
    of_dgpo = metrics_of("dgpo", columns["hard"], uids, config={})
    of_hadw = metrics_of("hadw", columns["hard"], uids, config={})
    return set(of_gdpo) | set(of_dgpo) | set(of_hadw)


def test_metrics_page_names_every_metric_that_a_run_logs():
    page = TEXTS[Path("docs/pages/reference/metrics.md")]
    first_cells = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    names = re.findall("`([^`]+)`", "\n".join(first_cells))
    patterns = "|".join(pattern_of_metric(name) for name in names)
    documented = re.compile(f"((gdpo|dgpo|hadw)/)?({patterns})")
    for metric in logged_metrics():
        assert documented.fullmatch(metric), metric


SHELLS = ("bash", "sh", "console")


def unquoted_lists(command: str) -> list[str]:
    """Return the words that set something to a list outside quotes. zsh reads these as patterns of file names.

    >>> unquoted_lists("python -m x a.b=[c,d] 'e=[f]'  # it's k=[v]")
    ['a.b=[c,d]']
    """
    without_comments = re.sub(r"(^|\s)#.*$", "", command, flags=re.M)
    without_quoted_text = re.sub(r"'[^']*'|\"[^\"]*\"", "", without_comments)
    return re.findall(r"\S*=\[\S*", without_quoted_text)


def shell_blocks(text: str) -> list[str]:
    """Return the code blocks of a page in a shell's language."""
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.M | re.S)
    return [code for language, code in blocks if language in SHELLS]


def test_lists_on_command_lines_are_quoted() -> None:
    block_count = 0
    for path in DOCUMENTS:
        for block in shell_blocks(path.read_text(encoding="utf-8")):
            block_count += 1
            assert unquoted_lists(block) == [], path
    assert block_count > 20


@pytest.fixture
def site_hooks():
    """Return docs/hooks.py."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks


@pytest.mark.parametrize(
    ("page", "link", "link_on_site"),
    [
        ("index.md", "docs/pages/gpu.md#memory", "gpu.md#memory"),
        ("index.md", "recipes/README.md", "recipes.md"),
        ("index.md", "CITATION.cff", "ADDRESS/blob/main/CITATION.cff"),
        ("recipes.md", "../docs/pages/gpu.md", "gpu.md"),
        ("recipes.md", "gsm8k/README.md", "ADDRESS/blob/main/recipes/gsm8k/README.md"),
        ("gpu.md", "../../README.md#status", "index.md#status"),
        ("methods/gdpo.md", "../rewards.md", "../rewards.md"),
        ("methods/gdpo.md", "../../../CHANGELOG.md", "../changelog.md"),
        ("methods/gdpo.md", "#formula", "#formula"),
        ("methods/gdpo.md", "https://arxiv.org", "https://arxiv.org"),
    ],
)
def test_links_of_the_site_lead_to_its_pages_or_to_the_repository(site_hooks, page, link, link_on_site):
    shown_page = SimpleNamespace(file=SimpleNamespace(src_uri=page), meta={})
    config = SimpleNamespace(repo_url="ADDRESS")
    markdown = site_hooks.on_page_markdown(f"a [text]({link}).", page=shown_page, config=config)
    assert markdown == f"a [text]({link_on_site})."


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_blocks_are_valid_bash(path):
    for block in shell_blocks(path.read_text(encoding="utf-8")):
        done = subprocess.run(["bash", "-n"], input=textwrap.dedent(block), capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stderr}{block}"


def without_seconds(line):
    """Return a line of an output without the measured time."""
    return re.sub(r"in [\d.e-]+ s each", "in SECONDS each", line)


def test_example_of_the_data_page_has_the_output_of_the_page(tmp_path, monkeypatch, capsys):
    page = TEXTS[Path("docs/pages/data.md")]
    python_code, command, output, *_ = re.findall(r"^```(?:python|bash|text)\n(.*?)^```", page, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    exec(python_code, {})
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    assert [program, *arguments[:2]] == ["python", "-m", "verl_ext"]
    assert main(arguments[2:]) == 0
    printed = [without_seconds(line) for line in capsys.readouterr().out.splitlines()]
    for line in output.splitlines():
        assert line == "..." or without_seconds(line) in printed, line


def test_commands_of_the_readme_are_accepted(tmp_path, monkeypatch, capsys):
    """The reward function and the overrides of the three steps, with the data of the page on data."""
    readme = TEXTS[Path("README.md")]
    reward_function, training, check = re.findall(r"^```(?:python|bash)\n(.*?)^```", readme, re.M | re.S)[1:4]
    monkeypatch.chdir(tmp_path)
    (data_code, command) = re.findall(r"^```(?:python|bash)\n(.*?)^```", TEXTS[Path("docs/pages/data.md")], re.M | re.S)
    exec(data_code, {})
    Path("my_reward.py").write_text(reward_function)
    overrides_of_training = shlex.split(training.strip().removesuffix("..."))[3:]
    _, _, _, *arguments = shlex.split(check.strip().removesuffix("..."))
    assert arguments[-len(overrides_of_training) :] == overrides_of_training
    arguments.remove("--strict")  # the function returns the same rewards for every response, which is a note
    data_settings = [word for word in shlex.split(command.replace("\\\n", " ")) if word.startswith(("data.", "actor"))]
    assert main([*arguments, *data_settings, "reward.custom_reward_function.path=my_reward.py"]) == 0
    assert "correctness: float, 1 to 1" in capsys.readouterr().out
