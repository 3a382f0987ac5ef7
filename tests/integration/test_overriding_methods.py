"""A method that calls the method that it overrides by its name as text is accepted."""

import pytest

from verl_ext.errors import IntegrationError
from verl_ext.trainers.mixin import require_passed_on


class Mixin:
    def fit(self):
        return "mixin"


class ByText(Mixin):
    def fit(self):
        return getattr(super(), "fit")()  # noqa: B009 - the name as text is what is tested


class Skips(Mixin):
    def fit(self):
        return "skipped"


def test_a_call_by_getattr_counts_as_a_call():
    require_passed_on(ByText, Mixin, ["fit"])
    with pytest.raises(IntegrationError, match="Skips"):
        require_passed_on(Skips, Mixin, ["fit"])
