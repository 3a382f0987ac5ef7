"""The BFCL evaluation: prompts, calls, the fraction of correct formats, and bfcl-eval where it is installed."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from recipes.tool_calling.bfcl import correct_format
from recipes.tool_calling.bfcl.calls import as_code, as_data
from recipes.tool_calling.bfcl.prompt import describe, dialogue, system_prompt, template_of
from tests.facts import a_line_says, facts
from tests.recipes.launchers import RECIPES

BFCL = RECIPES / "tool_calling/bfcl"
RUN = BFCL / "run.py"
# bfcl-eval pins versions that do not go with verl's, so it is installed elsewhere.
BFCL_PYTHON = os.environ.get("BFCL_PYTHON")
needs_bfcl = pytest.mark.skipif(not BFCL_PYTHON, reason="BFCL_PYTHON names no Python with bfcl-eval==2025.7.17")
TOOLS = [
    {"name": "f", "description": "Does f.", "parameters": {"type": "dict", "properties": {"a": {"type": "integer"}}}},
    {"name": "g.h", "description": "Two lines,\none **bold**.", "parameters": {"type": "dict", "properties": {}}},
]
SYSTEM = (
    "You call tools.\n\n**Available Tools**\nYou have these:\n1. Name: f\nDescription: Does f.\n"
    'Parameters: {"a": {"type": "integer"}}\n2. Name: g.h\nDescription: Two lines,\none **bold**.\nParameters: {}\n\n'
    "**Output Format**\n<think>...</think>"
)
CALL = '<think> t </think>\n<tool_call>\n{"name": "f", "parameters": {"a": 1}}\n</tool_call>'


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_template_is_a_prompt_with_other_tools():
    template = template_of(SYSTEM)
    assert template == SYSTEM.partition("1. Name")[0] + "{tools}" + "\n\n**Output Format**\n<think>...</think>"
    assert system_prompt(template, TOOLS) == SYSTEM
    assert "3." not in describe(TOOLS)


def test_prompt_without_a_list_of_tools_is_rejected():
    with pytest.raises(ValueError, match=facts("template", "{tools}")):
        template_of("no tools")


def test_dialogue_is_one_message_in_the_format_of_the_data():
    two_calls = CALL.replace("</tool_call>", '{"name": "g.h", "parameters": {}}\n</tool_call>')
    messages = [
        {"role": "system", "content": "not here"},
        {"role": "user", "content": " call f "},
        {"role": "assistant", "content": f"{CALL}\n"},
        {"role": "tool", "name": "f", "content": '{"done": true, "unit": "°C"}'},
        {"role": "assistant", "content": two_calls},
        {"role": "tool", "name": "f", "content": "Error during execution: no °C"},
        {"role": "tool", "name": "g.h", "content": "12"},
        {"role": "assistant", "content": "<think> t </think>\n<response> done </response>"},
        {"role": "user", "content": "again"},
    ]
    assert dialogue(messages) == (
        f"**Dialogue Records History**\n<user> call f </user>\n\n{CALL}\n"
        '<obs> [{"name": "f", "results": {"done": true, "unit": "\\u00b0C"}}] </obs>\n\n'
        f'{two_calls}\n<obs> [{{"name": "f", "results": "Error during execution: no \\u00b0C"}}, '
        '{"name": "g.h", "results": "12"}] </obs>\n\n'
        "<think> t </think>\n<response> done </response>\n\n<user> again </user>"
    )


def test_calls_are_those_of_the_last_block():
    two_blocks = CALL.replace('"f"', '"old"') + CALL
    assert as_data(two_blocks) == [{"f": {"a": 1}}]
    unclosed = two_blocks.removesuffix("</tool_call>")
    assert as_data(unclosed) == [{"f": {"a": 1}}]


def test_response_without_calls_has_no_data():
    assert as_data("<think> t </think>\n<response> no tool fits </response>") == []


def test_code_of_a_call_has_the_values_of_python():
    response = CALL.replace("1}", '"it\'s", "b": true}')
    assert as_code(response) == ['f(a="it\'s", b=True)']


# Lines of a block, each with the data that is compared and the code that is executed.
LINES = {
    "": ([], []),
    "I call f": ([], []),
    '{"name": "f", "parameters": {"a": 1}': ([], []),
    '{"name": "None", "parameters": {}}': ([], []),
    '{"name": "f"}': ([], ["f()"]),
    '{"parameters": {"a": 1}}': ([], ["(a=1)"]),
    '{"name": "f", "parameters": {"a": [1, "x"], "b": null}}': (
        [{"f": {"a": [1, "x"], "b": None}}],
        ["f(a=[1, 'x'], b=None)"],
    ),
}


@pytest.mark.parametrize("line", LINES)
def test_line_that_is_no_call_is_skipped_and_the_others_are_not(line):
    data, code = LINES[line]
    last_line = '{"name": "g", "parameters": {}}'
    response = CALL.replace("\n</tool_call>", f"\n{line}\n{last_line}\n</tool_call>")
    assert as_data(response) == [{"f": {"a": 1}}, *data, {"g": {}}]
    assert as_code(response) == ["f(a=1)", *code, "g()"]


def test_call_that_cannot_be_executed_is_an_error():
    with pytest.raises(ValueError, match="parameters"):
        as_code('<tool_call>\n{"name": "f", "parameters": [1]}\n</tool_call>')


IS_CORRECT = {
    CALL: True,
    f" {CALL}\n": True,
    "<think> t </think>\n<response> hi </response>": True,
    f"{CALL}\n<response> hi </response>": True,
    f"{CALL}{CALL}": False,
    CALL.replace("</think>\n", "</think>"): False,
    "<response> hi </response>": False,
}
"""Responses, and whether their format is correct."""


@pytest.mark.parametrize("response", IS_CORRECT)
def test_format_of_a_response_is_judged(response):
    assert correct_format.is_correct(response) == IS_CORRECT[response]


def write_results(folder, category, records):
    """Write the results of a category as bfcl-eval does."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    (folder / f"BFCL_v3_{category}_result.json").write_text("".join(lines), encoding="utf-8")


def test_fraction_of_correct_formats_is_printed(tmp_path, capsys):
    """The category of several turns has two correct responses and an incorrect one. One dialogue has failed."""
    simple = [{"id": f"simple_{number}", "result": response} for number, response in enumerate(IS_CORRECT)]
    turns = [[CALL, "no"], [], [CALL.replace(" t ", "\u2028")]]
    multi_turn = [
        {"id": "multi_turn_base_0", "result": turns},
        {"id": "multi_turn_base_1", "result": "Error during inference: no server", "traceback": "..."},
    ]
    write_results(tmp_path, "simple", simple)
    write_results(tmp_path, "multi_turn_base", multi_turn)
    assert correct_format.main(tmp_path) == 0
    printed = capsys.readouterr().out
    assert a_line_says(printed, "BFCL_v3_simple", 4, 7, "57.14")
    assert a_line_says(printed, "BFCL_v3_multi_turn_base", 2, 3, "66.67")
    assert a_line_says(printed, "correct format", 6, 10, "60.00")
    assert a_line_says(printed, "bfcl-eval", 1, "traceback")


def test_missing_folder_of_results_is_an_error(tmp_path):
    assert correct_format.main(tmp_path / "nowhere") == 1


def run_bfcl(home, *arguments, python=BFCL_PYTHON, **variables):
    """Run `run.py`, which must succeed, and return its output."""
    done = subprocess.run(
        [str(python), str(RUN), *arguments],
        env={**ENVIRONMENT, "BFCL_PROJECT_ROOT": str(home), **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_template_is_taken_from_prepared_data(tmp_path):
    import pyarrow
    import pyarrow.parquet

    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "u"}]
    data = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": prompt}]), data)
    run_bfcl(tmp_path / "home", "template", str(data), python=BFCL_PYTHON or sys.executable)
    assert (tmp_path / "home/template.txt").read_text() == template_of(SYSTEM)


class CompletionServer(BaseHTTPRequestHandler):
    """A server of completions that gives the same response to every question of BFCL, and records the prompts."""

    prompts: list[str]
    response: str

    def do_GET(self):
        self.reply({"object": "list", "data": []})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.prompts.append(request["prompt"])
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "text": self.response, "finish_reason": "stop", "logprobs": None}
        self.reply(
            {"id": "1", "object": "text_completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
        )

    def reply(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


# simple_0 asks for the area of a triangle with a base of 10 units and a height of 5.
AREA_CALL = CALL.replace('"f"', '"calculate_triangle_area"').replace(
    '{"a": 1}', '{"base": 10, "height": 5, "unit": "units"}'
)
MODEL_NAME = "verl-ext-tool-calling"


@pytest.fixture
def completion_server():
    """Start a server whose only response is `AREA_CALL`."""
    CompletionServer.prompts = []
    CompletionServer.response = AREA_CALL
    server = ThreadingHTTPServer(("127.0.0.1", 0), CompletionServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def assert_prompts_have_the_format_of_the_training_data(prompts):
    """Assert what the model sees of tools, of earlier turns and of system messages."""
    tool, question = "1. Name: calculate_triangle_area", "<user> Find the area"
    assert any(tool in prompt and question in prompt for prompt in prompts)
    # In several turns the model sees its response and the result of its call.
    result = '<obs> [{"name": "calculate_triangle_area", "results": "Error during execution: '
    assert any(f"{AREA_CALL}\n{result}" in prompt for prompt in prompts)
    # live_simple_66 has a system message, which is dropped as in ToolRL's handler.
    (live_prompt,) = [prompt for prompt in prompts if "item IDs 102" in prompt]
    assert "Requirement Extractor" not in live_prompt


def scores_of(home, category):
    """Return the first line of the scores of a category."""
    file = home / f"score/{MODEL_NAME}/BFCL_v3_{category}_score.json"
    return json.loads(file.read_text().splitlines()[0])


@pytest.mark.slow
@needs_bfcl
def test_bfcl_generates_and_scores_with_the_handler_of_the_recipe(tmp_path, tiny, completion_server):
    """The questions, the base class, the checkers and the tables are those of bfcl-eval."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "template.txt").write_text(template_of(SYSTEM))
    ids = {"multi_turn_base": ["multi_turn_base_0"], "live_simple": ["live_simple_66-30-0"]}
    (home / "test_case_ids_to_generate.json").write_text(json.dumps(ids))
    address = {"VLLM_ENDPOINT": "127.0.0.1", "VLLM_PORT": str(completion_server.server_port)}

    generate = ("generate", "--skip-server-setup", "--local-model-path", str(tiny / "model"))
    run_bfcl(home, *generate, "--test-category", "irrelevance,simple", **address)
    run_bfcl(home, *generate, "--run-ids", **address)
    assert_prompts_have_the_format_of_the_training_data(CompletionServer.prompts)

    results = home / "result" / MODEL_NAME
    assert "correct format" in run_bfcl(home, "correct-format", str(results), **address)
    assert len((results / "BFCL_v3_multi_turn_base_result.json").read_text().splitlines()) == 1

    run_bfcl(home, "evaluate", "--test-category", "irrelevance,simple", **address)
    # The response is correct only for simple_0. A call is incorrect if no tool is relevant.
    assert scores_of(home, "simple")["correct_count"] == 1
    assert scores_of(home, "simple")["total_count"] > 100
    assert scores_of(home, "irrelevance")["correct_count"] == 0
    assert MODEL_NAME in (home / "score/data_overall.csv").read_text()
