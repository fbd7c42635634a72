"""Prompts with images as vLLM takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import TokensPrompt

from roll.protocol.vision import VisionInputs, placeholder_problem, vision_token_ids


def check_torchvision() -> None:
    """
    Raises:
        ValueError: torchvision, which vLLM's vision-language models need, was not there when transformers was imported.
    """
    from transformers.utils.import_utils import is_torchvision_available

    if not is_torchvision_available():
        raise ValueError(
            "strategy_args.strategy_name: vllm: its vision-language models need torchvision. On a GPU it comes with "
            "vLLM; on a CPU make install-vllm-vision puts one into the folder roll-torchvision of the virtual "
            "environment, which the role finds with system_envs: {PYTHONPATH: (that folder)}. hf_infer does "
            "without"
        )


class ImagePrompts:
    """Makes prompts of one model.

    Args:
        config: the model's Hugging Face configuration.
        tokenizer: its tokenizer.
    """

    def __init__(self, config: Any, tokenizer: Any) -> None:
        self._config = config
        self._image_token_id = getattr(config, "image_token_id", None)
        self.never_sampled: list[str] = list(tokenizer.convert_ids_to_tokens(list(vision_token_ids(config))))
        """Texts of the tokens that stand for images: single tokens, which vLLM masks exactly."""

    def check(self, name: str, token_ids: Sequence[int], vision: VisionInputs | None) -> None:
        """
        Raises:
            ValueError: images for a model of text, or as many placeholders as do not go with them.
        """
        if self._image_token_id is None:
            if vision is not None:
                raise ValueError(f"{name}: {len(vision.images)} images for a model of text")
            return
        problem = placeholder_problem(token_ids, vision, self._config)
        if problem is not None:
            raise ValueError(f"{name}: {problem}")
        if vision is not None and vision.videos:
            raise ValueError(f"{name}: the prompt has a video, which hf_infer generates from, and vllm does not")

    def prompt(self, token_ids: Sequence[int], vision: VisionInputs | None) -> TokensPrompt:
        """vLLM writes the placeholders itself, from one for each image: it is given the images in the size in which
        they have as many, and names by which it finds their features again."""
        if vision is None:
            return TokensPrompt(prompt_token_ids=list(token_ids))
        short: list[int] = []
        counts, left = iter(vision.num_tokens), 0
        for token in token_ids:
            if token != self._image_token_id:
                short.append(token)
            elif left:
                left -= 1
            else:
                short.append(token)
                left = next(counts) - 1
        processing = vision.processing
        return TokensPrompt(
            prompt_token_ids=short,
            multi_modal_data={"image": vision.resized_images()},
            multi_modal_uuids={"image": list(vision.image_keys)},
            mm_processor_kwargs={
                "size": {"shortest_edge": processing.min_pixels, "longest_edge": processing.max_pixels}
            },
        )
