"""Seccomp filters: which system calls a confined process may make, as a program of the kernel's. Pure; must not know what is run.

Two lists. A scorer computes one thing: memory, reading files, its own end. An environment also has threads, an asyncio loop, its
parent's socket and a scratch folder. Neither may start processes, open sockets to anywhere, signal others or look into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class FilterInstruction(NamedTuple):
    """One instruction of the kernel's filter machine (struct sock_filter)."""

    code: int
    yes: int
    no: int
    k: int


_LOAD, _MASK, _EQUAL, _ABOVE, _ANY_BIT, _ANSWER = 0x20, 0x54, 0x15, 0x25, 0x45, 0x06
"""Codes of the filter machine: load a word; leave the bits in k; compare with k (=, >, &); end with the answer k."""
_KILL, _DENY, _UNKNOWN, _ALLOW = 0x80000000, 0x00050001, 0x00050026, 0x7FFF0000
"""Answers: kill the process; fail with EPERM; fail with ENOSYS; let it pass."""

_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""What the kernel calls a machine (AUDIT_ARCH_... of linux/audit.h): a call of another one's numbers kills the process."""

# System calls of a computation that imports Python modules: memory, reading files, time, threads' locks, its own end.
# Deliberately absent: fork, exec, sockets, kill, ptrace, prctl, fcntl (it can aim signals), chmod (Landlock allows it).
_COMPUTING = {
    "x86_64": (
        0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 20, 21, 23, 24, 25, 28, 32, 35, 39, 60, 63, 79, 89,
        96, 98, 99, 100, 102, 104, 107, 108, 110, 131, 186, 201, 202, 204, 217, 219, 228, 229, 230, 231, 257, 262, 267,
        269, 270, 271, 273, 318, 324, 332, 334, 439,
    ),
    "aarch64": (
        17, 23, 48, 56, 57, 61, 62, 63, 64, 65, 66, 67, 72, 73, 78, 79, 80, 93, 94, 98, 99, 101, 113, 114, 115, 123, 124,
        128, 132, 134, 135, 139, 153, 160, 165, 169, 172, 174, 175, 176, 177, 178, 179, 214, 215, 216, 222, 226, 233, 278,
        283, 291, 293, 439,
    ),
}  # fmt: skip

# What an environment needs besides: pwrite, dup, pipes, epoll, names of its own sockets, files and folders in its scratch folder.
_SERVING = {
    "x86_64": (18, 22, 33, 45, 51, 55, 74, 75, 76, 77, 80, 82, 83, 84, 87, 95, 213, 218, 232, 233, 258, 263, 264, 281, 291, 292,
               293, 316),
    "aarch64": (20, 21, 22, 24, 34, 35, 38, 45, 46, 49, 59, 68, 82, 83, 96, 166, 204, 207, 209, 276),
}  # fmt: skip

_NUMBERS = {
    "x86_64": {"clone": 56, "socketpair": 53, "sendto": 44, "fcntl": 72, "prlimit64": 302, "mmap": 9, "ioctl": 16},
    "aarch64": {"clone": 220, "socketpair": 199, "sendto": 206, "fcntl": 25, "prlimit64": 261, "mmap": 222, "ioctl": 29},
}
"""Of the calls that an environment may make with some arguments only (`_block`)."""

_CLONE3 = 435
"""On every machine. Its flags are behind a pointer, where a filter sees nothing; without it the C library takes clone."""

_CLONE_THREAD, _CLONE_NEW = 0x00010000, 0x7E020000
"""Flags of clone: a thread of this process; any new namespace."""

_SHARED_OF_NO_FILE = 0x21
"""Flags of mmap: such memory is not counted by any limit of a process."""

_IOCTLS = (0x5401, 0x541B, 0x5421, 0x5450, 0x5451)
"""Of ioctl (asm-generic/ioctls.h): whether it is a terminal, bytes to read, not to wait, and what a started program finds open.
None types into a terminal."""

_AF_UNIX, _DATAGRAMS, _F_SETLKW, _F_DUPFD_CLOEXEC = 1, 2, 7, 1030
"""Of socketpair: the family; the bit of its type that allows addresses. Of fcntl: up to the first are descriptors, flags and
locks, then who gets signals; the second is like dup."""


def scorer_filter(machine: str) -> list[FilterInstruction] | None:
    """For a process that computes one thing. None for a machine that is not known."""
    return _program(machine, {}) if machine in _ARCHITECTURE else None


def environment_filter(machine: str) -> list[FilterInstruction] | None:
    """For a process with threads, an asyncio loop, an open socket to its parent and a folder to write in."""
    if machine not in _ARCHITECTURE:
        return None
    blocks = {number: _block(name) for name, number in _NUMBERS[machine].items()}
    plain = [number for number in _SERVING[machine] if number not in blocks]
    return _program(machine, {_CLONE3: [_answer(_UNKNOWN)]} | blocks | {number: [_answer(_ALLOW)] for number in plain})


def _program(machine: str, blocks: dict[int, list[FilterInstruction]]) -> list[FilterInstruction]:
    """Load the architecture, then the call's number, and compare. A block is what is done about one call, and always answers."""
    blocks = {number: [_answer(_ALLOW)] for number in _COMPUTING[machine]} | blocks
    start = [
        FilterInstruction(_LOAD, 0, 0, 4), FilterInstruction(_EQUAL, 1, 0, _ARCHITECTURE[machine]), _answer(_KILL),
        FilterInstruction(_LOAD, 0, 0, 0),
    ]  # fmt: skip
    each = [one for number, block in blocks.items() for one in (FilterInstruction(_EQUAL, 0, len(block), number), *block)]
    return [*start, *each, _answer(_DENY)]


def _block(name: str) -> list[FilterInstruction]:
    if name == "clone":
        return _all(_load(0), _must(_ANY_BIT, _CLONE_THREAD), _must_not(_ANY_BIT, _CLONE_NEW))
    if name == "socketpair":
        return _all(_load(0), _must(_EQUAL, _AF_UNIX), _load(1), _must_not(_ANY_BIT, _DATAGRAMS))
    if name == "sendto":  # to the other end: no address
        return _all(*_no_pointer(4))
    if name == "prlimit64":  # reads its own
        return _all(_load(0), _must(_EQUAL, 0), *_no_pointer(2))
    if name == "mmap":
        mask = [FilterInstruction(_MASK, 0, 0, _SHARED_OF_NO_FILE)]
        return _all(_load(3), mask, _must_not(_EQUAL, _SHARED_OF_NO_FILE))
    if name == "ioctl":
        return [*_load(1), *(one for number in _IOCTLS for one in _may(number)), _answer(_DENY)]
    assert name == "fcntl"
    return _all(_load(1), _may(_F_DUPFD_CLOEXEC), _must_not(_ABOVE, _F_SETLKW))


def _all(*parts: Sequence[FilterInstruction]) -> list[FilterInstruction]:
    return [*(one for part in parts for one in part), _answer(_ALLOW)]


def _answer(what: int) -> FilterInstruction:
    return FilterInstruction(_ANSWER, 0, 0, what)


def _load(argument: int, *, high: bool = False) -> list[FilterInstruction]:
    """The lower half of an argument, on machines that are little-endian as all of ours are; with `high` the other one."""
    return [FilterInstruction(_LOAD, 0, 0, 16 + 8 * argument + 4 * high)]


def _no_pointer(argument: int) -> list[list[FilterInstruction]]:
    return [_load(argument), _must(_EQUAL, 0), _load(argument, high=True), _must(_EQUAL, 0)]


def _may(value: int) -> list[FilterInstruction]:
    return [FilterInstruction(_EQUAL, 0, 1, value), _answer(_ALLOW)]


def _must(test: int, value: int) -> list[FilterInstruction]:
    return [FilterInstruction(test, 1, 0, value), _answer(_DENY)]


def _must_not(test: int, value: int) -> list[FilterInstruction]:
    return [FilterInstruction(test, 0, 1, value), _answer(_DENY)]
