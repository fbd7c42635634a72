"""The model calls of an episode as a tree of token ids: which call goes on from which, and what of it is trained."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from roll.agents.chat_ids import Bridge, ChatTemplate, Message, TemplateError, Thinking
from roll.agents.images import digests, refuse_images, refuse_unseen

if TYPE_CHECKING:
    from roll.protocol.vision import EncodedImage, VisionInputs


@dataclass
class Call:
    """One generation of an episode.

    The prompt's ids are those of ``parent`` (prompt and response) followed by ``new_ids``; without a parent they are
    ``new_ids`` alone.  Only ``response_ids`` were sampled.
    """

    index: int
    parent: int | None
    new_ids: list[int]
    messages: list[Message]
    """The whole conversation that was asked about; images in it by their digests."""
    tools: list[Message] = field(default_factory=list)
    """Schemas that the conversation was offered."""
    response_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Of ``response_ids``, by the engine."""
    versions: list[int] = field(default_factory=list)
    """Weight version of every sampled id."""
    finish_reason: str = ""
    """``stop``, ``length`` or ``abort``; empty while the call is in flight."""
    reward: float = 0.0
    message: Message = field(default_factory=dict)
    """The response as it was given to the agent."""
    state: str = ""
    """Identifies the state of the environment that the call acted in, for step-level advantages."""
    opening: int = 0
    """Ids at the end of ``new_ids`` with which the response was made to begin (:mod:`roll.agents.demanded_calls`)."""
    role: str = ""
    """Who speaks, where the policy plays several parts: each has rewards and baselines of its own."""
    images: tuple[EncodedImage, ...] = ()
    """Of ``new_ids``, in the order of their placeholders."""

    @property
    def finished(self) -> bool:
        return bool(self.finish_reason)

    @property
    def whole_response(self) -> list[int]:
        """The response with the ids that it was made to begin with."""
        return self.new_ids[len(self.new_ids) - self.opening :] + self.response_ids


@dataclass(frozen=True)
class Branch:
    """A sample of an episode: ids from the first prompt to the last response of a chain of calls."""

    calls: tuple[int, ...]
    token_ids: NDArray[np.int64]
    """Shape (length,)."""
    trained: NDArray[np.bool_]
    """Shape (length,): sampled here, and in no earlier branch."""
    log_probs: NDArray[np.float32]
    """Shape (length,): of sampled ids, 0 elsewhere."""
    versions: NDArray[np.int64]
    """Shape (length,): weight versions of sampled ids, -1 elsewhere."""
    turns: NDArray[np.int64]
    """Shape (length,): index of the call that sampled an id, -1 elsewhere."""
    rewards: NDArray[np.float32]
    """Shape (length,): the reward of a call on its last trained id, 0 elsewhere."""
    images: tuple[EncodedImage, ...] = ()
    """In the order of their placeholders in ``token_ids``."""


@dataclass
class ConversationCounts:
    """Statistics of the ids of an episode's conversations."""

    breaks: int = 0
    """Calls that answer an earlier response without going on from its ids."""
    kept_thoughts: int = 0
    """Boundaries at which the template would have dropped thinking that was kept."""
    foreign_responses: int = 0
    """Responses in a conversation that no call gave: context, never trained."""


class Conversations:
    """All conversations of an episode, as a tree of calls.

    A conversation is known by its messages: an agent that sends the messages of an earlier call, its response and new
    messages goes on from the ids of that call, whoever keeps the list, in whatever order its calls interleave.
    """

    def __init__(self, template: ChatTemplate, thinking: Thinking = "keep") -> None:
        self._template = template
        self._thinking = thinking
        self.calls: list[Call] = []
        self.counts = ConversationCounts()
        self._answered: dict[str, int] = {}
        """Digest of a conversation that ends with a response that a call gave, to the newest such call; behind the name
        of a role, to the newest of that role."""
        self.images: dict[str, EncodedImage] = {}
        """By digest, those of all messages."""
        self._templates: dict[str, ChatTemplate] = {}
        """JSON of tools to the template with them."""

    def ask(self, messages: Sequence[Message], tools: Sequence[Message] | None = None, role: str = "") -> Call:
        """A new call whose prompt is ``messages``, from the ids of an earlier call where it goes on from one.

        Args:
            role: who asks; of calls that were answered alike it goes on from the one of its own role.
            tools: schemas that the conversation is offered; None: those of the run's template.  A conversation that
                goes on with other tools than before begins anew, as its prompt does.

        Raises:
            TemplateError: the chat template cannot render them, or an image of them cannot be read.
            BlindPolicyError: an image, and the policy is a model of text.
        """
        messages = self._seen(messages)
        template = self._with_tools(tools)
        parent, new_ids = self._grown(messages, template, tools or (), role)
        if parent is None:
            new_ids = template.prompt(messages)
        new_ids, images = self._expanded(new_ids, messages if parent is None else self._behind(parent, messages))
        call = Call(len(self.calls), parent, new_ids, messages, list(tools or ()), role=role, images=images)
        self.calls.append(call)
        return call

    def go_on(self, parent: Call, texts: Sequence[str]) -> Call:
        """A new call within the response of ``parent``, behind ``texts``: no message ends between the two, so the token
        that ended the text of ``parent`` is taken out of it."""
        if parent.response_ids and parent.response_ids[-1] == self._template.eos_token:
            for column in (parent.response_ids, parent.log_probs, parent.versions):
                column.pop()
        said: Message = {"role": "user", "content": "".join(texts)}
        ids = [one for text in texts for one in self._template.encode(text)]
        messages = [*parent.messages, parent.message, said]
        call = Call(len(self.calls), parent.index, ids, messages, parent.tools, role=parent.role)
        self.calls.append(call)
        return call

    def end(self, call: Call) -> None:
        """Put the token that ends a text behind a response that has stopped without it.

        It is trained, though nobody has sampled it, and the engine's log-probability of it is written as 0, as by SkyRL
        (``skyrl_gym_generator.py``, without ``use_conversation_multi_turn``).
        """
        eos, ids = self._template.eos_token, call.response_ids
        if eos is not None and call.finish_reason == "stop" and ids and ids[-1] != eos:
            ids.append(eos)
            call.log_probs.append(0.0)
            call.versions.append(call.versions[-1])

    @property
    def is_blind(self) -> bool:
        """The policy is a model of text."""
        return self._template.images is None

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> int:
        """The tokens of ``messages`` as a prompt of their own.

        Raises:
            see :meth:`ask`.
        """
        messages = self._seen(messages)
        return len(self._expanded(self._with_tools(tools).prompt(messages), messages)[0])

    def _seen(self, messages: Sequence[Message]) -> list[Message]:
        """Copies of ``messages``; their images are held, and named by their digests."""
        with _as_template_error():
            refuse_unseen(messages)
        if self._template.images is None:
            refuse_images(messages)
            return [dict(message) for message in messages]
        with _as_template_error():
            return [self._template.images.take(message, self.images) for message in messages]

    def _behind(self, parent: int, messages: list[Message]) -> list[Message]:
        """Those of ``messages`` that answer the response of ``parent``."""
        return messages[len(self.calls[parent].messages) + 1 :]

    def _expanded(self, token_ids: list[int], messages: list[Message]) -> tuple[list[int], tuple[EncodedImage, ...]]:
        """The ids of ``messages`` with all placeholders, and the images that these stand for."""
        if self._template.images is None:
            return token_ids, ()
        images = tuple(self.images[digest] for digest in digests(messages))
        with _as_template_error():
            return self._template.images.expanded(token_ids, images), images

    def restore(self, images: Sequence[EncodedImage]) -> None:
        """Give calls of an earlier process, which are here without, their images."""
        self.images = {image.digest: image for image in images}
        for call in self.calls:
            fresh = call.messages if call.parent is None else self._behind(call.parent, call.messages)
            call.images = tuple(self.images[digest] for digest in digests(fresh))

    def answer(
        self,
        call: Call,
        response_ids: Sequence[int],
        log_probs: Sequence[float],
        versions: Sequence[int],
        finish_reason: str,
        message: Message,
    ) -> None:
        """Record what was sampled for ``call``, and ``message``, the form in which the agent gets it."""
        assert not call.finished and len(response_ids) == len(log_probs) == len(versions)
        call.response_ids, call.log_probs, call.versions = list(response_ids), list(log_probs), list(versions)
        call.finish_reason, call.message = finish_reason, dict(message)
        self.known_as(call, call.message)

    def known_as(self, call: Call, message: Message) -> None:
        """Recognise ``message`` as the response of ``call``: a further form in which an agent gets it."""
        digest = _digest([*call.messages, message])
        self._answered[digest] = self._answered[call.role + digest] = call.index

    def _with_tools(self, tools: Sequence[Message] | None) -> ChatTemplate:
        if tools is None:
            return self._template
        key = json.dumps(list(tools), sort_keys=True, default=str)
        if key not in self._templates:
            self._templates[key] = self._template.with_tools(tools)
        return self._templates[key]

    def prompt_ids(self, call: Call) -> list[int]:
        """The ids that the engine is given for ``call``."""
        chain = self._chain(call)
        ids: list[int] = []
        for one in chain[:-1]:
            ids += one.new_ids
            ids += one.response_ids
        return ids + call.new_ids

    def ids_behind_prompt(self, call: Call) -> list[int]:
        """The ids of a conversation up to ``call`` and its response, without those of its first prompt."""
        ids: list[int] = []
        for one in (chain := self._chain(call)):
            ids += one.new_ids if one is not chain[0] else one.new_ids[len(one.new_ids) - one.opening :]
            ids += one.response_ids
        return ids

    def vision(self, call: Call) -> VisionInputs | None:
        """The images of :meth:`prompt_ids`; None without any."""
        return self.inputs([image for one in self._chain(call) for image in one.images])

    def inputs(self, images: Sequence[EncodedImage]) -> VisionInputs | None:
        """Images of a prompt or :class:`Branch`, as engines and trainers take them."""
        return None if self._template is None or self._template.images is None else self._template.images.inputs(images)

    def branches(self) -> list[Branch]:
        """Samples whose union is every call, each sampled id trained once: in the first branch that holds it."""
        parents = {call.parent for call in self.calls if call.finished}
        seen: set[int] = set()
        found = []
        for call in self.calls:
            if call.finished and call.index not in parents:
                chain = self._chain(call)
                found.append(_branch(chain, {one.index for one in chain} - seen))
                seen |= {one.index for one in chain}
        return found

    def steps(self) -> list[Branch]:
        """One sample a call: its prompt as context, its response trained."""
        return [_branch(self._chain(call), {call.index}) for call in self.calls if call.finished]

    def _chain(self, call: Call) -> list[Call]:
        chain = [call]
        while (parent := chain[-1].parent) is not None:
            chain.append(self.calls[parent])
        return chain[::-1]

    def _grown(
        self, messages: list[Message], template: ChatTemplate, tools: Sequence[Message], role: str
    ) -> tuple[int | None, list[int]]:
        """The call that ``messages`` go on from, and the ids that come behind its response."""
        responses = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not responses:
            return None, []
        last = responses[-1]
        digest = _digest(messages[: last + 1])
        known = self._answered.get(role + digest, self._answered.get(digest))
        if known is None or last + 1 == len(messages):
            self.counts.foreign_responses += known is None
            self.counts.breaks += known is not None
            return None, []
        call, new = self.calls[known], messages[last + 1 :]
        if call.tools != list(tools):
            self.counts.breaks += 1
            return None, []
        try:
            bridge = template.bridge([*call.messages, call.message], new)
        except TemplateError:
            self.counts.breaks += 1
            return None, []
        if self._breaks(call, new, bridge, template):
            self.counts.breaks += 1
            return None, []
        grown = template.extended([], call.response_ids, bridge)
        return known, grown[len(call.response_ids) :]

    def _breaks(self, call: Call, new: list[Message], bridge: Bridge, template: ChatTemplate) -> bool:
        """A new sample begins: the ids of ``call`` cannot grow, or the template drops their thinking."""
        moved = bridge.moved is not None
        if moved and not bridge.only_thoughts:
            return True
        if self._thinking == "keep":
            self.counts.kept_thoughts += moved
            return False
        return moved or template.drops_thoughts(call.messages, call.message, new)


@contextlib.contextmanager
def _as_template_error() -> Iterator[None]:
    from roll.protocol.vision import ImageError

    try:
        yield
    except ImageError as error:
        raise TemplateError(str(error)) from error


def _branch(chain: Sequence[Call], trained: set[int]) -> Branch:
    parts = list(_parts(chain))
    sizes = [len(ids) for ids, _ in parts]
    length = sum(sizes)
    token_ids = np.fromiter(itertools.chain.from_iterable(ids for ids, _ in parts), np.int64, length)
    log_probs, rewards = np.zeros(length, np.float32), np.zeros(length, np.float32)
    versions, turns = np.full(length, -1, np.int64), np.full(length, -1, np.int64)
    mask = np.zeros(length, bool)
    at = 0
    for size, (_, call) in zip(sizes, parts, strict=True):
        if call is not None and size:
            here = slice(at, at + size)
            log_probs[here], versions[here], turns[here] = call.log_probs, call.versions, call.index
            if call.index in trained:
                mask[here] = True
                rewards[at + size - 1] = call.reward
        at += size
    images = tuple(image for call in chain for image in call.images)
    return Branch(tuple(call.index for call in chain), token_ids, mask, log_probs, versions, turns, rewards, images)


def _parts(chain: Sequence[Call]) -> Iterator[tuple[list[int], Call | None]]:
    """Context ids (with None) and sampled ids (with their call), in order."""
    for call in chain:
        yield call.new_ids, None
        yield call.response_ids, call


def _digest(messages: Sequence[Message]) -> str:
    """Identity of a conversation, whatever a client's library does to absent fields and to JSON's white space."""
    return json.dumps([_canonical(message) for message in messages], sort_keys=True, default=str)


def _canonical(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message["role"], "content": _text(message.get("content"))}
    calls = message.get("tool_calls")
    if calls:
        found["tool_calls"] = [_canonical_call(call) for call in calls]
    if message["role"] == "tool":
        found["tool_call_id"] = message.get("tool_call_id")
    return found


def _text(content: Any) -> Any:
    """A list of text parts as one text; no content as an empty one."""
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    return content


def _canonical_call(call: dict[str, Any]) -> list[Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return [function.get("name"), arguments]
