"""What a process gives up before it runs text that strangers wrote. Linux, through ctypes; must not know what is run.

Three layers, each of which may be missing on a machine; `confine` and `seal` name those that are. Namespaces: no network
and no capabilities. Landlock: files can be read under a few directories and nothing can be changed. Seccomp: no system
calls but those a computation needs, so no sockets, no new processes, no signals to others. Scorers and environments give up
different things: an environment has threads, and a folder to write in.
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

from learner.rewards.system_calls import environment_filter, scorer_filter

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 38, 22
_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWNS, _CLONE_NEWIPC = 0x10000000, 0x40000000, 0x00020000, 0x08000000
_MOUNT_FLAGS = 0x02 | 0x04 | 0x08
"""Of a folder in memory: no set-user-id, no devices, no programs (linux/mount.h)."""
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Landlock's system calls: the same numbers on every architecture."""

_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
"""Landlock's rights to run a file, read a file and list a folder, as bits of linux/landlock.h."""
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
"""To write into a file that is there, and to cut it."""
_CHANGE = _READ_FILE | _READ_DIR | _WRITE_FILE | _TRUNCATE | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 13
"""All that a folder of one's own is for: files and folders made, changed, moved and removed; no devices, sockets or links."""
_FS_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Landlock version -> every file right it can take away (from that version until the next one listed)."""

_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
"""What the dynamic loader and the calendar read when a module is imported late."""

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


def leave_for_scratch(scratch: str | Path, size: int) -> list[str]:
    """As `leave_network`, and `scratch`, a folder that is there, becomes one in memory, empty, of `size` bytes, that nobody else
    sees and that ends with this process."""
    if sys.platform != "linux":
        return ["namespaces"]
    libc, uid, gid = _libc(), os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWNS | _CLONE_NEWIPC) != 0:
        return ["namespaces"]
    try:  # a file's owner must be somebody in the new namespace
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path("/proc/self", name).write_text(text)
    except OSError:
        return ["namespaces"]
    options = f"size={size},nr_inodes={max(64, size >> 12)},mode=700".encode()
    mounted = libc.mount(b"shoal", os.fsencode(scratch), b"tmpfs", ctypes.c_ulong(_MOUNT_FLAGS), options)
    return [] if mounted == 0 else ["namespaces"]


def confine(
    readable: Iterable[str | Path], *, listed: Iterable[str | Path] = (), changed: Iterable[str | Path] = ()
) -> list[str]:
    """From now on this thread and its children read files only under `readable` and the system's libraries, see names of files
    under `listed`, and change files only under `changed`. For a process of one thread. What could not be had, as words."""
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
            _allow(libc, fd, path, _EXECUTE | _READ_FILE | _READ_DIR)
        for path in map(str, listed):
            _allow(libc, fd, path, _READ_DIR)
        for path in map(str, changed):
            _allow(libc, fd, path, _CHANGE & rights)
        return [] if libc.syscall(_RESTRICT_SELF, fd, ctypes.c_uint(0)) == 0 else ["Landlock"]
    finally:
        os.close(fd)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not there: nothing to read
    try:
        of_files = _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE
        rule = _PathRule(rights if os.path.isdir(path) else rights & of_files, fd)
        libc.syscall(_ADD_RULE, ruleset, ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint(0))
    finally:
        os.close(fd)


def limit(*, memory: int, cpu_s: int) -> None:
    """Resource limits of a process that computes one thing: bytes of address space, seconds of CPU, no files written, no
    processes, few descriptors, no core dump."""
    _bound({
        resource.RLIMIT_AS: memory, resource.RLIMIT_CPU: cpu_s, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 32, resource.RLIMIT_CORE: 0,
    })  # fmt: skip


def limit_memory(size: int) -> None:
    """A bound in bytes for what this process, and each that it starts, writes into: heaps, stacks, private mappings. Beyond it
    there is no memory to be had (MemoryError). Files that are read, and shared memory, do not count."""
    _bound({resource.RLIMIT_DATA: size})


def limit_files(*, size: int, threads: int, files: int) -> None:
    """Resource limits of an environment: bytes of one file, threads (not where it is root's), descriptors; no core dump."""
    _bound({
        resource.RLIMIT_FSIZE: size, resource.RLIMIT_NPROC: threads, resource.RLIMIT_NOFILE: files, resource.RLIMIT_CORE: 0,
    })  # fmt: skip


def _bound(limits: dict[int, int]) -> None:
    for what, value in limits.items():
        hard = resource.getrlimit(what)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(ValueError, OSError):  # not every system knows every one of them
            resource.setrlimit(what, (bound, bound))


def seal(*, threads: bool = False) -> list[str]:
    """Seccomp: every system call that is not on the list (`system_calls.py`) fails with EPERM, for good. `threads`: the list of a
    process that has them. For a process that has none yet. What could not be had, as words."""
    code = None
    if sys.platform == "linux":
        code = environment_filter(platform.machine()) if threads else scorer_filter(platform.machine())
    if code is None:
        return ["seccomp"]
    libc = _libc()
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    program = _Program(len(code), (_Instruction * len(code))(*(_Instruction(*one) for one in code)))
    return [] if libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0) == 0 else ["seccomp"]


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
