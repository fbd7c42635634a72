"""Drafts for speculative decoding without a draft model: what followed a sample's last tokens before.

A draft's tokens are computed with the sample's last one in a single pass (Leviathan et al. 2023, arXiv 2211.17192), and
at each place the token is sampled as ever: by that place's number of the sample's random stream.  As long as what is
sampled is what was drafted, the next place counts too.  So drafts decide how many passes a sample takes and never what
it says: not only its distribution is that of decoding without them, it is the same sample.

What followed comes from the prompt, from the other samples of a group, and from earlier samples of the prompt, of other
steps and epochs too; from those of other prompts where more of the last tokens agree (SuffixDecoding, Oliaro et al.
2025, arXiv 2411.04975).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np

_SHORTEST, _LONGEST = 2, 6  # tokens that have to agree with what came before, and most that are compared
_PLACES = 128  # that are remembered of a pair of tokens, the latest
_REMEMBERED = 1 << 20  # tokens, beyond which what was not used for longest is forgotten

Place = tuple[list[int], int]  # a sequence, and the number of a token in it


@dataclass(eq=False)
class Continuations:
    """Sequences, and the places in them that come after each pair of tokens."""

    places: dict[tuple[int, int], deque[Place]] = field(default_factory=dict)
    num_tokens: int = 0

    def extended(self, sequence: list[int], count: int) -> None:
        """``count`` tokens have been appended to a sequence."""
        for place in range(max(len(sequence) - count + 1, _SHORTEST), len(sequence) + 1):
            pair = sequence[place - 2], sequence[place - 1]
            self.places.setdefault(pair, deque(maxlen=_PLACES)).append((sequence, place))
        self.num_tokens += count

    def after(self, sequence: list[int]) -> tuple[int, list[Place]]:
        """Return how many of the last tokens of ``sequence`` are found, and the places that follow them."""
        if len(sequence) < _SHORTEST:
            return 0, []
        latest = self.places.get((sequence[-2], sequence[-1]), ())
        found = [(other, place) for other, place in latest if place < len(other)]
        if not found:
            return 0, []
        for length in range(_SHORTEST + 1, min(_LONGEST, len(sequence)) + 1):
            token = sequence[-length]
            closer = [(other, place) for other, place in found if place >= length and other[place - length] == token]
            if not closer:
                return length - 1, found
            found = closer
        return min(_LONGEST, len(sequence)), found


def most_frequent(places: list[Place], limit: int, least: float) -> list[tuple[int, float]]:
    """At most ``limit`` tokens: the one that most places have, then the one that most of these have next, and so forth,
    each with how probable it is together with those before it: ``least`` or more."""
    tokens: list[tuple[int, float]] = []
    probability = 1.0
    while places and len(tokens) < limit:
        token, count = Counter(sequence[place] for sequence, place in places).most_common(1)[0]
        # As if one more had been seen, with another token.
        probability *= count / (len(places) + 1)
        if probability < least:
            break
        tokens.append((token, probability))
        followed = [(sequence, place + 1) for sequence, place in places if sequence[place] == token]
        places = [(sequence, place) for sequence, place in followed if place < len(sequence)]
    return tokens


@dataclass(eq=False)
class Draftable:
    """A running sample: what is known of its prompt, and its tokens, beginning with the last ones of the prompt."""

    known: Continuations
    tokens: list[int] = field(default_factory=list)


class Drafter:
    """Proposes drafts for an engine's rows and remembers what they say.

    Args:
        limit: most tokens of a draft.
        least: how probable a drafted token has to be, with those before it.
        max_tokens: of a pass, drafts and all: beyond some number a pass costs what its tokens cost.
    """

    def __init__(self, limit: int, least: float, max_tokens: int) -> None:
        self._limit, self._least, self._max_tokens = limit, least, max_tokens
        self._prompts: OrderedDict[bytes, Continuations] = OrderedDict()
        self._all = Continuations()
        self.counts: Counter[str] = Counter(drafts=0, drafted_tokens=0, accepted_tokens=0)

    def begin(self, prompt: Sequence[int], response: Sequence[int]) -> Draftable:
        """A sample of a prompt that has begun with ``response``."""
        key = np.asarray(prompt, np.int32).tobytes()
        if (known := self._prompts.get(key)) is None:
            known = self._prompts[key] = Continuations()
            known.extended(list(prompt), len(prompt))
            held = sum(one.num_tokens for one in self._prompts.values())
            while held > _REMEMBERED and len(self._prompts) > 1:
                held -= self._prompts.popitem(last=False)[1].num_tokens
        self._prompts.move_to_end(key)
        sample = Draftable(known)
        self.extend(sample, [*prompt[-_LONGEST:], *response])
        return sample

    def extend(self, sample: Draftable, tokens: Sequence[int]) -> None:
        """A sample goes on with ``tokens``."""
        sample.tokens += tokens
        if self._all.num_tokens > _REMEMBERED:
            self._all = Continuations()
        for known in (sample.known, self._all):
            known.extended(sample.tokens, len(tokens))

    def propose(self, samples: Sequence[Draftable | None], limits: np.ndarray) -> list[list[int]]:
        """A draft for each row of at most as many tokens as ``limits`` has, none for None; of all that could be drafted
        the most probable tokens that there is room for."""
        drafts: list[list[int]] = [[] for _ in samples]
        offers: list[tuple[float, int, int, int]] = []
        if (room := self._max_tokens - len(samples)) > 0:
            for row, (sample, limit) in enumerate(zip(samples, limits.tolist(), strict=True)):
                if sample is not None:
                    # The first of two that agree in as many tokens.
                    _, places = max((one.after(sample.tokens) for one in (sample.known, self._all)), key=itemgetter(0))
                    offered = most_frequent(places, min(self._limit, limit), self._least)
                    offers += [(-probability, row, place, token) for place, (token, probability) in enumerate(offered)]
        # A token is at most as probable as the one before it, so these are the beginnings of drafts.
        for _, row, _, token in sorted(offers)[: max(room, 0)]:
            drafts[row].append(token)
        self.counts["drafts"] += sum(map(bool, drafts))
        self.counts["drafted_tokens"] += sum(map(len, drafts))
        return drafts
