"""Images of conversations: a text for the chat template, placeholder ids for the policy, patches for both sides.

A message may have parts in place of a text, ``{"type": "text", "text": ...}`` and ``{"type": "image", "image": ...}``.
In the conversations of an episode an image is named by its digest, so that messages stay small, can be compared and
be stored; the image itself is held once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from roll.datasets.vision_model import VisionModel
    from roll.protocol.images import EncodedImage
    from roll.protocol.vision import VisionInputs

Message = dict[str, Any]
IMAGE_NAMED = "(image)"  # replaces an image in a text for people


class BlindPolicyError(ValueError):
    """A conversation has an image, and the policy is a text model."""


@dataclass(eq=False)
class ChatImages:
    """The images of conversations as a vision-language policy sees them. ``model``: its properties as the data layer
    reads them, with the run's pixel limits."""

    _model: VisionModel
    # Weak: an image is kept as long as an episode holds it, not as long as the run.
    _known: WeakValueDictionary[str, EncodedImage] = field(default_factory=WeakValueDictionary)

    def take(self, message: Mapping[str, Any], held: dict[str, EncodedImage]) -> Message:
        """The message with digests in place of its images, which are added to ``held``. Raises ``ImageError``: an image
        that cannot be read, or of another form (a path, a URL)."""
        from roll.protocol.images import encoded_image

        content: Any = message.get("content")
        if not has_images(content):
            return dict(message)
        parts: list[Message] = []
        for part in content:
            if isinstance(part, str):
                parts.append({"type": "text", "text": part})
                continue
            if not is_image(part):
                parts.append(dict(part))
                continue
            value = part.get("image", part.get("image_url"))
            value = value.get("url") if isinstance(value, Mapping) else value
            if not isinstance(value, str) or value not in held:
                image = encoded_image(value)
                found = self._known.get(image.digest)
                if found is None:
                    image.decode()  # once for each image of the run
                    self._model.processing.grid(*image.size[::-1])
                    found = self._known[image.digest] = image
                held[found.digest], value = found, found.digest
            parts.append({"type": "image", "image": value})
        return {**message, "content": parts}

    def as_text(self, message: Message) -> Message:
        """The message as chat templates take it: one text, with the model's placeholder for each image."""
        content = message.get("content")
        if not has_images(content):
            return message
        return {**message, "content": content_text(content, self._model.placeholder)}

    def expanded(self, token_ids: Sequence[int], images: Sequence[EncodedImage]) -> list[int]:
        """The ids with as many placeholders for each image as it takes. Raises ``ImageError``: another number of
        placeholders than images: a text spells one."""
        from roll.protocol.images import ImageError

        placeholder = self._model.image_token_id
        found = sum(token == placeholder for token in token_ids)
        if found != len(images):
            raise ImageError(
                f"the rendered messages have {found} placeholders of images and {len(images)} images: a text spells "
                f"{self._model.placeholder}, or the chat template leaves out a message"
            )
        vision = self.inputs(images)
        if vision is None:
            return list(token_ids)
        counts = iter(vision.num_tokens)
        return [one for token in token_ids for one in ([token] * next(counts) if token == placeholder else [token])]

    def inputs(self, images: Sequence[EncodedImage]) -> VisionInputs | None:
        """The form that engines and trainers compute with; None without images."""
        from roll.protocol.vision import vision_inputs

        return vision_inputs(images, self._model.processing, whole=False) if images else None


def has_images(content: object) -> bool:
    """True for the content of a message that is a list with an image in it."""
    return isinstance(content, list | tuple) and any(map(is_image, content))


def is_image(part: object) -> bool:
    """True for a part of a content that is an image, in the form of chat templates or of OpenAI."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def digests(messages: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Digests of the images of messages returned by :meth:`ChatImages.take`, in order."""
    for message in messages:
        if has_images(message.get("content")):
            yield from (part["image"] for part in message["content"] if is_image(part))


def content_text(content: object, image: str = IMAGE_NAMED) -> str:
    """The content of a message as one text, with ``image`` in place of each image."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        return str(content)
    parts = (
        image if is_image(part) else part if isinstance(part, str) else str(part.get("text", "")) for part in content
    )
    return "".join(parts)


def refuse_unseen(messages: Iterable[Mapping[str, Any]], is_blind: bool) -> None:
    """Refuse parts that would silently not be shown to the policy. ``is_blind``: the policy is a text model. Raises
    ``BlindPolicyError``: an image for a text model; ``ImageError``: a part that is neither a text nor an image, such as
    a video."""
    contents = (message.get("content") for message in messages)
    for part in (part for content in contents if isinstance(content, list | tuple) for part in content):
        if is_image(part) and is_blind:
            raise BlindPolicyError(
                "an observation or message has an image, and the policy is a model of text: give pretrain a "
                "vision-language model (docs/vision-language.md), or take render_mode: text"
            )
        if isinstance(part, Mapping) and not is_image(part) and not isinstance(part.get("text"), str):
            from roll.protocol.images import ImageError

            rule = "agents show texts and images (a video: its frames as images)"
            raise ImageError(f"a message has a part of type {part.get('type')!r}; {rule}")
