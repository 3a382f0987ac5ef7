import pytest

from verl_ext.errors import ConfigurationError, DataError, explaining_errors


def test_what_a_file_may_hold_is_an_error_that_names_it():
    for error in (ValueError("x"), OSError("x"), TypeError("x"), SystemExit("x"), KeyError("of a user's own code")):
        with pytest.raises(DataError) as caught, explaining_errors("a.txt"):
            raise error
        assert "a.txt" in str(caught.value)


def test_a_mistake_of_the_code_that_reads_passes():
    with pytest.raises(KeyError, match="missing"), explaining_errors("a.txt"):
        exec("{}['missing']", {"__name__": "verl_ext.somewhere"})
    with pytest.raises(ConfigurationError, match="x"), explaining_errors("a.txt"):
        raise ConfigurationError("x")
