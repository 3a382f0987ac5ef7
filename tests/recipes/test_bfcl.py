"""The BFCL evaluation: prompts, reading of calls, the format figure, and bfcl-eval itself where it is installed."""

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


CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_a_template_is_a_prompt_with_other_tools():
    template = template_of(SYSTEM)
    assert template == SYSTEM.partition("1. Name")[0] + "{tools}" + "\n\n**Output Format**\n<think>...</think>"
    assert system_prompt(template, TOOLS) == SYSTEM
    assert "3." not in describe(TOOLS)


def test_a_prompt_without_a_list_of_tools_is_refused():
    with pytest.raises(ValueError, match=facts("template", "{tools}")):
        template_of("no tools")


def test_a_dialogue_is_one_message_in_the_form_of_the_data():
    two = CALL.replace("</tool_call>", '{"name": "g.h", "parameters": {}}\n</tool_call>')
    messages = [
        {"role": "system", "content": "not here"},
        {"role": "user", "content": " call f "},
        {"role": "assistant", "content": f"{CALL}\n"},
        {"role": "tool", "name": "f", "content": '{"done": true, "unit": "°C"}'},
        {"role": "assistant", "content": two},
        {"role": "tool", "name": "f", "content": "Error during execution: no °C"},
        {"role": "tool", "name": "g.h", "content": "12"},
        {"role": "assistant", "content": "<think> t </think>\n<response> done </response>"},
        {"role": "user", "content": "again"},
    ]
    assert dialogue(messages) == (
        f"**Dialogue Records History**\n<user> call f </user>\n\n{CALL}\n"
        '<obs> [{"name": "f", "results": {"done": true, "unit": "\\u00b0C"}}] </obs>\n\n'
        f'{two}\n<obs> [{{"name": "f", "results": "Error during execution: no \\u00b0C"}}, '
        '{"name": "g.h", "results": "12"}] </obs>\n\n'
        "<think> t </think>\n<response> done </response>\n\n<user> again </user>"
    )


def test_calls_are_read_from_the_last_block():
    twice = CALL.replace('"f"', '"old"') + CALL
    assert as_data(twice) == [{"f": {"a": 1}}]
    assert as_data(twice.removesuffix("</tool_call>")) == [{"f": {"a": 1}}]
    assert as_data("<think> t </think>\n<response> no tool fits </response>") == []
    assert as_code(CALL.replace("1}", '"it\'s", "b": true}')) == ['f(a="it\'s", b=True)']


# A line of the block, and what is read from it: for comparing, for executing.
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
def test_a_line_that_is_no_call_is_skipped_and_the_others_count(line):
    data, code = LINES[line]
    last = '{"name": "g", "parameters": {}}'
    answer = CALL.replace("\n</tool_call>", f"\n{line}\n{last}\n</tool_call>")
    assert as_data(answer) == [{"f": {"a": 1}}, *data, {"g": {}}]
    assert as_code(answer) == ["f(a=1)", *code, "g()"]


def test_a_call_that_cannot_be_executed_ends_the_turn():
    with pytest.raises(ValueError, match="parameters"):
        as_code('<tool_call>\n{"name": "f", "parameters": [1]}\n</tool_call>')


CORRECT = {
    CALL: True,
    f" {CALL}\n": True,
    "<think> t </think>\n<response> hi </response>": True,
    f"{CALL}\n<response> hi </response>": True,
    f"{CALL}{CALL}": False,
    CALL.replace("</think>\n", "</think>"): False,
    "<response> hi </response>": False,
}


def test_the_correct_format_of_results(tmp_path, capsys):
    assert {answer: correct_format.is_correct(answer) for answer in CORRECT} == CORRECT
    simple = [{"id": f"simple_{n}", "result": answer} for n, answer in enumerate(CORRECT)]
    turns = [{"id": "multi_turn_base_0", "result": [[CALL, "no"], [], [CALL.replace(" t ", "\u2028")]]}]
    lost = [{"id": "multi_turn_base_1", "result": "Error during inference: no server", "traceback": "..."}]
    for name, records in (("BFCL_v3_simple", simple), ("BFCL_v3_multi_turn_base", turns + lost)):
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (tmp_path / f"{name}_result.json").write_text(lines, encoding="utf-8")
    assert correct_format.main(tmp_path) == 0
    shown = capsys.readouterr().out
    assert a_line_says(shown, "BFCL_v3_simple", 4, 7, "57.14")
    assert a_line_says(shown, "BFCL_v3_multi_turn_base", 2, 3, "66.67")
    assert a_line_says(shown, "correct format", 6, 10, "60.00")
    assert a_line_says(shown, "bfcl-eval", 1, "traceback")
    assert correct_format.main(tmp_path / "nowhere") == 1


def test_the_template_is_taken_from_prepared_data(tmp_path):
    import pyarrow
    import pyarrow.parquet

    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "u"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": prompt}]), tmp_path / "train.parquet")
    done = subprocess.run(
        [BFCL_PYTHON or sys.executable, RUN, "template", tmp_path / "train.parquet"],
        env={**CLEAN, "BFCL_PROJECT_ROOT": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "home/template.txt").read_text() == template_of(SYSTEM)


class Model(BaseHTTPRequestHandler):
    """A server of completions which answers every BFCL question in the same way."""

    asked: list[str]
    answer: str

    def do_GET(self):
        self.reply({"object": "list", "data": []})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(request["prompt"])
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "text": self.answer, "finish_reason": "stop", "logprobs": None}
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


@pytest.mark.slow
@needs_bfcl
def test_bfcl_generates_and_scores_with_our_handler(tmp_path, tiny):
    """bfcl-eval's own questions, base class, checkers and tables, with a model that knows one answer."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "template.txt").write_text(template_of(SYSTEM))
    ids = {"multi_turn_base": ["multi_turn_base_0"], "live_simple": ["live_simple_66-30-0"]}
    (home / "test_case_ids_to_generate.json").write_text(json.dumps(ids))
    Model.asked = []
    # simple_0 asks for the area of a triangle with a base of 10 units and a height of 5.
    Model.answer = CALL.replace('"f"', '"calculate_triangle_area"').replace(
        '{"a": 1}', '{"base": 10, "height": 5, "unit": "units"}'
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    variables = {
        **CLEAN,
        "BFCL_PROJECT_ROOT": str(home),
        "VLLM_ENDPOINT": "127.0.0.1",
        "VLLM_PORT": str(server.server_port),
    }

    def run(*arguments):
        done = subprocess.run(
            [str(BFCL_PYTHON), str(RUN), *arguments],
            env=variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    given = ("generate", "--skip-server-setup", "--local-model-path", str(tiny / "model"))
    try:
        run(*given, "--test-category", "irrelevance,simple")
        run(*given, "--run-ids")
    finally:
        server.shutdown()
        server.server_close()
    assert any(
        "1. Name: calculate_triangle_area" in prompt and "<user> Find the area" in prompt for prompt in Model.asked
    )
    # In several turns the model sees what it said and what came of it, in the form of the training data.
    returned = '<obs> [{"name": "calculate_triangle_area", "results": "Error during execution: '
    assert any(f"{Model.answer}\n{returned}" in prompt for prompt in Model.asked)
    # live_simple_66 has a system message, which is dropped as in ToolRL's handler.
    (live,) = (prompt for prompt in Model.asked if "item IDs 102" in prompt)
    assert "Requirement Extractor" not in live
    results = home / "result/verl-ext-tool-calling"
    assert "correct format" in run("correct-format", str(results))
    assert len((results / "BFCL_v3_multi_turn_base_result.json").read_text().splitlines()) == 1
    run("evaluate", "--test-category", "irrelevance,simple")
    scores = {}
    for category in ("simple", "irrelevance"):
        path = home / f"score/verl-ext-tool-calling/BFCL_v3_{category}_score.json"
        scores[category] = json.loads(path.read_text().splitlines()[0])
    # The one answer is right for simple_0 alone, and a call where none fits is wrong.
    assert scores["simple"]["correct_count"] == 1
    assert scores["simple"]["total_count"] > 100
    assert scores["irrelevance"]["correct_count"] == 0
    assert "verl-ext-tool-calling" in (home / "score/data_overall.csv").read_text()
