"""What a process gives up before it runs text that strangers wrote. Linux, through ctypes; must not know what is run.

Three layers, each of which may be missing on a machine; `confine` and `seal` name those that are. Namespaces: no network
and no capabilities. Landlock: files can be read under a few directories and nothing can be changed. Seccomp: no system
calls but those a computation needs, so no sockets, no new processes, no signals to others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 38, 22
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Landlock's system calls: the same numbers on every architecture."""

_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
"""Landlock's rights to run a file, read a file and list a folder, as bits of linux/landlock.h."""
_FS_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Landlock version -> every file right it can take away (from that version until the next one listed)."""

_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
"""What the dynamic loader and the calendar read when a module is imported late."""

# System calls of a computation that imports Python modules: memory, reading files, time, threads' locks, its own end.
# Deliberately absent: fork, exec, sockets, kill, ptrace, prctl, fcntl (it can aim signals), chmod (Landlock allows it).
_ALLOWED = {
    "x86_64": (
        0xC000003E,
        (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 20, 21, 23, 24, 25, 28, 32, 35, 39, 60, 63, 79, 89,
         96, 98, 99, 100, 102, 104, 107, 108, 110, 131, 186, 201, 202, 204, 217, 219, 228, 229, 230, 231, 257, 262, 267,
         269, 270, 271, 273, 318, 324, 332, 334, 439),
    ),
    "aarch64": (
        0xC00000B7,
        (17, 23, 48, 56, 57, 61, 62, 63, 64, 65, 66, 67, 72, 73, 78, 79, 80, 93, 94, 98, 99, 101, 113, 114, 115, 123, 124,
         128, 132, 134, 135, 139, 153, 160, 165, 169, 172, 174, 175, 176, 177, 178, 179, 214, 215, 216, 222, 226, 233, 278,
         283, 291, 293, 439),
    ),
}  # fmt: skip


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("fd", ctypes.c_int32))


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("code", ctypes.POINTER(_Instruction)))


def landlock_version() -> int:
    """The kernel's Landlock ABI; 0 where there is none. Changes nothing."""
    if sys.platform != "linux":
        return 0
    return max(0, _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1)))


def leave_network() -> list[str]:
    """A user and a network namespace of our own. For a process of one thread. What could not be had, as words."""
    if sys.platform != "linux":
        return ["namespaces"]
    return [] if _libc().unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0 else ["namespaces"]


def confine(readable: Iterable[str | Path]) -> list[str]:
    """From now on this thread and its children read files only under `readable` and the system's libraries, and change
    none. For a process of one thread. What could not be had, as words."""
    version = landlock_version()
    if not version:
        return ["Landlock"]
    libc = _libc()
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    rights = _FS_RIGHTS[max(v for v in _FS_RIGHTS if v <= version)]
    ruleset = _Ruleset(rights, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8  # an older kernel knows a shorter structure
    fd = libc.syscall(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), ctypes.c_uint(0))
    if fd < 0:
        return ["Landlock"]
    try:
        for path in dict.fromkeys([*map(str, readable), *_SYSTEM_LIBRARIES]):
            _allow(libc, fd, path)
        return [] if libc.syscall(_RESTRICT_SELF, fd, ctypes.c_uint(0)) == 0 else ["Landlock"]
    finally:
        os.close(fd)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not there: nothing to read
    try:
        rights = _EXECUTE | _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        rule = _PathRule(rights, fd)
        libc.syscall(_ADD_RULE, ruleset, ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint(0))
    finally:
        os.close(fd)


def limit(*, memory: int, cpu_s: int) -> None:
    """Resource limits of a process that computes one thing: bytes of address space, seconds of CPU, no files written, no
    processes, few descriptors, no core dump."""
    for what, value in (
        (resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 32), (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        hard = resource.getrlimit(what)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(ValueError, OSError):  # not every system knows every one of them
            resource.setrlimit(what, (bound, bound))


def seal() -> list[str]:
    """Seccomp: every system call that is not on the short list fails with EPERM, for good. What could not be had."""
    code = _filter() if sys.platform == "linux" else None
    if code is None:
        return ["seccomp"]
    libc = _libc()
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    program = _Program(len(code), (_Instruction * len(code))(*code))
    return [] if libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0) == 0 else ["seccomp"]


def _filter() -> list[_Instruction] | None:
    """The BPF program: load the architecture, then the call's number, and compare. None for an unknown architecture."""
    if platform.machine() not in _ALLOWED:
        return None
    architecture, calls = _ALLOWED[platform.machine()]
    load, equal, answer = 0x20, 0x15, 0x06
    kill, deny, allow = 0x80000000, 0x00050001, 0x7FFF0000  # KILL_PROCESS, ERRNO | EPERM, ALLOW
    n = len(calls)
    return [
        _Instruction(load, 0, 0, 4), _Instruction(equal, 1, 0, architecture), _Instruction(answer, 0, 0, kill),
        _Instruction(load, 0, 0, 0), *(_Instruction(equal, n - i, 0, call) for i, call in enumerate(calls)),
        _Instruction(answer, 0, 0, deny), _Instruction(answer, 0, 0, allow),
    ]  # fmt: skip


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
