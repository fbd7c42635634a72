"""Programs that evaluate models, on the server: their own packages, tasks from local files, no hub."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from roll.config.reading.errors import ConfigError
from roll.evaluate import main
from roll.serving.harness import HARNESSES, HarnessConfig, environment

pytestmark = pytest.mark.long

QUESTIONS = ["Tom has 3 eggs.", "Ann buys 12 pens.", "Six cats sleep.", "Bob sells 5 cups."]
CHOICES = [" 3", " 12 and more", " seven"]
GENERATE = """
task: tiny_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOOSE = """
task: tiny_choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{gold}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
INSPECT = """
from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import match
from inspect_ai.solver import generate


@task
def tiny_inspect():
    return Task(
        dataset=json_dataset({file!r}),
        solver=generate(),
        scorer=match(),
        config=GenerateConfig(temperature=0.0, max_tokens=8),
    )
"""


def program(serving: Any, options: HarnessConfig, output: Path) -> dict[str, float]:
    """The metrics of a real run against the server."""
    output.mkdir()
    base_url = f"{serving.server.url}/v1"
    command = HARNESSES[options.name].command(options, base_url, "tiny", str(serving.tokenizer.name_or_path), output)
    done = subprocess.run(command, env=environment(base_url), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return HARNESSES[options.name].metrics(output)


def best_choice(model: Any, tokenizer: Any, question: str) -> int:
    """The choice with the highest log-likelihood behind the question."""
    found = []
    for choice in CHOICES:
        context = tokenizer(question)["input_ids"]
        whole = tokenizer(question + choice)["input_ids"]
        with torch.no_grad():
            log_probs = model(torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
        taken = log_probs.gather(1, torch.tensor(whole)[1:, None])[:, 0]
        found.append(float(taken[len(context) - 1 :].sum()))
    return found.index(max(found))


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed (the extra harness)")
def test_lm_eval_generates_and_compares_likelihoods(serving: Any, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(serving.tokenizer.name_or_path, dtype=torch.float32)
    answers = [serving.complete(prompt=q, max_tokens=8, temperature=0)["choices"][0]["text"] for q in QUESTIONS]
    # The second answer and the third choice are what the model does not say.
    golds = [best_choice(model, serving.tokenizer, question) for question in QUESTIONS]
    rows = [
        {
            "question": question,
            "answer": "nothing of the kind" if number == 1 else answer,
            "choices": CHOICES,
            "gold": (gold + 1) % len(CHOICES) if number == 2 else gold,
        }
        for number, (question, answer, gold) in enumerate(zip(QUESTIONS, answers, golds, strict=True))
    ]
    data = tmp_path / "rows.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name, text in (("tiny_generate", GENERATE), ("tiny_choose", CHOOSE)):
        (tasks / f"{name}.yaml").write_text(text.format(file=data))
    options = HarnessConfig("lm_eval", ["tiny_generate", "tiny_choose"], [f"--include_path={tasks}"])
    found = program(serving, options, tmp_path / "out")
    assert found["tiny_generate/exact_match"] == pytest.approx(3 / 4)
    assert found["tiny_choose/acc"] == pytest.approx(3 / 4)


@pytest.mark.skipif(find_spec("inspect_ai") is None, reason="inspect-ai is not installed (the extra harness)")
def test_inspect_asks_in_chats(serving: Any, tmp_path: Path) -> None:
    rows = []
    for number, question in enumerate(QUESTIONS):
        chat = serving.chat(messages=[{"role": "user", "content": question}], max_tokens=8, temperature=0)
        answer = chat["choices"][0]["message"]["content"].strip()
        rows.append({"input": question, "target": "nothing of the kind" if number == 1 else answer})
    data, task = tmp_path / "rows.jsonl", tmp_path / "tiny_inspect.py"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task.write_text(INSPECT.format(file=str(data)))
    found = program(serving, HarnessConfig("inspect", [str(task)]), tmp_path / "out")
    assert found["tiny_inspect/match/accuracy"] == pytest.approx(3 / 4)


def test_a_harness_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("roll.serving.harness.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--harness = '?lm_eval'?: needs a package that is not installed"):
        main(["tiny/rlvr_config.yaml", "--harness", "lm_eval", "--tasks", "x"])
