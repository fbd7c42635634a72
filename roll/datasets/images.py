"""Images and videos of rows: where they are read, where they occur in conversations, and how many tokens they take."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.config.data import DataArguments
from roll.datasets.columns import Message
from roll.datasets.reading import Row, SourceRow
from roll.datasets.types import DataError
from roll.datasets.vision_model import VisionModel

if TYPE_CHECKING:
    from roll.protocol.images import EncodedImage, EncodedVideo, Seen
    from roll.protocol.vision import VisionInputs  # they import torch

IMAGE_MARK, VIDEO_MARK = "<image>", "<video>"  # marks of images and videos in a text
FLAG = "image_flag"  # column of mixed sets: false for rows of text
FRAMES_KEYS = ("video", "frames")  # keys of a video's mapping with its frames
RATE_KEYS = ("fps", "sample_fps")  # keys of a video's mapping with its frames per second
_MARKS = re.compile(f"({IMAGE_MARK}|{VIDEO_MARK})")
PLACED_ALIKE = "take fewer seconds, larger frames (video_min_pixels), Qwen3-VL, or strategy_name: hf_infer"
"""Remedies for a video whose positions differ between engine and trainer."""


@dataclass(frozen=True)
class ImageReader:
    """Reads the images and videos of rows. ``model``: that sees them; None: a model of text, for which a row with
    images is a bad one."""

    model: VisionModel | None
    column: str = "images"
    folder: Path | None = None  # folder searched first for relative paths
    video_column: str = "videos"
    video_folder: Path | None = None  # folder searched first for relative paths of frames; None: that of images

    @classmethod
    def of(cls, data_args: DataArguments, model: VisionModel | None) -> ImageReader:
        """A reader with the limits of ``data_args``."""
        if model is not None:
            low = data_args.image_min_pixels or model.processing.min_pixels
            high = data_args.image_max_pixels or model.processing.max_pixels
            # A maximum below the model's minimum lowers the minimum too: no size could satisfy both.
            processing = replace(model.processing, min_pixels=min(low, high), max_pixels=high)
            video = replace(
                model.video,
                fps=data_args.video_fps,
                max_frames=data_args.video_max_frames,
                frame_min_pixels=data_args.video_min_pixels,
                frame_max_pixels=data_args.video_max_pixels,
                total_pixels=data_args.video_total_pixels,
            )
            model = replace(model, processing=processing, video=video)
        folder, frames = (
            None if name is None else Path(name).expanduser()
            for name in (data_args.image_folder, data_args.video_folder)
        )
        return cls(model, data_args.images, folder, data_args.videos, frames)

    @property
    def placeholders(self) -> frozenset[int]:
        """Token ids of the placeholders of images and videos; empty for a model of text."""
        return frozenset() if self.model is None else frozenset((self.model.image_token_id, self.model.video_token_id))

    def read(self, source: SourceRow, messages: list[Message]) -> tuple[list[Message], list[Seen]]:
        """The conversation with a text in place of every image and video, and these in that order. Raises
        ``DataError``: an image that cannot be read, as many marks as there are no images, or the same of videos; more
        of them than the engine that generates keeps room for."""
        from roll.protocol.images import EncodedVideo

        row, model = source.row, self.model
        # A vision-language model's images may also be in the column ``image``.
        is_usual = row.get(self.column) is None and self.column == DataArguments().images and model is not None
        images = [] if row.get(FLAG) is False else listed(row.get("image" if is_usual else self.column))
        columns = {
            IMAGE_MARK: ("images", self.column, images),
            VIDEO_MARK: ("videos", self.video_column, listed(row.get(self.video_column))),
        }
        if model is None:
            for what, name, values in columns.values():
                if values:
                    raise DataError(
                        f"{source.place}: column {name!r} has {len(values)} {what}, and the model sees none; take a "
                        f"vision-language model, or data without {what}"
                    )
            return messages, []
        values_of = {mark: iter(values) for mark, (_, _, values) in columns.items()}
        seen: list[Seen] = []
        rendered: list[Message] = []
        for message, one in zip(messages, self._all_parts(source, messages, columns), strict=True):
            text = ""
            for part in one:
                if isinstance(part, str):
                    text += part
                    continue
                value = next(values_of[part.mark]) if part.own is None else part.own
                number = sum(isinstance(other, EncodedVideo) == (part.mark == VIDEO_MARK) for other in seen)
                if part.mark == VIDEO_MARK:
                    video = read_video(self, source, value, number)
                    seen.append(video)
                    text += model.video_placeholder(video)
                else:
                    seen.append(self.encoded(source, value, number))
                    text += model.placeholder
            rendered.append({**message, "content": text if one else message["content"]})
        num_videos = sum(isinstance(one, EncodedVideo) for one in seen)
        limits = (("image", len(seen) - num_videos, model.most_images), ("video", num_videos, model.most_videos))
        for what, number, most in limits:
            if most is not None and number > most:
                raise DataError(
                    f"{source.place}: {number} {what}s, and the engine keeps room for {most}; limit_mm_per_prompt: "
                    f"{{{what}: {number}}} is enough"
                )
        return rendered, seen

    def look(self, source: SourceRow, images: Sequence[Seen], whole: bool = True) -> VisionInputs | None:
        """The images and videos; ``whole``: each is decoded once to see that it can be. Raises ``DataError``: one that
        is not."""
        if not images:
            return None
        from roll.protocol.images import ImageError, VideoError
        from roll.protocol.vision import vision_inputs

        assert self.model is not None
        try:
            return vision_inputs(images, self.model.processing, whole)
        except VideoError as error:
            raise DataError(f"{source.place}: column {self.video_column!r}: not a readable video: {error}") from error
        except ImageError as error:
            raise DataError(f"{source.place}: column {self.column!r}: not a readable image: {error}") from error

    def expand(self, source: SourceRow, token_ids: list[int], vision: VisionInputs | None) -> list[int]:
        """The ids with as many placeholders for each image and video as it takes. Raises ``DataError``: placeholders in
        the text itself."""
        if self.model is None:
            return token_ids
        runs = vision.runs if vision is not None else []
        image, video = self.model.image_token_id, self.model.video_token_id
        found = [token == video for token in token_ids if token in (image, video)]
        if found != [is_video for is_video, _ in runs]:
            raise DataError(
                f"{source.place}: the rendered prompt has {found.count(False)} image and {found.count(True)} video "
                f"placeholders, and the row takes {sum(not one for one, _ in runs)} and {sum(one for one, _ in runs)}: "
                f"the text spells a placeholder itself; write {IMAGE_MARK} or {VIDEO_MARK}"
            )
        return [one for token, count in self.widths(token_ids, vision) for one in [token] * count]

    def widths(self, token_ids: Sequence[int], vision: VisionInputs | None) -> Iterator[tuple[int, int]]:
        """Each token with the number of tokens that it takes: of a placeholder those of its image or video, else 1."""
        runs, placeholders = iter(vision.runs if vision is not None else ()), self.placeholders
        return ((token, next(runs)[1] if token in placeholders else 1) for token in token_ids)

    def restore(
        self,
        files: Sequence[Path],
        messages: Callable[[SourceRow], list[Message]],
        row: Row,
        token_ids: Sequence[int],
        file: int,
        number: int,
    ) -> VisionInputs | None:
        """The images of a prepared row, read again from row ``number`` of ``file``; None: it has none.

        ``messages`` gives the row's conversation. ``DataError``: an image that is gone or has another size.
        """
        if self.placeholders.isdisjoint(token_ids):
            return None
        source = SourceRow(files[file], number, row)
        _, images = self.read(source, messages(source))
        vision = self.look(source, images, whole=False)
        found, placeholders = sum(vision.num_tokens) if vision is not None else 0, self.placeholders
        if found != sum(token in placeholders for token in token_ids):
            raise DataError(
                f"{source.place}: its images have changed since it was prepared; delete the folder datasets "
                "of $ROLL_CACHE_DIR (~/.cache/roll)"
            )
        return vision

    def _all_parts(
        self, source: SourceRow, messages: list[Message], columns: Mapping[str, tuple[str, str, list[Any]]]
    ) -> list[list[str | _Place]]:
        """The parts of all messages; images and videos without marks go in front of the first user message's."""
        assert self.model is not None
        parts = [self._parts(source, message["content"]) for message in messages]
        places = [part for one in parts for part in one if isinstance(part, _Place)]
        has_videos = any(place.mark == VIDEO_MARK for place in places) or bool(columns[VIDEO_MARK][2])
        if self.model.without_videos is not None and has_videos:
            raise DataError(f"{source.place}: column {self.video_column!r}: {self.model.without_videos}")
        front: list[str | _Place] = []
        for mark, (what, name, values) in columns.items():
            here = [place for place in places if place.mark == mark]
            if values and not here:
                front += [_Place(mark)] * len(values)
            elif (marks := sum(place.own is None for place in here)) != len(values):
                raise DataError(
                    f"{source.place}: {marks} times {mark} in the conversation, and {len(values)} {what} in column "
                    f"{name!r}; they must be as many, or none be marked"
                )
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
        if front:
            parts[first] = [*front, *parts[first]]
        return parts

    def _parts(self, source: SourceRow, content: object) -> list[str | _Place]:
        if isinstance(content, str):
            pieces = _MARKS.split(content)
            return [_Place(piece) if place % 2 else piece for place, piece in enumerate(pieces) if place % 2 or piece]
        if not isinstance(content, list):
            return []
        parts: list[str | _Place] = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "text":
                parts += self._parts(source, part.get("text") or "")
            elif kind in ("image", "image_url"):
                own = part.get("image_url")
                own = own.get("url") if isinstance(own, Mapping) else own
                if kind == "image":
                    keys = ("image", "path", "url", "bytes")
                    own = next((part[key] for key in keys if part.get(key) is not None), None)
                if _is_url(own):
                    raise DataError(
                        f"{source.place}: {own!r} in a message; URLs of images go into column {self.column!r}"
                    )
                parts.append(_Place(IMAGE_MARK, own))
            elif kind == "video":
                has_own = any(part.get(key) is not None for key in FRAMES_KEYS)
                parts.append(_Place(VIDEO_MARK, part if has_own else None))
            else:
                raise DataError(f"{source.place}: a part of type {kind!r} in a message; expected text, image or video")
        return parts

    def encoded(self, source: SourceRow, value: object, number: int, video: int | None = None) -> EncodedImage:
        """One image, from bytes, a path, a data URI, a URL, an image of PIL, or ``{"bytes": ..., "path": ...}``.

        Args:
            number: of the image in its row, or of the frame in its video, from 0.
            video: number of the video that it is a frame of.

        Raises:
            DataError: none of these, or one that cannot be read.
        """
        from roll.protocol.images import EncodedImage, ImageError, encoded_image

        where = f"{source.place}: image {number + 1} of column {self.column!r}"
        if video is not None:
            where = f"{source.place}: frame {number + 1} of video {video + 1} of column {self.video_column!r}"
        if isinstance(value, Mapping):  # what the library `datasets` writes
            value = value.get("bytes") or value.get("path") or value.get("url")
        if isinstance(value, str) and not value:
            raise DataError(f"{where}: expected bytes or a path, found an empty text")
        if not isinstance(value, str) or value.startswith("data:"):
            try:
                return encoded_image(value)
            except ImageError as error:
                found = f"expected bytes or a path, found {type(value).__name__}"
                raise DataError(f"{where}: {error if isinstance(value, str) else found}") from error
        if _is_url(value):
            raise DataError(f"{where}: {value!r} is a URL; download the files and give their paths")
        name = value.removeprefix("file://")
        path, folder = Path(name).expanduser(), self.folder if video is None else self.video_folder or self.folder
        places = [*([] if folder is None else [folder / path]), source.path.parent / path, path]
        for place in places:
            try:
                return EncodedImage.of(place.read_bytes())
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                raise DataError(f"{where}: {place} cannot be read: {error}") from error
        raise DataError(
            f"{where}: {name!r} does not exist (looked for {' and '.join(map(str, dict.fromkeys(places)))}); relative "
            "paths start from data_args.image_folder (frames: video_folder)"
        )


@dataclass(frozen=True)
class _Place:
    """The place of an image or a video in a message."""

    mark: str
    own: Any = None  # value that the message brings along; None: the next one of the column


def read_video(reader: ImageReader, source: SourceRow, value: object, number: int) -> EncodedVideo:
    """The row's video ``number``, from a list of frames or ``{"video": [...], "fps": ...}``. Raises ``DataError``: a
    file, frames that cannot be read, or a rate that is no number."""
    from roll.protocol.images import VideoError

    assert reader.model is not None
    where = f"{source.place}: video {number + 1} of column {reader.video_column!r}"
    rate = None
    if isinstance(value, Mapping):
        rate = next((value[key] for key in RATE_KEYS if value.get(key) is not None), None)
        value = next((value[key] for key in FRAMES_KEYS if value.get(key) is not None), value)
    if not isinstance(value, list | tuple):
        what = repr(value) if isinstance(value, str) else type(value).__name__
        raise DataError(
            f"{where}: expected a list of frames, found {what}; files of videos are not decoded: take their frames out "
            '(ffmpeg -i a.mp4 -vf fps=2 a-%04d.png) and give [["a-0001.png", "a-0002.png", ...]]'
        )
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or rate <= 0):
        raise DataError(f"{where}: fps {rate!r}; expected frames per second above 0")
    frames = [reader.encoded(source, frame, place, number) for place, frame in enumerate(value)]
    model = reader.model
    try:
        video = model.video.encoded(frames, rate, model.processing)
    except VideoError as error:
        raise DataError(f"{where}: {error}") from error
    difference = None if model.engine_time is None else model.engine_time.difference(video, model.processing)
    if difference is not None:
        raise DataError(f"{where}: {difference}; {PLACED_ALIKE}")
    return video


def listed(value: object) -> list[Any]:
    """The entries of a column that holds one, several, or (None) none."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _is_url(value: object) -> bool:
    return isinstance(value, str) and urllib.parse.urlparse(value).scheme in ("http", "https")
