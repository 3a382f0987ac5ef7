from __future__ import annotations

import pytest

from verl_ext.errors import ConfigurationError, DataError, reading


def test_what_a_file_may_hold_is_an_error_that_names_it():
    for error in (ValueError("x"), OSError("x"), TypeError("x"), SystemExit("x")):
        with pytest.raises(DataError) as caught, reading("a.txt"):
            raise error
        assert "a.txt" in str(caught.value)


def test_a_mistake_of_the_code_that_reads_passes():
    for error in (KeyError("x"), ConfigurationError("x")):
        with pytest.raises(type(error)) as caught, reading("a.txt"):
            raise error
        assert caught.value is error
