"""Compiled work on the threads that torch uses.

A worker is a numba function over one array of integers (addresses, sizes) that takes items 0, 1, 2, ... from
a shared counter until none is left: a thread that the system stops for a while holds up one item, not half of
the work. It runs on torch's own OpenMP threads. numba's `prange` would bring a second pool, whose threads
spin while torch's work, and whose default kind ends the process when two threads use it at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.code_cache import kept

Worker = Callable[..., None]

# torch has loaded an OpenMP runtime by now, under a name that depends on the build.
try:
    _fork = ctypes.CDLL(None).GOMP_parallel
except (AttributeError, OSError, TypeError) as error:
    raise ImportError(f"torch brings no OpenMP runtime with GOMP_parallel: {error}") from error
_fork.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_fork.restype = None


def worker(function: Callable[[Any], None]) -> Worker:
    """Compile function(int64* args) and return a call of it: run(items, *args).

    args[0] is the counter to `claim` items from, args[1] their number; the others follow.
    """
    signature = types.void(types.CPointer(types.int64))
    with kept() as cache:
        compiled = numba.cfunc(signature, cache=cache, error_model="numpy")(function)
    address, alone = compiled.address, compiled.ctypes

    def run(items: int, *args: int) -> None:
        numbers = np.array((0, items, *args), dtype=np.int64)
        threads = min(items, torch.get_num_threads())
        if threads > 1:
            _fork(address, numbers.ctypes.data, threads, 0)
        elif items:
            alone(ctypes.cast(numbers.ctypes.data, ctypes.POINTER(ctypes.c_int64)))

    return run


@intrinsic
def _claim(typingctx: Any, args: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", values[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), codegen


# claim(args) -> int, the next item: args[0] counts them for all threads.
claim: Any = _claim


def _pointer(to: Any) -> Any:
    @intrinsic
    def pointer(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(to))

        return to(types.int64), codegen

    return pointer


# From an address as an integer to what can be indexed.
floats: Any = _pointer(types.CPointer(types.float32))
integers: Any = _pointer(types.CPointer(types.int64))
