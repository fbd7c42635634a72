"""Lets Liger's kernels run in Triton's interpreter, on a CPU, in every process that the tests start.

The interpreter knows less than the compiler: floats that a kernel is given have no type; bfloat16 is held as integers,
multiplied as such, and made of float32 by cutting bits off; libdevice's functions, which are for GPUs, return nothing.
"""

import importlib.abc
import os
import sys
from collections.abc import Sequence
from typing import Any


def complete() -> None:
    import numpy as np
    import torch
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    builder, convert = interpreter.InterpreterBuilder, interpreter._implicit_cvt
    cast, compute = builder.cast_impl, builder.binary_op

    def with_floats(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)

    def with_bfloat16(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return compute(self, left, right, operation)
        wide = (self.cast_impl(one, tl.float32) for one in (left, right))
        return self.cast_impl(compute(self, *wide, operation), tl.bfloat16)

    def rounded(self: Any, source: Any, kind: Any) -> Any:
        if (source.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, kind)
        nearest = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return interpreter.TensorHandle(nearest.view(torch.uint16).numpy(), tl.bfloat16)

    interpreter._implicit_cvt = with_floats
    builder.cast_impl, builder.binary_op = rounded, with_bfloat16
    libdevice.rsqrt = lambda x: tl.rsqrt(x)
    libdevice.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1


class BeforeLiger(importlib.abc.MetaPathFinder):
    """Finds nothing; completes the interpreter when Liger's kernels are about to be imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if fullname == "liger_kernel.ops":
            sys.meta_path.remove(self)
            complete()


if os.environ.get("TRITON_INTERPRET") == "1":
    sys.meta_path.insert(0, BeforeLiger())
