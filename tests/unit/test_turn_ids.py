"""Given messages as token ids: only ever added, and what the template itself would write."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import trio

from learner.environments.environment import Environment, ToolCall, tool, tools_of
from learner.environments.running import running_environment
from learner.environments.settings import EnvironmentSection
from learner.environments.tools import MAX_CALLS, call_tool, find_calls
from learner.tasks.port import ChatFormat, EnvironmentSource, Prompt, Task
from learner.tasks.turns import TurnRenderer, check_messages, check_turn_stops
from netem.demo.tiny_model import char_tokenizer
from p2p.errors import UsageError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% elif m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MARKS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
]
TEMPLATES = {"chatml": (CHATML, "<|im_end|>"), "qwen3": (QWEN3, "<|im_end|>"), "llama3": (LLAMA3, "<|eot_id|>")}


def tokenizer_with(template: str) -> Any:
    tokenizer = char_tokenizer("\n<>|/_?!,\"'{}[]:.")
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_whole_episodes_read_as_the_template_would_write_them(name: str) -> None:
    template, end = TEMPLATES[name]
    tokenizer = tokenizer_with(template)
    stop = tokenizer.convert_tokens_to_ids(end)
    renderer = TurnRenderer(tokenizer, [stop], True)
    draw = random.Random(1)

    def words() -> str:
        return "".join(draw.choices("abc 012", k=draw.randint(1, 9))).strip() or "x"

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    for _ in range(30):
        messages = [{"role": "user", "content": words()}]
        ids = encode(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        for _ in range(draw.randint(1, 4)):
            text = words()
            sampled = (*encode(text), stop)
            answer = [{"role": draw.choice(["user", "tool"]), "content": words()} for _ in range(draw.randint(1, 2))]
            given = renderer.given(answer, sampled)
            before, ids = ids, (*ids, *sampled, *given)
            assert ids[: len(before)] == before
            assert renderer.turn_text(sampled) == text
            assert renderer.given(answer, sampled[:-1]) == (stop, *given), "a turn that was cut off is ended for the model"
            messages += [{"role": "assistant", "content": text}, *answer]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == whole


def test_thinking_that_a_template_would_drop_later_stays() -> None:
    tokenizer = tokenizer_with(QWEN3)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    format_ = ChatFormat({"enable_thinking": False}, ({"type": "function"},))
    renderer = TurnRenderer(tokenizer, [stop], True, format_)
    sampled = (*tokenizer.encode("<think>\nhm</think>a", add_special_tokens=False), stop)
    text = tokenizer.decode(renderer.given([{"role": "tool", "content": "7"}], sampled))
    tail = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert text == "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n" + tail


def test_another_end_of_turn_takes_the_place_of_the_template_s() -> None:
    tokenizer = tokenizer_with(LLAMA3)
    eot, eom = tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|eom_id|>"])
    renderer = TurnRenderer(tokenizer, [eot, eom], True)
    answer = [{"role": "tool", "content": "7"}]
    assert renderer.given(answer, [5, eom]) == renderer.given(answer, [5, eot]) == renderer.given(answer, [5])[1:]


def test_a_turn_that_a_stop_string_of_one_token_ends_is_ended_for_the_template() -> None:
    tokenizer = tokenizer_with(CHATML)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    answer = [{"role": "user", "content": "no"}]

    def text(stop: str, stop_ids: list[int]) -> str:
        sampled = tokenizer.encode(f"1{stop}", add_special_tokens=False)
        given = TurnRenderer(tokenizer, stop_ids, True, stop=[stop]).given(answer, sampled)
        return str(tokenizer.decode([*sampled, *given]))

    after = "<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
    assert text("?", [end]) == f"1?{after}" and text("\n", [end]) == f"1\n{after}"
    assert text("<|im_end|>", [tokenizer.eos_token_id]) == f"1{after}", "the template's own end, which the model does not name"


@pytest.mark.parametrize(("stop", "chat", "fits"), [("\n", True, False), ("\n", False, True), ("?", True, True)])
def test_a_stop_string_that_begins_each_turn_is_refused(stop: str, chat: bool, fits: bool) -> None:
    tokenizer, task = tokenizer_with(CHATML), Task()
    task.stop = ("##", stop)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    with nullcontext() if fits else pytest.raises(UsageError, match=r"task\.stop: '\\n' is one token") as caught:
        check_turn_stops(task, tokenizer, [end], Prompt(0, "?", None, chat))
    assert fits or "\n" not in str(caught.value)
    check_turn_stops(task, tokenizer, [end, *tokenizer.encode("\n")], Prompt(0, "?", None, True))  # then it is the model's own


def test_no_process_starts_for_turns_that_would_end_before_they_begin() -> None:
    tokenizer, task = tokenizer_with(CHATML), Task()
    task.stop, task.environment = ("\n",), EnvironmentSource("nowhere:Game")

    async def body() -> None:
        async with running_environment(
            task, tokenizer, [tokenizer.eos_token_id], EnvironmentSection(), seed=0, first=Prompt(0, "?", None, True)
        ):
            raise AssertionError("it must not run")

    with pytest.raises(UsageError, match=r"^task\.stop: "):
        trio.run(body)


def test_raw_text_follows_as_it_is() -> None:
    tokenizer = char_tokenizer("<>?")
    renderer = TurnRenderer(tokenizer, [tokenizer.eos_token_id], False)
    ids = renderer.given([{"role": "user", "content": "<a"}], [tokenizer.eos_token_id])
    assert tokenizer.decode(ids) == "<a"


def test_templates_that_cannot_say_it_are_refused_in_one_line() -> None:
    raising = tokenizer_with("{% for m in messages %}{{ raise_exception('no tools here') }}{% endfor %}")
    silent = tokenizer_with("{{ messages[0].content }}")
    message = [{"role": "tool", "content": "7"}]
    with pytest.raises(UsageError, match=r"cannot render .*\(tool\): no tools here"):
        TurnRenderer(raising, [1], True).given(message, [1])
    with pytest.raises(UsageError, match="does not print an assistant's turn"):
        TurnRenderer(silent, [1], True).given(message, [1])


def test_messages_are_checked() -> None:
    assert check_messages([{"role": "user", "content": "a"}]) == ""
    assert "assistant" in check_messages([{"role": "assistant", "content": "a"}])
    assert "without a text" in check_messages([{"role": "user", "content": 3}])
    assert check_messages([])


# --- tools -----------------------------------------------------------------------------------------------------------


def test_calls_are_read_from_text() -> None:
    text = (
        'so <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> and <tool_call>{"name": 3}</tool_call><tool_call>{'
    )
    found = find_calls(text, "hermes", 2)
    assert found.calls == (ToolCall("add", {"a": 1}, "c00020000"),)
    assert len(found.wrong) == 2 and "object" in found.wrong[0] and "not JSON" in found.wrong[1]
    assert find_calls('{"name": "add", "parameters": {"a": 1}}', "llama", 0).calls[0].arguments == {"a": 1}
    assert find_calls('```json\n{"name": "add"}\n```', "fenced", 0).calls[0].name == "add"
    assert len(find_calls('<tool_call>{"name": "a"}</tool_call>' * 40, "hermes", 0).calls) == MAX_CALLS
    assert find_calls("<tool_call>" + "[" * 100_000, "hermes", 0).wrong
    with pytest.raises(UsageError, match="hermes"):
        find_calls("", "hermse", 0)


class Calculator(Environment):
    @tool
    def add(self, a: int, b: int) -> int:
        """Adds.

        Args:
            a: one number
            b: another
        """
        return a + b

    @tool
    async def fail(self) -> None:
        """Fails."""
        raise RuntimeError("broken")


def test_tools_answer_whatever_goes_wrong() -> None:
    import asyncio

    tools = tools_of(Calculator())

    async def in_thread(function: Any, **arguments: Any) -> Any:
        return function(**arguments)

    def said(name: str, **arguments: Any) -> str:
        message = asyncio.run(call_tool(tools, ToolCall(name, arguments, "c000000000"), in_thread))
        assert message["role"] == "tool" and message["tool_call_id"] == "c000000000"
        return str(message["content"])

    assert said("add", a=1, b=2) == "3"
    assert "missing" in said("add", a=1) and "RuntimeError: broken" in said("fail")
    assert "there is no tool sub; there are: add, fail" in said("sub")
    assert said("add", a=1, b="x").startswith("error: TypeError")
