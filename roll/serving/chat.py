"""``roll chat MODEL``: a conversation in the terminal with a model folder, GGUF file or hub name, on ``hf_infer``.

One engine in this process, without Ray. Ctrl-C ends an answer, Ctrl-D the program. With a pipe on stdin every line is
a separate question, and stdout has the answers alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from rich.console import Console

from roll.config.model_files import model_number, require_model
from roll.config.reading.errors import ConfigError, Problem
from roll.config.roles import GenerationWorkerConfig, ModelArguments, StrategyArguments
from roll.datasets.templates import render_native
from roll.datasets.types import DataError
from roll.models.gguf_reading import dequantised_path
from roll.strategies.engines.requests import GenerationRequest, SamplingParams, check_sampling_params
from roll.strategies.hf_infer import HfInferStrategy

LONGEST = 8192  # most tokens of a conversation, for which the KV cache is made


class Chat:
    """A model and the conversation with it; ``system`` None: the chat template's own message, if it has one.
    ``ValueError`` or ``OSError`` for a model that cannot be read or computed."""

    def __init__(
        self, path: str, system: str | None, params: SamplingParams, dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    ) -> None:
        from transformers import AutoTokenizer

        section = engine_section(path, "hf_infer", {"max_num_seqs": 1, "prefix_cache_tokens": LONGEST}, dtype)
        self._engine = HfInferStrategy(section)
        self._engine.initialize()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(section.model_args.model_name_or_path)
        self._params = params
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, question: str) -> Iterator[str]:
        """Pieces of the answer. Question and answer, as far as it got, become part of the conversation. ``ValueError``
        where no room is left for an answer, ``DataError`` where the model has no chat template."""
        asked = [*self.messages, {"role": "user", "content": question}]
        prompt = self._tokenizer(render_native(self._tokenizer, asked), add_special_tokens=False)["input_ids"]
        self._engine.add_requests([GenerationRequest("answer", prompt, self._params)])
        shown, is_over = "", False
        try:
            while not is_over:
                finished = self._engine.step()
                if failed := self._engine.take_failures():
                    raise ValueError(failed["answer"])
                is_over = bool(finished)
                (output,) = finished or self._engine.running(["answer"])
                text = self._tokenizer.decode(output.token_ids, skip_special_tokens=True)
                # The last character may lack bytes, which are shown as U+FFFD until they are sampled.
                text = text if is_over else text.rstrip("\ufffd")
                yield text[len(shown) :]
                shown = text
        finally:
            # Also after Ctrl-C: the unfinished request would be computed along with the next question.
            self._engine.abort()
            self.messages = [*asked, {"role": "assistant", "content": shown}] if shown else self.messages


def main(words: Sequence[str]) -> int:
    """Exit status 0, or 1 where a question could not be answered."""
    options, status = build_parser().parse_args(words), 0
    params = SamplingParams(options.max_new_tokens, temperature=options.temperature)
    try:
        check_sampling_params(params, "roll chat")
        chat = Chat(options.model, options.system, params, options.dtype)
    except (OSError, ValueError) as error:
        raise ConfigError([Problem("MODEL", options.model, str(error))]) from error
    is_dialogue, start = sys.stdin.isatty(), chat.messages
    while (question := next_question("> " if is_dialogue else "")) is not None:
        chat.messages = chat.messages if is_dialogue else start
        try:
            for piece in chat.ask(question):
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            status = status if is_dialogue else 1
        except (DataError, ValueError) as error:
            Console(stderr=True, emoji=False).print(str(error), style="red", markup=False, soft_wrap=True)
            status = 1
        sys.stdout.write("\n")
    return status


def engine_section(
    path: str, strategy: str, options: Mapping[str, object], dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
) -> GenerationWorkerConfig:
    """The section of an engine, on device 0, with the weights of a model folder, GGUF file or hub name; ``ValueError``
    for one that cannot be read. ``options`` of the strategy get ``max_model_len``: the model's longest sequence, at
    most :data:`LONGEST`."""
    require_model(path)
    folder = dequantised_path(path)
    longest = min(LONGEST, model_number(folder, "max_position_embeddings") or LONGEST)
    return GenerationWorkerConfig(
        name="actor_infer",
        model_args=ModelArguments(folder, dtype=dtype),
        strategy_args=StrategyArguments(strategy, {**options, "max_model_len": longest, "load_format": "auto"}),
        device_mapping=[0],
    )


def next_question(prompt: str) -> str | None:
    """The next line that is not empty; None at the end."""
    try:
        return input(prompt).strip() or next_question(prompt)
    except (EOFError, KeyboardInterrupt):
        return None


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="roll chat", description=" ".join(__doc__.split("\n\n")[1].split()))
    parser.add_argument("model", metavar="MODEL", help="model folder, GGUF file or hub name")
    parser.add_argument("--system", help="system message (default: the chat template's)")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of an answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: greedy (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="(default: %(default)s)")
    return parser
