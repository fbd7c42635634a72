"""SFT runs on conversations against a plain loop, and on a stream of rows, continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pipelines.conftest import Run
from tests.support.tiny_runs import TinyWorld, constant_rate, supervised_layout, training_args, untimed

pytestmark = [pytest.mark.e2e, pytest.mark.long]

RATE, STEPS, ROWS = 1e-2, 3, 8


@pytest.fixture(scope="module")
def talks(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of one to three turns, made of the problems."""
    rows = [json.loads(line) for line in world.demonstrations.read_text().splitlines()]
    talks = []
    for number in range(32):
        turns = [rows[(number + i) % len(rows)] for i in range(1 + number % 3)]
        messages = []
        for one in turns:
            messages += [*one["messages"], {"role": "assistant", "content": one["response"]}]
        talks.append({"id": f"talk-{number}", "messages": messages})
    file = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    file.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    return file


def changes(talks: Path, **data: Any) -> dict[str, Any]:
    return {
        "train_on": "assistant",
        "sequence_length": 300,
        "max_steps": STEPS,
        "sft_train.training_args": constant_rate(training_args(4, 2, RATE)),
        "sft_train.data_args": {"file_name": str(talks), "messages": "messages", "shuffle": False, **data},
    }


def plain_losses(world: TinyWorld, talks: Path) -> list[float]:
    """One conversation at a time, tokenised message by message, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    model = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    rows = [json.loads(line)["messages"] for line in talks.read_text().splitlines()]
    found = []
    for step in range(STEPS):
        total, count = torch.zeros(()), 0
        for messages in rows[step * ROWS : (step + 1) * ROWS]:
            ids: list[int] = []
            learned: list[bool] = []
            for message in messages:
                own = message["role"] == "assistant"
                for text, flag in (
                    (f"<|im_start|>{message['role']}\n", False),
                    (f"{message['content']}<|im_end|>", own),
                    ("\n", False),
                ):
                    part = tokenizer(text, add_special_tokens=False)["input_ids"]
                    ids += part
                    learned += [flag] * len(part)
            log_probs = model(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
            taken = log_probs.gather(1, torch.tensor(ids)[1:, None])[:, 0]
            mask = torch.tensor(learned)[1:]
            total, count = total - taken[mask].sum(), count + int(mask.sum())
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(float(loss))
    return found


@pytest.fixture(scope="module")
def wanted(world: TinyWorld, talks: Path) -> list[float]:
    return plain_losses(world, talks)


def layout(strategy: str, config: dict[str, Any], micro: int, accumulation: int, **keys: Any) -> dict[str, Any]:
    own = supervised_layout("sft_train", strategy, config, micro, accumulation, **keys)
    return own | {"sft_train.training_args": constant_rate(training_args(micro, accumulation, RATE))}


LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": layout("fsdp2_train", {}, 2, 2, use_sequence_packing=True),
    "token budget": layout(
        "fsdp_train", {}, 1, 4, use_dynamic_batching_in_train=True, max_tokens_per_microbatch_in_train=400
    ),
    "ZeRO-2": layout("deepspeed_train", {"zero_optimization": {"stage": 2}}, 4, 1, use_remove_padding=True),
    "Megatron, two tensor ranks": layout("megatron_train", {"tensor_model_parallel_size": 2}, 2, 4),
}


@pytest.mark.default_rows("Megatron, two tensor ranks")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_turn_of_the_assistant_against_a_plain_loop(
    run: Run, talks: Path, wanted: list[float], name: str
) -> None:
    assert wanted[-1] < 0.9 * wanted[0]
    done = run(changes(talks) | LAYOUTS[name], "sft")
    assert done.values("sft_train/loss") == pytest.approx(wanted, rel=1e-4)


def test_a_stream_gives_what_prepared_rows_give_and_goes_on(run: Run, talks: Path, wanted: list[float]) -> None:
    """Shuffled streams: tests/datasets."""
    stream = changes(talks, streaming=True) | {"max_steps": 6, "save_steps": 3}
    whole = run(stream, "sft")
    assert whole.values("sft_train/loss")[:STEPS] == pytest.approx(wanted, rel=1e-4)
    checkpoint = whole.output / "checkpoints" / "checkpoint-3"
    resumed = run(stream | {"resume_from_checkpoint": str(checkpoint)}, "sft")
    assert [untimed(row) for row in resumed.steps] == [untimed(row) for row in whole.steps[3:]]
