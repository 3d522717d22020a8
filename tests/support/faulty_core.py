"""The scripted engine with faults. Run as a program, this file is the engine's process (as `node.engine.child`) with such a core;
`start_faulty` starts it in that one's place, and its settings are then the fields of `Faults`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from node.engine import child
from node.engine.fake import ScriptedCore, ScriptedSettings
from node.engine.port import CommitResult, EngineBroken, StateFile
from node.engine.process import start_program
from p2p.errors import Refusal
from p2p.processes import Process, python_command
from p2p.protocol.rollout import TokenEvent
from p2p.version import Version


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, and when; the zero of each means never."""

    commit_error: str = ""
    """commit raises RuntimeError with this text (the old version serves on)"""
    commit_broken: str = ""
    """commit raises EngineBroken with this text"""
    digest_mismatch: bool = False
    """commit raises a Refusal, as if the state's bytes were not what the seal says"""
    stage_error: str = ""
    """stage raises a Refusal with this reason"""
    step_error_at: int = 0
    """step raises once this many tokens were made: the engine is broken"""
    stall_at: int = 0
    """step never returns once this many tokens were made (a hung GPU); only for a child process"""


class FaultyCore(ScriptedCore):
    """See ScriptedCore. `faults` may be replaced while it runs."""

    def __init__(
        self, faults: Faults, settings: ScriptedSettings | None = None, *, version: Version | None = None
    ) -> None:
        super().__init__(settings, version=version)
        self.faults = faults

    def step(self) -> list[TokenEvent]:
        faults, had_work = self.faults, bool(self.held)
        events, tokens = super().step(), self.stats().tokens
        if had_work and faults.step_error_at and tokens >= faults.step_error_at:
            raise RuntimeError(f"scripted: broken after {tokens} tokens")
        while had_work and faults.stall_at and tokens >= faults.stall_at:
            time.sleep(60)
        return events

    def stage(self, state: StateFile) -> None:
        super().stage(state)
        if self.faults.stage_error:
            self._staged = None
            raise Refusal(self.faults.stage_error, version=state.version)

    def commit(self) -> CommitResult:
        faults, staged = self.faults, self._staged
        if staged is not None and (faults.commit_error or faults.commit_broken or faults.digest_mismatch):
            self._staged = None
            if faults.commit_error:
                raise RuntimeError(faults.commit_error)
            if faults.commit_broken:
                raise EngineBroken(faults.commit_broken)
            raise Refusal("state digest is not the sealed one", version=staged.version)
        return super().commit()


def start_faulty(command: list[str], fd: int, environment: dict[str, str]) -> Process:
    """An `EngineStarter` of `node.engine.process`."""
    return start_program(python_command("tests.support.faulty_core", *command[-3:]), fd, environment)


if __name__ == "__main__":
    child.make_core = lambda kind, settings: FaultyCore(Faults(**settings))
    sys.exit(child.main(sys.argv[1:]))
