"""The documents: generated pages are fresh, links lead somewhere, and the contributor's page works as it is written."""

from __future__ import annotations

import doctest
import importlib.util
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.facts import facts
from verl_ext import Batch, Settings, build, registry
from verl_ext.registry import ESTIMATORS

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "pages"
TEXTS = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in (*PAGES.rglob("*.md"), ROOT / "README.md")
}


def test_the_generated_pages_are_fresh():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_docs.py", "--check"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nrun python scripts/make_docs.py"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 180


def test_every_estimator_has_a_page_and_stands_in_the_readme():
    for name in set(registry.BUILT_IN) - {"compose"}:
        assert (PAGES / "estimators" / f"{name}.md").exists()
        assert f"estimators/{name}.md" in TEXTS[Path("README.md")]
        assert f"estimators/{name}.md" in (ROOT / "docs" / "mkdocs.yml").read_text()


@pytest.mark.parametrize("path", TEXTS, ids=str)
def test_links_to_files_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", TEXTS[path]):
        if "://" not in target:
            assert ((ROOT / path).parent / target).exists(), target


def test_no_sentence_stands_twice():
    seen: dict[str, Path] = {}
    for path, text in TEXTS.items():
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        prose = "\n".join(line for line in prose.splitlines() if not line.lstrip().startswith(("|", "#", "<!--")))
        for sentence in re.split(r"(?<=[.:])\s+", " ".join(prose.split())):
            if len(sentence.split()) > 7:
                assert seen.setdefault(sentence, path) == path, f"{sentence!r} in {path} and {seen[sentence]}"


@pytest.fixture
def clipped(tmp_path, monkeypatch):
    """The estimator of the contributor's page, as a module that the list names."""
    page = TEXTS[Path("docs/pages/contributing.md")]
    source, test = (textwrap.dedent(block) for block in re.findall(r"^    ```python\n(.*?)^    ```", page, re.M | re.S))
    (tmp_path / "clipped_example.py").write_text(source)
    spec = importlib.util.spec_from_file_location("clipped_example", tmp_path / "clipped_example.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "clipped_example", module)
    spec.loader.exec_module(module)
    listed = {**ESTIMATORS, "clipped": "clipped_example:clipped"}
    monkeypatch.setattr(ESTIMATORS, "_known", listed)
    return module, test


def test_the_estimator_of_the_contributors_page_works(clipped):
    module, test = clipped
    assert doctest.testmod(module).failed == 0
    names: dict[str, object] = {}
    exec(test, names)
    (function,) = (value for name, value in names.items() if name.startswith("test_"))
    function()
    batch = Batch.of([[3], [0], [0]], ["a"] * 3)
    assert build("clipped", Settings())(batch).advantages.tolist() == [0.5, -0.5, -0.5]


def test_its_settings_are_checked_and_shown(clipped, capsys):
    from verl_ext.cli import main
    from verl_ext.integration.config.presets import preset

    with pytest.raises(ValueError, match=facts("algorithm.clipped.limit", "above 0", "found 0")):
        Settings.parse({"clipped": {"limit": 0}})
    assert preset("clipped")["algorithm"]["clipped"] == {"limit": 0.5}
    assert main(["show", "clipped", "algorithm.clipped.limit=2"]) == 0
    assert "algorithm.clipped.limit=2.0" in capsys.readouterr().out
