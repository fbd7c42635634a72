"""A vision-language model as the data layer sees it: how images and videos are cut, and their placeholders."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.config.model_files import model_config
from roll.datasets.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.protocol.images import EncodedVideo, EngineTime, ImageProcessing, VideoProcessing  # it imports torch


@dataclass(frozen=True)
class VisionModel:
    """A vision-language model as the data layer sees it."""

    processing: ImageProcessing
    image_token_id: int
    placeholder: str  # text of one image in a prompt: what opens it, one token, what closes it
    video: VideoProcessing
    video_token_id: int
    video_tokens: tuple[str, str, str]
    """Texts of the tokens that open a video or a grid of it, hold its place, and close it."""
    tokens_per_second: float = 0.0  # positions that a second of a video takes; unused where the prompt has time stamps
    without_videos: str | None = None  # why rows with videos are bad ones; None: they are read
    most_images: int | None = None  # most images of a prompt that the engine keeps room for; None: any number
    most_videos: int | None = None
    engine_time: EngineTime | None = None
    """Positions of videos in the engine: a video that it places otherwise than the trainer is refused."""

    def video_placeholder(self, video: EncodedVideo) -> str:
        """Text of a video in a prompt, as the model's processor writes it."""
        start, token, end = self.video_tokens
        if not video.timed:
            return start + token + end
        times = (f"<{time:.1f} seconds>{start}{token}{end}" for time in video.timestamps(self.processing))
        return start + "".join(times) + end

    @classmethod
    def load(cls, model_path: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool) -> VisionModel | None:
        """From a model's folder or hub name; None for a model of text, also one that is used without its tower.

        Raises:
            DataError: a vision-language model whose image processor is not of the Qwen-VL kind.
        """
        if "vision_config" not in (model_config(model_path) or {"vision_config": None}):
            return None  # without loading transformers' configurations
        from transformers import AutoConfig

        from roll.models.stored import text_part

        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        if getattr(config, "vision_config", None) is None or text_part(config) is not config:
            return None
        processing = load_processing(model_path)
        vision = config.vision_config
        sizes = (processing.patch_size, processing.merge_size, processing.temporal_patch_size)
        expected = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
        if sizes != expected:
            raise DataError(
                f"{model_path}: the image processor has patch, merge and temporal patch sizes {sizes}, the model "
                f"{expected}: preprocessor_config.json and config.json are of two models"
            )
        ids = (config.vision_start_token_id, config.image_token_id, config.video_token_id, config.vision_end_token_id)
        start, image, video, end = map(str, tokenizer.convert_ids_to_tokens(list(ids)))
        timed = config.model_type != "qwen2_5_vl"
        return cls(
            processing,
            config.image_token_id,
            start + image + end,
            load_video_processing(model_path, processing, timed),
            config.video_token_id,
            (start, video, end),
            tokens_per_second=0.0 if timed else float(vision.tokens_per_second),
        )


def load_processing(model_path: str) -> ImageProcessing:
    """The settings of a model's image processor.

    Raises:
        DataError: no image processor, or one of another kind.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from roll.protocol.images import ImageProcessing

    try:
        settings, _ = Qwen2VLImageProcessorPil.get_image_processor_dict(model_path)
        found = Qwen2VLImageProcessorPil.from_dict(settings)
    except (OSError, ValueError) as error:
        raise DataError(f"{model_path}: no image processor (preprocessor_config.json): {error}") from error
    kind = str(settings.get("image_processor_type", ""))
    if not kind.startswith("Qwen2VL"):
        raise DataError(
            f"{model_path}: the image processor {kind!r} is not known; those of Qwen2.5-VL and Qwen3-VL are"
        )
    if not (found.do_resize and found.do_rescale and found.do_normalize and found.resample == 3):
        raise DataError(f"{model_path}: the image processor leaves out resizing or normalising, or is not bicubic")
    return ImageProcessing(
        patch_size=found.patch_size,
        temporal_patch_size=found.temporal_patch_size,
        merge_size=found.merge_size,
        min_pixels=found.size["shortest_edge"],
        max_pixels=found.size["longest_edge"],
        mean=tuple(map(float, found.image_mean)),
        std=tuple(map(float, found.image_std)),
    )


def load_video_processing(model_path: str, images: ImageProcessing, timed: bool) -> VideoProcessing:
    """The settings of a model's video processor: those of its image processor's file where it has none of its own.

    Args:
        timed: as :class:`~roll.protocol.images.VideoProcessing` has it.

    Raises:
        DataError: other patches or another normalisation than for images.
    """
    from transformers.utils.hub import cached_file

    from roll.protocol.images import VideoProcessing

    settings: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        found = cached_file(model_path, name, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            read = json.loads(Path(found).read_text(encoding="utf-8"))
            settings = read.get("video_processor", {} if name.startswith("processor") else read) or settings
    size = settings.get("size") or {}
    factor = images.patch_size * images.merge_size
    defaults = (128 * factor**2, 768 * factor**2)
    low, high = (
        settings.get(pixels) or size.get(edge) or default
        for pixels, edge, default in zip(
            ("min_pixels", "max_pixels"), ("shortest_edge", "longest_edge"), defaults, strict=True
        )
    )
    expected = asdict(images)
    for key, name in {"image_mean": "mean", "image_std": "std"}.items():
        if key in settings and tuple(map(float, settings[key])) != expected[name]:
            raise DataError(f"{model_path}: {key} of videos is {settings[key]}, and of images {list(expected[name])}")
    for key in ("patch_size", "temporal_patch_size", "merge_size"):
        if settings.get(key, expected[key]) != expected[key]:
            raise DataError(f"{model_path}: {key} of videos is {settings[key]}, and of images {expected[key]}")
    frames = {key: settings[key] for key in ("min_frames", "max_frames") if settings.get(key)}
    return VideoProcessing(timed, low, high, **frames)
