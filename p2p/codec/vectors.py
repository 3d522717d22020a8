"""Operations on 64 words at once, for compiled loops: comparisons that give a mask of bits, and operations on such masks.

numba has no vector types, so these functions write LLVM's: LLVM cuts 64 words into the vectors that the machine has (AVX-512,
AVX2 or NEON). The results are the same on every machine. Nothing is checked here: the caller must know that the indices lie
within its arrays. This module must not know what is compared and why.

Bit i of a mask stands for the i-th of the 64 words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload

BLOCK = 64
"""Words that one mask covers: one bit of a uint64 for each."""

_I1, _I32, _I64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)


_u = np.uint64

_ONES, _HIGHS = _u(0x0101010101010101), _u(0x8080808080808080)
"""The lowest bit of each of eight bytes, and the highest one."""

_IN_BYTE = np.array(
    [[([i for i in range(8) if byte >> i & 1] + [0] * 8)[rank] for byte in range(256)] for rank in range(8)], np.int64
)
"""int64 [rank, byte]: the place, in the byte, of the set bit that has `rank` set bits below it; 0 where there is none."""


@intrinsic
def different(typing: Any, ones: Any, others: Any, at: Any) -> Any:
    """uint64: where `ones` [n] and `others` [n] (uN of one type) differ, from `at` to at + 64 <= n."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one, other = (_load(context, builder, signature.args[k], args[k], args[2]) for k in (0, 1))
        return builder.bitcast(builder.icmp_unsigned("!=", one, other), _I64)

    return types.uint64(ones, others, types.int64), codegen


@intrinsic
def equal(typing: Any, words: Any, at: Any, value: Any) -> Any:
    """uint64: where `words` (uN [n]) are `value`, from `at` to at + 64 <= n."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = _load(context, builder, signature.args[0], args[0], args[1])
        return builder.bitcast(builder.icmp_unsigned("==", found, _spread(builder, args[2], found.type)), _I64)

    return types.uint64(words, types.int64, words.dtype), codegen


@intrinsic
def at_most(typing: Any, words: Any, at: Any, value: Any) -> Any:
    """int64: how many of `words` (uN [n]) are `value` or less, of the 32 from `at` to at + 32 <= n."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = _load(context, builder, signature.args[0], array=args[0], at=args[1], count=BLOCK // 2)
        few = builder.icmp_unsigned("<=", found, _spread(builder, args[2], found.type))
        return builder.zext(builder.ctpop(builder.bitcast(few, _I32)), _I64)

    return types.int64(words, types.int64, words.dtype), codegen


@intrinsic
def outside(typing: Any, words: Any, at: Any, low: Any, span: Any) -> Any:
    """uint64: where `words` (uN [n]) are less than `low` or more than low + span, from `at` to at + 64 <= n."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = _load(context, builder, signature.args[0], args[0], args[1])
        above = builder.sub(found, _spread(builder, args[2], found.type))
        return builder.bitcast(builder.icmp_unsigned(">", above, _spread(builder, args[3], found.type)), _I64)

    return types.uint64(words, types.int64, words.dtype, words.dtype), codegen


@intrinsic
def copy_block(typing: Any, words: Any, at: Any, out: Any, to: Any) -> Any:
    """Copy 64 of `words` (uN [n]), from `at` to at + 64 <= n, to `out` (the same type, [m]), from `to` to to + 64 <= m."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = _load(context, builder, signature.args[0], *args[:2])
        _store(context, builder, signature.args[2], array=args[2], at=args[3], value=found)
        return context.get_dummy_value()

    return types.void(words, types.int64, words, types.int64), codegen


STREAMED = 16
"""Bytes: `stream_block` writes to addresses that are multiples of this, as stores past the caches need (SSE: 16 bytes)."""


@intrinsic
def stream_block(typing: Any, words: Any, at: Any, out: Any, to: Any) -> Any:
    """Copy as `copy_block` does, past the caches: the target need not be read first, and no other data leaves the caches for it.

    out[to] must lie at a multiple of STREAMED bytes. `settle` must be called before another thread may read `out`.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        lanes = 512 // kind.dtype.bitwidth
        vector = ir.VectorType(ir.IntType(kind.dtype.bitwidth), lanes)
        mark = builder.module.add_metadata([_I32(1)])
        for part in range(BLOCK // lanes):
            source, target = (builder.add(at, _I64(part * lanes)) for at in (args[1], args[3]))
            found = builder.load(builder.bitcast(_pointer(context, builder, kind, args[0], source), vector.as_pointer()))
            found.align = kind.dtype.bitwidth // 8
            place = _pointer(context, builder, signature.args[2], args[2], target)
            stored = builder.store(found, builder.bitcast(place, vector.as_pointer()))
            stored.align = STREAMED
            stored.set_metadata("nontemporal", mark)
        return context.get_dummy_value()

    return types.void(words, types.int64, words, types.int64), codegen


@intrinsic
def settle(typing: Any) -> Any:
    """A memory fence: a thread that is woken after it sees all that `stream_block` wrote."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def put_octets(typing: Any, words: Any, at: Any, shift: Any, octets: Any, to: Any) -> Any:
    """Fill `octets` (uint8 [m]), from `to` to to + 64 <= m, with `(words >> shift) & 255` of `words` (uN [n]), from `at` to
    at + 64 <= n; shift < N."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = _load(context, builder, signature.args[0], *args[:2])
        shift = builder.trunc(args[2], found.type.element)
        found = builder.lshr(found, _spread(builder, shift, found.type))
        if signature.args[0].dtype.bitwidth > 8:
            found = builder.trunc(found, ir.VectorType(ir.IntType(8), BLOCK))
        _store(context, builder, signature.args[3], array=args[3], at=args[4], value=found)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64, octets, types.int64), codegen


@intrinsic
def expect(typing: Any, words: Any, at: Any) -> Any:
    """Prefetch the 64 of `words` (uN [n]) from `at` on, which will be read or written soon. `at` may lie beyond the array."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        size = signature.args[0].dtype.bitwidth // 8
        prefetch = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [ir.PointerType(), _I32, _I32, _I32]), "llvm.prefetch.p0"
        )
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        for line in range(size):
            at = builder.gep(pointer, [_I64(line * BLOCK // size)])
            builder.call(prefetch, [builder.bitcast(at, ir.PointerType()), _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(words, types.int64), codegen


@intrinsic
def count_bits(typing: Any, bits: Any) -> Any:
    """int64: how many of `bits` (uint64) are set."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), codegen


@intrinsic
def lowest_bit(typing: Any, bits: Any) -> Any:
    """int64: the place of the lowest bit that is set in `bits` (uint64); 64 when none is."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], _I1(0))

    return types.int64(types.uint64), codegen


@intrinsic
def highest_bit(typing: Any, bits: Any) -> Any:
    """int64: the place of the highest bit that is set in `bits` (uint64); -1 when none is."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sub(_I64(63), builder.ctlz(args[0], _I1(0)))

    return types.int64(types.uint64), codegen


@intrinsic
def load_bits(typing: Any, octets: Any, at: Any) -> Any:
    """uint64: the eight of `octets` (uint8 [n]) from `at` to at + 8 <= n, the first one lowest."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = builder.load(builder.bitcast(_pointer(context, builder, signature.args[0], *args), _I64.as_pointer()))
        found.align = 1
        return found

    return types.uint64(octets, types.int64), codegen


@intrinsic
def store_bits(typing: Any, octets: Any, at: Any, bits: Any) -> Any:
    """Set the eight of `octets` (uint8 [n]) from `at` to at + 8 <= n to `bits` (uint64), the lowest first."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stored = builder.store(
            args[2], builder.bitcast(_pointer(context, builder, signature.args[0], *args[:2]), _I64.as_pointer())
        )
        stored.align = 1
        return context.get_dummy_value()

    return types.void(octets, types.int64, types.uint64), codegen


@njit(nogil=True, cache=True)
def _place_of(bits, rank):  # type: ignore[no-untyped-def]
    """`place_of` without branches: the byte that holds the bit is found from the sums of the bytes' bits (Vigna, Broadword
    Implementation of Rank/Select Queries, 2008), its place within the byte from a table."""
    sums = bits - ((bits >> _u(1)) & _u(0x5555555555555555))
    sums = (sums & _u(0x3333333333333333)) + ((sums >> _u(2)) & _u(0x3333333333333333))
    sums = ((sums + (sums >> _u(4))) & _u(0x0F0F0F0F0F0F0F0F)) * _ONES
    # Byte i of `sums` is how many bits bytes 0 to i have; its highest bit stays where that is no more than `rank`.
    before = _u(8 * count_bits(((rank * _ONES | _HIGHS) - sums) & _HIGHS))
    rest = rank - (((sums << _u(8)) >> before) & _u(255))
    return np.int64(before) + _IN_BYTE[rest, (bits >> before) & _u(255)]


@intrinsic
def _spread_bits(typing: Any, low: Any, mask: Any) -> Any:
    """uint64: the lowest bits of `low`, moved to the places of the bits set in `mask`. Only where `_spreads()` is true."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64, _I64])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.bmi.pdep.64"), args)

    return types.uint64(types.uint64, types.uint64), codegen


def _spreads() -> bool:
    """Whether the machine that is compiled for has a fast instruction that spreads bits (pdep; the first two Zens have a slow
    one)."""
    _, processor, features = cpu_target.target_context.codegen().magic_tuple()
    return "+bmi2" in features.split(",") and processor not in ("znver1", "znver2", "bdver4")


def place_of(bits: Any, rank: Any) -> int:
    """int64: the place of the bit that is set in `bits` (uint64) after `rank` (uint64) others; there must be more than `rank`."""
    return int(_place_of(np.uint64(bits), np.uint64(rank)))


@overload(place_of, jit_options={"nogil": True, "cache": True})
def _(bits, rank):  # type: ignore[no-untyped-def]
    if _spreads():
        return lambda bits, rank: lowest_bit(_spread_bits(_u(1) << rank, bits))
    return lambda bits, rank: _place_of(bits, rank)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, value=array).data, [at])


def _load(context: Any, builder: Any, kind: Any, array: Any, at: Any, count: int = BLOCK) -> Any:
    vector = ir.VectorType(ir.IntType(kind.dtype.bitwidth), count)
    found = builder.load(builder.bitcast(_pointer(context, builder, kind, array, at), vector.as_pointer()))
    found.align = kind.dtype.bitwidth // 8
    return found


def _store(context: Any, builder: Any, kind: Any, array: Any, at: Any, value: Any) -> None:
    stored = builder.store(value, builder.bitcast(_pointer(context, builder, kind, array, at), value.type.as_pointer()))
    stored.align = kind.dtype.bitwidth // 8


def _spread(builder: Any, value: Any, vector: Any) -> Any:
    """A vector with `value` in each place."""
    none = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(none, value, _I32(0))
    return builder.shuffle_vector(first, none, ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count))
