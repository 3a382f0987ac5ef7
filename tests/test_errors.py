"""`reading` turns the errors of a file's content into errors that name the file."""

import pytest

from verl_ext.errors import ConfigurationError, DataError, explaining_errors


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), OSError("x"), TypeError("x"), SystemExit("x"), KeyError("of a user's own code")],
    ids=lambda error: type(error).__name__,
)
def test_error_of_the_content_names_the_file(error):
    with pytest.raises(DataError) as caught, explaining_errors("a.txt"):
        raise error
    assert "a.txt" in str(caught.value)


def test_bug_of_verl_ext_is_not_reported_as_an_error_of_the_file():
    with pytest.raises(KeyError, match="missing"), explaining_errors("a.txt"):
        exec("{}['missing']", {"__name__": "verl_ext.somewhere"})


def test_configuration_error_is_not_changed():
    with pytest.raises(ConfigurationError, match="x"), explaining_errors("a.txt"):
        raise ConfigurationError("x")
