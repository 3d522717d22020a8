"""Environments and their tools in the sandbox, in real processes: what a tool may not do is stopped, and said."""

from __future__ import annotations

import json
import os
import socket
import string
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from learner.environments.confining import NEEDED, SCRATCH_BYTES, needs_consent
from learner.environments.environment import Environment, oddities
from learner.environments.host import EnvironmentHost
from learner.environments.port import Episode, EpisodeKey, Turn, TurnAnswer
from learner.environments.running import running_environment, set_environment
from learner.environments.settings import LEAST_MB, EnvironmentSection
from learner.rewards.sandbox import landlock_version
from learner.rewards.sandbox_probe import missing_layers
from learner.rewards.system_calls import environment_filter, scorer_filter
from learner.tasks.port import EnvironmentSource, Prompt, Task
from netem.demo.tiny_model import char_tokenizer
from p2p.errors import UsageError, first_of

needs_sandbox = pytest.mark.skipif(bool(missing_layers()), reason="this system cannot confine processes")

TOKENIZER = char_tokenizer("".join(c for c in string.printable if c not in string.digits + string.ascii_lowercase + " +-*/=>?."))
EOS = TOKENIZER.eos_token_id
PATIENCE_S = 120.0

SOURCE = '''
import asyncio, mmap, os, resource, signal, socket, subprocess, threading, time
from pathlib import Path
from learner.environments.environment import Environment, tool

HERE = Path(__file__).parent
kept = []

def connect(port: int) -> str:
    """Open a connection.

    Args:
        port: where
    """
    socket.create_connection(("127.0.0.1", port)).close()
    return "connected"

def look_up() -> str:
    """Find a host."""
    return str(socket.getaddrinfo("localhost", 80))

def datagram() -> str:
    """Send a datagram to a socket in the file system."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return str(ours.sendto(b"x", "/dev/log"))

def write(name: str) -> str:
    """Write a file.

    Args:
        name: which
    """
    (HERE / name).write_text("mine")
    return "written"

def read(name: str) -> str:
    """Read a file.

    Args:
        name: which
    """
    return (HERE / name).read_text()

def environ() -> str:
    """Our variables."""
    return str(sorted(os.environ.items()))

def fork() -> str:
    """Fork without end."""
    while True:
        os.fork()

def spawn() -> str:
    """Start a program."""
    return str(subprocess.run(["true"]).returncode)

def stop_parent() -> str:
    """Kill the learner."""
    os.kill(os.getppid(), signal.SIGKILL)
    return "killed"

def starve_parent() -> str:
    """Take the learner's time."""
    return str(resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1)))

def eat() -> str:
    """Eat memory without end."""
    held = []
    while True:
        held.append(b"x" * (32 << 20))

def share() -> str:
    """Eat memory that no limit counts."""
    return str(len(mmap.mmap(-1, 64 << 30)))

def fill() -> str:
    """Write without end."""
    for i in range(10_000):
        Path(f"file{i}").write_bytes(b"x" * (8 << 20))
    return "written"

def threads() -> str:
    """Start threads without end."""
    while True:
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()

def note(text: str) -> str:
    """Keep a note.

    Args:
        text: which
    """
    Path("note.txt").write_text(text)
    Path("note.txt").rename("kept.txt")
    return Path("kept.txt").read_text()

async def both(n: int) -> int:
    """Wait a little, beside a thread.

    Args:
        n: a number
    """
    found = await asyncio.gather(asyncio.sleep(0.01, n), asyncio.to_thread(lambda: n))
    return sum(found)

class Tools(Environment):
    tools = (connect, look_up, datagram, write, read, environ, fork, spawn, stop_parent, starve_parent, eat, share, fill, note,
             both, threads)

    def __init__(self, data=""):
        self.data = Path(data).read_text() if data else ""
        self.count = 0

    @tool
    def add(self, n: int) -> str:
        """Add to the count.

        Args:
            n: how much
        """
        self.count += n
        print("counted", self.count, flush=True)
        return f"{self.count} {self.data}"

    def reward(self):
        return float(self.count)

class Plain(Environment):
    def begin(self, row, seed):
        self.seed = seed

    def respond(self, turn):
        if turn.text == "eat":
            kept.append(b"x" * (8 << 30))
        return str(self.seed)

class Nothing(Environment):
    pass
'''


class Rows(Task):
    name = "rows"

    def __init__(self, file: Path, kind: str, **options: Any) -> None:
        self.environment = EnvironmentSource(f"{file}:{kind}", options)

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, "?", {"n": index}, where=f"rows.jsonl, row {index}")


class Player:
    """Writes calls of tools, and reads what came back."""

    def __init__(self, host: EnvironmentHost) -> None:
        self.host, self._turns = host, tuple[Turn, ...]()
        self._key = EpisodeKey(1, 0)

    async def says(self, text: str, over: str = "") -> TurnAnswer:
        ids = (*TOKENIZER.encode(text, add_special_tokens=False), EOS)
        self._turns = (*self._turns, Turn(ids))
        self.host.respond(Episode(self._key, 7, self._turns, over))
        with trio.fail_after(PATIENCE_S):
            answer = await self.host.answers.receive()
        self._turns = (*self._turns[:-1], Turn(ids, answer.given))
        return answer

    async def calls(self, tool: str, **arguments: Any) -> str:
        answer = await self.says(f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>")
        assert not answer.failed and not answer.anew
        return str(TOKENIZER.decode(answer.given))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An environment beside a run's folder, as a person has them."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal.sqlite").write_text("the journal")
    (tmp_path / "secret.txt").write_text("a secret")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.txt").write_text("some rows")
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


@asynccontextmanager
async def player(task: Task, seed: int = 0, **settings: Any) -> AsyncIterator[Player]:
    host = EnvironmentHost(task, TOKENIZER, [EOS], EnvironmentSection(**settings), seed=seed)
    async with trio.open_nursery() as nursery:
        await nursery.start(host.run)
        yield Player(host)
        nursery.cancel_scope.cancel()


def run(body: Callable[[], Awaitable[None]]) -> None:
    trio.run(body)


@needs_sandbox
def test_what_a_tool_may_not_do_is_stopped_and_said(file: Path, caplog, monkeypatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "abc123")
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    forbidden: list[tuple[str, dict[str, Any], str]] = [
        ("connect", {"port": port}, "no network"),
        ("look_up", {}, "no network"),
        ("datagram", {}, "no network"),
        ("write", {"name": "out.txt"}, "its current folder only"),
        ("write", {"name": "mine.py"}, "its current folder only"),
        ("read", {"name": "run/journal.sqlite"}, "environment.readable"),
        ("read", {"name": "secret.txt"}, "environment.readable"),
        ("read", {"name": f"/proc/{os.getpid()}/environ"}, "environment.readable"),
        ("fork", {}, "no processes"),
        ("spawn", {}, "no processes"),
        ("stop_parent", {}, "no signals"),
        ("starve_parent", {}, "no signals"),
        ("share", {}, "the sandbox"),
        ("eat", {}, "environment.memory_mb = 2048"),
        ("fill", {}, f"{SCRATCH_BYTES >> 20} MB of files"),
    ]

    async def body() -> None:
        task = Rows(file, "Tools", data=str(file.parent / "data" / "rows.txt"))
        readable = [str(file.parent / "data")]
        async with player(task, run="sandbox", memory_mb=2048, readable=readable, max_turns=100) as p:
            pids = p.host.pids
            for name, arguments, why in forbidden:
                said = await p.calls(name, **arguments)
                assert said.startswith("error: ") and why in said, (name, said)
                await p.calls("add", n=1)  # the process goes on, and keeps its state
            assert await p.calls("add", n=1) == f"{len(forbidden) + 1} some rows"
            assert p.host.pids == pids, "none of it cost a process"
            assert await p.calls("both", n=21) == "42"
            variables = await p.calls("environ")
            assert "abc123" not in variables and "PYTHONPATH" in variables
            done = await p.says("enough")
            assert done.score is not None and done.score.reward == len(forbidden) + 1

    caplog.set_level("INFO", "shoal.environments")
    run(body)
    assert not (file.parent / "out.txt").exists() and (file.parent / "run" / "journal.sqlite").read_text() == "the journal"
    told = [line for line in caplog.messages if "was stopped by" in line]
    assert told[0].startswith(f"environment {file}:Tools, rows.jsonl, row 7, turn 1: tool connect was stopped by the sandbox:")
    assert len(told) < len(forbidden), "now and then, not each time"
    assert f"environment {file}:Tools: counted 1" in caplog.messages, "what it prints is shown"


@needs_sandbox
def test_a_folder_of_its_own_is_there_to_write_in_and_gone_afterwards(file: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()

    async def body() -> None:
        async with player(Rows(file, "Tools"), run="sandbox") as p:
            assert await p.calls("note", text="remember") == "remember"
            [scratch] = (tmp_path / "temporary").iterdir()
            assert list(scratch.iterdir()) == [], "it is in memory, and nobody else sees it"

    run(body)
    assert list((tmp_path / "temporary").iterdir()) == []


@needs_sandbox
def test_threads_without_end_cost_the_process_and_not_the_machine(file: Path) -> None:
    async def body() -> None:
        async with player(Rows(file, "Tools"), run="sandbox", memory_mb=1024) as p:
            [pid] = p.host.pids
            assert "no more threads" in await p.calls("threads")
            assert psutil.Process(pid).num_threads() < 1024 // 8 + 16, "each has a stack of 8 MB at the most"
            answer = await p.says('<tool_call>{"name": "add", "arguments": {"n": 1}}</tool_call>')
            assert answer.given or "can't start new thread" in answer.failed, "it goes on, or says why not"

    run(body)


NEARLY_FULL = """
import mmap, resource, sys, threading
from learner.environments.confining import leave_room_for_threads
from learner.rewards.sandbox import limit_memory

limit_memory(400 << 20)
if sys.argv[1:]:
    leave_room_for_threads()
held = []
stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
for size in (8 << 20, 1 << 20, 1 << 16):  # until a stack fits, and little more
    try:
        while True:
            spare = mmap.mmap(-1, stack + (1 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            held.append(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            spare.close()
    except OSError:
        spare.close()
ran = []
thread = threading.Thread(target=ran.append, args=(1,))
thread.start()
thread.join()
print("ran", ran)
"""


@needs_sandbox
def test_a_thread_that_would_die_before_it_begins_is_not_started() -> None:
    """CPython lets whoever starts it wait for good. A stack fits here, so without our look it starts."""
    plain = subprocess.run([sys.executable, "-c", NEARLY_FULL], capture_output=True, text=True, timeout=60)
    assert plain.stdout == "ran [1]\n", plain.stderr
    looked = subprocess.run([sys.executable, "-c", NEARLY_FULL, "look"], capture_output=True, text=True, timeout=60)
    assert looked.returncode == 1 and looked.stderr.endswith("RuntimeError: can't start new thread\n")


@pytest.mark.parametrize("where", ["process", pytest.param("sandbox", marks=needs_sandbox)])
def test_an_environment_that_eats_memory_costs_its_group_and_its_process(file: Path, where: str) -> None:
    async def body() -> None:
        async with player(Rows(file, "Plain"), run=where, memory_mb=512) as p:
            [pid] = p.host.pids
            failed = (await p.says("eat")).failed
            assert failed.startswith(f"environment {file}:Plain, rows.jsonl, row 7, turn 1: MemoryError")
            assert "environment.memory_mb = 512" in failed
            with trio.fail_after(PATIENCE_S):
                while pid in p.host.pids or not p.host.pids:
                    await trio.sleep(0.05)

    run(body)


@needs_sandbox
def test_what_an_environment_needs_and_may_not_read_is_said_at_the_start(file: Path) -> None:
    async def body() -> None:
        async with player(Rows(file, "Tools", data=str(file.parent / "data" / "rows.txt")), run="sandbox"):
            raise AssertionError("it must not run")

    with pytest.raises(BaseException) as caught:
        run(body)
    error = first_of(caught.value)
    assert isinstance(error, UsageError) and "\n" not in str(error)
    assert "cannot be made: PermissionError" in str(error) and "environment.readable" in str(error)


def test_tools_that_the_model_is_not_told_of_are_said_once(file: Path, caplog) -> None:
    async def body() -> None:
        for _ in range(2):
            task = Rows(file, "Tools")
            async with running_environment(task, TOKENIZER, [EOS], EnvironmentSection(), seed=0) as host:
                assert host is not None and len(task.chat_format.tools) == len(host.tools) > 10

    run(body)
    assert [line for line in caplog.messages if "task.chat = false" in line] == [
        f"environment {file}:Tools: it has tools, and the task's prompts are no chat (of rows of data: task.chat = false): the "
        "model is not told what it may call"
    ]


def test_an_environment_that_cannot_be_confined_is_refused_wherever_it_is_opened(file: Path) -> None:
    task = Rows(file, "Tools")
    task.environment = replace(task.environment, unconfinable="it starts programs")
    why = r'environment\.run = "sandbox", and task .* cannot run there: it starts programs; set environment\.run = "process"$'
    sandbox = EnvironmentSection(run="sandbox")
    with pytest.raises(UsageError, match=why):
        set_environment(task, sandbox)

    async def body() -> None:  # an evaluation's own task
        async with running_environment(task, TOKENIZER, [EOS], sandbox, seed=0):
            raise AssertionError("it must not run")

    with pytest.raises(UsageError, match=why):
        run(body)
    set_environment(task, EnvironmentSection())


def test_an_environment_that_does_nothing_is_said(file: Path, caplog) -> None:
    async def body() -> None:
        async with player(Rows(file, "Nothing")) as p:
            done = await p.says("what")
            assert done.score is not None and done.score.reward == 0.0

    run(body)
    assert "Nothing has no respond, no reward and no tools: every episode ends after one turn with the reward 0" in caplog.text


def test_seeds_are_the_tasks_and_the_prompts(file: Path) -> None:
    async def seed_of(seed: int) -> str:
        async with player(Rows(file, "Plain"), seed=seed) as p:
            return str(TOKENIZER.decode((await p.says("what")).given))

    async def body() -> None:
        assert await seed_of(1) == await seed_of(1) != await seed_of(2)

    run(body)


# --- without processes -----------------------------------------------------------------------------------------------


def test_a_system_that_cannot_confine_is_refused() -> None:
    assert needs_consent("mine.py:Game", ["namespaces"]) == "", "only the scratch folder needs them"
    for layer in NEEDED:
        why = needs_consent("mine.py:Game", ["namespaces", layer])
        assert f"no {layer}" in why and "environment.allow_unconfined = true" in why and 'run = "process"' in why


@pytest.mark.skipif(landlock_version() == 0, reason="no Landlock here")
def test_without_consent_a_system_without_a_layer_runs_nothing(file: Path, monkeypatch, caplog) -> None:
    """The filter is taken away in the child, by a module that Python imports first."""
    (file.parent / "sitecustomize.py").write_text("import platform\nplatform.machine = lambda: 'riscv64'\n")
    monkeypatch.setattr("sys.path", [str(file.parent), *__import__("sys").path])

    async def body() -> None:
        async with player(Rows(file, "Plain"), run="sandbox"):
            raise AssertionError("it must not run")

    with pytest.raises(BaseException) as caught:
        run(body)
    assert "this system has no seccomp" in str(first_of(caught.value))

    async def consent() -> None:
        async with player(Rows(file, "Plain"), run="sandbox", allow_unconfined=True) as p:
            assert not (await p.says("what")).failed

    run(consent)
    assert "Plain: it runs in a sandbox without seccomp: not to be had on this system" in caplog.text


def test_filters_are_there_for_known_machines_only() -> None:
    for machine in ("x86_64", "aarch64"):
        plain, threads = scorer_filter(machine), environment_filter(machine)
        assert plain is not None and threads is not None and len(plain) < len(threads) < 4096  # what the kernel takes
        assert plain[-1] == threads[-1] and plain[-1].k == 0x00050001, "what is not named fails"
    assert scorer_filter("riscv64") is environment_filter("riscv64") is None


def test_too_little_memory_is_said() -> None:
    assert EnvironmentSection(memory_mb=0).memory_mb == 0 and EnvironmentSection(memory_mb=LEAST_MB).memory_mb == LEAST_MB
    with pytest.raises(ValueError, match="too few for a process of Python: 256 or more, or 0"):
        EnvironmentSection(memory_mb=16)


def test_what_was_forgotten_is_said() -> None:
    class Empty(Environment):
        pass

    class Scored(Environment):
        def reward(self) -> float:
            return 1.0

    class Tooled(Environment):
        tools = (print,)

    assert "every episode ends after one turn with the reward 0" in oddities(Empty())[0]
    assert "neither respond nor reward" in oddities(Tooled())[0]
    assert oddities(Scored()) == []
