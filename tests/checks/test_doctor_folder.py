"""A folder that has the name of a package is not taken for the package."""

import importlib

from tests.facts import says
from verl_ext import doctor


def test_a_folder_with_the_name_of_a_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "not_a_package").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("not_a_package")
    state, subject, text = doctor._version("not_a_package", module)
    assert (state, subject) == ("error", "not_a_package")
    assert says(text, "__version__", f"{tmp_path}/not_a_package", "another folder")
