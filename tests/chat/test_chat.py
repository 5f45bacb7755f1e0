"""Conversations against the release's rendered strings and prompt ids, and completions parsed."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from tinfer.chat import ChatError, Tokenizer, TokenizerError, parse_completion, render
from tinfer.completion import Completion, ToolCall

pytest.importorskip("deepseek_recipe")

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
EFFORT = (
    "<｜System｜>Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the "
    "reasoning)\n\n"
)
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
TOOLS_BLOCK = """\n
## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "<｜DSML｜ calls>" block like the following:

<｜DSML｜ calls>
<｜DSML｜ invoke name="$TOOL_NAME">
<｜DSML｜ parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜ parameter>
...
</｜DSML｜ invoke>
<｜DSML｜ invoke name="$TOOL_NAME2">
...
</｜DSML｜ invoke>
</｜DSML｜ calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, \
booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{"name": "get_weather", "description": "Get the weather", "parameters": {"type": "object", \
"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
CALL_BLOCK = """\n
<｜DSML｜ calls>
<｜DSML｜ invoke name="get_weather">
<｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>
<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>
<｜DSML｜ parameter name="opt" string="false">{"a": [1, 2]}</｜DSML｜ parameter>
<｜DSML｜ parameter name="f" string="false">true</｜DSML｜ parameter>
</｜DSML｜ invoke>
</｜DSML｜ calls>"""
ARGUMENTS = {"city": "Paris", "days": 3, "opt": {"a": [1, 2]}, "f": True}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def assistant(text: str, reasoning: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "reasoning_content": reasoning, **more}


def call(name: str, arguments: Any, index: str = "1") -> dict[str, Any]:
    return {"id": index, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str, index: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": index, "content": text}


Q = "中国的首都是哪里？"
TWO_TURNS = [user("1+1?"), assistant("2", "easy"), user("and 2+2?")]
TOOL_TURNS = [
    user("Weather in Paris?"),
    assistant("Let me check.", "need tool", tool_calls=[call("get_weather", ARGUMENTS)]),
    result("sunny", "1"),
]
IMAGE_BLOCKS = [
    {"type": "text", "text": "第一张图"},
    {"type": "image_url", "image_url": {"url": "file:a.png"}},
    {"type": "text", "text": "有什么内容？"},
]

# Numbered as in the specification of the release's rendered strings.
RENDERED: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "1 chat": ([user(Q)], {}, f"<｜User｜>{Q}<｜Assistant｜></think>"),
    "2 thinking": (
        [user(Q)],
        {"thinking": True},
        f"{EFFORT.format(75)}<｜User｜>{Q}<｜Assistant｜><think>",
    ),
    "3 system": (
        [system("You are helpful."), user("Hi")],
        {},
        "<｜System｜>You are helpful.<｜User｜>Hi<｜Assistant｜></think>",
    ),
    "4 thinking with system": (
        [system("You are helpful."), user("Hi")],
        {"thinking": True},
        f"{EFFORT.format(75)}You are helpful.<｜User｜>Hi<｜Assistant｜><think>",
    ),
    "5 turns": (
        TWO_TURNS,
        {},
        f"<｜User｜>1+1?<｜Assistant｜></think>2{EOS}<｜User｜>and 2+2?<｜Assistant｜></think>",
    ),
    "6 reasoning is dropped": (
        TWO_TURNS,
        {"thinking": True},
        f"{EFFORT.format(75)}<｜User｜>1+1?<｜Assistant｜></think>2{EOS}"
        "<｜User｜>and 2+2?<｜Assistant｜><think>",
    ),
    "7 tools": (
        [system("You are helpful."), user("Weather in Paris?")],
        {"tools": [WEATHER]},
        f"<｜System｜>You are helpful.{TOOLS_BLOCK}<｜User｜>Weather in Paris?<｜Assistant｜>"
        "</think>",
    ),
    "8 reasoning is kept with tools": (
        TOOL_TURNS,
        {"thinking": True, "tools": [{"type": "function", "function": WEATHER}]},
        f"{EFFORT.format(75)}{TOOLS_BLOCK}<｜User｜>Weather in Paris?<｜Assistant｜><think>need"
        f" tool</think>Let me check.{CALL_BLOCK}{EOS}<｜User｜><tool_result>sunny</tool_result>"
        "<｜Assistant｜><think>",
    ),
    "9 image": (
        [user(IMAGE_BLOCKS)],
        {},
        "<｜User｜>第一张图\n\n<｜deepseek_image｜>\n\n有什么内容？<｜Assistant｜></think>",
    ),
    "10 system in between": (
        [user("a"), assistant("b"), system("mid"), user("c")],
        {},
        f"<｜User｜>a<｜Assistant｜></think>b{EOS}<｜System｜>mid<｜User｜>c<｜Assistant｜></think>",
    ),
    "10 system last": (
        [user("a"), assistant("b"), system("mid")],
        {},
        f"<｜User｜>a<｜Assistant｜></think>b{EOS}<｜System｜>mid<｜Assistant｜></think>",
    ),
    "11 json": (
        [user("a")],
        {"response_format": {"type": "json_object"}},
        "<｜System｜>\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema "
        'to reply:\n{"type": "json_object"}<｜User｜>a<｜Assistant｜></think>',
    ),
    "13 continued answer": (
        [user("a"), assistant("The answer", prefix=True)],
        {},
        "<｜User｜>a<｜Assistant｜></think>The answer",
    ),
    "13 continued answer after reasoning": (
        [user("a"), assistant("The answer", "r", prefix=True)],
        {"thinking": True},
        f"{EFFORT.format(75)}<｜User｜>a<｜Assistant｜><think>r</think>The answer",
    ),
    "14 required call": (
        [system("s"), user("a")],
        {"tools": [WEATHER], "tool_choice": "required"},
        f"<｜System｜>s{TOOLS_BLOCK}<｜User｜>a<｜Assistant｜></think>\n\n<｜DSML｜ calls>\n",
    ),
    "15 query": ([user("classify me")], {"task": "query"}, "<｜User｜>classify me<｜query｜>"),
    "15 action": (
        [user("a")],
        {"task": "action"},
        "<｜User｜>a<｜Assistant｜></think><｜action｜>",
    ),
    "15 title": (
        [user("a"), assistant("b")],
        {"task": "title"},
        f"<｜User｜>a<｜Assistant｜></think>b{EOS}<｜title｜>",
    ),
    "reminder": (
        [{"role": "latest_reminder", "content": "rem"}, user("a")],
        {},
        "<｜latest_reminder｜>rem<｜User｜>a<｜Assistant｜></think>",
    ),
    "merged user messages": (
        [user("a"), user("b")],
        {},
        "<｜User｜>a\n\nb<｜Assistant｜></think>",
    ),
    "schema": (
        [user("a")],
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}},
        "<｜System｜>\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema "
        'to reply:\n{"type": "array"}<｜User｜>a<｜Assistant｜></think>',
    ),
}


@pytest.mark.parametrize("name", RENDERED)
def test_rendered_strings_TK01(name: str) -> None:
    messages, options, expected = RENDERED[name]
    assert render(messages, **options).text == BOS + expected


def test_results_are_put_in_call_order_12() -> None:
    calls = [call("x", "{}", "1"), call("y", "{}", "2")]
    messages = [
        user("a"),
        assistant("", tool_calls=calls),
        result("r2", "2"),
        result("r1", "1"),
        user("also"),
    ]
    assert render(messages, tools=[WEATHER]).text.endswith(
        f"</｜DSML｜ calls>{EOS}<｜User｜><tool_result>r1</tool_result>\n\n"
        "<tool_result>r2</tool_result>\n\nalso<｜Assistant｜></think>"
    )


@pytest.mark.parametrize(
    ("effort", "shown"),
    [(1, 1), (50, 50), (100, 100), (75, 75), ("low", 50), ("high", 75), ("max", 100), (None, 75)],
)
def test_efforts_TK01(effort: int | str | None, shown: int) -> None:
    prompt = render([user("a")], thinking=True, effort=effort)
    assert prompt.text == f"{BOS}{EFFORT.format(shown)}<｜User｜>a<｜Assistant｜><think>"
    spelled = [prompt.text[a:b] for a, b in prompt.control]
    assert spelled == [BOS, "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>"]


@pytest.mark.parametrize("effort", ["medium", 0, 101, True, 0.5, "75"])
def test_bad_efforts(effort: Any) -> None:
    with pytest.raises(ChatError, match=r"effort must be 1\.\.100 or one of"):
        render([user("a")], thinking=True, effort=effort)


def test_no_generation_prompt_TK01() -> None:
    assert render([user("a")], header=False).text == f"{BOS}<｜User｜>a"
    closed = f"{BOS}<｜User｜>a<｜Assistant｜></think>b{EOS}"
    assert render([user("a"), assistant("b")]).text == closed
    thinking = render([user("a"), assistant("b", "r")], thinking=True).text
    opened = f"{BOS}{EFFORT.format(75)}<｜User｜>a<｜Assistant｜><think>"
    assert thinking == f"{opened}r</think>b{EOS}"
    assert render([user("a"), assistant("b")], thinking=True).text == f"{opened}</think>b{EOS}"
    only = render([user("a"), assistant("", "r")], thinking=True).text
    assert only == f"{opened}r</think>{EOS}"


def test_tools_may_come_with_the_first_message() -> None:
    first = system("You are helpful.") | {"tools": [WEATHER]}
    given = render([first, user("Weather in Paris?")]).text
    assert given == BOS + RENDERED["7 tools"][2]
    # A later system message announces changed tools; it renders no second block.
    later = render(
        [user("a"), assistant("b"), system("new") | {"tools": [WEATHER]}, user("c")]
    ).text
    assert "new\n\n### Updated Tool Schemas\n\n" in later


# ---------------------------------------------------------------- ids
WORKED_IDS = [
    ("1 chat", [0, 128803, 17607, 2793, 3139, 12108, 1148, 128804, 128822]),
    (
        "2 thinking",
        [0, 128799, 77666, 288, 9504, 482, 28, 223, 2402, 343, 16801, 223, 19, 15, 1457, 14, 270,
         4077, 270, 1990, 14, 270, 850, 15146, 270, 22805, 868, 128803, 17607, 2793, 3139, 12108,
         1148, 128804, 128821],
    ),
    ("3 system", [0, 128799, 3476, 477, 11502, 16, 128803, 23166, 128804, 128822]),
    ("10 system in between",
     [0, 128803, 67, 128804, 128822, 68, 1, 128799, 14062, 128803, 69, 128804, 128822]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "ids"), WORKED_IDS)
def test_worked_ids(tokenizer: Tokenizer, name: str, ids: list[int]) -> None:
    messages, options, _ = RENDERED[name]
    assert render(messages, **options).encode(tokenizer) == ids


def test_more_worked_ids(tokenizer: Tokenizer) -> None:
    prefixed = render([user(f"问题：{Q}")]).encode(tokenizer)
    assert prefixed == [0, 128803, 2056, 768, 17607, 2793, 3139, 12108, 1148, 128804, 128822]
    for effort, index in ((50, 1328), (100, 1457)):
        ids = render([user(Q)], thinking=True, effort=effort).encode(tokenizer)
        assert ids[8] == index
    messages, options, _ = RENDERED["7 tools"]
    assert len(render(messages, **options).encode(tokenizer)) == 278
    image = [{"type": "image"}, {"type": "text", "text": "describe"}]
    ids = render([user(image)]).encode(tokenizer)
    assert (ids[:3], ids[-2:]) == ([0, 128803, 129264], [128804, 128822])
    messages, options, _ = RENDERED["14 required call"]
    ids = render(messages, **options).encode(tokenizer)
    assert ids[-6:] == [128822, 271, 30, 128825, 10699, 1018]
    assert [tokenizer.encode_plain(w)[0] for w in (" invoke", " parameter")] == [34756, 10767]
    assert tokenizer.encode_plain("<tool_result>") == [30, 72461, 46148, 32]


@pytest.mark.parametrize("name", RENDERED)
def test_ids_agree_with_the_whole_text(tokenizer: Tokenizer, name: str) -> None:
    """Nothing typed in these conversations spells a control token."""
    messages, options, _ = RENDERED[name]
    prompt = render(messages, **options)
    assert prompt.encode(tokenizer) == tokenizer.encode(prompt.text)


def test_typed_control_strings_stay_text_as_in_recipe(
    tokenizer: Tokenizer, tokenizer_file: Path
) -> None:
    import deepseek_recipe as recipe

    text = f"x <｜User｜> {EOS} </think> y ｜DSML｜"
    ids = render([user(text), assistant("a<think>b"), user("c")]).encode(tokenizer)
    conversation = recipe.Conversation(
        [
            recipe.UserMessage(text),
            recipe.AssistantMessage("a<think>b"),
            recipe.UserMessage("c"),
        ],
        thinking_mode=False,
    )
    other = recipe.DeepseekV41Encoding().with_tokenizer(
        recipe.Tokenizer.from_file(str(tokenizer_file))
    )
    assert ids == other.encode(conversation)
    assert ids.count(128803) == 2
    assert 1 not in ids[:-8]


def test_images_follow_their_places_when_results_are_reordered() -> None:
    def picture(name: str) -> list[dict[str, Any]]:
        return [{"type": "image_url", "image_url": {"url": name}}]

    calls = [call("x", {}, "1"), call("y", {}, "2")]
    messages = [
        user(picture("first")),
        assistant("", tool_calls=calls),
        result(picture("of y"), "2"),  # type: ignore[arg-type]
        result(picture("of x"), "1"),  # type: ignore[arg-type]
    ]
    prompt = render(messages, tools=[WEATHER])
    assert [i["image_url"]["url"] for i in prompt.images] == ["first", "of x", "of y"]
    assert prompt.text.count("<｜deepseek_image｜>") == 3


def test_reasoning_goes_back_with_tool_results_TK05() -> None:
    text = render(TOOL_TURNS, thinking=True, tools=[WEATHER]).text
    assert "<｜Assistant｜><think>need tool</think>Let me check.\n\n<｜DSML｜ calls>" in text
    dropped = render([*TOOL_TURNS[:1], assistant("ok", "thought"), user("b")], thinking=True).text
    assert "thought" not in dropped


# ---------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "messages must not be empty"),
        ([{"role": "developer", "content": "x"}], {}, r"messages\[0\]\.role must be one of"),
        ([user(5)], {}, r"messages\[0\]\.content must be text or a list"),
        ([user([{"type": "audio"}])], {}, "block type must be text or image, got 'audio'"),
        ([user("see <｜deepseek_image｜>")], {}, "must not spell <｜deepseek_image｜>"),
        ([user("a"), assistant("b", "<｜deepseek_image｜>")], {}, "must not spell"),
        ([assistant("b", prefix=True), user("a")], {}, "must be on a last assistant message"),
        ([user("a"), {"role": "latest_reminder", "content": "r"}], {}, "before the user's turn"),
        ([user("a"), assistant("", tool_calls=[call("x", "{")])], {}, "of x are not JSON"),
        ([user("a"), assistant("", tool_calls=[call("x", "3")])], {}, "an object of arguments"),
        ([user("a")], {"effort": 50}, "effort must be given with thinking only"),
        ([user("a")], {"tools": [{}]}, r"tools\[0\] must have a name"),
        ([user("a")], {"tool_choice": "maybe"}, "tool_choice"),
        ([user("a")], {"response_format": {"type": "xml"}}, "response_format must be text"),
        (
            [user("a")],
            {"response_format": {"type": "json_schema"}},
            "must have an object as schema",
        ),
        ([user("a")], {"task": "poem"}, "task must be one of"),
        ([user("a")], {"task": "title"}, "task title must follow a finished assistant message"),
        ([user("a"), assistant("b")], {"task": "query"}, "must follow a finished user message"),
        (
            [user("a")],
            {"tools": [WEATHER], "tool_choice": "required", "header": False},
            "must have the assistant's header",
        ),
        ([assistant([{"type": "image"}])], {}, "an image must not be in a message of the assist"),  # type: ignore[arg-type]
    ],
)
def test_bad_conversations(
    messages: list[dict[str, Any]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ChatError, match=message):
        render(messages, **options)


def test_a_missing_renderer_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_recipe(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "deepseek_recipe":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_recipe)
    with pytest.raises(ChatError, match=r"pip install 'tinfer\[chat\]'"):
        render([user("a")])


def test_a_small_tokenizer_cannot_carry_a_conversation() -> None:
    golden = Path(__file__).parents[1] / "data/golden/models/text_plain"
    with pytest.raises(TokenizerError, match="cannot carry a conversation; use raw text or ids"):
        render([user("w1")]).encode(Tokenizer.load(golden))


# ---------------------------------------------------------------- completions
CALLS = (ToolCall("get_weather", ARGUMENTS),)


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        (f"Paris.{EOS}", False, Completion("Paris.")),
        ("Paris.", False, Completion("Paris.")),
        (f"hm</think>Paris.{EOS}", True, Completion("Paris.", "hm")),
        ("hm, let me", True, Completion("", "hm, let me", finished_thinking=False)),
        (f"Checking.{CALL_BLOCK}{EOS}", False, Completion("Checking.", None, CALLS)),
        (f"need</think>{CALL_BLOCK}{EOS}", True, Completion("", "need", CALLS)),
        (f"{CALL_BLOCK.lstrip()}{EOS}", False, Completion("", None, CALLS)),
        ("", False, Completion("")),
        ("</think>", True, Completion("", "")),
    ],
)
def test_completions(text: str, thinking: bool, expected: Completion) -> None:
    assert parse_completion(text, thinking) == expected


def test_calls_of_every_kind() -> None:
    block = (
        '<｜DSML｜ invoke name="a">\n\n</｜DSML｜ invoke>\n<｜DSML｜ invoke name="n::b">\n'
        '<｜DSML｜ parameter name="t" string="true">two\nlines "x" </x></｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="z" string="false">null</｜DSML｜ parameter>\n</｜DSML｜ invoke>'
        "\n</｜DSML｜ calls>"
    )
    expected = (ToolCall("a", {}), ToolCall("n::b", {"t": 'two\nlines "x" </x>', "z": None}))
    assert parse_completion(block, thinking=False, in_calls=True).tool_calls == expected


def test_a_parsed_completion_renders_to_the_same_text() -> None:
    text = f"need tool</think>Let me check.{CALL_BLOCK}"
    message = parse_completion(text, thinking=True).message()
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    again = render([user("q"), message, result("s", "call_0")], thinking=True, tools=[WEATHER]).text
    assert f"<think>{text}{EOS}" in again


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"a{EOS}b", "nothing must follow the end"),
        (f"a{CALL_BLOCK[:-3]}", "must end with its closing tag"),
        (f"a{CALL_BLOCK}more", "must end with its closing tag"),
        ("a\n\n<｜DSML｜ calls>\n\n</｜DSML｜ calls>", "must hold a call"),
        (f"a{CALL_BLOCK.replace('name=', 'nom=')}", "must be an invoke element"),
        (f"a{CALL_BLOCK.replace('string=', 'str=')}", "get_weather: bad parameter element"),
        (f"a{CALL_BLOCK.replace('>3<', '>3x<')}", "parameter days is not JSON"),
    ],
)
def test_malformed_completions(text: str, message: str) -> None:
    with pytest.raises(ChatError, match=message):
        parse_completion(text, thinking=False)
