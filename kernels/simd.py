"""The two innermost loops of a product with quantized weights, written in LLVM IR through numba.

Both work on vectors of `LANES` output channels, which LLVM splits into the registers of whatever processor
this is (AVX-512, AVX2, NEON). They are not written as Python loops because numba's vectoriser keeps the sums
of `multiply` in memory instead of registers, which costs more than half of the speed.

One output's sum runs over the inputs in order, one fused multiply-add each, in its own lane and register:
neither the number of rows nor where a row stands among them can change a bit of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.grouped import GROUP

LANES = 32

# Inputs a turn of a loop handles, and how far ahead codes are fetched: one thread then reads them from memory
# about 1.5 times as fast.
_UNROLL = 4
_AHEAD_BYTES = 4096
_CACHE_LINE = 64

_FLOAT, _BYTE, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FLOATS, _BYTES, _I32S = (ir.VectorType(item, LANES) for item in (_FLOAT, _BYTE, _I32))
_VECTOR_BYTES = 4 * LANES


class _Loops:
    """Loads, multiply-adds and counted loops on top of a builder."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        self._fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _I32, _I32, _I32])
        self._prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")

    def pointer(self, base: Any, offset: Any, kind: Any) -> Any:
        return self.builder.inttoptr(self.builder.add(base, offset), kind.as_pointer())

    def load(self, base: Any, offset: Any, kind: Any) -> Any:
        return self.builder.load(self.pointer(base, offset, kind), align=1 if kind is _BYTES else 4)

    def store(self, value: Any, base: Any, offset: Any) -> None:
        self.builder.store(value, self.pointer(base, offset, _FLOATS), align=4)

    def times(self, value: Any, factor: int) -> Any:
        return self.builder.mul(value, _int(factor))

    def plus(self, value: Any, summand: int) -> Any:
        return self.builder.add(value, _int(summand))

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.call(self._fma, [a, b, c])

    def broadcast(self, scalar: Any) -> Any:
        empty = ir.Constant(_FLOATS, ir.Undefined)
        first = self.builder.insert_element(empty, scalar, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(first, empty, ir.Constant(_I32S, [0] * LANES))

    def prefetch(self, base: Any, nbytes: int) -> None:
        for ahead in range(_AHEAD_BYTES, _AHEAD_BYTES + nbytes, _CACHE_LINE):
            read, keep, data = (ir.Constant(_I32, n) for n in (0, 2, 1))
            self.builder.call(self._prefetch, [self.pointer(base, _int(ahead), _BYTE), read, keep, data])

    @contextmanager
    def count(self, end: Any, step: int, sums: list[Any]) -> Iterator[Any]:
        """for i in range(0, end, step), at least once; the body finds in `sums` what its last turn left."""
        builder, before = self.builder, self.builder.block
        body = builder.append_basic_block("body")
        builder.branch(body)
        builder.position_at_end(body)
        index = builder.phi(_I64)
        index.add_incoming(_int(0), before)
        carried = [builder.phi(_FLOATS) for _ in sums]
        for phi, value in zip(carried, sums, strict=True):
            phi.add_incoming(value, before)
        sums[:] = carried
        yield index
        following, last = self.plus(index, step), builder.block
        index.add_incoming(following, last)
        for phi, value in zip(carried, sums, strict=True):
            phi.add_incoming(value, last)
        after = builder.append_basic_block("after")
        builder.cbranch(builder.icmp_signed("<", following, end), body, after)
        builder.position_at_end(after)


def _int(value: int) -> Any:
    return ir.Constant(_I64, value)


def expander(bits: int) -> Any:
    """expand(codes, scale, offset, groups, out), all addresses but `groups`.

    out: float32[groups * 32, LANES] = codes * scale + offset for a tile, with its codes uint8[groups * 32 *
    bits // 8, LANES], and its scale and offset float32[groups, LANES]. A byte with two codes has that of an
    even input in its low half and the next one's in its high half.
    """

    def write(loops: _Loops, codes: Any, scale: Any, offset: Any, groups: Any, out: Any) -> None:
        builder = loops.builder
        per_turn = _UNROLL * LANES * bits // 8
        with loops.count(groups, 1, []) as group:
            d = loops.load(scale, loops.times(group, _VECTOR_BYTES), _FLOATS)
            m = loops.load(offset, loops.times(group, _VECTOR_BYTES), _FLOATS)
            with loops.count(_int(GROUP // _UNROLL), 1, []) as part:
                turn = builder.add(loops.times(group, GROUP // _UNROLL), part)
                start = builder.add(codes, loops.times(turn, per_turn))
                loops.prefetch(start, per_turn)
                numbers = []
                for at in range(0, per_turn, LANES):
                    loaded = builder.zext(loops.load(start, _int(at), _BYTES), _I32S)
                    if bits == 8:
                        numbers.append(loaded)
                        continue
                    numbers.append(builder.and_(loaded, ir.Constant(_I32S, [15] * LANES)))
                    numbers.append(builder.lshr(loaded, ir.Constant(_I32S, [4] * LANES)))
                target = builder.add(out, loops.times(turn, _UNROLL * _VECTOR_BYTES))
                for at, number in enumerate(numbers):
                    value = loops.multiply_add(builder.sitofp(number, _FLOATS), d, m)
                    loops.store(value, target, _int(at * _VECTOR_BYTES))

    @intrinsic
    def expand(typingctx: Any, codes: Any, scale: Any, offset: Any, groups: Any, out: Any) -> Any:
        return types.void(*[types.int64] * 5), _codegen(write)

    return expand


def multiplier(rows: int) -> Any:
    """multiply(weights, inputs, x, x_stride, start, start_stride, y, y_stride): addresses, strides in bytes.

    y[r, lane] = start[r, lane] + sum over k of x[r, k] * weights[k, lane], for `rows` rows of x float32[rows,
    inputs] and weights float32[inputs, LANES]; inputs is a multiple of 32. `start` may be y itself.
    """

    def write(
        loops: _Loops,
        weights: Any,
        inputs: Any,
        x: Any,
        x_stride: Any,
        start: Any,
        start_stride: Any,
        y: Any,
        y_stride: Any,
    ) -> None:
        builder = loops.builder
        sums = [loops.load(start, loops.times(start_stride, r), _FLOATS) for r in range(rows)]
        with loops.count(inputs, _UNROLL, sums) as first:
            for at in range(_UNROLL):
                k = loops.plus(first, at)
                weight = loops.load(weights, loops.times(k, _VECTOR_BYTES), _FLOATS)
                for r in range(rows):
                    place = builder.add(loops.times(x_stride, r), loops.times(k, 4))
                    value = loops.broadcast(loops.load(x, place, _FLOAT))
                    sums[r] = loops.multiply_add(value, weight, sums[r])
        for r, value in enumerate(sums):
            loops.store(value, y, loops.times(y_stride, r))

    @intrinsic
    def multiply(
        typingctx: Any,
        weights: Any,
        inputs: Any,
        x: Any,
        x_stride: Any,
        start: Any,
        start_stride: Any,
        y: Any,
        y_stride: Any,
    ) -> Any:
        return types.void(*[types.int64] * 8), _codegen(write)

    return multiply


def _codegen(write: Callable[..., None]) -> Callable[..., Any]:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        write(_Loops(builder), *values)
        return context.get_dummy_value()

    return codegen
