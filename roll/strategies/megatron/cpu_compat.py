"""Megatron Core on a host without CUDA devices. With CUDA nothing here does anything.

Megatron Core 0.16 creates tensors on ``"cuda"``, asks ``torch.cuda.current_device()`` and compares tensor types with
``"torch.cuda.FloatTensor"``.  None of its arithmetic needs that, so four changes make it run on CPU and gloo:

1. In every loaded ``megatron.core`` module the global name ``torch`` is bound to a stand-in, which is torch itself
   except for tensor factories (a CUDA device becomes the CPU) and a few names of ``torch.cuda``.  torch as all other
   packages see it is untouched.
2. The random states that activation recomputation saves and restores are those of the CPU.
3. Streams and events, on which the all-to-all of experts moves sizes to the host, do nothing; those sizes become
   arrays although they are on the host already; tensors of several shapes are gathered one by one; and without
   Transformer Engine its matrix product is None.
4. While a model or an optimizer is built (:func:`construction`), ``Tensor.cuda`` returns the tensor itself and
   ``Tensor.type`` speaks of CUDA types.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_CPU = torch.device("cpu")
_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "ones_like", "tensor", "zeros", "zeros_like")


def install() -> None:
    """Bind the stand-in in all ``megatron.core`` modules loaded so far. May be called again after loading more."""
    if torch.cuda.is_available():
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = _stand_in()  # type: ignore[attr-defined]
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # Its tracker warns whenever the CPU's random state changes inside a fork, which here is the state drawn from.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Megatron's own returns a CPU tensor unchanged even if an array is requested.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
    )


@contextmanager
def construction() -> Iterator[None]:
    """Make ``Tensor.cuda`` and ``Tensor.type`` work on a CPU while Megatron Core builds a model or an optimizer."""
    if torch.cuda.is_available():
        yield
        return
    to_cuda, type_of = torch.Tensor.cuda, torch.Tensor.type

    def cuda_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = type_of(tensor, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    torch.Tensor.type = cuda_type  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.Tensor.cuda, torch.Tensor.type = to_cuda, type_of  # type: ignore[method-assign]


def _all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> None:
    """gloo gathers tensors of one shape only; the tokens of an expert's ranks are of any number."""
    if len({len(output) for output in outputs}) == 1:
        dist.all_gather(outputs, tensor, group=group)
        return
    for rank, output in enumerate(outputs):
        if rank == dist.get_rank(group):
            output.copy_(tensor)
        dist.broadcast(output, dist.get_global_rank(group, rank), group=group)


def _reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], group: ProcessGroup | None = None) -> None:
    for rank, part in enumerate(inputs):
        total = part.clone()
        dist.all_reduce(total, group=group)
        if rank == dist.get_rank(group):
            output.copy_(total)


def _over(base: ModuleType, **own: object) -> ModuleType:
    """A module with some names of its own; all others are those of ``base``."""
    module = ModuleType(base.__name__)
    vars(module).update(own, __getattr__=functools.partial(getattr, base))
    return module


@functools.cache
def _stand_in() -> ModuleType:
    stream = SimpleNamespace(wait_stream=lambda *_: None, synchronize=lambda *_: None)
    stream.record_event = lambda: stream  # of a stream or an event that is always done
    cuda = _over(
        torch.cuda,
        Stream=lambda *_, **__: stream,
        Event=lambda *_, **__: stream,
        current_stream=lambda *_: stream,
        stream=lambda _: nullcontext(),
        current_device=lambda: _CPU,
        synchronize=lambda *_: None,
        manual_seed=torch.manual_seed,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
    )
    distributed = _over(dist, all_gather=_all_gather, reduce_scatter=_reduce_scatter)
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _over(torch, cuda=cuda, distributed=distributed, **factories)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: object, device: object = None, **kwargs: object) -> torch.Tensor:
        is_cuda = isinstance(device, int) or str(device).startswith("cuda")
        return factory(*args, device=_CPU if is_cuda else device, **kwargs)

    return create
