from __future__ import annotations

import pytest

from verl_ext.integration.compat.versions import TESTED


@pytest.fixture
def known_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a verl whose losses the package does not know, the rules are those of the last tested version."""
    import verl

    if verl.__version__ not in TESTED:
        monkeypatch.setattr(verl, "__version__", TESTED[-1])
