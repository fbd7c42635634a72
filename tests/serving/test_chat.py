"""``roll chat``: what is streamed is what the model says, in a terminal and through a pipe, without Ray."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from roll import cli
from roll.serving.chat import Chat
from roll.strategies.engines.requests import SamplingParams
from tests.conftest import ROOT
from tests.strategies.engine_models import load, save_model

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LENGTH = 24
GREEDY = f"--temperature 0 --dtype fp32 --max-new-tokens {LENGTH}".split()
CODE = "import sys; from roll import cli; end = cli.main(sys.argv[1:]); assert 'ray' not in sys.modules; sys.exit(end)"
PROGRAM = [sys.executable, "-c", CODE, "chat"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoTokenizer

    folder = save_model("qwen2", tmp_path_factory.mktemp("chat"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


class Plain:
    """Greedy answers of transformers' ``generate`` to a conversation."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.model, self.tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)

    def answer(self, messages: list[dict[str, str]]) -> str:
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = torch.tensor([self.tokenizer(text, add_special_tokens=False)["input_ids"]])
        whole = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LENGTH, top_k=None, top_p=None
        )
        return str(self.tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


@pytest.mark.long
def test_pieces_make_up_the_answers_of_a_conversation(model: Path) -> None:
    plain, system = Plain(model), {"role": "system", "content": "be brief"}
    chat = Chat(str(model), "be brief", SamplingParams(LENGTH, temperature=0.0), "fp32")
    expected = [system]
    for question in ("the quick brown fox?", "and the answer?"):
        expected.append(user(question))
        pieces = list(chat.ask(question))
        answer = plain.answer(expected)
        expected.append({"role": "assistant", "content": answer})
        assert "".join(pieces) == answer and len([piece for piece in pieces if piece]) > 3
        assert not any(piece.endswith("\ufffd") for piece in pieces[:-1]), "a character is shown when it is whole"
    assert chat.messages == expected


@pytest.mark.long
def test_an_answer_that_is_interrupted_ends_there(model: Path) -> None:
    chat = Chat(str(model), None, SamplingParams(LENGTH, temperature=0.0), "fp32")
    answer = chat.ask("the quick brown fox?")
    seen = "".join(next(answer) for _ in range(6))
    answer.close()
    assert chat.messages == [user("the quick brown fox?"), {"role": "assistant", "content": seen}]
    assert "".join(chat.ask("and now?")) == Plain(model).answer([*chat.messages[:2], user("and now?")])
    with pytest.raises(ValueError, match="max_model_len"):
        list(chat.ask("fox " * 200))
    assert len(chat.messages) == 4, "a question without room for an answer leaves no trace"


@pytest.mark.long
def test_every_line_of_a_pipe_is_a_question_of_its_own(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["the answer is", "stop here"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(["", *asked]) + "\n"))
    assert cli.main(["chat", str(model), *GREEDY, "--system", "be brief"]) == 0
    plain, system = Plain(model), {"role": "system", "content": "be brief"}
    assert capsys.readouterr().out == "".join(f"{plain.answer([system, user(question)])}\n" for question in asked)


def read_until(terminal: int, text: str, seconds: float = 90) -> str:
    seen, give_up = b"", time.monotonic() + seconds
    while text not in seen.decode(errors="replace").replace("\r\n", "\n"):
        assert time.monotonic() < give_up, f"{text!r} did not come; {seen!r} did"
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 65536)
    return seen.decode(errors="replace").replace("\r\n", "\n")


@pytest.mark.long
def test_a_conversation_in_a_terminal_ends_with_control_d(model: Path) -> None:
    terminal, other = pty.openpty()
    words = [*PROGRAM, str(model), *GREEDY]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    process = subprocess.Popen(words, stdin=other, stdout=other, stderr=other, env=environment)
    os.close(other)
    plain, messages = Plain(model), []
    try:
        read_until(terminal, "> ")
        for question in ("the quick brown fox?", "and the answer?"):
            messages.append(user(question))
            answer = plain.answer(messages)
            messages.append({"role": "assistant", "content": answer})
            os.write(terminal, f"{question}\n".encode())
            assert answer.strip() in read_until(terminal, "\n> ")
        os.write(terminal, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_what_is_no_model_is_said(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong: dict[str, list[Any]] = {
        "must be a model folder (with a config.json), a .gguf file or a hub name": [tmp_path],
        "temperature is -1.0": [model, "--temperature", -1],
        "max_new_tokens is 0": [model, "--max-new-tokens", 0],
    }
    for said, words in wrong.items():
        assert cli.main(["chat", *map(str, words)]) == 2, said
        assert said in " ".join(capsys.readouterr().err.split())
