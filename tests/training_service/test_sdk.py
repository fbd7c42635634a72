"""The SDK drives the service: losses, gradients and steps against plain torch, samples, checkpoints, refusals."""

from __future__ import annotations

import runpy
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roll.config.roles import ModelArguments
from roll.strategies.engines.requests import SamplingParams
from roll.training_service.adapters import Base, LoraOptions, Tenant
from roll.training_service.sampling import Sampler, SampleRequest
from roll.training_service.wire import messages
from tests.training_service.batches import data, documented, sequences
from tests.training_service.conftest import MAX_LENGTH, NAME

tinker = pytest.importorskip("tinker", reason="needs the SDK: pip install tinker")
types = tinker.types
Connect = Callable[..., Any]
RANK, SEED = 4, 7


@pytest.fixture
def client(connect: Connect) -> Any:
    return connect().create_lora_training_client(NAME, rank=RANK, seed=SEED).result()


class Reference:
    """The same adapter by peft and transformers alone, with the losses of the SDK's documentation."""

    def __init__(self, folder: Path, rank: int = RANK, seed: int = SEED) -> None:
        import peft
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
        # The service's own beginning of A: what is tested is what is computed with it.
        tenant = Tenant(Base(ModelArguments(model_name_or_path=str(folder), dtype="fp32"), 64), LoraOptions(rank, seed))
        linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        self.model = peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=32, target_modules=linear))
        peft.set_peft_model_state_dict(self.model, dict(tenant.weights().tensors))
        self.parameters = [own for own in self.model.parameters() if own.requires_grad]

    def loss(self, name: str, batch: list[Any]) -> torch.Tensor:
        total = torch.zeros(())
        for datum in batch:
            tokens = torch.tensor([datum.model_input.to_ints()])
            inputs = {key: value.to_torch() for key, value in datum.loss_fn_inputs.items()}
            table = self.model(input_ids=tokens).logits[0].log_softmax(-1)
            log_probs = table.gather(1, inputs["target_tokens"][:, None])[:, 0]
            total = total + documented(name, log_probs, inputs, {}).sum()
        return total


@pytest.mark.long_rows("ppo")
@pytest.mark.default_rows("cross_entropy", "ppo")
@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"])
def test_losses_and_steps_are_those_of_plain_torch(loss: str, client: Any, base_folder: Path) -> None:
    reference, batch = Reference(base_folder), data(loss)
    optimizer = torch.optim.AdamW(reference.parameters, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    params = types.AdamParams(learning_rate=0.01, eps=1e-8, weight_decay=0.1, grad_clip_norm=2.0)
    for _ in range(3):
        passed, stepped = client.forward_backward(batch, loss), client.optim_step(params)
        expected = reference.loss(loss, batch)
        optimizer.zero_grad()
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters, 2.0)
        optimizer.step()
        assert passed.result().metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-4)
        assert stepped.result().metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)


def test_sums_of_two_passes_are_one_pass_of_all(connect: Connect) -> None:
    norms = []
    for parts in ([data("cross_entropy")], [[one] for one in data("cross_entropy")]):
        client = connect().create_lora_training_client(NAME, rank=RANK, seed=SEED).result()
        for part in parts:
            client.forward_backward(part, "cross_entropy")
        norms.append(client.optim_step(types.AdamParams()).result().metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_forward_pass_leaves_no_gradient(client: Any) -> None:
    batch = data("cross_entropy")
    output = client.forward(batch, "cross_entropy").result()
    lengths = [len(one["logprobs"].data) for one in output.loss_fn_outputs]
    assert lengths == [len(one.model_input.to_ints()) for one in batch]
    with pytest.raises(tinker.RequestFailedError, match="there is no gradient"):
        client.optim_step(types.AdamParams()).result()


def test_several_targets_a_position_sparse(connect: Connect) -> None:
    tokens = sequences(1)[0]
    targets = torch.stack([tokens[1:], tokens[:-1]], 1)
    weights = torch.rand(targets.shape)
    plain = types.ModelInput.from_ints(tokens[:-1].tolist())
    datum = types.Datum(model_input=plain, loss_fn_inputs={"target_tokens": targets, "weights": weights})
    client = connect().create_lora_training_client(NAME, rank=RANK).result()
    output = client.forward([datum], "cross_entropy").result()
    log_probs = output.loss_fn_outputs[0]["logprobs"]
    assert list(log_probs.shape) == list(targets.shape)
    expected = -(torch.tensor(log_probs.data).reshape(targets.shape) * weights).sum().item()
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    single = types.Datum(model_input=plain, loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[:, 0]})
    both = [one["logprobs"] for one in client.forward([single, datum], "cross_entropy").result().loss_fn_outputs]
    assert list(both[0].shape) == [len(targets)] and list(both[1].shape) == list(targets.shape)
    assert both[0].data == pytest.approx(both[1].data[::2], rel=1e-5)


def test_a_custom_loss_by_two_passes(client: Any, base_folder: Path) -> None:
    batch = data("cross_entropy")

    def squares(_: Any, log_probs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return torch.stack([(own**2).sum() for own in log_probs]).sum(), {"own:mean": 3.0}

    metrics = client.forward_backward_custom(batch, squares).result().metrics
    norm = client.optim_step(types.AdamParams()).result().metrics["grad_norm"]
    reference, total = Reference(base_folder), torch.zeros(())
    for datum in batch:
        table = reference.model(input_ids=torch.tensor([datum.model_input.to_ints()])).logits[0].log_softmax(-1)
        own = table.gather(1, datum.loss_fn_inputs["target_tokens"].to_torch()[:, None])
        total = total + (own**2).sum()
    total.backward()
    expected = torch.stack([own.grad.norm() for own in reference.parameters if own.grad is not None]).norm()
    assert metrics["own:mean"] == 3.0
    assert metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-4)
    assert norm == pytest.approx(expected.item(), rel=1e-3)


def test_chunks_of_one_pass_in_any_order(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client sends the first chunk last; the service computes them in their order."""
    whole = client.forward(data("cross_entropy", 6), "cross_entropy").result()
    config = client.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 2})
    monkeypatch.setattr(client.holder, "_client_config", config)
    chunked = client.forward(data("cross_entropy", 6), "cross_entropy").result()
    assert chunked.metrics["loss:sum"] == pytest.approx(whole.metrics["loss:sum"], rel=1e-5)
    assert len(chunked.loss_fn_outputs) == 6


def test_samples_and_their_log_probs(connect: Connect) -> None:
    service = connect()
    client = service.create_lora_training_client(NAME, rank=RANK, seed=SEED).result()
    for _ in range(3):
        client.forward_backward(data("cross_entropy"), "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.02))
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = sequences(1)[0].tolist()
    params = types.SamplingParams(max_tokens=8, seed=5)
    model_input = types.ModelInput.from_ints(prompt)
    answer = sampler.sample(model_input, 3, params, topk_sample_logprobs=2, include_prompt_logprobs=True).result()
    again = sampler.sample(model_input, 3, params).result()
    assert [one.tokens for one in answer.sequences] == [one.tokens for one in again.sequences]
    assert len({one.sequence_id for one in answer.sequences}) == 3
    whole = [*prompt, *answer.sequences[0].tokens]
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result()
    np.testing.assert_allclose(scored[len(prompt) :], answer.sequences[0].logprobs, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(scored[1 : len(prompt)], answer.prompt_logprobs[1:], rtol=1e-3, atol=1e-4)
    assert answer.prompt_logprobs[0] is None
    assert all(len(top) == 2 for top in answer.sequences[0].topk_logprobs)
    # The model that trains says the same of these tokens as the engine, into whose weights its adapter is merged.
    weights = torch.ones(len(whole) - 1)
    targets = torch.tensor(whole[1:])
    datum = types.Datum(types.ModelInput.from_ints(whole[:-1]), {"target_tokens": targets, "weights": weights})
    trained = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    np.testing.assert_allclose(scored[1:], trained, rtol=1e-3, atol=1e-4)
    plain = service.create_sampling_client(base_model=NAME).result().compute_logprobs(model_input).result()
    assert plain[1] != pytest.approx(scored[1], abs=1e-3)


def test_stops_and_limits_of_samples(connect: Connect) -> None:
    sampler = connect().create_sampling_client(base_model=NAME).result()
    model_input = types.ModelInput.from_ints(sequences(1)[0].tolist())
    greedy = sampler.sample(model_input, 1, types.SamplingParams(max_tokens=6, temperature=0)).result().sequences[0]
    stop = [greedy.tokens[2]]
    stopped = sampler.sample(model_input, 1, types.SamplingParams(max_tokens=6, temperature=0, stop=stop)).result()
    assert stopped.sequences[0].stop_reason == "stop"
    assert stopped.sequences[0].tokens == greedy.tokens[: greedy.tokens.index(stop[0]) + 1]
    one = sampler.sample(model_input, 1, types.SamplingParams(max_tokens=1, top_k=1, top_p=0.5)).result()
    assert one.sequences[0].tokens == greedy.tokens[:1] and one.sequences[0].stop_reason == "length"
    last = sampler.sample(model_input, 1, types.SamplingParams(max_tokens=1), True, prompt_logprobs_last_n=2).result()
    assert [value is None for value in last.prompt_logprobs] == [True] * 4 + [False] * 2


def test_checkpoints_are_listed_published_loaded_and_deleted(connect: Connect) -> None:
    service = connect()
    options = {"rank": RANK, "train_unembed": False, "user_metadata": {"a": "b"}}
    client = service.create_lora_training_client(NAME, **options).result()
    client.forward_backward(data("cross_entropy"), "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=0.02))
    state = client.save_state("state", ttl_seconds=7200).result().path
    sampler = client.save_weights_for_sampler("sampler").result().path
    rest = service.create_rest_client()
    found = rest.list_checkpoints(client.model_id).result().checkpoints
    assert {one.tinker_path: one.checkpoint_type for one in found} == {state: "training", sampler: "sampler"}
    info = rest.get_weights_info_by_tinker_path(state).result()
    assert (info.base_model, info.lora_rank, info.train_unembed) == (NAME, RANK, False)
    run = rest.get_training_run(client.model_id).result()
    assert run.last_checkpoint.tinker_path == state and run.user_metadata == {"a": "b"}
    rest.publish_checkpoint_from_tinker_path(sampler).result()
    assert [one.public for one in rest.list_checkpoints(client.model_id).result().checkpoints] == [True, False]
    assert rest.get_sampler(service.create_sampling_client(sampler).result()._sampling_session_id).result().model_path
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        client.save_state("state").result()
    client.save_state("state", overwrite=True).result()
    other = service.create_training_client_from_state_with_optimizer(state).result()
    losses = [one.forward(data("cross_entropy"), "cross_entropy").result().metrics for one in (client, other)]
    assert losses[0] == losses[1]
    rest.delete_checkpoint_from_tinker_path(state).result()
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        rest.get_weights_info_by_tinker_path(state).result()


def test_the_download_is_an_adapter_that_peft_loads(connect: Connect, base_folder: Path, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    service = connect()
    client = service.create_lora_training_client(NAME, rank=RANK, seed=SEED, train_unembed=False).result()
    client.forward_backward(data("cross_entropy"), "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=0.02))
    path = client.save_weights_external("download").result().path
    urls = service.create_rest_client().get_external_weights_urls(path).result().urls
    for name, url in urls.items():
        (tmp_path / name).write_bytes(urllib.request.urlopen(url).read())
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url[:-1] + ("0" if url[-1] != "0" else "1"))
    model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32), tmp_path
    )
    tokens = sequences(1)[0]
    table = model(input_ids=tokens[None, :-1]).logits[0].log_softmax(-1)
    expected = table.gather(1, tokens[1:, None])[:, 0].detach().numpy()
    output = client.forward(data("cross_entropy", 1), "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    np.testing.assert_allclose(output.data, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_model": "other/model"}, "'other/model' is not served"),
        ({"rank": 0}, "rank: 0 must be in"),
        ({"optimizer": types.DimuonOptimizerConfig()}, "'dimuon' is not served"),
    ],
)
def test_models_that_are_refused(change: dict[str, Any], message: str, connect: Connect) -> None:
    with pytest.raises((tinker.APIStatusError, tinker.RequestFailedError), match=message):
        connect().create_lora_training_client(**{"base_model": NAME, "rank": RANK, **change}).result()


@pytest.mark.long
def test_passes_that_are_refused(client: Any) -> None:
    """By name, and the requests that follow go on."""
    image = types.ImageChunk(data=b"no image, which nobody looks at", format="png", expected_tokens=2)
    long = types.ModelInput.from_ints([5] * (MAX_LENGTH + 1))
    batch, ratios = data("cross_entropy"), data("ppo")
    cases: list[tuple[list[Any], str, Any, str]] = [
        (batch, "gspo", None, "'gspo' is not served"),
        (batch, "stable_reinforce", None, "'stable_reinforce' is not served"),
        (ratios, "ppo", {"clip": 0.1}, "loss_fn_config.clip: ppo does not have it"),
        (batch, "importance_sampling", None, "needs logprobs"),
        ([of(types.ModelInput(chunks=[image]), 2)], "cross_entropy", None, "image chunks are not served"),
        ([of(long, MAX_LENGTH + 1)], "cross_entropy", None, "the model takes 1 to 256"),
    ]
    for given, loss, config, message in cases:
        refused = client.forward_backward(given, loss, config)
        after = client.forward(batch, "cross_entropy")
        with pytest.raises(tinker.RequestFailedError, match=message):
            refused.result()
        assert after.result().metrics["loss:sum"] > 0


def of(model_input: Any, length: int) -> Any:
    """A datum whose targets and weights are all the same."""
    return types.Datum(model_input, {"target_tokens": [5] * length, "weights": [1.0] * length})


def test_a_step_is_not_taken_without_a_pass_that_has_failed(client: Any) -> None:
    """Nor where the others have a gradient; then training goes on, from the weights of before."""
    before = client.forward(data("cross_entropy"), "cross_entropy").result().metrics["loss:sum"]
    client.forward_backward(data("cross_entropy"), "cross_entropy")
    refused = client.forward_backward(data("cross_entropy"), "importance_sampling")
    step = client.optim_step(types.AdamParams(learning_rate=0.02))
    with pytest.raises(tinker.RequestFailedError, match="needs logprobs"):
        refused.result()
    with pytest.raises(tinker.RequestFailedError, match="since the last step has failed"):
        step.result()
    assert client.forward(data("cross_entropy"), "cross_entropy").result().metrics["loss:sum"] == before
    client.forward_backward(data("cross_entropy"), "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=0.02)).result()
    assert client.forward(data("cross_entropy"), "cross_entropy").result().metrics["loss:sum"] < before


def test_samples_that_are_refused(connect: Connect, client: Any) -> None:
    """At once, which holds up no later request."""
    sampler = connect().create_sampling_client(base_model=NAME).result()
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"prompt_alt_tokens_k": 2}, {}, "prompt_alt_tokens_k: not served"),
        ({}, {"stop": []}, "stop: .* is not served"),
        ({}, {"temperature": -1.0}, "temperature is -1.0"),
        ({"num_samples": 0}, {}, "num_samples: 0 must be in"),
    ]
    for arguments, params, message in cases:
        given = {"num_samples": 1, **arguments}
        sampling = types.SamplingParams(**{"max_tokens": 2, **params})
        with pytest.raises(tinker.BadRequestError, match=message):
            sampler.sample(types.ModelInput.from_ints([5, 6, 7]), sampling_params=sampling, **given).result()
    with pytest.raises(tinker.BadRequestError, match="inflight sampling clients are not served"):
        client.save_weights_and_get_sampling_client(kind="inflight").result()
    assert client.forward(data("cross_entropy"), "cross_entropy").result().loss_fn_outputs


def test_a_prompt_that_waits_several_times_is_computed_once(base_folder: Path, tmp_path: Path) -> None:
    sampler = Sampler(Base(ModelArguments(model_name_or_path=str(base_folder), dtype="fp32"), 64), 8, tmp_path)
    prompt, free, seeded = [5, 6, 7, 8], SamplingParams(6), SamplingParams(6, seed=1)
    asked = {"a": (free, 2), "b": (free, 3), "c": (seeded, 1), "d": (seeded, 1), "e": (SamplingParams(2), 1)}
    answers = sampler.sample([SampleRequest(name, prompt, *own, False, 0, None) for name, own in asked.items()])
    drawn = {}
    for name, answer in answers.items():
        assert isinstance(answer, bytes)
        drawn[name] = [one.tokens for one in messages()["SampleResponse"].FromString(answer).sequences]
    assert {name: len(own) for name, own in drawn.items()} == {name: own[1] for name, own in asked.items()}
    assert drawn["c"] == drawn["d"]
    assert len({*drawn["a"], *drawn["b"]}) == 5
    assert sampler._engine.counts["prompt_tokens"] == 4 * len(prompt)


def test_the_example_of_the_page(
    service: str, base_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training-service.md").read_text(encoding="utf-8")
    example = page.split("```python\n")[1].split("```")[0]
    program = tmp_path / "example.py"
    program.write_text(example.replace("http://127.0.0.1:8000", service).replace("Qwen/Qwen2.5-0.5B-Instruct", NAME))
    names = runpy.run_path(str(program))
    names["service"].close("success")
    losses = [float(line) for line in capsys.readouterr().out.splitlines()[:5]]
    assert losses == sorted(losses, reverse=True) and len(example.splitlines()) <= 15
