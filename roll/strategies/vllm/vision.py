"""Prompts with images and videos as vLLM takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm import TokensPrompt

from roll.protocol.images import EncodedVideo
from roll.protocol.video import EngineTime
from roll.protocol.vision import VisionInputs, check_images, vision_token_ids

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def check_torchvision() -> None:
    """ValueError where torchvision, which vLLM's vision-language models need, was not there when transformers was
    imported."""
    from transformers.utils.import_utils import is_torchvision_available

    if not is_torchvision_available():
        raise ValueError(
            "strategy_args.strategy_name: vllm: its vision-language models need torchvision, also for text alone. On a "
            "GPU it comes with vLLM; on a CPU make install-vllm-vision puts one into the folder roll-torchvision of "
            "the virtual environment, which the role finds with system_envs: {PYTHONPATH: (that folder)}. hf_infer "
            "does without"
        )


class ImagePrompts:
    """Makes prompts of one model, for an engine of ``dtype`` (torch's name).

    Args:
        config: the model's Hugging Face configuration.
        tokenizer: its tokenizer.
        dtype: of the engine, by torch's name.
    """

    def __init__(self, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, dtype: str) -> None:
        self._config = config
        self._time: EngineTime | None = None  # where positions count seconds
        if config.model_type == "qwen2_5_vl":
            self._time = EngineTime(config.vision_config.tokens_per_second, dtype)
        self.never_sampled: list[str] = list(tokenizer.convert_ids_to_tokens(list(vision_token_ids(config))))
        """Texts of the tokens that stand for images: single tokens, which vLLM masks exactly."""

    def check(self, name: str, token_ids: Sequence[int], vision: VisionInputs | None) -> None:
        """ValueError for images of a model of text, as many placeholders as do not go with them, or a video that vLLM
        places differently than the trainer."""
        check_images(name, token_ids, vision, self._config)
        if vision is not None and self._time is not None:
            for video in vision.videos:
                if (difference := self._time.difference(video, vision.processing)) is not None:
                    raise ValueError(f"{name}: {video}: {difference}")

    def prompt(self, token_ids: Sequence[int], vision: VisionInputs | None) -> TokensPrompt:
        """vLLM writes the placeholders itself, from one for each image and each video: it is given images and frames in
        the size in which they have as many, and names by which it finds their features again."""
        if vision is None:
            return TokensPrompt(prompt_token_ids=list(token_ids))
        keys: dict[str, list[str]] = {"image": [], "video": []}
        for one, key in zip(vision.images, vision.image_keys, strict=True):
            keys["video" if isinstance(one, EncodedVideo) else "image"].append(key)
        data = {"image": vision.resized_images(), "video": [_frames(video) for video in vision.videos]}
        processing = vision.processing
        return TokensPrompt(
            prompt_token_ids=self._short(token_ids, vision),
            multi_modal_data={kind: given for kind, given in data.items() if given},
            multi_modal_uuids={kind: names for kind, names in keys.items() if names},
            mm_processor_kwargs={
                "images_kwargs": {
                    "size": {"shortest_edge": processing.min_pixels, "longest_edge": processing.max_pixels}
                },
                "videos_kwargs": {"do_resize": False, "do_sample_frames": False},
            },
        )

    def _short(self, token_ids: Sequence[int], vision: VisionInputs) -> list[int]:
        """The prompt with one placeholder for each image and each video."""
        ids, short, at = list(token_ids), [], 0
        for one, count in zip(vision.images, vision.num_tokens, strict=True):
            token = self._config.video_token_id if isinstance(one, EncodedVideo) else self._config.image_token_id
            begin = ids.index(token, at)
            if isinstance(one, EncodedVideo) and one.timed:
                # What opens the video; then come, for each grid, its time, what opens it, placeholders, what closes it.
                opened = [place for place in range(at, begin - 1) if ids[place] == self._config.vision_start_token_id]
                short += [*ids[at : opened[-1] + 1 if opened else begin], token]
                places = [place for place in range(begin, len(ids)) if ids[place] == token]
                at = places[count - 1] + 2
            else:
                short += [*ids[at:begin], token]
                at = begin + count
        return short + ids[at:]


def _frames(video: EncodedVideo) -> tuple[np.ndarray, dict[str, Any]]:
    """uint8 (frames, height, width, 3) in the size of the patches, and the times of the frames."""
    metadata = {
        "fps": video.fps,
        "frames_indices": list(video.indices),
        "total_num_frames": video.num_frames,
        "duration": video.num_frames / video.fps,
        "video_backend": "frames",
        "do_sample_frames": False,
    }
    return np.stack([np.asarray(frame) for frame in video.resized()]), metadata
