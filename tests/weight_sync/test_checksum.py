"""tensor_checksum against its formula in plain Python, and against the mistakes that it must see."""

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.weight_sync import encoding
from roll.weight_sync.encoding import ChecksumKind, tensor_checksum

KINDS = pytest.mark.parametrize("kind", ["xxh3", "words"])
MASK = (1 << 64) - 1
DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def make(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, 100, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def formula(tensor: torch.Tensor) -> int:
    """The module docstring, one word at a time in Python integers."""
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    data += bytes(-len(data) % 8)
    seed = encoding._seed(tensor)
    total = 0
    for i in range(len(data) // 8):
        word = int.from_bytes(data[8 * i : 8 * i + 8], "little", signed=True)
        h = signed((word + (word >> 32) + i * encoding._GOLDEN + seed) * encoding._MULTIPLIER)
        total += h * (h >> 32)
    mixed = (seed + total) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_formula_and_xxh3_of_the_bytes(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (1,), (7,), (4, 0, 2), (65, 33)):
        tensor = make(dtype, *shape)
        assert tensor_checksum(tensor, "words") == formula(tensor), shape
        data = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        assert tensor_checksum(tensor) == xxhash.xxh3_64(data, seed=encoding._seed(tensor)).intdigest()


@KINDS
def test_independent_of_chunk_size_layout_and_alignment(kind: ChecksumKind, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = make(torch.float32, 61, 77)
    expected = tensor_checksum(tensor, kind)
    assert tensor_checksum(tensor.t().contiguous().t(), kind) == expected
    assert tensor_checksum(torch.cat([tensor, tensor], dim=1)[:, 77:], kind) == expected
    assert tensor_checksum(tensor.clone().requires_grad_(), kind) == expected
    assert tensor_checksum(tensor[:1, ::77], kind) == tensor_checksum(tensor[:1, :1].clone(), kind)
    half = make(torch.bfloat16, 999)
    for offset in range(9):
        assert tensor_checksum(torch.cat([half[:offset], half])[offset:], kind) == tensor_checksum(half, kind)
    for words in (1, 13, 1 << 20):
        monkeypatch.setattr(encoding, "_CPU_CHUNK_WORDS", words)
        assert tensor_checksum(tensor, kind) == expected


@KINDS
def test_depends_on_dtype_shape_and_order(kind: ChecksumKind) -> None:
    zeros, numbers = torch.zeros(24), torch.arange(1000)
    others = [zeros.view(torch.int32), zeros[:23], zeros.view(4, 6), zeros.view(6, 4), zeros.view(torch.bfloat16)]
    cancelling = numbers.clone()
    cancelling[10:13] += torch.tensor([1, -2, 1])
    moved = [numbers, cancelling, numbers.flip(0), numbers.roll(1)]  # a plain sum is the same
    assert len({tensor_checksum(tensor, kind) for tensor in [zeros, *others, *moved]}) == 10


@KINDS
@settings(max_examples=50)
@given(dtype=st.sampled_from(DTYPES), size=st.integers(1, 70), data=st.data())
def test_one_flipped_bit(kind: ChecksumKind, dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    original = make(torch.uint8, size * dtype.itemsize)
    changed = original.clone()
    position = data.draw(st.integers(0, len(original) - 1))
    changed[position] ^= 1 << data.draw(st.integers(0, 7))
    if dtype == torch.bool:
        dtype = torch.uint8
    assert tensor_checksum(original.view(dtype), kind) != tensor_checksum(changed.view(dtype), kind)


@KINDS
@settings(max_examples=50)
@given(dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), data=st.data())
def test_swaps(kind: ChecksumKind, dtype: torch.dtype, data: st.DataObject) -> None:
    """Two elements change places; opposite signs and zeros are where a weighted sum would fail."""
    tensor = make(dtype, 64)
    i, j = data.draw(st.lists(st.integers(0, 63), min_size=2, max_size=2, unique=True))
    tensor[j] = data.draw(st.sampled_from([-tensor[i].item(), 0.0, 1.0, float("inf")]))
    swapped = tensor.clone()
    swapped[i], swapped[j] = tensor[j].clone(), tensor[i].clone()
    assert tensor_checksum(swapped, kind) != tensor_checksum(tensor, kind)


@pytest.mark.gpu
def test_same_on_accelerator() -> None:
    for dtype in DTYPES:
        tensor = make(dtype, 1001, 37)
        assert tensor_checksum(tensor.cuda()) == tensor_checksum(tensor, "words")
    large = make(torch.bfloat16, (1 << 24) + 3)
    assert tensor_checksum(large.cuda()) == tensor_checksum(large, "words")
    assert tensor_checksum(large.cuda(), "xxh3") == tensor_checksum(large)
