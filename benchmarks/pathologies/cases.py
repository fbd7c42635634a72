"""The seeded pathologies and the healthy runs: the tiny example, with one thing wrong or with nothing."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples/tiny"
ARTIFACTS = TINY / "artifacts"
MODEL = ARTIFACTS / "seed0/warm_start/model"
UNTRAINED = ARTIFACTS / "seed0/init"
PARTS = "benchmarks.pathologies.parts"
STOPS = f"actor_infer.generating_args.stop_token_ids={json.dumps(list(range(0, 400, 12)))}".replace(" ", "")
"""An untrained model hardly ever says its end token; with one token in twelve ending a response, lengths vary."""

Prepare = Callable[[Path], Sequence[str]]
"""Makes files in a folder; the keys that name them."""


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        cause: what :func:`roll.report.diagnosis.diagnose` should name first; None: nothing, the run is healthy.
        what: the pathology in words.
        keys: ``key=value``.
        config: the recipe, relative to ``examples/``.
    """

    name: str
    cause: str | None
    what: str
    keys: tuple[str, ...] = ()
    prepare: Prepare | None = None
    config: str = "tiny/rlvr_config.yaml"
    steps: int = 8

    def overrides(self, output: Path, seed: int | None = None) -> list[str]:
        """Everything on top of the recipe; ``seed``: another than the case's own."""
        recipe = {"tiny/sft_config.yaml": SFT, "tiny_dpo/dpo_config.yaml": DPO}.get(self.config, RLVR)
        made = list(self.prepare(output / "input")) if self.prepare is not None else []
        common = [f"max_steps={self.steps}", f"output_dir={output}", f"logging_dir={output}/logs", *COMMON]
        return [*common, *recipe, *made, *self.keys, *([] if seed is None else [f"seed={seed}"])]


COMMON = (
    *("track_with=[jsonl]", "save_steps=0", "eval_steps=0", "memory_steps=1", "logging_steps=1", "rpc_timeout=120"),
    "sample_log.max_samples_per_step=32",
)
RLVR = (
    f"pretrain={MODEL}",
    "rollout_batch_size=8",
    "num_return_sequences_in_group=8",
    "actor_train.training_args.per_device_train_batch_size=64",
    "actor_train.training_args.save_hf_model=false",
    "actor_train.training_args.warmup_steps=0",
    f"actor_train.data_args.file_name=[{ARTIFACTS}/data/train.jsonl]",
    "actor_train.device_mapping=[0]",
    "actor_infer.device_mapping=[1]",
    "+reference.device_mapping=[0]",
    "validation=null",
)
SFT = (
    f"pretrain={UNTRAINED}",
    f"sft_train.data_args.file_name={ARTIFACTS}/data/sft.jsonl",
    "sft_train.device_mapping=[0]",
    "sft_train.training_args.save_hf_model=false",
)
DPO = (
    f"pretrain={MODEL}",
    "actor_train.device_mapping=[0]",
    "reference.device_mapping=[0]",
    "actor_train.training_args.save_hf_model=false",
    "validation=null",
)


def domain(name: str) -> tuple[str, ...]:
    """A reward of one's own in place of the recipe's."""
    return (
        f"rewards.word_problems.worker_cls={PARTS}.{name}",
        "~rewards.word_problems.reward_kwargs",
    )


def rate(value: float) -> str:
    return f"actor_train.training_args.learning_rate={value:g}"


def rows(count: int = 400) -> list[dict[str, Any]]:
    lines = (ARTIFACTS / "data/train.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    return [json.loads(line) for line in lines]


def written(folder: Path, data: Sequence[dict[str, Any]]) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in data), encoding="utf-8")
    return [f"actor_train.data_args.file_name=[{file}]"]


def with_questions(change: Callable[[str], str]) -> Prepare:
    def prepare(folder: Path) -> list[str]:
        data = rows()
        for row in data:
            row["messages"][0]["content"] = change(row["messages"][0]["content"])
        return written(folder, data)

    return prepare


def two_prompts(folder: Path) -> list[str]:
    data = rows()
    few = data[:2]
    return written(folder, [{**few[number % 2], "id": row["id"]} for number, row in enumerate(data)])


def wrong_truth(folder: Path) -> list[str]:
    """The ground truth is the number of the row."""
    return written(folder, [{**row, "ground_truth": str(100000 + number)} for number, row in enumerate(rows())])


def other_model(change: Callable[[Path], None]) -> Prepare:
    def prepare(folder: Path) -> list[str]:
        shutil.copytree(MODEL, folder / "model")
        change(folder / "model")
        return [f"pretrain={folder / 'model'}"]

    return prepare


def without_generation_prompt(model: Path) -> None:
    turn = "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    text = f"{{% for message in messages %}}{turn}{{% endfor %}}"
    (model / "chat_template.jinja").write_text(text)


def other_end_token(model: Path) -> None:
    for name, key, value in (
        ("tokenizer_config.json", "eos_token", "<|endoftext|>"),
        ("generation_config.json", "eos_token_id", 0),
        ("config.json", "eos_token_id", 0),
    ):
        settings = json.loads((model / name).read_text())
        settings[key] = value
        (model / name).write_text(json.dumps(settings))


def lost_letters(folder: Path) -> list[str]:
    """Letters with accents in the questions, and a tokenizer without the bytes that they are made of."""
    made = [*other_model(_ascii_only)(folder)]
    return made + list(with_questions(lambda text: text.replace("e", "\u00eb").replace("o", "\u00f6"))(folder))


def _ascii_only(model: Path) -> None:
    file = model / "tokenizer.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = settings["model"]["vocab"]
    lost = [token for token in vocabulary if len(token) == 1 and not token.isascii() and token not in "\u0120\u010a"]
    for token in lost:
        del vocabulary[token]
    file.write_text(json.dumps(settings), encoding="utf-8")


def half_dead_experts(folder: Path) -> list[str]:
    """An untrained mixture whose routers choose among four of eight experts: w and -w for two directions, so that two
    of the four have positive logits, while those of the others are 0."""
    sys.path[:0] = [str(ROOT / "examples/tiny_moe"), str(TINY)]
    import importlib.util

    import torch
    from transformers import AutoTokenizer

    spec = importlib.util.spec_from_file_location("tiny_moe_prepare", ROOT / "examples/tiny_moe/prepare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tokenizer = AutoTokenizer.from_pretrained(UNTRAINED)
    model = module.make_model(tokenizer, seed=0)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight
            weight[4:] = 0.0
            weight[2:4] = -weight[:2]
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return [f"pretrain={folder / 'model'}"]


def preference_pairs(folder: Path) -> list[str]:
    sys.path.insert(0, str(TINY))
    import random

    import word_problems

    rng = random.Random(3)
    folder.mkdir(parents=True, exist_ok=True)
    pairs = []
    for index, problem in enumerate(word_problems.draw_problems(400, 3, validation=False)):
        right = wrong = word_problems.solution(problem)
        while wrong == right:
            wrong = word_problems.demonstration(problem, rng, 0.4)
        pairs.append({"id": f"pair-{index}", "instruction": problem.question, "chosen": right, "rejected": wrong})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return [f"actor_train.data_args.file_name={folder / 'pairs.jsonl'}"]


def rendered(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


UNTRAINED_POLICY = (f"pretrain={UNTRAINED}", STOPS)

PATHOLOGIES = (
    Case("truncation", "truncation", "response_length of 22 for solutions of 27 tokens", ("response_length=22",)),
    Case(
        "end_token",
        "end_token",
        "tokenizer and generation config name another end token",
        (),
        other_model(other_end_token),
    ),
    Case(
        "no_generation_prompt",
        "template",
        "a chat template that does not open the assistant's turn",
        (),
        other_model(without_generation_prompt),
    ),
    Case(
        "rendered_twice",
        "template",
        "questions that were rendered before",
        ("prompt_length=96",),
        with_questions(rendered),
    ),
    Case("lost_letters", "tokeniser", "letters that the tokenizer cannot spell", (), lost_letters),
    Case("reward_fails", "reward_fails", "a reward that always raises", domain("always_fails")),
    Case(
        "reward_sometimes_fails", "reward_fails", "a reward that raises for one text in four", domain("fails_for_some")
    ),
    Case("always_right", "reward_constant", "a reward that is 1 for everything", domain("always_one")),
    Case("wrong_truth", "reward_constant", "ground truths of other questions", (), wrong_truth),
    Case("no_spread", "no_spread", "a reward that looks at the question alone", domain("by_question")),
    Case("repeated_prompts", "repeated_prompts", "a file that holds two questions 200 times each", (), two_prompts),
    Case(
        "mismatch_after_update",
        "mismatch_after_update",
        "an engine whose weights are not those that it was sent",
        (f"actor_infer.worker_cls={PARTS}.DriftingEngine",),
    ),
    Case(
        "engine_mismatch",
        "engine_mismatch",
        "an engine that samples from the two most probable tokens",
        ("actor_infer.generating_args.top_k=2", "actor_infer.generating_args.top_p=0.7"),
    ),
    Case(
        "stale_samples",
        "stale_samples",
        "engines that run six steps ahead of training",
        ("async_generation_ratio=6",),
        steps=16,
    ),
    Case("rate_too_high", "learning_rate_high", "a learning rate 60 times the recipe's", (rate(5e-2),), steps=12),
    Case(
        "sft_rate_too_high",
        "learning_rate_high",
        "supervised training at a rate of 1",
        ("sft_train.training_args.learning_rate=1.0", "sft_train.training_args.warmup_steps=0", "max_grad_norm=null"),
        config="tiny/sft_config.yaml",
        steps=12,
    ),
    Case("rate_too_low", "learning_rate_low", "a learning rate of 1e-12", (rate(1e-12),)),
    Case(
        "ratio_drift",
        "ratio_drift",
        "eight passes over every batch, hardly clipped",
        (rate(1e-3), "ppo_epochs=8", "pg_clip=5"),
    ),
    Case(
        "length_hacking",
        "length_hacking",
        "a reward that likes long responses",
        (*domain("length"), *UNTRAINED_POLICY, rate(3e-3)),
        steps=12,
    ),
    Case(
        "entropy_collapse",
        "entropy_collapse",
        "rewards above 0 for everything, without a baseline",
        (*domain("lottery"), rate(1e-3), "adv_estimator=reinforce", "kl_loss_coef=0.0"),
        steps=40,
    ),
    Case(
        "one_text",
        "entropy_collapse",
        "a reward for one text whatever was asked",
        (*domain("fixed_text"), rate(2e-3), "kl_loss_coef=0.0"),
        steps=40,
    ),
    Case(
        "slow_trainer",
        "straggler",
        "a rank of the trainer that computes for nearly a second more than the other",
        (
            f"actor_train.worker_cls={PARTS}.SlowTrainer",
            "actor_train.device_mapping=[0,1]",
            "actor_train.training_args.per_device_train_batch_size=32",
        ),
    ),
    Case(
        "straggler",
        "straggler",
        "an engine that is a second late with everything",
        (f"actor_infer.worker_cls={PARTS}.SlowEngine", "actor_infer.device_mapping=[0,1]"),
    ),
    Case("memory_growth", "memory_growth", "a reward that keeps what it has seen", domain("leaking")),
    Case(
        "dead_experts",
        "dead_experts",
        "routers that choose among half of the experts",
        (*domain("digit_share"), STOPS),
        half_dead_experts,
    ),
)

HEALTHY = (
    *(
        Case(f"grpo_seed{seed}", None, f"GRPO, seed {seed}", (f"seed={seed}", f"pretrain={MODEL}"), steps=12)
        for seed in (1, 2, 3)
    ),
    Case("grpo_long", None, "GRPO for 100 steps", steps=100),
    Case("dapo", None, "DAPO", config="algorithms/dapo.yaml", steps=12),
    Case("gspo", None, "GSPO", config="algorithms/gspo.yaml", steps=12),
    Case("tis", None, "truncated importance sampling", config="algorithms/tis.yaml", steps=12),
    Case("reinforce_pp", None, "REINFORCE++", config="algorithms/reinforce_pp_baseline.yaml", steps=12),
    Case(
        "two_passes",
        None,
        "GRPO, two mini-batches and two passes",
        ("actor_train.training_args.per_device_train_batch_size=32", "ppo_epochs=2", rate(2e-4)),
        steps=12,
    ),
    Case(
        "async",
        None,
        "GRPO, one step ahead",
        ("async_generation_ratio=1", "train_infer_correction=decoupled"),
        steps=12,
    ),
    Case("untrained", None, "GRPO from an untrained model", (*domain("digit_share"), *UNTRAINED_POLICY), steps=12),
    Case("sft", None, "supervised training", config="tiny/sft_config.yaml", steps=40),
    Case("dpo", None, "DPO", (), preference_pairs, config="tiny_dpo/dpo_config.yaml", steps=16),
)
