"""Read `Settings` from verl's configuration objects."""

from verl_ext.integration.config.read import estimator_name, read_settings, select

__all__ = ["estimator_name", "read_settings", "select"]
