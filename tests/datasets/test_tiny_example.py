"""The scripts of ``examples/tiny``: word problems, tokenizer, model, files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll.rewards import RewardSample, build_reward

Modules = dict[str, ModuleType]


@pytest.fixture(scope="module")
def artifacts(tiny: Modules, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny["prepare"].prepare(tmp_path_factory.mktemp("tiny"), seeds=[0, 1])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def calculations(path: Path) -> set[str]:
    """The first operand, and then operators and operands without results, of each worked solution: ``3*7-9+3``."""
    solutions = [row["solution"].splitlines()[:-1] for row in read(path)]
    return {
        lines[0].partition("=")[0] + "".join(line.partition("=")[0].lstrip("0123456789") for line in lines[1:])
        for lines in solutions
    }


@pytest.mark.long
def test_solutions_are_right_and_one_demonstration_in_three_is(artifacts: Any) -> None:
    """Validation asks for calculations never seen in training."""
    rows, demonstrations = read(artifacts.train_file), read(artifacts.demonstrations_file)
    truths = {row["messages"][0]["content"]: row["ground_truth"] for row in rows}
    rule = build_reward("gsm8k_rule")
    rows += read(artifacts.validation_file)
    assert (len(rows), len(demonstrations)) == (8200, 32000)
    results = rule([RewardSample("", row["solution"], row["ground_truth"]) for row in rows[::4]])
    assert all(result.score == 1.0 for result in results)
    samples = [RewardSample("", d["response"], truths[d["messages"][0]["content"]]) for d in demonstrations[::8]]
    share = sum(result.score or 0.0 for result in rule(samples)) / len(samples)
    # 0.7^3 = 0.343 without a slip, and a few whose slips cancel out; a standard error of 0.008.
    assert 0.32 < share < 0.39
    seen, held_out = calculations(artifacts.train_file), calculations(artifacts.validation_file)
    assert len(seen) > 1000 and len(held_out) > 50 and not seen & held_out


def test_a_solution_by_hand_and_slips_that_are_carried_on(tiny: Modules) -> None:
    words = tiny["word_problems"]
    problem = words.WordProblem("", ("*", "-", "+"), (3, 7, 9, 3))
    assert words.solution(problem) == "3*7=21\n21-9=12\n12+3=15\n#### 15"
    assert (problem.answer, problem.results) == (15, [21, 12, 15])
    problem = words.WordProblem("", ("+", "+", "+"), (2, 2, 2, 2))
    lines = words.demonstration(problem, random.Random(0), slip_probability=1.0).splitlines()
    results = [line.partition("=")[2] for line in lines[:-1]]
    assert [line.partition("+")[0] for line in lines[1:-1]] == results[:-1]
    assert lines[-1] == f"#### {results[-1]}"
    assert results[0] != "4"


def test_the_tokenizer_survives_a_reload(artifacts: Any, tiny: Modules) -> None:
    """AutoTokenizer rebuilds the pre-tokenizer from the model type: ids must not depend on that."""
    words = tiny["word_problems"]
    problems = words.draw_problems(8000, tiny["prepare"].TRAIN_SEED, validation=False)[:3000]
    made = tiny["tiny_model"].make_tokenizer(
        f"<|im_start|>user\n{p.question}<|im_end|>\n<|im_start|>assistant\n{words.solution(p)}" for p in problems
    )
    loaded = AutoTokenizer.from_pretrained(artifacts.model_folder(0))
    assert loaded.get_vocab() == made.get_vocab()
    solutions = [row["solution"] for row in read(artifacts.train_file)[:500]]
    hard = ["naïve  café\t1234567\r\n", "日本語 don't #### -5", "e\u0301", *solutions]
    for text in hard:
        assert loaded(text)["input_ids"] == made(text)["input_ids"]
    messages = [{"role": "user", "content": problems[0].question}]
    chats = [t.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) for t in (made, loaded)]
    assert chats[0] == chats[1]
    for text in solutions:
        assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert loaded.convert_tokens_to_ids("<|im_start|>") == loaded("<|im_start|>")["input_ids"][0]


def test_models_load_and_differ_by_seed_alone(artifacts: Any, tiny: Modules) -> None:
    tokenizer, before = AutoTokenizer.from_pretrained(artifacts.model_folder(0)), torch.get_rng_state()
    zero, one = (AutoModelForCausalLM.from_pretrained(artifacts.model_folder(seed)) for seed in (0, 1))
    again = tiny["tiny_model"].make_model(tokenizer, seed=0)
    assert torch.equal(before, torch.get_rng_state())
    weights = zero.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in again.state_dict().items())
    assert not torch.equal(weights["model.embed_tokens.weight"], one.state_dict()["model.embed_tokens.weight"])
    assert (zero.num_parameters(), zero.dtype) == (135_872, torch.float32)
    assert zero.config.vocab_size >= len(tokenizer)
    assert zero.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id


@pytest.mark.long
def test_what_is_there_is_kept_and_what_is_not_is_made(artifacts: Any, tiny: Modules) -> None:
    def times() -> dict[str, int]:
        return {str(p): p.stat().st_mtime_ns for p in sorted(artifacts.folder.rglob("*")) if p.is_file()}

    before = times()
    content = artifacts.train_file.read_bytes()
    tiny["prepare"].prepare(artifacts.folder, seeds=[0, 1])
    assert times() == before

    artifacts.train_file.write_bytes(content[:1000])
    (artifacts.model_folder(1) / "config.json").unlink()
    tiny["prepare"].prepare(artifacts.folder, seeds=[0, 1])
    assert artifacts.train_file.read_bytes() == content
    assert (artifacts.model_folder(1) / "config.json").is_file()
    kept = [path for path, moment in times().items() if before[path] == moment]
    assert kept and all("seed0" in path for path in kept)
