"""Saved and loaded, training goes on as if nothing had happened, also under another layout or strategy."""

from __future__ import annotations

import pytest
import torch

from tests.strategies import jobs
from tests.strategies.comparison import assert_resumed, assert_same_bits, contents_of

# Epsilon keeps AdamW from turning a gradient that is rounding noise into a whole step.
SCHEDULE = {"lr_scheduler_type": "cosine", "warmup_steps": 1, "adam_epsilon": 1e-3}
OFFLOAD = {"offload": "cpu"}
UNITS = {"wrap_policy": {"moe_experts": ["Qwen3MoeMLP"]}}
SHARDED = {"dist_opt": True}
LAYOUTS = {
    "fsdp2-1": (1, "fsdp2", {}),
    "fsdp2": (2, "fsdp2", {}),
    "fsdp2-in-the-foreground": (2, "fsdp2", {"async_save_ckpt": False}),
    "fsdp2-4": (4, "fsdp2", {}),
    "fsdp2-hsdp": (4, "fsdp2", {"fsdp_size": 2}),
    "fsdp2-units": (2, "fsdp2", UNITS),
    "fsdp2-ep2": (2, "fsdp2", {"ep_size": 2}),
    "fsdp-1": (1, "fsdp", {}),
    "fsdp": (2, "fsdp", {}),
    "fsdp-4": (4, "fsdp", {}),
    "fsdp-hsdp": (4, "fsdp", {"fsdp_size": 2}),
    "fsdp-units": (2, "fsdp", UNITS),
    **{f"zero{stage}": (2, f"zero{stage}", {}) for stage in range(4)},
    "zero2-offload": (2, "zero2", OFFLOAD),
    "zero3-offload": (2, "zero3", OFFLOAD | {"offload_param": True}),
    "zero1-1": (1, "zero1", {}),
    "zero2-4": (4, "zero2", {}),
    "zero3-1": (1, "zero3", {}),
    "zero3-4": (4, "zero3", {}),
    "zero3-offload-1": (1, "zero3", OFFLOAD | {"offload_param": True}),
    "megatron-1": (1, "megatron", {}),
    "dp2": (2, "megatron", SHARDED),
    "tp2": (2, "megatron", {"tp": 2}),
    "pp2": (2, "megatron", {"pp": 2}),
    "tp2-sp": (2, "megatron", {"tp": 2, "sp": True}),
    "pp2-vpp2": (2, "megatron", {"pp": 2, "vpp": 2}),
    "tp2-pp2": (4, "megatron", {"tp": 2, "pp": 2}),
    "pp4": (4, "megatron", {"pp": 4}),
    "tp2-cp2": (4, "megatron", {"tp": 2, "cp": 2, **SHARDED}),
    "pp2-vpp2-dp2": (4, "megatron", {"pp": 2, "vpp": 2, **SHARDED}),
    "ep2": (2, "megatron", {"ep": 2, **SHARDED}),
    "ep2-pp2": (4, "megatron", {"ep": 2, "pp": 2}),
    "tp2-etp1": (2, "megatron", {"tp": 2, "sp": True, "etp": 1}),
}
"""Ranks, strategy and options."""


ADAPTERS = {"lora_target": ["q_proj", "v_proj", "o_proj", "down_proj"], "lora_rank": 4, "lora_alpha": 8}


def run_in(run, job, layout, model, *args, **options):
    world, strategy, config = LAYOUTS[layout]
    if model == "dense":
        model = "qwen2" if strategy == "megatron" else "tied"
    if model == "adapters":
        pytest.importorskip("peft")
        model, options["model_args"] = "untied", ADAPTERS
    return run(job, world, strategy, model, *args, config=config, training=SCHEDULE, **options)


RESUMED = [
    *((name, "dense", "fp32") for name in ("fsdp2-1", "fsdp2", "fsdp2-in-the-foreground", "fsdp2-hsdp", "fsdp-hsdp")),
    *((name, "dense", "fp32") for name in ("zero0", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload")),
    *((name, "dense", "fp32") for name in ("megatron-1", "dp2", "tp2-pp2", "pp2-vpp2-dp2")),
    *((name, "dense", "bf16") for name in ("fsdp", "zero0", "zero2", "zero3-offload", "dp2", "tp2-sp")),
    *((name, "qwen3_moe", "fp32") for name in ("fsdp2-units", "fsdp2-ep2", "fsdp-units")),
    ("ep2", "qwen2_moe", "bf16"),
    ("ep2-pp2", "qwen2_moe", "fp32"),
]


@pytest.mark.long_rows("zero2-dense-bf16", "dp2-dense-bf16")
@pytest.mark.default_rows("fsdp2-dense-fp32", "zero2-dense-bf16", "dp2-dense-bf16")
@pytest.mark.parametrize(("layout", "model", "dtype"), RESUMED)
def test_resumed_equals_uninterrupted_bit_for_bit(run, tmp_path, layout, model, dtype):
    whole = run_in(run, jobs.train_and_save, layout, model, tmp_path, dtype=dtype)
    resumed = run_in(run, jobs.load_and_train, layout, model, tmp_path, dtype=dtype)
    assert_resumed(whole, resumed, tmp_path)
    assert whole[0]["step"] == 4
    updates = {float(tensor) for name, tensor in contents_of(tmp_path / "end").items() if name.startswith("updates/")}
    assert updates == {4.0}


ON_HOST = [
    *((name, "dense", "fp32") for name in ("fsdp2-1", "fsdp-hsdp", "pp2-vpp2-dp2")),
    *((name, "dense", "bf16") for name in ("fsdp2", "dp2")),
    *((name, "dense", "fp16") for name in ("fsdp2", "dp2")),
    *((name, "qwen3_moe", "fp32") for name in ("fsdp2-ep2", "ep2")),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("layout", "model", "dtype"), ON_HOST)
def test_moments_in_host_memory_change_no_bit(run, tmp_path, monkeypatch, layout, model, dtype):
    """Begun there or continued from the other's checkpoint."""
    whole = run_in(run, jobs.train_and_save, layout, model, tmp_path / "plain", dtype=dtype)
    world, strategy, config = LAYOUTS[layout]
    monkeypatch.setitem(LAYOUTS, layout, (world, strategy, {**config, "optimizer_cpu_offload": True}))
    run_in(run, jobs.train_and_save, layout, model, tmp_path / "host", dtype=dtype)
    resumed = run_in(run, jobs.load_and_train, layout, model, tmp_path / "plain", dtype=dtype)
    assert_resumed(whole, resumed, tmp_path / "plain")
    for part in ("", "end"):
        assert_same_bits(contents_of(tmp_path / "host" / part), contents_of(tmp_path / "plain" / part))


@pytest.fixture(scope="module")
def written(run, tmp_path_factory):
    """``written(layout, model, dtype)``: the folder of a checkpoint, and how its writer's training ended."""
    found = {}

    def write(*key):
        if key not in found:
            layout, model, dtype = key
            folder = tmp_path_factory.mktemp(layout)
            found[key] = folder, run_in(run, jobs.train_and_save, layout, model, folder, dtype=dtype)[0]
        return found[key]

    return write


# What every layout reads and writes is the same to the last bit: from FSDP2 to each of them and back is any to any.
ON_TWO = ("fsdp", "zero0", "zero1", "zero2", "zero3", "tp2", "pp2", "dp2")
EVERYWHERE = (*ON_TWO, "fsdp2-1", "fsdp2-hsdp", "fsdp-4", "zero3-4", "tp2-pp2")
OTHERS = [
    *(("tied", "fp32", "fsdp2", reader) for reader in EVERYWHERE),
    *(("tied", "fp32", writer, "fsdp2") for writer in ON_TWO),
    *(("tied", "fp32", writer, reader) for writer, reader in [("fsdp2", "fsdp2-4"), ("fsdp", "fsdp-1")]),
    *(("tied", "fp32", writer, reader) for writer, reader in [("zero2", "zero2-4"), ("zero3", "zero3-1")]),
    *(("tied", "bf16", writer, reader) for writer, reader in [("zero1", "zero1-1"), ("zero3", "zero3-4")]),
    ("tied", "bf16", "zero3-offload", "zero3-offload-1"),
    *(("tied", "bf16", f"zero{one}", f"zero{(one + 1) % 4}") for one in range(4)),
    *(("untied", "fp32", writer, reader) for writer, reader in [("tp2-pp2", "zero1"), ("fsdp2-hsdp", "tp2")]),
    *(("qwen2", "fp32", "tp2-pp2", reader) for reader in ("megatron-1", "tp2", "dp2", "pp4", "pp2-vpp2")),
    *(("qwen2", "bf16", "tp2-pp2", reader) for reader in ("dp2", "tp2-cp2")),
    *(("adapters", "fp32", writer, reader) for writer, reader in [("fsdp2", "tp2"), ("pp2", "zero3")]),
    ("adapters", "fp32", "zero2", "fsdp"),
    *(("qwen3_moe", "fp32", writer, "fsdp2-1") for writer in ("fsdp2-units", "fsdp2-ep2", "fsdp-units")),
    *(("qwen3_moe", "fp32", writer, reader) for writer, reader in [("zero3", "zero2"), ("fsdp2", "ep2")]),
    *(("qwen3_moe", "fp32", writer, reader) for writer, reader in [("ep2", "zero3"), ("tp2-sp", "fsdp2")]),
    ("qwen3_moe", "fp32", "zero2", "pp2"),
    *(("qwen2_moe", "fp32", "ep2-pp2", reader) for reader in ("megatron-1", "tp2-sp", "ep2", "tp2-etp1")),
]
"""Model, type, layout of the writer and of the reader."""


@pytest.mark.long_rows("tied-fp32-fsdp2-zero1", "tied-fp32-fsdp2-tp2")
@pytest.mark.default_rows("tied-fp32-fsdp2-tp2", "tied-fp32-fsdp2-zero1", "tied-fp32-zero3-fsdp2")
@pytest.mark.parametrize(("model", "dtype", "writer", "reader"), OTHERS)
def test_another_layout_goes_on_from_the_same_state(run, written, tmp_path, model, dtype, writer, reader):
    """The same float32 weights and moments to the last bit, and then the same steps."""
    folder, whole = written(writer, model, dtype)
    resumed = run_in(run, jobs.load_and_train, reader, model, folder, 2, tmp_path, dtype=dtype)[0]
    assert_same_bits(contents_of(tmp_path / "loaded"), contents_of(folder))
    assert resumed["step"] == whole["step"]
    close = 1e-3 if dtype == "fp32" else 0.03
    assert resumed["metrics"]["grad_norm"] == pytest.approx(whole["metrics"]["grad_norm"], rel=close)
    for name, weight in whole["weights"].items():
        # Only the order of sums differs: the bound of docs/backends.md. In bf16 gradients and weights have 8 bits.
        atol = (1e-5 if dtype == "fp32" else 2**-6) * float(weight.abs().max())
        torch.testing.assert_close(resumed["weights"][name], weight, rtol=0, atol=atol)


@pytest.mark.long
@pytest.mark.default_rows("fsdp2")
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_model_only_checkpoint_starts_the_moments_anew(run, tmp_path, strategy):
    run(jobs.train_and_save, 2, strategy, "tied", tmp_path, config={"save_only_model": True}, training=SCHEDULE)
    assert run(jobs.load_and_train, 2, strategy, "tied", tmp_path, 1, training=SCHEDULE)[0]["step"] == 3
    updates = [tensor for name, tensor in contents_of(tmp_path / "resumed").items() if name.startswith("updates/")]
    assert {float(tensor) for tensor in updates} == {1.0}


@pytest.mark.default_rows("fsdp2-tied")
@pytest.mark.parametrize(("strategy", "model"), [("fsdp2", "tied"), ("zero1", "tied"), ("megatron", "qwen2")])
def test_a_folder_without_checkpoint_is_named(run, tmp_path, strategy, model):
    with pytest.raises(AssertionError, match=r"FileNotFoundError.*not a training checkpoint"):
        run(jobs.load_and_train, 1, strategy, model, tmp_path, 1)
