"""A completion's text taken apart: reasoning, answer, tool calls.

    thinking:  reasoning </think> answer [call block] [EOS]
    chat:      answer [call block] [EOS]
    block:     \\n\\n<｜DSML｜ calls>\\n  calls, one after the other  \\n</｜DSML｜ calls>

Control tokens must still be in the text. The closing EOS may be missing: generation stops at it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

EOS = "<｜end▁of▁sentence｜>"
THINK_END = "</think>"
CALLS_OPEN, CALLS_CLOSE = "<｜DSML｜ calls>\n", "\n</｜DSML｜ calls>"
_INVOKE = re.compile(
    r'<｜DSML｜ invoke name="([^"\n]+)">\n(.*?)\n</｜DSML｜ invoke>(?:\n(?=<)|$)', re.DOTALL
)
_PARAMETER = re.compile(
    r'<｜DSML｜ parameter name="([^"\n]+)" string="(true|false)">'
    r"(.*?)</｜DSML｜ parameter>(?:\n|$)",
    re.DOTALL,
)


class ChatError(ValueError):
    """A conversation that cannot be rendered, or a completion that cannot be parsed."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Completion:
    """What the model said. `finished_thinking` is False if it stopped inside its reasoning."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = field(default=())
    finished_thinking: bool = True

    def message(self) -> dict[str, Any]:
        """The assistant message to continue the conversation with."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{i}",
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(call.arguments, ensure_ascii=False),
                    },
                }
                for i, call in enumerate(self.tool_calls)
            ]
        return message


def parse_completion(text: str, thinking: bool, in_calls: bool = False) -> Completion:
    """Take a completion apart.

    Args:
        text: what was generated, control tokens included.
        thinking: the prompt opened a reasoning part.
        in_calls: the prompt opened a call block (a required tool choice).

    Raises:
        ChatError: a call block that is not well formed or not closed, or text after EOS.
    """
    text, _, after = text.partition(EOS)
    if after:
        raise ChatError(f"chat: nothing must follow the end of a completion, got {after[:40]!r}")
    reasoning = None
    if in_calls:
        return Completion("", None, _calls(text))
    if thinking:
        reasoning, closed, text = text.partition(THINK_END)
        if not closed:
            return Completion("", reasoning, finished_thinking=False)
    content, opened, block = text.partition(f"\n\n{CALLS_OPEN}")
    if not opened and text.startswith(CALLS_OPEN):
        content, opened, block = "", CALLS_OPEN, text[len(CALLS_OPEN) :]
    return Completion(content, reasoning, _calls(block) if opened else ())


def _calls(block: str) -> tuple[ToolCall, ...]:
    """The calls of an open block."""
    body, closed, rest = block.rpartition(CALLS_CLOSE)
    if not closed or rest:
        raise ChatError(f"chat: a call block must end with its closing tag, got {block[-40:]!r}")
    calls, at = [], 0
    while at < len(body):
        found = _INVOKE.match(body, at)
        if not found:
            raise ChatError(f"chat: a call must be an invoke element, got {body[at : at + 60]!r}")
        calls.append(ToolCall(found[1], _arguments(found[1], found[2])))
        at = found.end()
    if not calls:
        raise ChatError("chat: a call block must hold a call, got an empty one")
    return tuple(calls)


def _arguments(name: str, text: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    at = 0
    while at < len(text):
        found = _PARAMETER.match(text, at)
        if not found:
            raise ChatError(f"chat: {name}: bad parameter element: {text[at : at + 60]!r}")
        key, is_string, value = found.groups()
        if is_string == "true":
            arguments[key] = value
        else:
            try:
                arguments[key] = json.loads(value)
            except ValueError as error:
                raise ChatError(f"chat: {name}: parameter {key} is not JSON: {value!r}") from error
        at = found.end()
    return arguments
