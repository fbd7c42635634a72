"""Sizes of known models, what `roll check` says of them, engines, links: arithmetic against sums done by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from roll.cli import main
from roll.config.loader import load_config
from roll.config.reading.errors import ConfigError
from roll.rehearsal.catalog import GB, GPUS, KNOWN, gpu_of, hardware, known_config
from roll.rehearsal.formulas import engine_use, misfits, model_shape, quick_lines
from roll.rehearsal.roofline import PhaseTime, generation_time, kernel_times, network_time, traffic
from roll.rehearsal.tracker import Collective, Operation

PUBLISHED = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
}
"""Weights that the models' pages on the hub give."""
SEVEN = "qwen2.5-7B-rlvr_fsdp2/rlvr_config"


def test_known_sizes_are_those_of_the_published_models() -> None:
    shapes = {name: model_shape(known_config(name) or {}) for name in KNOWN}
    assert {name: shape.total for name, shape in shapes.items() if shape is not None} == PUBLISHED
    # 3.3 of 30.5 billion: eight experts of 128, without the input embeddings.
    moe = shapes["Qwen3-30B-A3B"]
    assert moe is not None and round(moe.active / 1e9, 1) == 3.0


@pytest.mark.parametrize(
    "name, base",
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B"),
        ("/models/Qwen3-4B-Instruct-2507/", "Qwen3-4B"),
        ("Qwen/Qwen3-8B-Base", "Qwen3-8B"),
        ("meta-llama/Llama-3.3-70B-Instruct", "Llama-3.1-70B"),
        ("Qwen/Qwen2.5-Math-7B", ""),
        ("my-Qwen2.5-7B", ""),
    ],
)
def test_variants_have_the_size_of_their_base_and_others_are_not_guessed(name: str, base: str) -> None:
    assert known_config(name) == known_config(base) and bool(known_config(name)) == bool(base)


def test_check_says_the_memory_of_each_role(capsys: pytest.CaptureFixture[str]) -> None:
    """7.6B float32 weights, gradients and two moments over 8 ranks: 16 x 7.6156e9 / 8 bytes = 14.2 GiB."""
    lines = dict(quick_lines(load_config(None, SEVEN, check_files=False).plan))
    assert list(lines)[:3] == ["actor_train", "actor_infer", "reference"]
    assert "states 14.2 GiB" in lines["actor_train"]
    # Keys and values: 2 x 28 layers x 4 heads x 128 x 2 bytes = 56 KiB a token.
    assert "14.2 GiB a device, and for 4,096 tokens of KV cache 224 MiB a sample" in lines["actor_infer"]
    assert main(["check", SEVEN, "--skip-files"]) == 0
    assert f"memory      actor_train: {lines['actor_train']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reshard", "weights"),
    [("true", "2.9 GiB"), ("8", "4.7 GiB"), ("false", "14.2 GiB"), ("auto", "2.9 GiB")],
)
def test_check_counts_weights_that_stay_gathered(reshard: str, weights: str) -> None:
    """7.6156e9 of 2 bytes; two layers of 233e6 and both matrices of 545e6 are 1.56e9."""
    key = "actor_train.strategy_args.strategy_config.reshard_after_forward"
    loaded = load_config(None, SEVEN, overrides=[f"++{key}={reshard}"], check_files=False)
    assert f"gathered weights {weights}" in dict(quick_lines(loaded.plan))["actor_train"]


def test_an_engine_without_room_for_a_sample_is_refused_with_the_sum() -> None:
    plan = load_config(None, SEVEN, check_files=False).plan
    role, shape = plan.roles["actor_infer"], model_shape(known_config("Qwen2.5-7B") or {})
    assert shape is not None
    roomy = engine_use(role, shape, GPUS["h100-80g"])
    # 0.7 x 79.2 GiB - 14.18 GiB - 2 GiB = 39.3 GiB, at 56 KiB a token.
    assert roomy.tokens == int((0.7 * GPUS["h100-80g"].memory - shape.total * 2 - 2 * 2**30) // 57344)
    assert not roomy.problem
    tight = engine_use(role, shape, replace(GPUS["rtx4090-24g"], memory=23 * 2**30))
    assert "0.7 x 23.0 GiB = 16.1 GiB, less weights 14.2 GiB and workspace 2.0 GiB" in tight.problem
    arithmetic, reading = generation_time(role, shape, roomy, GPUS["h100-80g"], 1024, 8, 1024, 3072)
    # 128 samples at a time, so 3072 steps, each of which reads 15.2 GB of weights and 128 x 2560 x 57344 bytes.
    assert reading == pytest.approx(3072 * (shape.total * 2 + 128 * 2560 * 57344) / 3350e9)
    assert reading > arithmetic


def test_check_refuses_what_cannot_fit_with_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    """7.6B weights of 4 bytes, as many gradients and two moments, on one device: 113.5 GiB."""
    one = "qwen2.5-0.5B-rlvr_fsdp2/rlvr_config_1gpu"
    words = ["check", one, "--skip-files", "--gpu", "h100-80g"]
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "pretrain=Qwen/Qwen2.5-7B"]) == 2
    refused = " ".join(capsys.readouterr().err.split())
    assert "actor_train" in refused and "cannot fit on h100-80g, which has 79.2 GiB" in refused
    assert "parameters 28.4 GiB + gradients 28.4 GiB + optimizer 56.7 GiB = 113.5 GiB a device" in refused
    half = "actor_infer.strategy_args.strategy_config.gpu_memory_utilization=0.5"
    assert main(["check", SEVEN, "--skip-files", "--gpu", "rtx4090-24g", half]) == 2
    assert "leaves room for" in capsys.readouterr().err
    assert main(["check", SEVEN, "--skip-files", "--gpu", "abacus"]) == 2


def test_a_teacher_that_is_served_elsewhere_needs_no_device() -> None:
    served = "{strategy_name: remote, strategy_config: {base_url: 'http://127.0.0.1:1/v1'}}"
    words = [f"teacher.strategy_args={served}", "~teacher.device_mapping", "teacher_pretrain=Qwen/Qwen2.5-72B"]
    loaded = load_config(None, "tiny_distill/distill_config", None, words, check_files=False)
    assert misfits(loaded.plan, GPUS["rtx4090-24g"]) == []


def test_links_between_nodes_are_shared_by_the_devices_of_a_node() -> None:
    """An all-gather of 16 GB over two nodes of 8: a device receives 15/16 of it, 1 GB of that from the other node."""
    flows = traffic(Counter({Collective("all_gather", tuple(range(16)), 16 * GB): 2}), range(16), per_node=8)
    assert [(flow.name, flow.ranks) for flow in flows] == [("all_gather", 16)]
    assert flows[0].between == pytest.approx(2 * 1 * GB)
    assert flows[0].within == pytest.approx(2 * 14 * GB)
    machine = hardware("h100-80g", "nvlink+ib400", 8)
    assert network_time(flows, machine) == pytest.approx(max(28 / 450, 2 / 50))
    # One adapter of 12.5 GB/s for all eight.
    assert network_time(flows, hardware("h100-80g", "nvlink+eth100", 8)) == pytest.approx(2 / (12.5 / 8))
    alone = traffic(Counter({Collective("all_reduce", tuple(range(8)), 8 * GB): 1}), range(8), per_node=8)
    assert (alone[0].within, alone[0].between) == (pytest.approx(14 * GB), 0.0)


def test_the_larger_of_arithmetic_and_traffic_bounds_a_kernel() -> None:
    product = Operation(flops=989 * 10**12, num_bytes=3350 * 10**6, dtype=torch.bfloat16)
    copy = Operation(flops=0, num_bytes=3350 * 10**9, dtype=torch.float32)
    machine = hardware("h100-80g", "nvlink+ib400", 8)
    assert kernel_times(Counter({product: 2, copy: 1}), machine)[:2] == (pytest.approx(2.0), pytest.approx(1.0))
    assert [PhaseTime(*parts).bound for parts in ((2, 1, 1), (1, 2, 1), (1, 1, 3))] == ["compute", "memory", "network"]
    assert PhaseTime(1, 1, 3).seconds == 3 and PhaseTime(2, 1, 1).seconds == 3


def test_unknown_hardware_is_refused_by_name() -> None:
    for gpu, network in (("h1000", "nvlink+ib400"), ("l40s-48g", "nvlink+ib400"), ("h100-80g", "pigeon+ib400")):
        with pytest.raises(ConfigError) as refused:
            hardware(gpu, network, 8)
        assert gpu in str(refused.value) or network in str(refused.value)


@pytest.mark.parametrize(
    ("driver", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_a_device_by_the_name_of_its_driver(driver: str, chip: str | None) -> None:
    found = gpu_of(driver)
    assert (found and found.name.partition("-")[0]) == chip
