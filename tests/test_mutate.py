"""scripts/quality/mutate.py: its list explains no mutant that does not exist."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts/quality"


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(SCRIPTS)
    import mutate

    return mutate


def test_the_list_of_harmless_changes_is_checked(
    mutate: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mutate.py", "--list"])
    assert mutate.main() == 0
    assert " mutants" in capsys.readouterr().out
    monkeypatch.setattr(mutate, "HARMLESS", (("keys = ids", "Add -> Sub", "no such mutant"),))
    with pytest.raises(SystemExit) as stopped:
        mutate.main()
    assert stopped.value.code == 2
    assert "'keys = ids'" in capsys.readouterr().err
