"""Entries of `algorithm` that resemble a setting of verl_ext."""

from verl_ext.registry import misspelled_settings


def test_a_setting_of_several_methods_names_each_of_them() -> None:
    (finding,) = misspelled_settings(["epsilon"])
    assert finding.severity == "error"
    assert "algorithm.gdpo.epsilon and algorithm.maxrl.epsilon" in finding.text
    assert "algorithm.gdpo.epsilon or algorithm.maxrl.epsilon" in finding.fix


def test_a_setting_of_one_section_names_its_path() -> None:
    (finding,) = misspelled_settings(["history_window"])
    assert finding.severity == "error"
    assert finding.text.endswith("The nearest setting is algorithm.hadw.history_window.")
    assert finding.fix == "Use algorithm.hadw.history_window instead, or remove algorithm.history_window."
