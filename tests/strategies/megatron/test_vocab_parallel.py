"""Log-probs and entropies of a cut output matrix equal those of the whole one, gradients included."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from roll.models.log_probs import HeadMemory, token_log_probs


def cut_head(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, chunk_tokens: int
) -> dict[str, torch.Tensor]:
    """On each rank: its rows of ``weight``; gradients of a loss through both outputs."""
    from roll.strategies.megatron.model import OwnTokens, vocab_parallel_log_probs

    ranks, rank = dist.get_world_size(), dist.get_rank()
    rows = -(-len(weight) // ranks)
    padded = torch.cat([weight, torch.full((rows * ranks - len(weight), weight.shape[1]), torch.nan)])
    own = padded[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    hidden = hidden.clone().requires_grad_()
    log_probs, entropy, squares = vocab_parallel_log_probs(
        hidden,
        own,
        targets,
        OwnTokens(own, dist.group.WORLD, len(weight)),
        temperature,
        memory=HeadMemory(chunk_bytes=4 * rows * chunk_tokens, min_chunk_tokens=chunk_tokens),
    )
    _loss(log_probs, entropy).backward()
    grad_hidden = hidden.grad
    dist.all_reduce(grad_hidden)
    return {
        "log_probs": log_probs.detach(),
        "entropy": entropy.detach(),
        "squares": squares,
        "hidden": grad_hidden,
        "weight": own.grad[: max(0, len(weight) - rank * rows)],
    }


def _loss(log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    factors = torch.linspace(-1.0, 2.0, len(log_probs))
    return (log_probs * factors).sum() + 0.3 * (entropy * factors.flip(0)).sum()


@pytest.mark.default_rows("1.0-2-ranks-in-chunks", "0.6-4-ranks-one-with-padding-only", "1.0-no-tokens")
@pytest.mark.parametrize(
    ("world", "vocabulary", "tokens", "chunk"),
    [(1, 11, 5, 2), (2, 12, 7, 3), (2, 11, 7, 100), (4, 5, 6, 4), (2, 9, 0, 4)],
    ids=["1-rank", "2-ranks-in-chunks", "2-ranks-padded", "4-ranks-one-with-padding-only", "no-tokens"],
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_the_whole_matrix(run_ranks, world, vocabulary, tokens, chunk, temperature):
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    random = torch.Generator().manual_seed(world)
    # Logits of some hundreds: the largest must be taken over all ranks, or exp overflows.
    hidden = torch.randn(tokens, 8, generator=random) * 10
    weight = torch.randn(vocabulary, 8, generator=random) * 5
    targets = torch.randint(vocabulary, (tokens,), generator=random)
    results = run_ranks(world, cut_head, hidden, weight, targets, temperature, chunk)

    wide = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    log_probs, entropy, squares = token_log_probs(
        *wide, targets, temperature=temperature, with_entropy=True, with_sum_of_squares=True
    )
    _loss(log_probs, entropy).backward()
    for result in results:
        torch.testing.assert_close(result["log_probs"].double(), log_probs, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(result["entropy"].double(), entropy, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(result["squares"].double(), squares, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(result["hidden"].double(), wide[0].grad, rtol=1e-4, atol=1e-3)
    whole = torch.cat([result["weight"] for result in results])[:vocabulary]
    torch.testing.assert_close(whole.double(), wide[1].grad, rtol=1e-4, atol=1e-3)
