"""Conversations to prompts and completions back to messages, in the release's encoding.

Rendering is DeepSeek's own (`deepseek-recipe`, imported only when a conversation is rendered).
Around it this module checks the messages, orders images, sets a numeric effort, ends a finished
dialogue without a new header, and knows the task markers. A prompt keeps which of its ranges are
control tokens, so that text which somebody typed never becomes one.

Message: `{"role": "system" | "user" | "assistant" | "tool" | "latest_reminder", "content": …}`;
content is a string or a list of blocks, `{"type": "text", "text": …}` or any `"type"` that
contains "image". An assistant message may have `reasoning_content`, `tool_calls`
(`{"id", "function": {"name", "arguments": JSON string or object}}`) and `prefix: true` (continue
it); a tool message has `tool_call_id`. `tools` on the first message are the conversation's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinfer.completion import EOS, THINK_END, ChatError, Completion, parse_completion
from tinfer.tokenizer import TextStream, Tokenizer, TokenizerError

__all__ = [
    "ChatError",
    "Completion",
    "Prompt",
    "TextStream",
    "Tokenizer",
    "TokenizerError",
    "parse_completion",
    "render",
]

IMAGE = "<｜deepseek_image｜>"
ASSISTANT = "<｜Assistant｜>"
EFFORTS = ("low", "high", "xhigh", "max")  # 50, 75, 75, 100
# Task markers replace the assistant header, follow it, or follow a finished answer.
TASKS_FOR_HEADER = ("query", "authority", "domain", "read_url")
TASK_AFTER_HEADER, TASK_AFTER_ANSWER = "action", "title"
_ROLES = ("system", "user", "assistant", "tool", "latest_reminder")

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation."""

    text: str
    control: tuple[tuple[int, int], ...]  # ranges of `text` that are control tokens
    images: tuple[Mapping[str, Any], ...] = field(default=())  # in the order of their places

    def then(self, marker: str) -> Prompt:
        """With a control token behind it."""
        end = len(self.text)
        control = (*self.control, (end, end + len(marker)))
        return Prompt(self.text + marker, control, self.images)

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids; each image is one image token, to be widened to its span."""
        return tokenizer.encode_segments(self.text, self.control)


@dataclass(frozen=True)
class _Options:
    thinking: bool
    effort: int | str | None
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str
    response_format: Mapping[str, Any] | None


def render(
    messages: Sequence[Message],
    thinking: bool = False,
    effort: int | str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str = "auto",
    response_format: Mapping[str, Any] | None = None,
    task: str | None = None,
    header: bool = True,
) -> Prompt:
    """Render a conversation.

    Args:
        messages: see the module's docstring.
        thinking: open the answer with a reasoning part.
        effort: 1..100, or low (50), high (75, the default), max (100); only with `thinking`.
        tools: `{"name", "description", "parameters"}`, or that under `"function"`.
        tool_choice: auto, none, or required (the prompt then opens a call block).
        response_format: `{"type": "json_object"}` or `{"type": "json_schema", "json_schema":
            {"schema": …}}`.
        task: a quick task's marker: action, query, authority, domain, read_url, title.
        header: open the assistant's turn. A dialogue that ends with an answer is left closed.

    Raises:
        ChatError: the messages or options are not valid, or `deepseek-recipe` is missing.
    """
    _check_messages(messages)
    _check_task(messages, task)
    last = messages[-1]
    continued = bool(last.get("prefix"))
    closed = last["role"] == "assistant" and not continued
    bare = not closed and (not header or task in TASKS_FOR_HEADER)
    if (closed or bare) and (tool_choice == "required" or continued):
        raise ChatError("chat: a call block or a continued answer must have the assistant's header")
    # A finished answer is one that was being continued, plus the end: its reasoning stays.
    turns = [*messages[:-1], {**last, "prefix": True}] if closed else messages
    tools = [*(messages[0].get("tools") or ()), *tools]
    prompt = _recipe_render(turns, _Options(thinking, effort, tools, tool_choice, response_format))
    if thinking and isinstance(effort, int):
        prompt = _set_effort(prompt, effort)
    if bare:
        prompt = _without_header(prompt)
    if closed:
        said = last.get("content") or last.get("tool_calls") or not last.get("reasoning_content")
        prompt = prompt.then(EOS) if said or not thinking else prompt.then(THINK_END).then(EOS)
    return prompt.then(f"<｜{task}｜>") if task else prompt


# ---------------------------------------------------------------- checks
def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise ChatError("chat: messages must not be empty")
    for at, message in enumerate(messages):
        role = message.get("role")
        if role not in _ROLES:
            raise ChatError(f"chat: messages[{at}].role must be one of {_ROLES}, got {role!r}")
        if message.get("prefix") and (role != "assistant" or at != len(messages) - 1):
            raise ChatError(f"chat: messages[{at}].prefix must be on a last assistant message")
        if role == "latest_reminder" and at and messages[at - 1]["role"] in ("user", "tool"):
            raise ChatError(f"chat: messages[{at}]: a reminder must come before the user's turn")
        typed = [_text(message, at), str(message.get("reasoning_content") or "")]
        if any(IMAGE in text for text in typed):
            raise ChatError(f"chat: messages[{at}] must not spell {IMAGE}; give an image block")


def _check_task(messages: Sequence[Message], task: str | None) -> None:
    if task is None:
        return
    known = (*TASKS_FOR_HEADER, TASK_AFTER_HEADER, TASK_AFTER_ANSWER)
    if task not in known:
        raise ChatError(f"chat: task must be one of {known}, got {task!r}")
    last, wanted = messages[-1]["role"], "assistant" if task == TASK_AFTER_ANSWER else "user"
    if last != wanted or messages[-1].get("prefix"):
        raise ChatError(f"chat: task {task} must follow a finished {wanted} message, got {last}")


def _blocks(message: Message, at: int) -> list[Mapping[str, Any]]:
    content = message.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, Sequence) or not all(isinstance(b, Mapping) for b in content):
        raise ChatError(f"chat: messages[{at}].content must be text or a list of blocks")
    for block in content:
        kind = block.get("type")
        if kind != "text" and "image" not in str(kind):
            raise ChatError(f"chat: messages[{at}]: block type must be text or image, got {kind!r}")
    return list(content)


def _text(message: Message, at: int) -> str:
    return "\n\n".join(str(b["text"]) for b in _blocks(message, at) if b["type"] == "text")


# ---------------------------------------------------------------- DeepSeek's renderer
def _recipe() -> Any:
    try:
        import deepseek_recipe
    except ImportError as error:
        raise ChatError(
            "chat: rendering a conversation needs deepseek-recipe: pip install 'tinfer[chat]' "
            "(raw text and ids work without it)"
        ) from error
    return deepseek_recipe


def _recipe_render(messages: Sequence[Message], options: _Options) -> Prompt:
    recipe = _recipe()
    images: list[Mapping[str, Any]] = []
    try:
        conversation = recipe.Conversation(
            [_message(recipe, m, at, images) for at, m in enumerate(messages)],
            thinking_mode=options.thinking,
            tools=[_tool(recipe, t, at) for at, t in enumerate(options.tools)],
            tool_choice=options.tool_choice,
            reasoning_effort=_effort(options),
            **_format(options.response_format),
        )
        encoding = recipe.DeepseekV41Encoding()
        encoding = encoding.with_special_tokens(recipe.SpecialTokens(image=IMAGE))
        rendered = encoding.render_conversation(conversation)
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, ChatError) else ChatError(f"chat: {error}") from error
    placed = tuple(images[int(source.path)] for source in rendered.image_sources)
    return Prompt(rendered.prompt, tuple(rendered.special_ranges), placed)


def _message(recipe: Any, message: Message, at: int, images: list[Mapping[str, Any]]) -> Any:
    role, parts, sources = message["role"], [], []
    for block in _blocks(message, at):
        if block["type"] == "text":
            parts.append(str(block["text"]))
            continue
        # Results are put into call order: the path finds the image again behind its place.
        sources.append(recipe.BytesImageSource(b"", path=str(len(images))))
        images.append(block)
        parts.append(IMAGE)
    content = "\n\n".join(parts)
    if sources and role in ("assistant", "latest_reminder"):
        raise ChatError(f"chat: messages[{at}]: an image must not be in a message of the {role}")
    if role == "system":
        # The first message's tools are the conversation's; later ones announce a change.
        tools = [_tool(recipe, t, i) for i, t in enumerate(message.get("tools") or ()) if at]
        return recipe.SystemMessage(content, sources, tools or None, image_token=IMAGE)
    if role == "user":
        return recipe.UserMessage(content, sources, image_token=IMAGE)
    if role == "tool":
        called = message.get("tool_call_id")
        return recipe.ToolMessage(content, called, sources, image_token=IMAGE)
    if role == "latest_reminder":
        return recipe.LatestReminderMessage(content)
    calls = [_call(recipe, c, at) for c in message.get("tool_calls") or ()] or None
    reasoning = message.get("reasoning_content")
    return recipe.AssistantMessage(content, reasoning, calls, bool(message.get("prefix")))


def _call(recipe: Any, call: Mapping[str, Any], at: int) -> Any:
    function = call.get("function", call)
    name, arguments = function.get("name"), function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise ChatError(f"chat: messages[{at}]: arguments of {name} are not JSON") from error
    if not name or not isinstance(arguments, Mapping):
        raise ChatError(f"chat: messages[{at}]: a call must have a name and an object of arguments")
    text = json.dumps(arguments, ensure_ascii=False)
    return recipe.ToolCall(str(call.get("id", "")), str(name), text)


def _tool(recipe: Any, tool: Mapping[str, Any], at: int) -> Any:
    function = tool.get("function", tool)
    if not function.get("name"):
        raise ChatError(f"chat: tools[{at}] must have a name")
    return recipe.ToolDefinition(
        function["name"], function.get("description"), function.get("parameters")
    )


def _effort(options: _Options) -> str | None:
    """The name to render with; a number replaces its line afterwards."""
    effort = options.effort
    if effort is None:
        return None
    number = isinstance(effort, int) and not isinstance(effort, bool) and 1 <= effort <= 100
    if not number and effort not in EFFORTS:
        raise ChatError(f"chat: effort must be 1..100 or one of {EFFORTS}, got {effort!r}")
    if not options.thinking:
        raise ChatError("chat: effort must be given with thinking only")
    return "high" if number else str(effort)


def _format(wanted: Mapping[str, Any] | None) -> dict[str, Any]:
    kind = (wanted or {}).get("type", "text")
    if kind == "json_schema" and wanted is not None:
        schema = wanted.get("json_schema", {}).get("schema")
        if not isinstance(schema, Mapping):
            raise ChatError("chat: response_format.json_schema must have an object as schema")
        return {"response_schema": dict(schema)}
    if kind not in ("text", "json_object"):
        raise ChatError(
            f"chat: response_format must be text, json_object or json_schema, got {kind}"
        )
    return {"response_format": kind}


# ---------------------------------------------------------------- edits of the rendered prompt
_EFFORT_LINE = re.compile(r"(<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: )75( \(range)")


def _set_effort(prompt: Prompt, effort: int) -> Prompt:
    found = _EFFORT_LINE.match(prompt.text)
    assert found, "a thinking prompt opens with its effort line"
    text = f"{found[1]}{effort}{prompt.text[found.start(2) :]}"
    shift, line = len(text) - len(prompt.text), found.start(2)
    control = tuple((a + shift, b + shift) if a >= line else (a, b) for a, b in prompt.control)
    return Prompt(text, control, prompt.images)


def _without_header(prompt: Prompt) -> Prompt:
    """Drop the opening of the assistant's turn: its marker and the thinking token behind it."""
    first, last = prompt.control[-2]
    assert prompt.text[first:last] == ASSISTANT, "a prompt ends with the assistant's header"
    return Prompt(prompt.text[:first], prompt.control[:-2], prompt.images)
