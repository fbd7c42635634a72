"""Images of rows: where they are read, where they stand in the conversation, and how many tokens they take."""

from __future__ import annotations

import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.config.data import DataArguments
from roll.config.model_files import model_config
from roll.datasets.columns import Columns, Message
from roll.datasets.reading import Row, SourceRow
from roll.datasets.types import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.protocol.vision import EncodedImage, ImageProcessing, VisionInputs  # which imports torch

IMAGE_MARK = "<image>"
"""Where an image stands in a text."""
FLAG = "image_flag"
"""Column of mixed sets: false for rows of text."""
URL_SECONDS = 20.0
URL_BYTES = 32 * 2**20
"""Most that a URL may give."""


@dataclass(frozen=True)
class VisionModel:
    """A vision-language model as the data layer sees it."""

    processing: ImageProcessing
    image_token_id: int
    placeholder: str
    """Text of one image in a prompt: what opens it, one token, what closes it."""

    @classmethod
    def load(cls, model_path: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool) -> VisionModel | None:
        """From a model's folder or hub name; None for a model of text.

        Raises:
            DataError: a vision-language model whose image processor is not of the Qwen-VL kind.
        """
        from transformers import AutoConfig

        if "vision_config" not in (model_config(model_path) or {"vision_config": None}):
            return None  # without loading transformers' configurations
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        if getattr(config, "vision_config", None) is None:
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
        ids = (config.vision_start_token_id, config.image_token_id, config.vision_end_token_id)
        return cls(processing, config.image_token_id, "".join(map(str, tokenizer.convert_ids_to_tokens(list(ids)))))


def load_processing(model_path: str) -> ImageProcessing:
    """The settings of a model's image processor.

    Raises:
        DataError: no image processor, or one of another kind.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from roll.protocol.vision import ImageProcessing

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


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of rows.

    Args:
        model: that sees them; None: a model of text, for which a row with images is a bad one.
    """

    model: VisionModel | None
    column: str = "images"
    folder: Path | None = None
    """Where relative paths are looked for first."""
    urls: bool = False
    """Images may be fetched."""
    _fetched: dict[str, Row] = field(default_factory=dict, repr=False)
    """Rows whose images came from URLs, until they are stored."""

    @classmethod
    def of(cls, data_args: DataArguments, model: VisionModel | None) -> ImageReader:
        """With the limits of ``data_args``."""
        if model is not None:
            low = data_args.image_min_pixels or model.processing.min_pixels
            high = data_args.image_max_pixels or model.processing.max_pixels
            processing = replace(model.processing, min_pixels=min(low, high), max_pixels=high)
            model = replace(model, processing=processing)
        folder = None if data_args.image_folder is None else Path(data_args.image_folder).expanduser()
        return cls(model, data_args.images, folder, data_args.image_urls)

    def read(self, source: SourceRow, messages: list[Message]) -> tuple[list[Message], list[EncodedImage]]:
        """The conversation with a text in place of every image, and its images in that order.

        Raises:
            DataError: an image that cannot be read, as many marks as there are no images, or videos.
        """
        row = source.row
        values = self._values(row)
        if self.model is None:
            if values:
                raise DataError(
                    f"{source.place}: column {self.column!r} has {len(values)} images, and the model sees none; take a "
                    "vision-language model, or data without images"
                )
            return messages, []
        if row.get("videos"):
            raise DataError(f"{source.place}: column 'videos': videos are not read; give frames as images")
        given = iter(values)
        parts = [self._parts(source, message["content"]) for message in messages]
        marks = sum(part is None for one in parts for part in one)
        own = sum(part is not None and not isinstance(part, str) for one in parts for part in one)
        if values and not marks and not own:
            first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
            parts[first] = [*([None] * len(values)), *parts[first]]
            marks = len(values)
        if marks != len(values):
            raise DataError(
                f"{source.place}: {marks} times {IMAGE_MARK} in the conversation, and {len(values)} images in column "
                f"{self.column!r}; they must be as many, or none be marked"
            )
        images: list[EncodedImage] = []
        rendered: list[Message] = []
        for message, one in zip(messages, parts, strict=True):
            text = ""
            for part in one:
                if isinstance(part, str):
                    text += part
                    continue
                images.append(self.encoded(source, next(given) if part is None else part["image"], len(images)))
                text += self.model.placeholder
            rendered.append({**message, "content": text if one else message["content"]})
        if any(map(_is_url, values)):
            self._fetched[source.place] = {**row, self.column: [image.data.tobytes() for image in images]}
        return rendered, images

    def settings(self) -> dict[str, Any]:
        """Settings that prepared rows depend on."""
        return {} if self.model is None else {"vision": asdict(self.model)}

    def row_of(self, source: SourceRow) -> Row:
        """The row as it is kept: with what its URLs gave in their place."""
        return self._fetched.pop(source.place, source.row)

    def look(self, source: SourceRow, images: Sequence[EncodedImage], whole: bool = True) -> VisionInputs | None:
        """The images; ``whole``: each is decoded once to see that it can be.

        Raises:
            DataError: one that is not.
        """
        if not images:
            return None
        from roll.protocol.vision import ImageError, vision_inputs

        assert self.model is not None
        try:
            return vision_inputs(images, self.model.processing, whole)
        except ImageError as error:
            raise DataError(f"{source.place}: column {self.column!r}: not a readable image: {error}") from error

    def expand(self, source: SourceRow, token_ids: list[int], vision: VisionInputs | None) -> list[int]:
        """The ids with as many placeholders for each image as it takes.

        Raises:
            DataError: placeholders in the text itself.
        """
        if self.model is None:
            return token_ids
        counts = vision.num_tokens if vision is not None else []
        image = self.model.image_token_id
        if token_ids.count(image) != len(counts):
            raise DataError(
                f"{source.place}: the rendered prompt has {token_ids.count(image)} image placeholders, and the row "
                f"{len(counts)} images: the text spells a placeholder itself; write {IMAGE_MARK}"
            )
        each = iter(counts)
        return [token for one in token_ids for token in ([image] * next(each) if one == image else [one])]

    def is_seen(self, token_ids: Sequence[int]) -> bool:
        """True for a prompt with images."""
        return self.model is not None and self.model.image_token_id in token_ids

    def restore(
        self, source: SourceRow, messages: Callable[[SourceRow], list[Message]], token_ids: Sequence[int]
    ) -> VisionInputs | None:
        """The images of a prepared row, read again.

        Args:
            messages: gives the row's conversation.

        Raises:
            DataError: an image that is gone, or has another size than when the row was prepared.
        """
        assert self.model is not None
        _, images = self.read(source, messages(source))
        vision = self.look(source, images, whole=False)
        found = sum(vision.num_tokens) if vision is not None else 0
        if found != list(token_ids).count(self.model.image_token_id):
            raise DataError(
                f"{source.place}: its images have changed since it was prepared; delete data_args.cache_dir"
            )
        return vision

    def _values(self, row: Row) -> list[Any]:
        if row.get(FLAG) is False:
            return []
        value = row.get(self.column)
        if value is None and self.column == DataArguments().images and self.model is not None:
            value = row.get("image")
        if value is None:
            return []
        return list(value) if isinstance(value, list | tuple) else [value]

    def _parts(self, source: SourceRow, content: Any) -> list[Any]:
        """The parts of a message: texts, None for an image of the column, ``{"image": ...}`` for one of its own."""
        if isinstance(content, str):
            if IMAGE_MARK not in content:
                return [content]
            pieces = content.split(IMAGE_MARK)
            return [part for piece in pieces for part in (None, piece)][1:]
        if not isinstance(content, list):
            return []
        parts: list[Any] = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "text":
                parts += self._parts(source, part.get("text") or "")
            elif kind == "image":
                own = next((part[key] for key in ("image", "path", "url", "bytes") if part.get(key) is not None), None)
                parts.append(None if own is None else self._own(source, own))
            elif kind == "image_url":
                value = part.get("image_url")
                parts.append(self._own(source, value.get("url") if isinstance(value, Mapping) else value))
            else:
                raise DataError(f"{source.place}: a part of type {kind!r} in a message; expected text or image")
        return parts

    def _own(self, source: SourceRow, value: Any) -> dict[str, Any]:
        """An image inside a message."""
        if _is_url(value):
            raise DataError(f"{source.place}: {value!r} in a message; URLs of images go into column {self.column!r}")
        return {"image": value}

    def encoded(self, source: SourceRow, value: Any, number: int) -> EncodedImage:
        """One image, from bytes, a path, a data URI, a URL, an image of PIL, or ``{"bytes": ..., "path": ...}``.

        Raises:
            DataError: none of these, or one that cannot be read.
        """
        from roll.protocol.vision import EncodedImage, ImageError, encoded_image

        where = f"{source.place}: image {number + 1} of column {self.column!r}"
        if isinstance(value, Mapping):  # what the library `datasets` writes
            value = value.get("bytes") or value.get("path") or value.get("url")
        if not isinstance(value, str):
            try:
                return encoded_image(value)
            except ImageError as error:
                raise DataError(f"{where}: expected bytes or a path, found {type(value).__name__}") from error
        if not value:
            raise DataError(f"{where}: expected bytes or a path, found an empty text")
        if value.startswith("data:"):
            try:
                return encoded_image(value)
            except ImageError as error:
                raise DataError(f"{where}: {error}") from error
        if _is_url(value):
            return EncodedImage.of(self._fetch(where, value))
        return EncodedImage.of(self._file(where, source, value.removeprefix("file://")))

    def _file(self, where: str, source: SourceRow, name: str) -> bytes:
        path = Path(name).expanduser()
        places = [folder / path for folder in (self.folder, source.path.parent) if folder is not None] + [path]
        for place in places:
            try:
                return place.read_bytes()
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                raise DataError(f"{where}: {place} cannot be read: {error}") from error
        raise DataError(
            f"{where}: {name!r} does not exist (looked for {' and '.join(map(str, dict.fromkeys(places)))}); relative "
            "paths start from data_args.image_folder"
        )

    def _fetch(self, where: str, url: str) -> bytes:
        if not self.urls:
            raise DataError(
                f"{where}: {url!r} is a URL, which is fetched with data_args.image_urls: true only; or download the "
                "images and give their paths"
            )
        try:
            with urllib.request.urlopen(url, timeout=URL_SECONDS) as answer:
                data: bytes = answer.read(URL_BYTES + 1)
        except (OSError, ValueError) as error:
            raise DataError(f"{where}: {url!r} cannot be fetched: {error}") from error
        if len(data) > URL_BYTES:
            raise DataError(f"{where}: {url!r} has more than {URL_BYTES >> 20} MiB")
        return data


class PreparedImages:
    """The images of prepared rows, which are read when a row is drawn."""

    def __init__(
        self,
        reader: ImageReader,
        data_args: DataArguments,
        files: Sequence[Path],
        messages: Callable[[SourceRow], list[Message]] | None = None,
    ) -> None:
        """``messages`` gives a row's conversation; None: that of its prompt column."""
        self._reader = reader
        self._data_args = data_args
        self._files = files
        self._messages = messages

    def of(self, row: dict[str, Any], token_ids: Sequence[int], file: int, number: int) -> VisionInputs | None:
        """Those of one row; None: it has none.

        Raises:
            DataError: an image that is gone or has changed since the row was prepared.
        """
        if not self._reader.is_seen(token_ids):
            return None
        source = SourceRow(self._files[file], number, row)
        messages = self._messages or Columns.of(self._data_args, source).read_messages
        return self._reader.restore(source, messages, token_ids)


def _is_url(value: Any) -> bool:
    return isinstance(value, str) and urllib.parse.urlparse(value).scheme in ("http", "https")
