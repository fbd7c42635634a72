"""Question to a judge of the tests, and the slow way to its answer."""

from __future__ import annotations

from typing import Any

import torch

TEMPLATE = "{{ response }} {{ positive }} or {{ negative }}?"


def chance_of_yes(model: Any, tokenizer: Any, response: str) -> float:
    """P(Y...) against P(N...) of the first token that the judge would say, by its logits."""
    message = {"role": "user", "content": f"{response} Yes or No?"}
    prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        probabilities = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    chances = {"yes": 0.0, "no": 0.0}
    for token in range(len(probabilities)):
        text = tokenizer.decode([token]).strip().casefold()
        for word in chances:
            if text and word.startswith(text):
                chances[word] += float(probabilities[token])
    return chances["yes"] / sum(chances.values())
