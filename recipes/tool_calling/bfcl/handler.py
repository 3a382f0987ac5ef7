"""A handler of bfcl-eval for models trained on ToolRL's data. It makes the prompts and reads the calls.

It needs bfcl-eval 2025.7.17 (BFCL v3) in a separate environment, with this repository on PYTHONPATH. From verl_ext it
uses only the code that reads tool calls, which has no dependencies.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bfcl_eval.model_handler.local_inference.base_oss_handler import OSSHandler
from bfcl_eval.model_handler.utils import func_doc_language_specific_pre_processing
from overrides import override

from recipes.tool_calling.bfcl.calls import as_code, as_data
from recipes.tool_calling.bfcl.prompt import dialogue, system_prompt

TEMPLATE = "TOOL_CALLING_TEMPLATE"
"""The environment variable with the path of the system prompt's template. `run.py` sets the variable."""


class ToolCallingHandler(OSSHandler):
    """Uses the system prompt and the dialogue format of the training. Each call is one JSON object on one line."""

    def __init__(self, model_name: str, temperature: float) -> None:
        super().__init__(model_name, temperature)
        path = os.environ.get(TEMPLATE)
        self.template = Path(path).read_text(encoding="utf-8") if path else None

    @override
    def _pre_query_processing_prompting(self, test_entry: dict) -> dict:
        """Return the tools without bfcl-eval's own system prompt."""
        category = test_entry["id"].rsplit("_", 1)[0]
        return {"message": [], "function": func_doc_language_specific_pre_processing(test_entry["function"], category)}

    @override
    def _format_prompt(self, messages: list[dict], function: list[dict]) -> str:
        if self.template is None:
            raise ValueError(
                f"the environment variable {TEMPLATE} does not name a template. Use run.py to start bfcl-eval."
            )
        prompt = [
            {"role": "system", "content": system_prompt(self.template, function)},
            {"role": "user", "content": dialogue(messages)},
        ]
        return self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)

    @override
    def _add_execution_results_prompting(
        self, inference_data: dict, execution_results: list[str], model_response_data: dict
    ) -> dict:
        """Add the results of the calls, each with the name of its tool only, as in the data."""
        for call, result in zip(model_response_data["model_responses_decoded"], execution_results, strict=True):
            inference_data["message"].append({"role": "tool", "name": call.partition("(")[0], "content": result})
        return inference_data

    @override
    def decode_ast(self, result: str, language: str = "Python") -> list[dict[str, Any]]:
        return as_data(result)

    @override
    def decode_execute(self, result: str) -> list[str]:
        return as_code(result)
