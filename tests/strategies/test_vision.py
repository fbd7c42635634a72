"""Vision-language models are trained as the plain model would be, however the work is cut."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from roll.config.roles import SequencePackingArguments, WorkerConfig
from roll.models.stored import StoredLayout
from roll.protocol.vision import vision_token_ids
from roll.strategies.engines.requests import GenerationRequest, SamplingParams
from roll.strategies.hf_infer.engine import GenerationEngine
from roll.strategies.hf_infer.strategy import create_decoder
from tests import vision_models
from tests.strategies import jobs, sync_cases, vision_cases
from tests.strategies.comparison import STEPS, assert_resumed, assert_step_equals
from tests.strategies.hf_infer.helpers import run
from tests.strategies.samples import DYNAMIC, PACKING, make_role


def packs(train: int, forward: int) -> dict[str, Any]:
    lengths: dict[str, Any] = {"max_packed_sequence_length_train": train, "max_packed_sequence_length_forward": forward}
    return PACKING | {"sequence_packing_args": SequencePackingArguments(algorithm="load_balance", **lengths)}


PACKS, VIDEO_PACKS = packs(110, 150), packs(180, 250)
TOKENS = {**DYNAMIC, "max_tokens_per_microbatch_in_train": 120, "max_tokens_per_microbatch_in_infer": 160}
SHARED = {"use_prefix_sharing": True, "micro_batch": 8}
ULYSSES: dict[str, Any] = {"model_args": {"ulysses_size": 2}, "split": (15,)}
SPLITS = {1: (15,), 2: (8, 7), 4: (4, 4, 4, 3)}
TEXT_ON_ONE = (12, 3)
"""The second rank has text only."""
PARTITION: dict[str, Any] = {"zero_stage": 3, "zero_optimization": {"stage3_param_persistence_threshold": 40}}
CHECKPOINTED = {"model_args": {"disable_gradient_checkpointing": False}}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    @cache
    def save(kind: Any) -> Path:
        return vision_models.save(tmp_path_factory.mktemp(kind), kind)

    return save


@pytest.fixture(scope="module")
def expected(model_of):
    @cache
    def results(kind: str, frozen: str | None = None, videos: bool = False) -> dict[str, Any]:
        batch = vision_cases.make_batch(videos=kind if videos else None)
        return vision_cases.plain_results(model_of(kind), batch, frozen)

    return results


TEXT: dict[str, Any] = {"split": TEXT_ON_ONE}
FSDP1: dict[str, Any] = {"strategy": "fsdp_train"}
ZERO3: dict[str, Any] = {"strategy": "deepspeed_train", "config": PARTITION}
QWEN25, MOE, VIDEOS = {"kind": "qwen2_5_vl"}, {"kind": "qwen3_vl_moe"}, {"videos": True}
CASES: dict[str, dict[str, Any]] = {
    "fsdp2-1-rank-videos-qwen2.5": {"ranks": 1, **QWEN25, **VIDEOS},
    "fsdp2-checkpointed-dynamic": {**CHECKPOINTED, **TOKENS},
    "fsdp2-text-on-one-rank": TEXT,
    "fsdp2-text-on-one-rank-moe": {**TEXT, **MOE},
    "fsdp2-frozen-text-on-one-rank": {**TEXT, "frozen": "vision_model"},
    "fsdp2-shared-prompts-packed-moe": {**MOE, **PACKS, "use_prefix_sharing": True},
    "fsdp2-ulysses-shared-prompts": {**ULYSSES, **SHARED, "ranks": 4, "split": (8, 7)},
    "fsdp2-ulysses-packed-qwen2.5": {**ULYSSES, **PACKS, **QWEN25},
    "fsdp1-ulysses": {**FSDP1, **ULYSSES},
    "fsdp1-text-on-one-rank-packed": {**FSDP1, **TEXT, **PACKS},
    "fsdp1-frozen-text-on-one-rank": {**FSDP1, **TEXT, "frozen": "model.visual"},
    "fsdp1-moe-shared-prompts": {**FSDP1, **MOE, "use_prefix_sharing": True},
    "zero2-text-on-one-rank": {**ZERO3, **TEXT, "config": {"zero_stage": 2}},
    "zero3-text-on-one-rank-packed": {**ZERO3, **TEXT, **PACKS},
    "zero3-moe-shared-prompts": {**ZERO3, **MOE, "use_prefix_sharing": True},
    "fsdp2-videos-shared-prompts-moe": {**VIDEOS, **MOE, **SHARED},
    "fsdp2-videos-ulysses-qwen2.5": {**VIDEOS, **QWEN25, **ULYSSES, **VIDEO_PACKS},
    "fsdp1-videos-qwen2.5": {**FSDP1, **VIDEOS, **QWEN25},
    "zero3-videos": {**ZERO3, **VIDEOS, **CHECKPOINTED},
    "zero3-videos-qwen2.5": {**ZERO3, **VIDEOS, **TEXT, **QWEN25},
}


@pytest.mark.long_rows("fsdp2-ulysses-packed-qwen2.5")
@pytest.mark.default_rows("fsdp2-text-on-one-rank", "fsdp2-ulysses-packed-qwen2.5")
@pytest.mark.parametrize("name", CASES)
def test_gradient_and_outputs_equal_the_plain_model(run_ranks, model_of, expected, name):
    options = dict(CASES[name])
    kind, ranks, frozen = options.pop("kind", "qwen3_vl"), options.pop("ranks", 2), options.pop("frozen", None)
    sizes, strategy = options.pop("split", SPLITS[ranks]), options.pop("strategy", "fsdp2_train")
    videos = options.pop("videos", False)
    needs(strategy)
    if frozen is not None:
        options["model_args"] = {**options.get("model_args", {}), "freeze_module_prefix": frozen}
    role = make_role(model_of(kind), strategy, **options)
    parts = vision_cases.split(vision_cases.make_batch(videos=kind if videos else None), sizes)
    shared = ranks // len(parts)
    results = run_ranks(
        ranks, jobs.train, role, [part for part in parts for _ in range(shared)] if ranks > 1 else parts
    )
    wanted = expected(kind, None if frozen is None else "model.visual", videos)
    assert len(results[0]["gradients"]) == len(wanted["gradients"])
    assert_step_equals(results, wanted, wanted["rounding"])


BACKENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp2": ("fsdp2_train", {}),
    "fsdp1": ("fsdp_train", {}),
    "zero3": ("deepspeed_train", PARTITION),
}


def half(**options: Any) -> list[dict[str, Any]]:
    return vision_cases.split(vision_cases.make_batch(**options), SPLITS[2])


def needs(strategy: str) -> None:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")


def role_on(name: str, model: Path, **options: Any) -> WorkerConfig:
    strategy, config = BACKENDS[name]
    needs(strategy)
    return make_role(model, strategy, config=config, **options)


@pytest.mark.long
@pytest.mark.default_rows("fsdp2")
@pytest.mark.parametrize("name", BACKENDS)
def test_a_frozen_tower_costs_nothing(run_ranks, model_of, name):
    """No gradient, no optimizer state, no change, and nothing to send after the first weight update."""
    role = role_on(name, model_of("qwen3_vl"), model_args={"freeze_module_prefix": ["vision_model"]})
    results = run_ranks(2, vision_cases.facts_of_freezing, role, half())
    parameters = dict(vision_cases.plain_model(model_of("qwen3_vl")).named_parameters())
    language = [one for one in parameters if not one.startswith("model.visual.")]
    for result in results:
        if name != "zero3":
            assert {one.replace("_fsdp_wrapped_module.", "") for one in result["with_gradient"]} <= set(language)
    assert sorted(results[0]["changed"]) == sorted(results[0]["sent"]) == sorted(language)
    elements = sum(result["optimizer_elements"] for result in results)
    trained, total = (sum(parameters[one].numel() for one in names) for names in (language, parameters))
    assert 2 * trained <= elements < min(3.2 * trained, 2 * total)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["fsdp2", "fsdp1"])
def test_angles_of_patches_stay_in_float32(run_ranks, model_of, name):
    """The blocks of the tower get the same inputs as in a plain model in bf16."""
    for result in run_ranks(
        2, vision_cases.types_that_arrive, role_on(name, model_of("qwen3_vl"), dtype="bf16"), half()
    ):
        assert result == {"hidden": {torch.bfloat16}, "angles": {torch.float32}}


@pytest.mark.long
@pytest.mark.default_rows("fsdp2")
@pytest.mark.parametrize("name", BACKENDS)
def test_a_critic_reads_images(run_ranks, model_of, name):
    """Its head starts at zero, and after a step the values are those of one process."""
    batch = vision_cases.make_batch()

    def values(name: str, ranks: int) -> tuple[list[dict[str, Any]], torch.Tensor]:
        role = role_on(name, model_of("qwen3_vl"), training=STEPS)
        parts = vision_cases.split(batch, SPLITS[ranks])
        results = run_ranks(ranks, jobs.train, role, parts, 2, None, True)
        return results, torch.cat([result["outputs"]["values"] for result in results])

    _, alone = values("fsdp2", 1)
    results, cut = values(name, 2)
    assert "score.weight" in results[0]["weights"] and alone.abs().max() > 1e-3
    torch.testing.assert_close(cut, alone, rtol=0, atol=2e-6)


@pytest.mark.long
@pytest.mark.default_rows("fsdp2-qwen3_vl_moe")
@pytest.mark.parametrize(
    ("name", "kind"), [("fsdp2", "qwen2_5_vl"), ("fsdp2", "qwen3_vl_moe"), ("fsdp1", "qwen3_vl"), ("zero3", "qwen3_vl")]
)
def test_weights_arrive_in_an_engine(run_ranks, model_of, tmp_path, name, kind):
    """Checksums of what ``hf_infer`` holds after each update; the second one is without the frozen tower."""
    training = {"learning_rate": 1e-5, "weight_decay": 0.0}
    frozen = {"freeze_module_prefix": "vision_model"}
    role = role_on(name, model_of(kind), dtype="bf16", model_args=frozen, training=training)
    sent = run_ranks(2, sync_cases.train_and_sync, role, half(), tmp_path, [("shared_memory", "trained")])[0]
    plain = vision_cases.plain_model(model_of(kind))
    travelling = StoredLayout(plain).on_the_way().views(dict(plain.named_parameters()))
    assert (kind == "qwen3_vl_moe") == any(one.endswith("experts.gate_up_proj[1]") for one in travelling)
    sizes = {one: parameter.numel() for one, parameter in plain.named_parameters()}
    language = [size for one, size in sizes.items() if not one.startswith("model.visual.")]
    number = len(travelling)
    assert sent == [(number, 2 * sum(sizes.values())), (number, 2 * sum(language))], "all are verified"


@pytest.mark.long
@pytest.mark.default_rows("qwen3_vl_moe-fsdp1")
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", vision_models.KINDS)
def test_export_is_a_folder_of_transformers(run_ranks, model_of, tmp_path, name, kind):
    run_ranks(2, jobs.export, role_on(name, model_of(kind)), tmp_path / "out")
    before, after = (vision_cases.plain_model(folder).state_dict() for folder in (model_of(kind), tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[one]) for one, tensor in before.items())
    if kind == "qwen3_vl_moe":
        with safe_open(tmp_path / "out/model.safetensors", framework="pt") as file:
            shape = file.get_slice("model.language_model.layers.0.mlp.experts.gate_up_proj").get_shape()
        assert shape == [8, 64, 96], "experts, hidden size, gate and up: as on the hub, and as vLLM reads them"


@pytest.mark.long
@pytest.mark.default_rows("fsdp1")
@pytest.mark.parametrize("name", BACKENDS)
def test_resumed_equals_uninterrupted(run_ranks, model_of, tmp_path, name):
    options = {"model_args": {"freeze_module_prefix": "visual"}, "use_remove_padding": True} if name != "zero3" else {}
    role = role_on(name, model_of("qwen2_5_vl" if name == "zero3" else "qwen3_vl"), **options)
    whole = run_ranks(2, jobs.train_and_save, role, half(), tmp_path)
    assert_resumed(whole, run_ranks(2, jobs.load_and_train, role, half(), tmp_path), tmp_path)


@pytest.mark.long
@pytest.mark.default_rows("zero3")
@pytest.mark.parametrize("name", BACKENDS)
def test_adapters_are_on_the_language_model(run_ranks, model_of, name):
    """``all-linear`` leaves the tower alone; outputs are the plain model's, and a step changes the language model."""
    pytest.importorskip("peft")
    adapters = {"lora_target": "all-linear", "lora_rank": 2}
    role = role_on(name, model_of("qwen2_5_vl"), model_args=adapters)
    facts = run_ranks(2, vision_cases.facts_of_freezing, role, half())[0]
    assert facts["changed"] and sorted(facts["changed"]) == sorted(facts["sent"])
    assert all(".layers." in one and "visual" not in one for one in facts["changed"]), facts["changed"]


@pytest.mark.long
@pytest.mark.default_rows("qwen3_vl-shared prompts")
@pytest.mark.parametrize("layout", ["padded", "packed", "shared prompts"])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_the_ratio_to_what_was_sampled_is_one(run_ranks, model_of, tmp_path, kind, layout):
    """A model that would rather say placeholders: engine and trainer leave them out of the distribution alike."""
    model = vision_cases.plain_model(model_of(kind))
    excluded = list(vision_token_ids(model.config))
    with torch.no_grad():
        model.lm_head.weight[excluded] *= 3
    model.save_pretrained(tmp_path)
    engine = GenerationEngine(create_decoder(model, 160), str, (), 8, 160)
    prompts = vision_cases.prompts()
    params = SamplingParams(12, temperature=1.0, seed=1)
    requests = [
        GenerationRequest(str(index), one.token_ids, params, 3, vision=one.vision) for index, one in enumerate(prompts)
    ]
    outputs = run(engine, requests)
    keys = sorted(outputs)
    batch = vision_cases.assembled([(prompts[int(name)], outputs[name, index].token_ids) for name, index in keys])
    keys_of_layout: dict[str, dict[str, Any]] = {
        "padded": {},
        "packed": {"use_remove_padding": True},
        "shared prompts": {"use_prefix_sharing": True},
    }
    role = make_role(tmp_path, micro_batch=5, infer_batch_size=5, **keys_of_layout[layout])
    ((before, within),) = run_ranks(1, vision_cases.log_probs_before_and_in_a_step, role, batch)
    assert torch.equal(before, within), "the ratio of an update on the same weights is 1, to the bit"
    mask = batch["response_mask"]
    sampled = torch.cat([torch.tensor(outputs[key].log_probs) for key in keys])
    torch.testing.assert_close(before[mask], sampled, rtol=0, atol=2e-5)
    logits = model(**vision_cases.plain_inputs(model, batch)).logits.log_softmax(-1)
    assert logits[..., excluded].exp().sum(-1)[mask].max() > 0.05, "without masks the log-probs would be others"
