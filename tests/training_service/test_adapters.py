"""Losses of the SDK's documentation by the package's policy losses; passes of models that cannot be packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from roll.config.roles import ModelArguments
from roll.training_service.adapters import LOSSES, Base, LoraOptions, Tenant
from roll.training_service.wire import Datum
from tests.training_service.batches import HIGH, LOW, documented


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cross_entropy", {}),
        ("importance_sampling", {}),
        ("ppo", {}),
        ("ppo", {LOW: 0.3, HIGH: 3.7}),
        ("cispo", {}),
        ("cispo", {LOW: 0.0, HIGH: 2.0}),
        ("dro", {}),
        ("dro", {"beta": 0.7}),
    ],
)
@pytest.mark.parametrize("of_datum", [False, True])
def test_losses_are_those_of_the_documentation(name: str, options: dict[str, float], of_datum: bool) -> None:
    """Values and gradients, clipping bounds of the request or of the tokens of one datum."""
    random = torch.Generator().manual_seed(0)
    log_probs = [(-3 * torch.rand(size, generator=random)).requires_grad_() for size in (40, 1, 90)]
    data = []
    for index, own in enumerate(log_probs):
        noise = torch.randn(3, len(own), generator=random)
        inputs = {"logprobs": own.detach() + 0.5 * noise[0], "advantages": noise[1], "weights": noise[2]}
        if of_datum and index and LOSSES[name].takes:
            inputs |= {LOW: torch.rand(len(own), generator=random), HIGH: 1 + torch.rand(len(own), generator=random)}
        data.append(Datum(torch.zeros(len(own), dtype=torch.int64), inputs))
    found = LOSSES[name].sum(log_probs, data, options)
    pairs = zip(log_probs, data, strict=True)
    wanted = torch.cat([documented(name, own, dict(datum.inputs), options) for own, datum in pairs]).sum()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(found, log_probs), torch.autograd.grad(wanted, log_probs))


def computed(tenant: Tenant, data: list[Datum]) -> list[Tensor]:
    passes = tenant.forward_backward(data, "cross_entropy", {}, backward=False)
    while True:
        try:
            next(passes)
        except StopIteration as end:
            return end.value[0]


@pytest.mark.long_rows("sliding_attention-None", "full_attention-eager")
@pytest.mark.parametrize(
    ("kind", "implementation"), [("full_attention", None), ("sliding_attention", None), ("full_attention", "eager")]
)
def test_rows_are_packed_where_the_model_allows_it(
    base_folder: Path, tmp_path: Path, kind: str, implementation: str | None
) -> None:
    """Either way the log-probs are those of each datum alone by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    changes = {"layer_types": ["full_attention", kind], "use_sliding_window": True, "sliding_window": 8}
    config = AutoConfig.from_pretrained(base_folder, **changes)
    model = AutoModelForCausalLM.from_pretrained(base_folder, config=config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    arguments = ModelArguments(model_name_or_path=str(tmp_path), dtype="fp32", attn_implementation=implementation)
    base = Base(arguments, 64)
    assert base.role.use_remove_padding is (implementation != "eager")
    random, data = torch.Generator().manual_seed(0), []
    for length in (3, 40, 17):
        tokens = torch.randint(3, 400, (length + 1,), generator=random)
        data.append(Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": torch.ones(length)}))
    for datum, found in zip(data, computed(Tenant(base, LoraOptions(4)), data), strict=True):
        table = model(input_ids=datum.tokens[None]).logits[0].detach().log_softmax(-1)
        wanted = table.gather(1, datum.inputs["target_tokens"][:, None])[:, 0]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_model_that_scales_its_logits_is_refused(tmp_path: Path) -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = GraniteConfig(vocab_size=64, num_key_value_heads=2, logits_scaling=4.0, **sizes)
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="its logits are changed after the output matrix"):
        Base(ModelArguments(model_name_or_path=str(tmp_path), dtype="fp32"), 64)
