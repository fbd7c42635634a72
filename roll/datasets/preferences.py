"""Judged responses: a prompt with one or more responses and a judgement of their quality.

One kind of row serves all training on judgements of whole responses or of their steps: pairs (one of two is
preferred), rankings (every response has a place), points (every response has a number), labels (desirable or not), and
steps (a label for every step of one response).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import accumulate, chain, takewhile
from typing import TYPE_CHECKING, Any, Literal

from roll.config.data import DataArguments
from roll.config.losses import ScoreInput
from roll.datasets.columns import Columns, Message, as_number, check_messages, is_conversation, require, without_nulls
from roll.datasets.images import ImageReader
from roll.datasets.making import Draft, RowMaker
from roll.datasets.preparation import load_rows
from roll.datasets.reading import SourceRow
from roll.datasets.sampling import PreparedRows
from roll.datasets.templates import Rendered, Renderer, TemplateChoice, chat_text, end_of_response, tokenize, truncate
from roll.datasets.types import DataError
from roll.datasets.vision_model import VisionModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.datasets.store import StoredRow
    from roll.protocol.vision import VisionInputs

PROMPT_COLUMNS = ("messages", "prompt", "instruction", "question")
"""Columns searched for the prompt when the data section names none."""
Judgement = Literal["pairs", "ranking", "points", "labels", "steps"]


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """A prompt with K responses as token ids."""

    row_id: str
    tag: str
    prompt_ids: list[int]
    """The common part of the responses: the rendered prompt, of whole conversations their common beginning."""
    responses: list[list[int]]
    scores: list[float]
    """(K,): the higher the better; of labels 1 and 0; of steps the labels of the only response's steps. Empty of pairs:
    the first response is the preferred one."""
    step_ends: list[int]  # end of each step, in tokens from the first of the response; empty unless steps are judged
    margin: float | None  # margin of the chosen response, where the row says it
    vision: VisionInputs | None = None  # the images of the prompt, which all responses have in common

    @property
    def sides(self) -> list[list[int]]:
        """The K whole sequences."""
        return [self.prompt_ids + response for response in self.responses]


STEP_END = "\n"  # added after every step but the last: the separator of TRL's PRM trainer


@dataclass(frozen=True)
class JudgedColumns:
    """Columns of the responses and of their judgement."""

    chosen: str = "chosen"
    rejected: str = "rejected"
    margin: str | None = None
    responses: str = "responses"  # a response or a list of them; of steps a list of the steps of one response
    scores: str = "scores"
    """A number (a label) or a list of as many as there are responses or steps; of rankings it may be missing: the
    responses are then in order, the best first."""


class JudgedDataset(PreparedRows[JudgedRow]):
    """Rows in file order; draw from it with :class:`roll.datasets.ShuffledEpochs`."""

    @classmethod
    def build(
        cls,
        data_args: DataArguments,
        tokenizer: PreTrainedTokenizerBase,
        sequence_length: int,
        columns: JudgedColumns,
        judgement: Judgement,
        *,
        score_input: ScoreInput = "tokens",
        global_template: str | None = None,
        vision: VisionModel | None = None,
    ) -> JudgedDataset:
        """Read ``data_args.file_name`` and keep the rows whose longest side has at most ``sequence_length`` tokens.

        Args:
            score_input: ``tokens``, the rendered prompt, then the response and the end-of-turn token, tokenised apart
                as in generation; ``chat``, the whole conversation as :func:`roll.datasets.templates.chat_text` has it.
            vision: of a model that sees images.

        Raises:
            DataError: a file, row or template that cannot be used, or no row left.
        """
        renderer = Renderer(tokenizer, TemplateChoice.of_settings(data_args, global_template, None))
        images = ImageReader.of(data_args, vision)
        maker = JudgedMaker(
            data_args, renderer, sequence_length, images, names=columns, judgement=judgement, score_input=score_input
        )
        return cls(*load_rows(maker))

    def _row(self, position: int) -> JudgedRow:
        store, extra = self._store, self._store.content("row", position)
        ids, begin, responses = store.token_ids(position), store.value("prompt_length", position), []
        prompt = ids[:begin]
        for length in extra["lengths"]:
            responses.append(ids[begin : begin + length])
            begin += length
        return JudgedRow(
            row_id=store.value("id", position),
            tag=store.value("tag", position),
            prompt_ids=prompt,
            responses=responses,
            scores=extra["scores"],
            step_ends=extra["step_ends"],
            margin=extra["margin"],
            vision=self._vision(position, extra.get("source") or {}, prompt),
        )


@dataclass(frozen=True)
class Judged:
    """The responses of a row as texts, and their judgement."""

    responses: list[str]  # for `steps`: the steps of the only response
    scores: list[float]
    margin: float | None


@dataclass(frozen=True)
class JudgedTokens:
    """Token ids of a prompt and of its responses, and the ends of steps."""

    prompt: list[int]
    responses: list[list[int]]
    step_ends: list[int] = field(default_factory=list)


@dataclass(eq=False, kw_only=True)
class JudgedMaker(RowMaker[JudgedTokens]):
    """Makes judged rows; the content of a draft is a :class:`Judged`. ``judgement``, ``score_input``: as
    :meth:`JudgedDataset.build` has them."""

    limit_key, example = "sequence_length", "data/preferences.jsonl"
    names: JudgedColumns
    judgement: Judgement
    score_input: ScoreInput

    def __post_init__(self) -> None:
        super().__post_init__()
        self._end = end_of_response(self.renderer.tokenizer)
        pairs = self.judgement == "pairs"
        self.what, self._domain = ("pairs", "preferences") if pairs else ("rows", "responses")

    def settings(self) -> dict[str, Any]:
        kind = [self.judgement, self.score_input]
        return {"columns": list(astuple(self.names)), "kind": kind, "eos_token": self._end}

    def columns_of(self, first: SourceRow) -> Columns:
        """The prompt's column is the configured one, else one of the usual names; without any of them the prompt is
        in the conversations of the responses."""
        if self.data_args.prompt is not None or self.data_args.messages is not None:
            return Columns.of(self.data_args, first)
        names = self.names
        pairs = self.judgement == "pairs"
        usual = PROMPT_COLUMNS if pairs else (*PROMPT_COLUMNS, names.chosen)
        last = names.chosen if pairs else names.responses
        name = next((name for name in usual if name in first.row), last)
        return Columns.of(replace(self.data_args, prompt=name), first)

    def tokenize(self, drafts: Sequence[Draft]) -> list[JudgedTokens | DataError]:
        if self.score_input == "chat":
            return [self._chat(draft) for draft in drafts]
        texts = []
        for draft in drafts:
            parts = draft.content.responses
            behind = STEP_END if self.judgement == "steps" else self._end
            texts += [f"{part}{behind}" for part in parts[:-1]] + [f"{parts[-1]}{self._end}"]
        ids = iter(tokenize(self.renderer.tokenizer, texts))
        found: list[JudgedTokens | DataError] = []
        for draft, rendered in zip(drafts, self.renderer(drafts), strict=True):
            own = [next(ids) for _ in draft.content.responses]
            if isinstance(rendered, DataError):
                found.append(rendered)
            elif self.judgement == "steps":
                whole, ends = list(chain.from_iterable(own)), list(accumulate(map(len, own)))
                found.append(JudgedTokens(rendered.token_ids, [whole], ends))
            else:
                found.append(JudgedTokens(rendered.token_ids, own))
        return found

    def expand(self, draft: Draft, tokens: JudgedTokens) -> JudgedTokens:
        prompt = self.images.expand(draft.source, tokens.prompt, draft.vision)
        if not self.images.placeholders.isdisjoint(chain.from_iterable(tokens.responses)):
            raise DataError(f"{draft.source.place}: a response spells an image's placeholder; only prompts have images")
        return replace(tokens, prompt=prompt)

    def finish(self, draft: Draft, tokens: JudgedTokens) -> StoredRow | None:
        longest, prompt, side = max(map(len, tokens.responses)), tokens.prompt, self.data_args.truncation
        may_cut = self.score_input == "tokens" and draft.vision is None  # a cut could go through an image
        if may_cut and not self.data_args.filter_overlong_prompts and side != "error":
            # A response is never cut, since its end is judged.
            room = self.limit - longest
            whole = Rendered("", prompt)
            shortened = truncate(draft, whole, room, side, self.renderer) if len(prompt) > room else None
            if shortened is not None:
                self.tally.truncated[self._domain] += 1
                prompt = shortened.token_ids
        length = len(prompt) + longest
        if length > self.limit:
            self.tally.leave_out(self._domain, length)
            return None
        ids = [*prompt, *chain.from_iterable(tokens.responses)]
        judged: Judged = draft.content
        row: dict[str, Any] = {"lengths": [len(response) for response in tokens.responses], "scores": judged.scores}
        row |= {"step_ends": tokens.step_ends, "margin": judged.margin}
        if draft.vision is not None:
            row["source"] = draft.source.row
        return self.stored(draft, self._domain, ids, len(prompt), row)

    def _chat(self, draft: Draft) -> JudgedTokens | DataError:
        from jinja2 import TemplateError

        tokenizer = self.renderer.tokenizer
        try:
            texts = [chat_text(tokenizer, draft.messages, response) for response in draft.content.responses]
        except (TemplateError, TypeError) as error:
            return DataError(f"{draft.source.place}: the chat template cannot render this conversation: {error}")
        whole = tokenize(tokenizer, texts)
        # At least the last token of each is its own: where one is the beginning of another, its end is scored too.
        together = takewhile(lambda ids: len(set(ids)) == 1, zip(*(ids[:-1] for ids in whole), strict=False))
        shared = sum(1 for _ in together)
        return JudgedTokens(whole[0][:shared], [ids[shared:] for ids in whole])

    def conversation(self, source: SourceRow) -> list[Message]:
        self.columns = self.columns_of(source)
        return self.read(source)[0]

    def read(self, source: SourceRow) -> tuple[list[Message], Judged]:
        """The prompt's messages; the responses and their judgement. Raises ``DataError``: a column that is missing or
        holds something else; responses to different prompts; a ranking without two different responses of different
        rank."""
        names = self.names
        if self.judgement == "steps":
            steps = source.row.get(names.responses)
            if not isinstance(steps, list) or not steps or not all(isinstance(one, str) and one for one in steps):
                raise DataError(f"{source.place}: {names.responses} must be a list of steps, each a non-empty text")
            return self.columns.read_messages(source), Judged(steps, self._scores(source, len(steps)), None)
        pair = self.judgement == "pairs" or (
            self.judgement in ("ranking", "labels") and source.row.get(names.responses) is None
        )
        if pair:
            values = [(name, require(source, name)) for name in (names.chosen, names.rejected)]
        else:
            value = require(source, names.responses)
            listed = isinstance(value, list) and not is_conversation(value)
            if value == []:
                raise DataError(f"{source.place}: {names.responses} is an empty list")
            values = [(names.responses, one) for one in (value if listed else [value])]
        sides = [response_of(source, name, value) for name, value in values]
        messages = self._messages(source, [before for _, before in sides], pair)
        responses, both = [text for text, _ in sides], f"{names.chosen} and {names.rejected}"
        margin = None if names.margin is None else as_number(source, names.margin, "margin_key")
        if self.judgement == "pairs":
            if responses[0] == responses[1]:
                raise DataError(f"{source.place}: {both} are the same text")
            return messages, Judged(responses, [], margin)
        scores = [1.0, 0.0] if pair else self._scores(source, len(responses))
        if self.judgement == "ranking":
            if len(responses) < 2 or len(set(scores)) < 2:
                raise DataError(f"{source.place}: no two responses of different rank: {len(responses)} responses")
            best = {text for text, score in zip(responses, scores, strict=True) if score == max(scores)}
            if best & {text for text, score in zip(responses, scores, strict=True) if score < max(scores)}:
                what = both if pair else names.responses
                raise DataError(f"{source.place}: {what} are the same text and of different rank")
        return messages, Judged(responses, scores, margin)

    def _scores(self, source: SourceRow, count: int) -> list[float]:
        name = self.names.scores
        value: Any = source.row.get(name)
        if value is None and self.judgement == "ranking":
            return [float(count - place) for place in range(count)]
        values = value if isinstance(value, list) else [value]
        if len(values) != count or not all(isinstance(one, int | float) for one in values):
            raise DataError(f"{source.place}: {name} must be {count} numbers, found {str(value)[:60]!r}")
        scores = [float(one) for one in values]
        if self.judgement in ("labels", "steps") and not all(0 <= one <= 1 for one in scores):
            raise DataError(f"{source.place}: {name} must be true or false, or a number from 0 to 1, found {value!r}")
        return scores

    def _messages(self, source: SourceRow, before: Sequence[list[Message] | None], pair: bool) -> list[Message]:
        """The prompt, of its own column or from the conversations of the responses."""
        names = self.names
        if {self.columns.prompt, self.columns.messages} & {names.chosen, names.responses}:
            first = before[0]
            if first is None or None in before:
                where = (
                    f"conversations under {names.chosen} and {names.rejected}" if pair else "conversations as responses"
                )
                raise DataError(
                    f"{source.place}: no prompt: neither one of the columns {', '.join(PROMPT_COLUMNS)} nor "
                    f"conversations {where}; name it with data_args.prompt"
                )
            if any(other != first for other in before):
                what = f"{names.chosen} and {names.rejected}" if pair else "the responses' conversations"
                raise DataError(
                    f"{source.place}: {what} differ before their last messages, so that they answer different prompts"
                )
            messages = first
        else:
            messages = self.columns.read_messages(source)
        if messages[-1]["role"] == "assistant":
            raise DataError(f"{source.place}: the prompt ends with an assistant's message; expected the user's turn")
        return messages


def response_of(source: SourceRow, column: str, value: object) -> tuple[str, list[Message] | None]:
    """The text of a response, and the messages before it where the ``value`` is a conversation. Raises ``DataError``:
    it is neither a text nor a conversation that ends with one."""
    before: list[Message] | None = None
    if isinstance(value, Mapping):
        value = [value]
    if is_conversation(value):
        check_messages(source, column, value)
        if value[-1]["role"] != "assistant":
            role = value[-1]["role"]
            raise DataError(f"{source.place}: {column} ends with a message of {role}, expected the assistant's")
        before, value = [without_nulls(one) for one in value[:-1]] or None, value[-1]["content"]
    if not isinstance(value, str) or not value:
        raise DataError(f"{source.place}: {column} must be a non-empty text or conversation, found {value!r}")
    return value, before
