"""The doctests of a module that needs verl's default trainer are left out where verl does not have it."""

from tests.integration.conftest import pytest_ignore_collect  # noqa: F401 - pytest calls it
