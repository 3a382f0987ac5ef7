from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.cpu.servers import CONFIG
from tests.facts import facts
from verl_ext.cpu.server import sampling_from
from verl_ext.errors import ConfigurationError


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"min_p": 0.1}, ("'min_p'", "'temperature'")),
        ({"repetition_penalty": 1.1}, ("repetition_penalty",)),
        ({"temperature": -1.0}, ("temperature", "at least 0", -1.0)),
        ({"top_p": 0.0}, ("top_p", "above 0", 0.0)),
        ({"top_p": 1.5}, ("top_p", "above 0", "at most 1", 1.5)),
    ],
)
def test_unknown_parameters_and_settings_out_of_range_are_refused(params, told):
    with pytest.raises(ConfigurationError, match=facts(*told)):
        sampling_from(params, prompt_length=3, config=CONFIG)


@pytest.mark.parametrize("configured", [False, True])
def test_the_end_token_is_ignored_where_the_request_or_else_the_configuration_says_so(configured):
    config = SimpleNamespace(**{**vars(CONFIG), "ignore_eos": configured})
    assert sampling_from({}, prompt_length=3, config=config).ignore_eos is configured
    assert sampling_from({"ignore_eos": not configured}, prompt_length=3, config=config).ignore_eos is not configured


def test_greedy_knows_no_truncation():
    found = sampling_from({"temperature": 0, "top_k": 1, "top_p": 0.5}, prompt_length=3, config=CONFIG)
    assert (found.temperature, found.top_k, found.top_p) == (0.0, -1, 1.0)


def test_max_model_len_bounds_the_answer_and_refuses_a_prompt_without_room():
    config = SimpleNamespace(**{**vars(CONFIG), "max_model_len": 12})
    assert sampling_from({}, prompt_length=10, config=config).max_tokens == 2  # 12 - 10
    assert sampling_from({"max_tokens": 8}, prompt_length=10, config=config).max_tokens == 2
    with pytest.raises(ConfigurationError, match=facts("12 tokens", "max_model_len=12")):
        sampling_from({}, prompt_length=12, config=config)


@pytest.mark.parametrize(
    ("params", "prompt_length", "expected"),
    [
        ({}, 3, 8),  # response_length 8, however short the prompt
        ({}, 16, 8),  # prompt_length 16 + response_length 8 - 16 = 8
        ({}, 20, 4),  # 16 + 8 - 20 = 4: a prompt over its length takes from the response
        ({}, 30, 1),  # never less than 1
        ({"max_tokens": 3}, 16, 3),
        ({"max_new_tokens": 5}, 16, 5),
    ],
)
def test_the_limit_follows_verls_rules(params, prompt_length, expected):
    assert sampling_from(params, prompt_length=prompt_length, config=CONFIG).max_tokens == expected
