"""The endpoint before clients that others wrote, and before a thousand at once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from p2p.version import Version
from tests.support.endpoint_house import EOS, MODEL, House, open_house
from tests.support.request_twin import logprob_of

HI: Any = [{"role": "user", "content": "hi"}]


class TestOpenAI:
    """The `openai` package, unmodified, as its users call it: in a thread of its own."""

    @pytest.fixture(autouse=True)
    def openai(self) -> Any:
        return pytest.importorskip("openai")

    async def ask(self, openai: Any, house: House, use: Any, **options: Any) -> Any:
        """What `use(client)` returns."""
        with openai.OpenAI(base_url=f"{house.endpoint.url}/v1", api_key=house.key, **options) as client:
            return await trio.to_thread.run_sync(use, client)

    async def test_models_and_completions(self, openai: Any, tmp_path: Path) -> None:
        async with open_house(tmp_path, "hé") as house:
            models = await self.ask(openai, house, lambda c: c.models.list())
            assert [(m.id, m.max_model_len) for m in models.data] == [(MODEL, 500)]
            extra = {"return_token_ids": True}
            found = await self.ask(openai, house, lambda c: c.completions.create(
                model=MODEL, prompt=house.ids("ab"), logprobs=0, n=2, extra_body=extra,
            ))  # fmt: skip
            assert [c.text for c in found.choices] == ["hé", "hé"] and found.usage.completion_tokens == 8
            assert found.choices[0].token_ids == [*house.ids("hé"), EOS]
            assert found.choices[0].logprobs.token_logprobs == [logprob_of(i) for i in range(4)]

    async def test_chat_whole_and_streamed(self, openai: Any, tmp_path: Path) -> None:
        async with open_house(tmp_path, "añ€𝄞 done") as house:
            whole = await self.ask(openai, house, lambda c: c.chat.completions.create(
                model=MODEL, messages=HI, logprobs=True, top_logprobs=1, seed=3, temperature=0.5, stop=["!"],
                max_completion_tokens=50, user="me",
            ))  # fmt: skip
            (choice,) = whole.choices
            assert (choice.message.content, choice.finish_reason) == ("añ€𝄞 done", "stop")
            told = [one.logprob for one in choice.logprobs.content]
            assert told == [logprob_of(i) for i in range(len(told))] and len(told) == len(house.ids("añ€𝄞 done")) + 1

            def streamed(client: Any) -> list[Any]:
                return list(client.chat.completions.create(
                    model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
                ))  # fmt: skip

            chunks = await self.ask(openai, house, streamed)
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "añ€𝄞 done"
            assert chunks[-1].usage.completion_tokens == len(told)

    async def test_leaving_a_stream_cancels_it(self, openai: Any, tmp_path: Path) -> None:
        async with open_house(tmp_path, "x" * 400, stop=False) as house:
            house.twin.pause_s = 0.02

            def leave(client: Any) -> None:
                with client.chat.completions.create(model=MODEL, messages=HI, stream=True) as stream:
                    next(iter(stream))

            await self.ask(openai, house, leave)
            await house.settled()
            assert (house.twin.cancelled, house.twin.finished) == (1, 0)

    async def test_refusals_are_its_own_exceptions_and_busy_is_tried_again(self, openai: Any, tmp_path: Path) -> None:
        async with open_house(tmp_path) as house:
            def create(client: Any) -> Any:
                return client.chat.completions.create(model=MODEL, messages=HI)

            house.twin.most = 0
            with pytest.raises(openai.RateLimitError, match="wait already"):
                await self.ask(openai, house, create, max_retries=0)
            with pytest.raises(openai.ConflictError, match=r"no node serves version 1\.9"):
                house.twin.most = 10
                await self.ask(openai, house, create, max_retries=0, default_headers={"X-Shoal-Exact-Version": "1.9"})
            with pytest.raises(openai.AuthenticationError):
                await self.ask(openai, house, lambda c: create(c.with_options(api_key="wrong")), max_retries=0)
            with pytest.raises(openai.BadRequestError, match="presence_penalty"):
                await self.ask(openai, house, lambda c: c.chat.completions.create(
                    model=MODEL, messages=HI, presence_penalty=1.0,
                ))  # fmt: skip
            house.published.clear()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.ask, openai, house, create)  # the package comes again as Retry-After says
                await trio.sleep(0.5)
                house.published.append(Version(1, 4))


CLIENTS, LEAVERS = 1000, 300


async def test_a_thousand_clients_of_whom_many_leave_early(tmp_path: Path) -> None:
    """Streams and whole answers, clients that stop reading a stream, that close in the middle, and that give up waiting: whoever
    stays has the whole answer, and of the others nothing is left."""
    text = "one two three " * 4
    async with open_house(tmp_path, text) as house:
        house.twin.pause_s = 0.05
        whole: list[bool] = []
        before, files = trio.lowlevel.current_statistics().tasks_living, psutil.Process().num_fds()
        rng = random.Random(1)
        leavers = set(rng.sample(range(CLIENTS), LEAVERS))

        async def one(number: int) -> None:
            stream = number % 2 == 0
            body = b'{"messages": [{"role": "user", "content": "hi"}], "stream": %s}' % (b"true" if stream else b"false")
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {house.key}\r\n"
                f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            port = int(house.endpoint.url.rpartition(":")[2])
            async with await trio.open_tcp_stream("127.0.0.1", port) as connection:
                await connection.send_all(head.encode() + body)
                if number in leavers:
                    if number % 3:
                        await connection.receive_some(200)
                    else:
                        await trio.sleep(rng.random() / 2)
                    return
                found = b""
                async for part in connection:
                    found += part
            whole.append(found.startswith(b"HTTP/1.1 200") and (b"[DONE]" if stream else b'"finish_reason":"stop"') in found)

        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(one, number)
        assert len(whole) == CLIENTS - LEAVERS and all(whole)
        await house.settled()
        with trio.fail_after(30):
            while trio.lowlevel.current_statistics().tasks_living > before:
                await trio.sleep(0.01)
        assert house.twin.active == 0 and house.twin.finished + house.twin.cancelled == len(house.twin.asked)
        assert house.twin.finished >= CLIENTS - LEAVERS and house.twin.cancelled > 0
        assert psutil.Process().num_fds() == files
