"""Small runs of whole pipelines: what they start from, their configurations, and what they leave behind."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from roll.config.loader import LoadedConfig
from roll.datasets import EpochOrder
from roll.tracking import METRICS_NAME, read_metrics
from tests.config.good import changed, load

HERE = "tests.pipelines"
"""Where rewards, workers and environments of runs are."""
GRPO_STEPS = 4
SECRET = "a-secret-that-nobody-reads"
NUM_PROBLEMS, NUM_VALIDATION = 64, 8

GENERATING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": list(range(0, 400, 8))}
"""An untrained model hardly ever says its end token; with one token in ten ending a response, lengths vary."""

TIMED = ("time/", "memory/", "model_update/")
"""Prefixes of metrics that differ from run to run."""
TIMED_NAMES = ("time", "system/tps", "system/actor_infer/response/tps_dp")


def _in_folder(name: str) -> Any:
    return property(lambda world: world.folder / name)


@dataclass(frozen=True)
class TinyWorld:
    """Files that a run reads; the teacher is another model with the same tokenizer."""

    folder: Path
    model, teacher = _in_folder("model"), _in_folder("teacher")
    train, validation = _in_folder("train.jsonl"), _in_folder("val.jsonl")
    demonstrations, validation_answers = _in_folder("sft.jsonl"), _in_folder("val_sft.jsonl")
    preferences = _in_folder("pairs.jsonl")


def write_untrained(tiny: Mapping[str, ModuleType], folder: Path, num_problems: int = 32) -> Path:
    """The tiny example's model with its tokenizer and chat template, untrained; its output matrix is its embeddings.

    Args:
        num_problems: texts that the vocabulary is learnt from.
    """
    words, model = tiny["word_problems"], tiny["tiny_model"]
    problems = words.draw_problems(num_problems, seed=1, validation=False)
    tokenizer = model.make_tokenizer(f"{problem.question}\n{words.solution(problem)}" for problem in problems)
    model.save(model.make_model(tokenizer, seed=0), tokenizer, folder)
    return folder


def make_world(tiny: Mapping[str, ModuleType], folder: Path) -> TinyWorld:
    """An untrained two-layer model, and word problems whose tags alternate between ``even`` and ``odd``."""
    world = TinyWorld(folder)
    words, model = tiny["word_problems"], tiny["tiny_model"]
    training = words.draw_problems(NUM_PROBLEMS, seed=1, validation=False)
    held_out = words.draw_problems(NUM_VALIDATION, seed=2, validation=True)
    tokenizer = model.make_tokenizer(f"{problem.question}\n{words.solution(problem)}" for problem in training)
    model.save(model.make_model(tokenizer, seed=0), tokenizer, world.model)
    model.save(model.make_model(tokenizer, seed=1), tokenizer, world.teacher)
    sets = ((world.train, training), (world.validation, held_out), (world.demonstrations, training))
    for path, problems in (*sets, (world.validation_answers, held_out)):
        rows = [_row(f"{path.stem}-{i}", problem, words.solution(problem)) for i, problem in enumerate(problems)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [
        {
            "id": f"pair-{i}",
            "instruction": problem.question,
            "chosen": words.solution(problem),
            "rejected": f"#### {problem.answer + 1}" + i % 3 * " or so",
        }
        for i, problem in enumerate(training)
    ]
    world.preferences.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return world


def _row(row_id: str, problem: Any, solution: str) -> dict[str, Any]:
    return {
        "id": row_id,
        "tag": "even" if problem.answer % 2 == 0 else "odd",
        "messages": [{"role": "user", "content": problem.question}],
        "ground_truth": str(problem.answer),
        "response": solution,
    }


def role(strategy: str, devices: list[int], **settings: Any) -> dict[str, Any]:
    """A section of a role with a float32 model."""
    model_args = {"dtype": "fp32", "disable_gradient_checkpointing": True}
    strategy_args = {"strategy_name": strategy, "strategy_config": {}}
    return {"model_args": model_args, "strategy_args": strategy_args, "device_mapping": devices} | settings


def training_args(micro_batch_size: int, accumulation: int, learning_rate: float = 1e-3) -> dict[str, Any]:
    return {
        "learning_rate": learning_rate,
        "per_device_train_batch_size": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
    }


def constant_rate(arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {"lr_scheduler_type": "constant"}


def shared_settings(output: Path, pipeline: str, exp_name: str, max_steps: int) -> dict[str, Any]:
    """Two devices; nothing is saved, validated or measured."""
    return {
        "pipeline": pipeline,
        "exp_name": exp_name,
        "seed": 7,
        "output_dir": str(output),
        "logging_dir": str(output / "logs"),
        "track_with": ["jsonl"],
        "num_gpus_per_node": 2,
        "max_steps": max_steps,
        **dict.fromkeys(("save_steps", "eval_steps", "memory_steps"), 0),
        "rpc_timeout": 120,
    }


def policy_settings(world: TinyWorld) -> dict[str, Any]:
    """The model, a trainer with an optimizer step of 16 samples, and an engine."""
    return {
        "pretrain": str(world.model),
        "reward_pretrain": str(world.model),
        "estimator": "grpo",
        "actor_train": role("fsdp2_train", [0], training_args=training_args(8, 2)),
        "actor_infer": role("hf_infer", [1], generating_args=GENERATING),
    }


def rlvr_settings(world: TinyWorld, output: Path) -> dict[str, Any]:
    """GRPO with one trainer and one engine: 4 prompts x 4 samples, one optimizer step of 16."""
    settings = shared_settings(output, "rlvr", "tiny", 2) | policy_settings(world)
    settings["actor_train"]["data_args"] = {"file_name": [str(world.train)], "messages": "messages"}
    return settings | {
        "rollout_batch_size": 4,
        "num_return_sequences_in_group": 4,
        "prompt_length": 128,
        "response_length": 12,
        "rewards": {
            "digits": {"worker_cls": f"{HERE}.rewards.digit_share", "tag_included": ["even", "odd"], "world_size": 1}
        },
    }


def grpo_changes(world: TinyWorld) -> dict[str, Any]:
    """Two trainers, two engines and a reference; KL in the loss, validations, checkpoints, TensorBoard, samples."""
    return {
        "max_steps": GRPO_STEPS,
        "save_steps": 2,
        "eval_steps": 2,
        "memory_steps": 2,
        "sample_log.mismatch_steps": 2,
        "track_with": ["tensorboard", "jsonl"],
        "system_envs": {"SERVICE_API_KEY": SECRET},
        "use_kl_loss": True,
        "kl_loss_coef": 0.01,
        "actor_train.device_mapping": [0, 1],
        "actor_train.training_args": training_args(8, 1) | {"save_hf_model": True},
        "actor_infer.device_mapping": [0, 1],
        "reference": role("fsdp2_infer", [0, 1], infer_batch_size=4),
        "validation": {
            "data_args": {"file_name": [str(world.validation)], "messages": "messages"},
            "generating_args": {"num_return_sequences": 2, "temperature": 1.0, "top_p": 1.0, "top_k": 0},
            "sets": {
                "evens": {
                    "data_args": {"file_name": [str(world.validation)], "dataset_filter": {"tag": "even"}},
                    "greedy": False,
                }
            },
        },
    }


def sft_settings(world: TinyWorld, output: Path) -> dict[str, Any]:
    """Imitation on one rank: 8 demonstrations a step."""
    data = {"file_name": str(world.demonstrations), "messages": "messages", "response": "response"}
    return shared_settings(output, "sft", "tiny_sft", 6) | {
        "pretrain": str(world.model),
        "sequence_length": 160,
        "sft_train": role("fsdp2_train", [0], training_args=training_args(4, 2), data_args=data),
    }


class LengthGame:
    """Whatever an untrained model says is a move: its length decides about the reward and whether the game goes on."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return f"Game {seed % 7}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        size = len(action)
        return f"You said {size}", (size % 4) / 4, size % 3 == 0, False, {"state": str(size % 3)}


def agentic_settings(world: TinyWorld, output: Path) -> dict[str, Any]:
    """Games in one conversation each, with one trainer and one engine: 4 tasks x 4 episodes, one optimizer step."""
    game = {"env_type": f"{__name__}.LengthGame", "max_steps": 3, "max_tokens_per_step": 8}
    return {
        **shared_settings(output, "agentic", "tiny_game", 1),
        **policy_settings(world),
        "rollout_batch_size": 16,
        "sequence_length": 512,
        "custom_envs": {"game": game},
        "train_env_manager": {"num_env_groups": 4, "group_size": 4, "tags": ["game"]},
    }


def dpo_settings(world: TinyWorld, output: Path) -> dict[str, Any]:
    """DPO on one rank, 8 pairs a step, with its reference on the same device."""
    data = {"file_name": str(world.preferences)}
    return shared_settings(output, "dpo", "tiny_dpo", 3) | {
        "pretrain": str(world.model),
        "sequence_length": 160,
        "actor_train": role("fsdp2_train", [0], training_args=constant_rate(training_args(4, 2, 1e-4)), data_args=data),
        "reference": role("fsdp2_infer", [0], infer_batch_size=4),
    }


def rm_settings(world: TinyWorld, output: Path) -> dict[str, Any]:
    """A reward model on one rank, 8 pairs a step."""
    shared = dpo_settings(world, output)
    role_args = shared["actor_train"]
    del shared["reference"], shared["actor_train"]
    return shared | {"pipeline": "rm", "exp_name": "tiny_rm", "reward_train": role_args}


def distill_settings(world: TinyWorld, output: Path) -> dict[str, Any]:
    """Distillation on one rank, 8 rows a step, the teacher on a device of its own."""
    shared = sft_settings(world, output)
    student = shared.pop("sft_train") | {"training_args": constant_rate(training_args(4, 2, 1e-3))}
    student["training_args"]["save_hf_model"] = True
    del shared["pretrain"]
    return shared | {
        "pipeline": "distill",
        "student_pretrain": str(world.model),
        "teacher_pretrain": str(world.teacher),
        "max_steps": 3,
        "logits_topk": 6,
        "distill_loss_weight": 0.6,
        "student": student,
        "teacher": role("fsdp2_infer", [1], infer_batch_size=8),
    }


def load_changed(base: Mapping[str, Any], changes: Mapping[str, Any]) -> LoadedConfig[Any]:
    """The configuration with dotted keys set, loaded from a file in the folder ``input`` of the run's output."""
    data = changed(changes, base)
    folder = Path(data["output_dir"]) / "input"
    folder.mkdir(parents=True, exist_ok=True)
    return load(folder, data, check_files=True)


@dataclass(frozen=True)
class FinishedRun:
    """Files of a run's folder."""

    output: Path

    @property
    def logs(self) -> Path:
        return self.output / "logs"

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The metrics of each training step, in order; those of a validation at the same step are among them."""
        return [row for row in read_metrics(self.logs / METRICS_NAME) if "system/global_step" in row]

    def samples(self, step: int) -> list[dict[str, Any]]:
        """The samples of a training step, or its episodes, of a run that writes its rollouts."""
        return [json.loads(line) for line in (self.output / f"rollouts/train-{step:06d}.jsonl").open()]

    def with_metric(self, name: str) -> list[dict[str, Any]]:
        """Metrics of the steps that have this one, such as one of a validation."""
        return [row for row in read_metrics(self.logs / METRICS_NAME) if name in row]

    def values(self, name: str) -> list[float]:
        """One metric over the steps."""
        return [row[name] for row in self.steps]


def let_go_of_process() -> None:
    """Take away what a run in this process leaves in it: its log's handlers and the address of its Ray."""
    package = logging.getLogger("roll")
    for handler in list(package.handlers):
        package.removeHandler(handler)
    package.propagate = True
    os.environ.pop("RAY_ADDRESS", None)


def untimed(row: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics that are the same when a run is repeated."""
    return {k: v for k, v in row.items() if not k.startswith(TIMED) and k not in TIMED_NAMES}


def supervised_layout(
    name: str, strategy: str, config: dict[str, Any], micro: int, accumulation: int, **more: Any
) -> dict[str, Any]:
    """The role ``name`` on two devices, 8 rows a step at a constant rate of 1e-4."""
    return {
        f"{name}.device_mapping": [0, 1],
        f"{name}.training_args": constant_rate(training_args(micro, accumulation, 1e-4)),
        f"{name}.strategy_args": {"strategy_name": strategy, "strategy_config": config},
        **{f"{name}.{key}": value for key, value in more.items()},
    }


def supervised_layouts(name: str) -> dict[str, dict[str, Any]]:
    """Layouts that must give the numbers of one rank, for the role ``name`` of a pipeline that learns from given
    rows."""
    balanced = {"use_sequence_packing": True, "sequence_packing_args": {"algorithm": "load_balance"}}
    budget = {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 400}
    zero_2 = {"zero_optimization": {"stage": 2}}
    return {
        "two ranks, shared prompts": supervised_layout(name, "fsdp2_train", {}, 1, 4, use_prefix_sharing=True),
        "packed to equal work": supervised_layout(name, "fsdp2_train", {}, 2, 2, **balanced),
        "token budget": supervised_layout(name, "fsdp_train", {}, 2, 2, **budget),
        "ZeRO-2": supervised_layout(name, "deepspeed_train", zero_2, 4, 1, use_prefix_sharing=True),
    }


def drawn_pairs(stream: str, steps: int, size: int) -> list[list[str]]:
    """The ids of the pairs of each step, drawn as a run draws them."""
    order = EpochOrder(NUM_PROBLEMS, 7, stream, True).of_epoch(0)
    return [[f"pair-{row}" for row in order[step * size : (step + 1) * size]] for step in range(steps)]


def learned(row: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics that are the same when supervised training goes on: neither times nor what is counted at the start."""
    return {k: v for k, v in untimed(row).items() if not k.startswith(("data/", "val/"))}
