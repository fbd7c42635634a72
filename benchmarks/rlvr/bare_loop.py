"""The tiny GRPO recipe as one bare process: no roles, no Ray, no batches on the move.

    python benchmarks/rlvr/bare_loop.py MODEL TRAIN.jsonl --steps 20 [--threads 1] [--recompute]

Generation uses the same engine as the pipeline's ``hf_infer``; training is the Hugging Face model, PyTorch's AdamW and
one padded batch of all samples.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

import torch
from markers import mark_step
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll.config.roles import ModelArguments, StrategyArguments, WorkerConfig
from roll.strategies.base import create_generation_strategy
from roll.strategies.engines.requests import GenerationRequest, SamplingParams

PROMPTS, GROUP, MAX_NEW_TOKENS, CLIP = 32, 8, 36, 0.2
ANSWER = re.compile(r"####\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?)")


def reward(text: str, truth: str) -> float:
    found = ANSWER.findall(text)
    return float(bool(found) and found[-1].replace(",", "") == truth)


def response_log_probs(model, ids, mask, prompt_width):
    logits = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        logits_to_keep=ids.shape[1] - prompt_width + 1,
        use_cache=False,
    ).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, ids[:, prompt_width:, None])[..., 0]


def pad(rows: list[list[int]], fill: int, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), fill)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, where] = torch.tensor(row)
        mask[i, where] = 1
    return ids, mask


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lr", type=float, default=8e-4)
    parser.add_argument("--recompute", action="store_true", help="compute old log-probs apart from the update")
    return parser.parse_args()


def encode(tokenizer, rows) -> list[list[int]]:
    texts = [tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False) for row in rows]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def start_engine(model: str):
    role = WorkerConfig(
        model_args=ModelArguments(model_name_or_path=model, dtype="fp32"),
        strategy_args=StrategyArguments("hf_infer", {"max_num_seqs": 256, "max_model_len": 128}),
    )
    engine = create_generation_strategy(role, seed=0)
    engine.initialize()
    return engine


@torch.no_grad()
def generate(engine, chosen: list[int], prompts):
    """``GROUP`` samples of each chosen prompt, in the order of ``chosen``."""
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
    engine.add_requests([GenerationRequest(str(i), prompts[i], params, GROUP) for i in chosen])
    outputs = []
    while engine.num_unfinished:
        outputs += engine.step()
    order = {str(i): place for place, i in enumerate(chosen)}
    return sorted(outputs, key=lambda output: (order[output.request_id], output.sample_index))


def update(model, optimizer, prompts, responses, rewards, recompute: bool) -> None:
    """One GRPO step on all samples at once."""
    prompt_ids, prompt_mask = pad(prompts, 0, left=True)
    response_ids, response_mask = pad(responses, 0, left=False)
    ids, mask = torch.cat([prompt_ids, response_ids], 1), torch.cat([prompt_mask, response_mask], 1)
    width = prompt_ids.shape[1]
    groups = rewards.view(PROMPTS, GROUP)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).reshape(-1, 1)
    old = None
    if recompute:
        with torch.no_grad():
            old = response_log_probs(model, ids, mask, width)
    log_probs = response_log_probs(model, ids, mask, width)
    ratio = (log_probs - (log_probs.detach() if old is None else old)).exp()
    surrogate = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    loss = ((surrogate * response_mask).sum(1) / response_mask.sum(1)).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def send_weights(model, engine, version: int) -> None:
    engine.start_weight_update(version)
    engine.update_weights({name: parameter.detach() for name, parameter in model.named_parameters()})
    engine.finish_weight_update()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    rows = [json.loads(line) for line in Path(arguments.data).read_text().splitlines()]
    prompts = encode(tokenizer, rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.0)
    engine = start_engine(arguments.model)
    pick = random.Random(0)
    mark_step(0)
    for step in range(1, arguments.steps + 1):
        outputs = generate(engine, pick.sample(range(len(rows)), PROMPTS), prompts)
        texts = tokenizer.batch_decode([output.token_ids for output in outputs], skip_special_tokens=True)
        asked = [int(output.request_id) for output in outputs]
        rewards = torch.tensor([reward(t, rows[i]["ground_truth"]) for t, i in zip(texts, asked, strict=True)])
        responses = [output.token_ids for output in outputs]
        update(model, optimizer, [prompts[i] for i in asked], responses, rewards, arguments.recompute)
        send_weights(model, engine, step)
        mark_step(step, reward=float(rewards.mean()))


if __name__ == "__main__":
    main()
