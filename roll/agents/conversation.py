"""The model calls of an episode as a tree of token ids: which call continues which, and which ids are trained."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.agents.chat_ids import ChatTemplate, Message, TemplateError, Thinking
from roll.agents.images import digests, refuse_unseen

if TYPE_CHECKING:
    from roll.protocol.images import EncodedImage
    from roll.protocol.vision import VisionInputs


@dataclass
class Call:
    """One generation of an episode.

    The prompt's ids are those of ``parent`` (prompt and response) followed by ``new_ids``; without a parent they are
    ``new_ids`` alone. Only ``response_ids`` were sampled.
    """

    index: int
    parent: int | None
    new_ids: list[int]
    messages: list[Message]  # the whole conversation up to the response; images in it by their digests
    tools: list[Message] = field(default_factory=list)  # schemas of the tools offered
    response_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # log-probs of `response_ids`, by the engine
    versions: list[int] = field(default_factory=list)  # weight version of every sampled id
    finish_reason: str = ""  # `stop`, `length` or `abort`; empty while the call is in flight
    reward: float = 0.0
    message: Message = field(default_factory=dict)  # the response as it was given to the agent
    state: str = ""  # identifies the state of the environment that the call acted in, for step-level advantages
    opening: int = 0  # ids at the end of `new_ids` that force a tool call (`call_opening`)
    role: str = ""  # role that the policy plays, where there are several: each has rewards and baselines of its own
    images: tuple[EncodedImage, ...] = ()  # images of `new_ids`, in the order of their placeholders

    @property
    def finished(self) -> bool:
        return bool(self.finish_reason)

    @property
    def whole_response(self) -> list[int]:
        """The response with the ids of its forced opening."""
        return self.new_ids[len(self.new_ids) - self.opening :] + self.response_ids


@dataclass(frozen=True)
class Branch:
    """A sample of an episode: the tokens from the first prompt to the last response of a chain of calls."""

    calls: list[Call]
    is_trained: list[bool]  # by call: something was sampled in it, and it is in no earlier branch


@dataclass
class ConversationCounts:
    """Statistics of the ids of an episode's conversations."""

    breaks: int = 0  # calls that follow an earlier response but do not extend its ids
    kept_thoughts: int = 0  # boundaries at which the template would have dropped thinking that was kept
    foreign_responses: int = 0  # responses in conversations that no call produced: context, never trained


_ARRAYS = {"new_ids": np.int32, "response_ids": np.int32, "log_probs": np.float64, "versions": np.int32}
_PLAIN = ("parent", "finish_reason", "reward", "state", "role", "opening")


class Conversations:
    """All conversations of an episode, as a tree of calls.

    Conversations are recognised by their messages: an agent that sends the messages of an earlier call, its response
    and new messages extends the ids of that call, wherever the list is kept and however calls interleave.
    """

    def __init__(self, template: ChatTemplate, thinking: Thinking = "keep") -> None:
        self._template = template
        self._thinking = thinking
        self.calls: list[Call] = []
        self.counts = ConversationCounts()
        # Digest of a conversation that ends with the response of a call, to the index of the newest such call; with the
        # name of a role in front, to that of the newest of that role.
        self._answered: dict[str, int] = {}
        self.images: dict[str, EncodedImage] = {}  # the images of all messages by digest

    def ask(self, messages: Sequence[Message], tools: Sequence[Message] | None = None, role: str = "") -> Call:
        """Add a call whose prompt is ``messages``, which extends the ids of an earlier call where it continues one.

        Args:
            role: the role that makes the call; of calls with equal responses, that of the same role is continued.
            tools: schemas that the conversation is offered; None: those of the run's template. A conversation that
                continues with other tools than before starts over, as its prompt does.

        Raises:
            TemplateError: the chat template cannot render them, or an image of them cannot be read.
            BlindPolicyError: an image, and the policy is a text model.
        """
        messages = self._with_digests(messages)
        template = self._template if tools is None else self._template.with_tools(tools)
        parent, new_ids = self._extend(messages, template, tools or (), role)
        if parent is None:
            new_ids = template.prompt(messages)
        # After the extension, for the new messages alone: the parent's ids already have their placeholders repeated.
        new_ids, images = self._expanded(new_ids, self._behind(parent, messages))
        call = Call(len(self.calls), parent, new_ids, messages, list(tools or ()), role=role, images=images)
        self.calls.append(call)
        return call

    def go_on(self, parent: Call, texts: Sequence[str]) -> Call:
        """Add a call that continues the response of ``parent`` after ``texts``: no message ends between the two, so the
        token that ended the text of ``parent`` is removed."""
        if parent.response_ids and parent.response_ids[-1] == self._template.eos_token:
            for column in (parent.response_ids, parent.log_probs, parent.versions):
                column.pop()
        ids = [one for text in texts for one in self._template.encode(text)]
        messages = [*parent.messages, parent.message, {"role": "user", "content": "".join(texts)}]
        call = Call(len(self.calls), parent.index, ids, messages, parent.tools, role=parent.role)
        self.calls.append(call)
        return call

    def end(self, call: Call) -> None:
        """Append the end-of-text token to a response that has stopped without it.

        It is trained although it was not sampled, with an engine log-prob of 0, as in SkyRL
        (``skyrl_gym_generator.py``, without ``use_conversation_multi_turn``).
        """
        eos, ids = self._template.eos_token, call.response_ids
        if eos is not None and call.finish_reason == "stop" and ids and ids[-1] != eos:
            ids.append(eos)
            call.log_probs.append(0.0)
            call.versions.append(call.versions[-1])

    @property
    def is_blind(self) -> bool:
        """The policy is a text model."""
        return self._template.images is None

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> int:
        """The tokens of ``messages`` as a prompt of their own; raises as :meth:`ask`."""
        messages = self._with_digests(messages)
        template = self._template if tools is None else self._template.with_tools(tools)
        return len(self._expanded(template.prompt(messages), messages)[0])

    def _with_digests(self, messages: Sequence[Message]) -> list[Message]:
        """Copies of ``messages`` with digests in place of their images, which go to ``images``."""
        images = self._template.images
        with _as_template_error():
            refuse_unseen(messages, self.is_blind)
            return [dict(one) if images is None else images.take(one, self.images) for one in messages]

    def _behind(self, parent: int | None, messages: list[Message]) -> list[Message]:
        """The part of ``messages`` that follows the response of ``parent``; None: all."""
        return messages if parent is None else messages[len(self.calls[parent].messages) + 1 :]

    def _expanded(self, token_ids: list[int], messages: list[Message]) -> tuple[list[int], tuple[EncodedImage, ...]]:
        """The ids of ``messages`` with all placeholders, and the images that belong to them."""
        if self._template.images is None:
            return token_ids, ()
        images = tuple(self.images[digest] for digest in digests(messages))
        with _as_template_error():
            return self._template.images.expanded(token_ids, images), images

    def state_dict(self) -> dict[str, Any]:
        """All calls that are over, as plain values and arrays."""
        messages = [[call.messages, call.message] for call in self.calls]
        calls = [{name: getattr(call, name) for name in (*_ARRAYS, *_PLAIN)} for call in self.calls]
        for entry in calls:
            entry |= {name: np.asarray(entry[name], dtype) for name, dtype in _ARRAYS.items()}
        return {
            "counts": asdict(self.counts),
            "messages": json.dumps(messages, default=str),
            "calls": calls,
            "images": [image.data for image in self.images.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        from roll.protocol.images import EncodedImage

        self.counts = ConversationCounts(**state["counts"])
        for entry, (messages, message) in zip(state["calls"], json.loads(state["messages"]), strict=True):
            fields = {**entry, **{name: entry[name].tolist() for name in _ARRAYS}}
            self.calls.append(Call(index=len(self.calls), messages=messages, message=message, **fields))
        images = [EncodedImage.of(data.tobytes()) for data in state["images"]]
        self.images = {image.digest: image for image in images}
        for call in self.calls:
            call.images = tuple(self.images[digest] for digest in digests(self._behind(call.parent, call.messages)))

    def answer(
        self,
        call: Call,
        response_ids: Sequence[int],
        log_probs: Sequence[float],
        versions: Sequence[int],
        finish_reason: str,
        message: Message,
    ) -> None:
        """Record the sampled response of ``call``, and ``message``, the form in which the agent gets it."""
        assert not call.finished and len(response_ids) == len(log_probs) == len(versions)
        call.response_ids, call.log_probs, call.versions = list(response_ids), list(log_probs), list(versions)
        call.finish_reason, call.message = finish_reason, dict(message)
        self.known_as(call, call.message)

    def known_as(self, call: Call, message: Message) -> None:
        """Register ``message`` as another form of the response of ``call``."""
        digest = _digest([*call.messages, message])
        # Under both names: equal texts of two roles are two calls, and one of the same role is to be continued.
        self._answered[digest] = self._answered[call.role + digest] = call.index

    def prompt_ids(self, call: Call) -> list[int]:
        """The ids that the engine is given for ``call``."""
        return _ids(self._chain(call)[:-1]) + call.new_ids

    def ids_behind_prompt(self, call: Call) -> list[int]:
        """The ids of a conversation up to ``call`` and its response, without those of its first prompt."""
        first, *others = self._chain(call)
        return first.whole_response + _ids(others)

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
                # A shared beginning is trained once: else it would weigh as often as it has continuations.
                found.append(Branch(chain, [one.index not in seen and bool(one.response_ids) for one in chain]))
                seen |= {one.index for one in chain}
        return found

    def steps(self) -> list[Branch]:
        """One sample a call: its prompt as context, its response trained."""
        chains = (self._chain(call) for call in self.calls if call.finished)
        return [Branch(chain, [False] * (len(chain) - 1) + [bool(chain[-1].response_ids)]) for chain in chains]

    def _chain(self, call: Call) -> list[Call]:
        chain = [call]
        while (parent := chain[-1].parent) is not None:
            chain.append(self.calls[parent])
        return chain[::-1]

    def _extend(
        self, messages: list[Message], template: ChatTemplate, tools: Sequence[Message], role: str
    ) -> tuple[int | None, list[int]]:
        """The index of the call that ``messages`` continue (None: of none), and the ids that follow its response."""
        responses = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not responses:
            return None, []
        last = responses[-1]
        digest = _digest(messages[: last + 1])
        known = self._answered.get(role + digest, self._answered.get(digest))
        # Without a message after the response there is no boundary to bridge: the prompt is rendered anew.
        if known is None or last + 1 == len(messages):
            self.counts.foreign_responses += known is None
            self.counts.breaks += known is not None
            return None, []
        call, new, bridge = self.calls[known], messages[last + 1 :], None
        if call.tools == list(tools):
            with contextlib.suppress(TemplateError):
                bridge = template.bridge([*call.messages, call.message], new)
        moved = bridge is not None and bridge.moved is not None
        breaks = bridge is None or (moved and not bridge.only_thoughts)
        if not breaks and self._thinking == "keep":
            self.counts.kept_thoughts += moved
        elif not breaks:
            breaks = moved or template.drops_thoughts(call.messages, call.message, new)
        if bridge is None or breaks:
            self.counts.breaks += 1
            return None, []
        # A response that ends with any end token is followed by what comes after the template's: a model may be trained
        # to end a turn differently than its template writes history. One that was cut short gets the template's.
        ended = call.response_ids[-1:] and call.response_ids[-1] in template.end_tokens
        return known, bridge.token_ids[1:] if ended and bridge.end_token is not None else bridge.token_ids


@contextlib.contextmanager
def _as_template_error() -> Iterator[None]:
    from roll.protocol.images import ImageError

    try:
        yield
    except ImageError as error:
        raise TemplateError(str(error)) from error


def _ids(calls: Sequence[Call]) -> list[int]:
    return [token for call in calls for token in (*call.new_ids, *call.response_ids)]


def _digest(messages: Sequence[Message]) -> str:
    """Identity of a conversation, independent of how a client's library writes absent fields and JSON."""
    canonical = []
    for message in messages:
        content = message.get("content") or ""
        # Clients send a text as a string or as a list of parts; both have to be recognised as the same message.
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            content = "".join(part["text"] for part in content)
        calls = []
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            arguments = function.get("arguments")
            # OpenAI's clients send arguments as JSON text, whose spaces and order of keys are the library's.
            if isinstance(arguments, str):
                with contextlib.suppress(ValueError):
                    arguments = json.loads(arguments)
            calls.append([function.get("name"), arguments])
        answered = message.get("tool_call_id") if message["role"] == "tool" else None
        canonical.append([message["role"], content, calls, answered])
    return json.dumps(canonical, sort_keys=True, default=str)
