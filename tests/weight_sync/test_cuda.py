"""The transports of accelerators, between two processes on one GPU."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from roll.weight_sync.device_transports import CudaIpcSender
from roll.weight_sync.encoding import tensor_checksum


def make_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(2000, 1000, generator=generator).bfloat16().cuda(),
        "transposed": torch.randn(30, 40, generator=generator).cuda().t(),
        "scalar": torch.tensor(float(seed)).cuda(),
    }


def receive(link: Connection) -> None:
    receiver = CudaIpcSender.receiver()
    while (payload := link.recv()) is not None:
        held = {name: tensor.clone() for name, tensor in receiver.receive(payload).items()}
        receiver.settle()
        link.send({name: tensor_checksum(tensor) for name, tensor in held.items()})


@pytest.mark.gpu
def test_cuda_ipc() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs,))
    process.start()
    sender = CudaIpcSender()
    for version in range(3):
        weights = make_weights(version)
        sender.start([object()], version, 30)
        ours.send(sender.pack(weights))
        assert ours.poll(60), "no answer"
        assert ours.recv() == {name: tensor_checksum(tensor) for name, tensor in weights.items()}
        sender.release()
    ours.send(None)
    process.join(30)
    assert process.exitcode == 0
