"""The measurements of one GPU, each a function that returns its figures: ``python -m benchmarks.gpu.stages NAME OUT``.

``benchmarks.gpu.run`` calls them, most valuable first.  Every one starts what a user starts: pytest, a pipeline by its
start script with overrides, an engine with its own defaults.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.rehearsal.catalog import DEFAULT_GPU, GPUS, gpu_of

ROOT = Path(__file__).parents[2]
WORK = Path(os.environ.get("GPU_WORK", ROOT / "build" / "gpu" / "work"))
ON_GPU = os.environ.get("ROLL_PLATFORM") != "cpu"

Figures = dict[str, Any]


def call(*command: object, accepted: Collection[int] = (0,)) -> str:
    """Output of a command at the repository's root, which ends with a status that is ``accepted``; its output goes to
    our standard error as well."""
    process = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    sys.stderr.write(process.stdout)
    if process.returncode not in accepted:
        raise RuntimeError(f"{' '.join(map(str, command))} exited with {process.returncode}: {process.stdout[-2000:]}")
    return process.stdout


def doctor() -> Figures:
    """What the devices give, and two steps of a run; the report is kept whatever it says."""
    output = call(sys.executable, "-m", "roll.cli", "doctor", "--gpu", "--json", "--output", WORK, accepted=(0, 1, 2))
    report, _ = json.JSONDecoder().raw_decode(output[output.index('{\n "roll"') :])
    grave = [each for each in report["findings"] if each["severity"] in ("warning", "error")]
    said = "; ".join(f"{each['severity']}: {each['section']}: {each['what']}" for each in grave)
    return {"summary": said or "in order", "report": report}


def tests() -> Figures:
    """The tests that need a GPU; the doctor, which is one of them, has a stage of its own."""
    files = sorted({line.partition(":")[0] for line in call("grep", "-rn", "mark.gpu", "tests").splitlines()})
    output = call(sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu and not e2e", *files)
    return {"summary": re.sub(r"^=+ | =+$", "", output.strip().splitlines()[-1])}


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """Metrics by step: lines of one step are joined."""
    steps: dict[int, dict[str, float]] = {}
    for path in folder.rglob("metrics.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            steps.setdefault(row["step"], {}).update(row)
    return [steps[step] for step in sorted(steps)]


# Metrics whose values of every step are kept.
KEPT = re.compile(
    r"val/|critic/score/mean|actor/train_infer_log_diff_abs|actor/entropy$|model_update/bytes|.*tps|.*mfu"
)


def pipeline(name: str, config: str, overrides: dict[str, object], steps: int) -> Figures:
    """Run ``examples/<config>`` and summarise its metrics."""
    folder = WORK / name
    words = [f"{key}={value}" for key, value in {**overrides, "max_steps": steps, "output_dir": folder}.items()]
    path, _, file = config.rpartition("/")
    began = time.perf_counter()
    try:
        call(sys.executable, "examples/start_rlvr_pipeline.py", "--config_path", path, "--config_name", file, *words)
    finally:
        figures = summary(metrics_of(folder))
        figures["wall_s"] = round(time.perf_counter() - began, 1)
        (WORK / f"{name}.json").write_text(json.dumps(figures))
    return figures


def summary(rows: list[dict[str, float]]) -> Figures:
    rows = [row for row in rows if any(key.startswith("time/") for key in row)]
    figures: Figures = {"steps": len(rows)}
    for key in sorted({key for row in rows for key in row}):
        values = [row[key] for row in rows if isinstance(row.get(key), int | float)]
        if key.startswith("time/") and len(values) > 3:
            figures[key] = round(statistics.median(values[2:]), 4)
        elif KEPT.match(key):
            figures[key] = [round(value, 7) for value in values]
    return figures


MODEL = "SmolLM2-135M-Instruct.gguf"


def prepared() -> Path:
    """The folder of the example's model and prompts."""
    gguf = sorted(Path(os.environ.get("GPU_SITE", ".")).glob("*.gguf"))
    call(sys.executable, "examples/smollm2/prepare.py", *(["--gguf", gguf[0]] if gguf else []))
    return ROOT / "examples/smollm2/artifacts"


def smollm2(name: str, steps: int, config: str = "rlvr_config", **overrides: object) -> Figures:
    prepared()
    return pipeline(name, f"smollm2/{config}", overrides, steps)


VLLM = {
    "actor_infer.strategy_args.strategy_name": "vllm",
    "actor_infer.strategy_args.strategy_config": "{gpu_memory_utilization: 0.4, max_num_seqs: 256, sleep_level: 1, "
    # CUDA graphs of the plain model: a graph replays what the eager engine does, without minutes of compilation.
    "engine_args: {compilation_config: {mode: 0, cudagraph_mode: FULL_DECODE_ONLY}}}",
    "weight_sync.transport": "cuda_ipc",
}

SGLANG = {
    "actor_infer.strategy_args.strategy_name": "sglang",
    "actor_infer.strategy_args.strategy_config": "{mem_fraction_static: 0.4, max_num_seqs: 256}",
}


def grpo_hf() -> Figures:
    """A pretrained model learns: fsdp2 and hf_infer on one device."""
    return smollm2("grpo_hf", 40 if ON_GPU else 2)


def grpo_vllm() -> Figures:
    """The same with vLLM next to the trainer: CUDA graphs, sleep mode, weights by cuda_ipc."""
    return smollm2("grpo_vllm", 30, **VLLM) if ON_GPU else {"rehearsed": "needs a GPU"}


def grpo_vllm_eager() -> Figures:
    """vLLM without graphs: what they are worth."""
    config = str(VLLM["actor_infer.strategy_args.strategy_config"]).partition("engine_args")[0] + "enforce_eager: true}"
    overrides = {**VLLM, "actor_infer.strategy_args.strategy_config": config, "eval_steps": 0}
    return smollm2("grpo_vllm_eager", 8, **overrides) if ON_GPU else {"rehearsed": "needs a GPU"}


def grpo_large_batch() -> Figures:
    """A batch that fills the device: 64 prompts x 16 answers."""
    overrides = {
        "rollout_batch_size": 64,
        "num_return_sequences_in_group": 16,
        "actor_train.training_args.per_device_train_batch_size": 1024,
        "actor_infer.strategy_args.strategy_config.max_num_seqs": 1024,
        "eval_steps": 0,
    }
    return smollm2("grpo_large_batch", 8, **overrides) if ON_GPU else {"rehearsed": "needs a GPU"}


SHAPE = ["--model", "qwen2.5-1.5B", "--prompt", "1024", "--response", "1024", "--micro-batch", "4", "--repeats", "3"]
REHEARSED_SHAPE = ["--model", "136k", "--repeats", "1"]


def training_step(*options: str) -> Figures:
    """One optimizer step of 1.5B weights on 65,000 tokens, with a bare loop alongside."""
    shape = SHAPE if ON_GPU else REHEARSED_SHAPE
    command = [sys.executable, "-m", "benchmarks.train_step", "--dtype", "bf16", "--packed", "--ranks", "1"]
    return {"table": table_rows(call(*command, *shape, "--peak-tflops", peak_tflops(), *options))}


def train_step() -> Figures:
    return training_step("--only", "fsdp2")


def backends() -> Figures:
    """DeepSpeed and Megatron, where they are installed."""
    return training_step("--only", "alone")


def fits() -> Figures:
    """7B weights under LoRA, and under ZeRO-3 with weights and moments in host memory: peaks, and those rehearsed."""
    shape = ["qwen2.5-7B", "--prompt", "1024", "--response", "1024", "--micro-batch", "2", "--group-size", "2"]
    if not ON_GPU:
        shape = ["10M"]
    command = [sys.executable, "-m", "benchmarks.rehearsal", "--dtype", "bf16", "--recompute", "--ranks", "1"]
    return {"table": table_rows(call(*command, "--large", "--models", *shape))}


def random_model() -> Path:
    """A folder with 1.5B random weights in bf16 and the small model's tokenizer; written once."""
    import torch
    from transformers import AutoTokenizer

    from benchmarks.train_step import SHAPES, write_model
    from roll.models.gguf_reading import dequantise

    folder = WORK / "random_1.5B"
    if not (folder / "tokenizer.json").exists():
        write_model(folder, SHAPES["qwen2.5-1.5B" if ON_GPU else "136k"], torch.bfloat16)
        model = dequantise(ROOT / "examples/smollm2/artifacts" / MODEL)
        AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def generation() -> Figures:
    """vLLM alone: 256 responses of 1,024 tokens from 1.5B weights."""
    if not ON_GPU:
        return {"rehearsed": "needs a GPU"}
    from vllm import LLM, SamplingParams

    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    engine = LLM(
        str(random_model()), gpu_memory_utilization=0.5, max_model_len=2048, max_num_seqs=256, compilation_config=graphs
    )
    prompts = [f"Write a story about the number {number}." for number in range(256)]
    engine.generate(prompts[:8], SamplingParams(max_tokens=8), use_tqdm=False)
    began = time.perf_counter()
    outputs = engine.generate(prompts, SamplingParams(max_tokens=1024, ignore_eos=True), use_tqdm=False)
    seconds = time.perf_counter() - began
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {"tokens": tokens, "generate_s": round(seconds, 2), "tokens_per_s": round(tokens / seconds)}


def colocated() -> Figures:
    """Whole steps of 1.5B weights, trainer and vLLM taking turns: 256 responses of 1,024 tokens."""
    if not ON_GPU:
        return {"rehearsed": "needs a GPU"}
    overrides = {
        **VLLM,
        "pretrain": random_model(),
        "rollout_batch_size": 32,
        "response_length": 1024,
        "eval_steps": 0,
        "actor_train.training_args.per_device_train_batch_size": 16,
        "actor_train.training_args.gradient_accumulation_steps": 16,
        "actor_train.training_args.save_hf_model": "false",
    }
    return smollm2("colocated", 3, **overrides)


def grpo_sglang() -> Figures:
    """The same as ``grpo_vllm`` with SGLang, where it is installed."""
    if not ON_GPU or importlib.util.find_spec("sglang") is None:
        return {"rehearsed": "needs a GPU and SGLang"}
    return smollm2("grpo_sglang", 10, **SGLANG)


def grpo_asynchronous() -> Figures:
    """Generation one step ahead, on a device of its own."""
    import torch

    if not ON_GPU or torch.cuda.device_count() < 2:
        return {"rehearsed": "needs two GPUs"}
    return smollm2("grpo_asynchronous", 20, config="async_config")


def bisect() -> Figures:
    """Where engine and trainer part in bf16, by the first operation: `strict_on_policy` is for CPUs."""
    prepared()
    command = (sys.executable, "-m", "roll.cli", "bisect-logprobs", "examples/smollm2/rlvr_config")
    output = call(*command, accepted=(0, 1))
    return {"summary": "; ".join(line for line in output.splitlines() if " log-probs" in line or "they part" in line)}


def grpo_trl() -> Figures:
    """The recipe of ``grpo_hf`` in TRL's trainer."""
    if importlib.util.find_spec("trl") is None:
        return {"rehearsed": "needs trl"}
    from roll.models.gguf_reading import dequantise

    artifacts = prepared()
    script = ROOT / "benchmarks/rlvr/trl_recipes.py"
    words = [dequantise(artifacts / MODEL), artifacts / "instructions_train.jsonl", "--recipe", "smollm2"]
    output = call(sys.executable, script, *words, "--steps", 8 if ON_GPU else 1, *(["--gpu"] if ON_GPU else []))
    seconds = [float(found) for found in re.findall(r"'step_time': '?([\d.]+)", output)]
    return {"steps": len(seconds), "step_s": statistics.median(seconds[len(seconds) // 2 :])}


def table_rows(text: str) -> list[dict[str, str]]:
    """Rows of a Markdown table in ``text``."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return [dict(zip(["what", *lines[0][1:]], row, strict=True)) for row in lines[1:]]


def peak_tflops() -> int:
    if not ON_GPU:
        return 1
    import torch

    known = gpu_of(torch.cuda.get_device_name()) or GPUS[DEFAULT_GPU]
    return round(known.half / 1e12)


@dataclass(frozen=True)
class Stage:
    run: Callable[[], Figures]
    estimate_s: int
    """Measured on an H200, or guessed by what is like it."""
    limit_s: int
    """It is killed after so many seconds; what it had written until then is kept."""
    title: str


STAGES = {
    "doctor": Stage(doctor, 60, 90, "`roll doctor --gpu`"),
    "tests": Stage(tests, 35, 60, "`pytest -m gpu`"),
    "grpo_hf": Stage(grpo_hf, 110, 180, "SmolLM2-135M, GRPO, fsdp2 + hf_infer"),
    "train_step": Stage(train_step, 120, 240, "a training step of 1.5B weights"),
    "grpo_vllm": Stage(grpo_vllm, 120, 150, "SmolLM2-135M, GRPO, fsdp2 + vLLM with CUDA graphs"),
    "colocated": Stage(colocated, 130, 180, "1.5B weights, whole steps, trainer and vLLM on one device"),
    "generation": Stage(generation, 40, 90, "vLLM, 1.5B weights, 256 responses of 1,024 tokens"),
    "fits": Stage(fits, 150, 200, "7B weights: LoRA, and ZeRO-3 with offload"),
    "backends": Stage(backends, 90, 120, "a training step of 1.5B weights under DeepSpeed and Megatron"),
    "grpo_trl": Stage(grpo_trl, 45, 60, "SmolLM2-135M, GRPO in TRL"),
    "grpo_asynchronous": Stage(grpo_asynchronous, 80, 120, "SmolLM2-135M, GRPO, generation one step ahead"),
    "bisect": Stage(bisect, 30, 60, "`roll bisect-logprobs`: hf_infer and fsdp2, SmolLM2-135M, bf16"),
    "grpo_sglang": Stage(grpo_sglang, 100, 150, "SmolLM2-135M, GRPO, fsdp2 + SGLang"),
    "grpo_vllm_eager": Stage(grpo_vllm_eager, 50, 70, "the same without graphs"),
    "grpo_large_batch": Stage(grpo_large_batch, 50, 60, "SmolLM2-135M, 1,024 samples a step, hf_infer"),
}


if __name__ == "__main__":
    WORK.mkdir(parents=True, exist_ok=True)
    Path(sys.argv[2]).write_text(json.dumps(STAGES[sys.argv[1]].run()))
