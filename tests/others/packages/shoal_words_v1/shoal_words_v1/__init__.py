"""A verifiers environment (v1) as its users write one: a taskset with two rewards, and a harness that chats and has a tool.

It knows nothing of Shoal. Words are said, in one turn, in several, or after a tool told them.
"""

import asyncio
import json
from typing import Literal

import openai
import verifiers.v1 as vf

__all__ = ["WordHarness", "WordTaskset"]

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "The word of a number.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}


class WordData(vf.TaskData):
    word: str
    kind: str
    trouble: str


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.trouble == "reward":
            raise KeyError("no such word")
        return float(self.data.word in trace.last_reply)

    @vf.reward(weight=0.5)
    async def letters(self, trace: vf.Trace) -> float:
        """Share of the letters of the last reply that the word has."""
        reply = trace.last_reply
        return sum(letter in self.data.word for letter in reply) / len(reply) if reply else 0.0


class WordConfig(vf.TasksetConfig):
    words: tuple[str, ...] = ("tide", "reef", "kelp")
    kind: Literal["once", "again", "tool", "parallel", "rewrite", "stream"] = "once"
    trouble: str = ""
    shout: bool = False


class WordTaskset(vf.Taskset[WordTask, WordConfig]):
    def load(self) -> list[WordTask]:
        if self.config.trouble == "load":
            raise FileNotFoundError("words.txt")
        c = self.config
        return [
            WordTask(WordData(
                prompt=f"word {i}" + "!" * c.shout, system_prompt="one word", word=word, kind=c.kind, trouble=c.trouble,
            ), c.task)
            for i, word in enumerate(c.words)
        ]  # fmt: skip


class WordHarnessConfig(vf.HarnessConfig):
    most: int = 3


class WordHarness(vf.Harness[WordHarnessConfig]):
    """Runs its loop in the process of the environment, as verifiers allows."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        kind = trace.task.data.kind
        tools = {"tools": [TOOL]} if kind == "tool" else {}
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            async def ask(asked):
                return await client.chat.completions.create(model=ctx.model, messages=asked, **tools)

            try:
                if kind == "stream":
                    stream = await client.chat.completions.create(model=ctx.model, messages=messages, stream=True)
                    async for _ in stream:
                        pass
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for turn in range(self.config.most):
                    if kind == "parallel" and turn == 1:
                        await asyncio.gather(ask(messages), ask([*messages, {"role": "user", "content": "or?"}]))
                        break
                    message = (await ask(messages)).choices[0].message
                    messages.append(message.model_dump(exclude_none=True))
                    if kind == "once" or (kind == "again" and trace.task.data.word in (message.content or "")):
                        break
                    if kind == "tool":
                        if not message.tool_calls:
                            break
                        for call in message.tool_calls:
                            number = json.loads(call.function.arguments)["number"]
                            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"it has {number} letters"})
                    else:
                        messages.append({"role": "user", "content": "no, again"})
                    if kind == "rewrite":
                        messages[1] = {"role": "user", "content": "another question"}
            except openai.BadRequestError as error:
                return vf.ProgramResult(exit_code=1, stdout="", stderr=str(error))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
