"""The errors that cross module seams. Every refusal names the peer, the version, the chunk and the reason."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

from p2p.version import Version


class ShoalError(Exception):
    """Base of every error Shoal raises on purpose."""


class UsageError(ShoalError):
    """Bad input from the person at the keyboard: exit status 2. Each argument is one thing that is wrong, printed as one line."""

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(str(problem) for problem in self.args)

    def __str__(self) -> str:
        return "; ".join(self.problems)


@dataclass(eq=False, repr=False)
class Refusal(ShoalError):
    """Something a peer sent is not accepted; what was held before stays whole.

    `peer` is the peer id as text ("" when local), `version` and `chunk` are what the refused bytes claimed to be,
    `fatal` says whether the connection to that peer must be dropped, `cause` is one of `p2p.protocol.rollout.CAUSES` where the
    peer is to act on the refusal, else "".
    """

    reason: str
    _: KW_ONLY
    peer: str = ""
    version: Version | None = None
    chunk: int | None = None
    fatal: bool = False
    cause: str = ""

    def __str__(self) -> str:
        peer = self.peer or "local"
        version = "-" if self.version is None else str(self.version)
        chunk = "-" if self.chunk is None else str(self.chunk)
        return f"refused: peer={peer} version={version} chunk={chunk}: {self.reason}"

    def at(self, *, peer: str = "", version: Version | None = None, chunk: int | None = None) -> Refusal:
        """The same refusal; `peer`, `version` and `chunk` fill in what was unknown where it was raised."""
        return replace(
            self,
            peer=self.peer or peer,
            version=self.version if self.version is not None else version,
            chunk=self.chunk if self.chunk is not None else chunk,
        )


class ChannelClosed(ShoalError):
    """The channel is gone: closed here, closed by the peer, or broken. The message says which and why."""


class Unreachable(ChannelClosed):
    """No channel to `peer` is to be had. `why` says it by itself, address by address."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(f"cannot open a channel to {peer}: {why}")
        self.peer, self.why = peer, why


class Terminated(KeyboardInterrupt):
    """SIGTERM came. Programs end on it as they do on Ctrl-C."""


def first_of(error: BaseException) -> BaseException:
    """The first leaf of an exception group, or the exception itself: what a one-line message is made of."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
