"""A model's folder gives the same texts and boundaries as its tokenizer, without transformers or torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roll.agents.chat_ids import BOUNDARIES, ChatTemplate, TemplateError, probe_boundary
from roll.agents.template_files import TemplateFiles
from roll.config.weight_files import weights_problem
from tests.agents.conftest import rows
from tests.agents.templates import Family

TOOL = {"type": "function", "function": {"name": "calc", "description": "é", "parameters": {"type": "object"}}}
CALL = {"id": "call00000", "type": "function", "function": {"name": "calc", "arguments": {"x": "1 < 2 é"}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nI ask", "tool_calls": [CALL]},
    {"role": "tool", "name": "calc", "tool_call_id": "call00000", "content": "2"},
    {"role": "assistant", "content": "two"},
]


@pytest.mark.parametrize("family", rows("chatml", "qwen3", "gptoss"))
def test_as_the_tokenizer_renders(family: Family, tmp_path: Path) -> None:
    tokenizer = family.tokenizer()
    tokenizer.save_pretrained(tmp_path)
    files: Any = TemplateFiles(tmp_path)
    assert not files.has_own_code
    ends = [tokenizer.eos_token_id, *(tokenizer.convert_tokens_to_ids(end) for end in family.ends)]
    for tools in (None, [TOOL]):
        whole, light = ChatTemplate(tokenizer, ends, tools), ChatTemplate(files, [files.eos_token_id, *ends[1:]], tools)
        assert sorted(light.end_tokens) == sorted(whole.end_tokens) and light.source == whole.source
        for length in range(2, len(TALK) + 1):
            for prompt in (False, True):
                assert _said(light, TALK[:length], prompt) == _said(whole, TALK[:length], prompt)
        for name in BOUNDARIES:
            assert _moved(light, name) == _moved(whole, name)


def _said(template: ChatTemplate, messages: list[dict[str, Any]], prompt: bool) -> str:
    try:
        return template.render(messages, prompt)
    except TemplateError as error:
        return f"refused: {error}"


def _moved(template: ChatTemplate, boundary: str) -> object:
    try:
        bridge = probe_boundary(template, boundary)
    except TemplateError as error:
        return f"refused: {error}"
    return bridge.moved, bridge.only_thoughts


def test_older_forms_of_the_files(tmp_path: Path) -> None:
    """Templates by name, tokens as objects, end tokens among the added ones; a tokenizer of the model's own."""
    source = "{% generation %}{% for m in messages %}{{ bos_token ~ m | tojson }}{% endfor %}{% endgeneration %}"
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "chat_template": [{"name": "default", "template": source}, {"name": "tool_use", "template": "t"}],
        "added_tokens_decoder": {"7": {"content": "</s>"}},
        "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    files = TemplateFiles(tmp_path)
    assert files.has_own_code and files.eos_token_id == 7 and files.convert_ids_to_tokens(7) == "</s>"
    assert files.apply_chat_template([{"role": "user"}]) == '<s>{"role": "user"}'
    assert files.apply_chat_template([], tools=[TOOL]) == "t"


@pytest.mark.long
def test_a_check_imports_no_torch(tmp_path: Path) -> None:
    """``roll check`` of a file with a model on this machine, whose template moves earlier turns, refuses it. That the
    model is whole is known from an earlier check."""
    import tests.agents.tiny as tiny

    model, moves = tmp_path / "model", "{% for m in messages %}{{ loop.last }}{{ m.content }}{% endfor %}"
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = moves
    tokenizer.save_pretrained(model)
    tiny.tiny_model.make_model(tokenizer, 0).save_pretrained(model)
    assert weights_problem(model, {}) is None
    run = tmp_path / "run.yaml"
    run.write_text(
        f"""
pretrain: {model}
pipeline: agentic
rollout_batch_size: 2
max_steps: 1
adv_estimator: grpo
custom_envs: {{lake: {{env_type: frozen_lake}}}}
train_env_manager: {{num_env_groups: 2, tags: [lake]}}
actor_train: {{device_mapping: [0], training_args: {{per_device_train_batch_size: 1, gradient_accumulation_steps: 2}}}}
actor_infer: {{device_mapping: [0]}}
"""
    )
    code = (
        "import sys; from roll.cli import main; status = main(['check', sys.argv[1]]);"
        "print('torch' in sys.modules, 'transformers' in sys.modules, status)"
    )
    found = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, timeout=120)
    assert found.stdout.splitlines()[-1] == "False False 2", found
    assert "custom_envs.lake.thinking" in found.stdout + found.stderr
