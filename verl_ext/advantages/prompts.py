"""Name the prompt of a response in an error, because a reader cannot find the prompt by its uid, which is random."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from verl_ext.errors import DataError

FIELDS = ("data_source", "extra_info", "raw_prompt")
"""The fields of verl's batch that say which row of the data a response belongs to."""
MAX_CHARACTERS = 80
"""The number of characters of a prompt that an error quotes."""


@contextmanager
def naming_prompts(fields_of: Callable[[Hashable], Mapping[str, Any]]) -> Iterator[None]:
    """Add to a `DataError` about one response which row of the data the response belongs to.

    For a uid, `fields_of` returns those of the `FIELDS` that the batch has, with their values.
    """
    try:
        yield
    except DataError as error:
        description = ""
        if error.label is not None:
            try:
                description = describe(fields_of(error.label))
            except Exception:  # noqa: BLE001 - the error about the reward is the important one
                raise error from None
        if not description:
            raise
        raise DataError(f"{error} The response belongs to {description}.") from error


def describe(fields: Mapping[str, Any]) -> str:
    """Return the data source, the index and the beginning of the prompt, as far as they are known.

    >>> prompt = [{"role": "user", "content": "2+3"}]
    >>> describe({"data_source": "sums", "extra_info": {"index": 7}, "raw_prompt": prompt})
    "data_source='sums', index=7, prompt '2+3'"

    A prompt that is too long is truncated, and a prompt without text is omitted.

    >>> describe({"raw_prompt": [{"role": "user", "content": "ab " * 40}]})[-15:]
    "ab ab ab ab'..."
    >>> describe({"data_source": "pictures", "raw_prompt": [{"role": "user", "content": [{"type": "image"}]}]})
    "data_source='pictures'"
    """
    parts = []
    if fields.get("data_source") is not None:
        parts.append(f"data_source={str(fields['data_source'])!r}")
    extra_info = fields.get("extra_info")
    if isinstance(extra_info, Mapping) and extra_info.get("index") is not None:
        parts.append(f"index={extra_info['index']}")
    text = _last_message(fields.get("raw_prompt"))
    if len(text) > MAX_CHARACTERS:
        parts.append(f"prompt {text[:MAX_CHARACTERS]!r}...")
    elif text:
        parts.append(f"prompt {text!r}")
    return ", ".join(parts)


def _last_message(messages: Any) -> str:
    """Return the last message of a prompt on one line, or an empty text if the message is not text."""
    if messages is None or len(messages) == 0:
        return ""
    message = messages[-1]
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, str):
        return ""
    words = content.split()
    return " ".join(words)
