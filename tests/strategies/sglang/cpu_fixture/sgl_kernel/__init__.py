"""Stands in for SGLang's kernels, which are published for GPUs only. None of them is needed by the models of these
tests: one that is called says so."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"sgl_kernel.{name} was called; it has no version for CPUs")

    return kernel
