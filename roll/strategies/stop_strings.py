"""Finding stop strings in a growing list of token ids, across token boundaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that do not make a character yet
_CONTEXT_TOKENS = 5  # decoders drop a leading space or merge accents with what stands before


class StopStringMatcher:
    """Decodes one sample token by token and says when one of its stop strings is complete.

    Only text that was generated counts: a stop string that begins in the prompt does not match.

    Args:
        decode: token ids to text, special tokens included.
        stop_strings: none of them empty.
        prompt_token_ids: the sample's prompt (its end is decoded along, so that spacing comes out right).
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop_strings: Sequence[str], prompt_token_ids: Sequence[int]
    ) -> None:
        self._decode = decode
        self._stop_strings = tuple(stop_strings)
        self._longest = max(len(text) for text in stop_strings)
        self._pending = [int(token) for token in prompt_token_ids[-_CONTEXT_TOKENS:]]
        self._num_decoded = len(self._pending)
        self._tail = ""

    def push(self, token_id: int) -> bool:
        """Append a token; True when it completes a stop string."""
        self._pending.append(token_id)
        before = self._decode(self._pending[: self._num_decoded])
        text = self._decode(self._pending)[len(before) :]
        found = self._ends_in(text.rstrip(_REPLACEMENT))
        if text and not text.endswith(_REPLACEMENT):
            self._tail = (self._tail + text)[-(self._longest - 1) :] if self._longest > 1 else ""
            self._pending = self._pending[-_CONTEXT_TOKENS:]
            self._num_decoded = len(self._pending)
        return found

    def _ends_in(self, new_text: str) -> bool:
        text, start = self._tail + new_text, len(self._tail)
        return any(text.find(stop, max(0, start - len(stop) + 1)) >= 0 for stop in self._stop_strings)
