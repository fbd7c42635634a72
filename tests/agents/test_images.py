"""Images of environments in conversations: ids with placeholders that only grow, the images that go with them, and
what a policy of text says to them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from roll.agents.agent_options import VerlOptions
from roll.agents.chat_ids import ChatTemplate, TemplateError
from roll.agents.conversation import Conversations
from roll.agents.endpoint import Session
from roll.agents.environment_agent import EnvironmentAgent, EnvironmentOptions
from roll.agents.episode import Episode, Limits, Model, Task, run_episode
from roll.agents.images import ChatImages
from roll.agents.registry import make_verifier
from roll.agents.verl_agent import VerlAgent
from roll.checkpoint.state import load_state, save_state
from roll.datasets.vision_model import VisionModel
from roll.environments.base import BrokenContract, read_reset, read_step
from roll.environments.frozen_lake import FrozenLake
from roll.environments.sokoban import Sokoban
from roll.protocol.vision import IMAGES, VisionInputs
from roll.rollout.episodes import EngineSampler, EpisodeGroup, build_episode_batch
from roll.rollout.groups import FinishedGroup
from roll.rollout.loops import Calls
from roll.rollout.routing import Generation
from roll.serving.dialects.chat import read_chat
from roll.serving.http import BadRequest, Refusal
from roll.strategies.engines.requests import SamplingParams
from tests.support.episodes import ids_of, sampled
from tests.vision_models import PROCESSING, tokenizer, video_processing

LAKE = {"size": 3, "p": 0.9, "max_steps": 4, "render_mode": "rgb_array", "cell_pixels": 16}
TOKENS = 9  # of a picture of 3 x 3 cells


class Walker:
    """An engine that says ``text`` and keeps what it was given."""

    def __init__(self, template: ChatTemplate, text: str = "Up") -> None:
        self.template, self.text = template, text
        self.prompts: list[tuple[list[int], VisionInputs | None]] = []

    async def __call__(
        self, prompt_ids: list[int], most: int, options: Mapping[str, Any], vision: VisionInputs | None = None
    ) -> FinishedGroup:
        self.prompts.append((prompt_ids, vision))
        ids = [*self.template.encode(self.text), *self.template.end_tokens]
        return sampled(ids)


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    words = tokenizer()
    vision = VisionModel(
        PROCESSING,
        words.convert_tokens_to_ids("<|image_pad|>"),
        "<|vision_start|><|image_pad|><|vision_end|>",
        video_processing("qwen3_vl"),
        words.convert_tokens_to_ids("<|video_pad|>"),
        ("<|vision_start|>", "<|video_pad|>", "<|vision_end|>"),
    )
    return ChatTemplate(words, images=ChatImages(vision))


def play(chat: ChatTemplate, engine: Walker, make: Any = None, seed: int = 5, **options: Any) -> Episode:
    limits = Limits(context=4096)
    agent = EnvironmentAgent("lake", make or (lambda: FrozenLake(**LAKE)), EnvironmentOptions(**options))
    return asyncio.run(run_episode(Task("lake", seed), agent, Model(engine, chat, "hermes", limits), limits))


def assert_goes_together(template: ChatTemplate, ids: list[int], vision: VisionInputs | None, images: int) -> None:
    placeholder = template.images._model.image_token_id  # type: ignore[union-attr]
    assert vision is not None and len(vision.images) == images
    assert ids.count(placeholder) == sum(vision.num_tokens) == TOKENS * images


def lake_picture() -> Any:
    return read_reset("lake", FrozenLake(**LAKE).reset(1)).observation[0]["content"][1]["image"]


@pytest.mark.parametrize("context", ["append", "last", "observation"])
def test_every_prompt_has_the_images_that_its_context_shows(template: ChatTemplate, context: str) -> None:
    engine = Walker(template)
    observed = context == "observation"
    text = "{history} now {current_observation}" if observed else "{{{turn_idx!r:>4}}} {observation} Go!"
    episode = play(template, engine, template=text, context=context, history_length=1)
    assert episode.outcome in ("terminated", "truncated") and len(engine.prompts) > 1
    for turn, (ids, vision) in enumerate(engine.prompts):
        shown = {"append": turn + 1, "last": min(turn, 1) + 1, "observation": 1}[context]
        assert_goes_together(template, ids, vision, shown)
        said = template.decode(ids)
        assert observed or f"{{{str(turn + 1)!r:>4}}} " in said
        assert ("(image)" in said) == (context == "observation" and turn > 0)
        assert context == "observation" or said.count("<|vision_end|> Go!") == shown
    if context == "append":
        (branch,) = episode.conversations.branches()
        last = engine.prompts[-1][0]
        assert ids_of(branch)[: len(last)] == last
        images = [image for call in branch.calls for image in call.images]
        assert [image.digest for image in images] == [one.digest for one in engine.prompts[-1][1].images]  # type: ignore[union-attr]
    counts = [sum(len(call.images) for call in one.calls) for one in episode.conversations.steps()]
    assert counts == [len(vision.images) for _, vision in engine.prompts if vision]


def test_a_picture_is_the_state(template: ChatTemplate) -> None:
    """A cell's look identifies it; equal states are equal images, held once in a run."""
    lake = FrozenLake(**LAKE)
    turn = read_reset("lake", lake.reset(3))
    rules, part = turn.observation[0]["content"]
    pixels = np.asarray(part["image"].decode())
    assert pixels.shape == (48, 48, 3) and "red disc" in rules
    row, column = lake.position
    assert tuple(pixels[row * 16 + 8, column * 16 + 8]) == (210, 40, 40)
    row, column = lake.goal
    assert tuple(pixels[row * 16 + 8, column * 16 + 8]) == (40, 160, 60)
    again = read_reset("lake", FrozenLake(**LAKE).reset(3))
    assert (
        again == turn
        and read_step("lake", lake.step("nonsense")).observation[0]["content"][0]["image"] == part["image"]
    )
    room = read_reset("room", Sokoban(render_mode="rgb_array", cell_pixels=8).reset(1))
    assert room.observation[0]["content"][1]["image"].size == (48, 48)
    first, second = (play(template, Walker(template)) for _ in range(2))
    assert first.calls[0].images[0] is second.calls[0].images[0]


def test_rows_of_a_batch_have_their_images(template: ChatTemplate) -> None:
    group = EpisodeGroup(0, Task("lake", 5), [play(template, Walker(template, said)) for said in ("Up", "Up", "x")])
    for rule in ("trajectory", "step"):
        batch = build_episode_batch([group], rule, 0)  # type: ignore[arg-type]
        seen = batch.non_tensor_batch[IMAGES]
        placeholder = template.images._model.image_token_id  # type: ignore[union-attr]
        for row, vision in enumerate(seen):
            assert (batch.batch["input_ids"][row] == placeholder).sum() == sum(vision.num_tokens)
        assert len({id(one) for one in seen}) < len(seen), "rows with the same images hold one object"


def test_a_stored_episode_has_its_images(template: ChatTemplate, tmp_path: Path) -> None:
    episode = play(template, Walker(template), system="Play.")
    save_state(tmp_path / "state", episode.state_dict())
    state = load_state(tmp_path / "state")
    again = Episode.from_state(state, episode.task, template, "keep")
    assert [call.images for call in again.calls] == [call.images for call in episode.calls]
    call = again.calls[-1]
    ids, vision = again.conversations.prompt_ids(call), again.conversations.vision(call)
    assert_goes_together(template, ids, vision, len(again.calls))


def test_requests_of_an_engine_have_the_images(template: ChatTemplate) -> None:
    """And a recorded response counts for the same images alone."""

    class Engines:
        def __init__(self) -> None:
            self.requests: list[Any] = []

        def submit(self, request: Any) -> Any:
            self.requests.append(request)
            return Generation(cast(Any, self), request.request_id, request, done=True, value=sampled([7]))

    async def asked(call: Any, recorded: Any = None) -> tuple[Engines, Calls]:
        engines = Engines()
        calls = Calls(cast(Any, engines), recorded)
        sampler = EngineSampler(calls, "e", SamplingParams(max_new_tokens=4))
        await sampler(conversations.prompt_ids(call), 4, {}, conversations.vision(call))
        return engines, calls

    conversations = Conversations(template)
    begun = [FrozenLake(**LAKE).reset(seed) for seed in (1, 2)]
    first, second = (conversations.ask(read_reset("lake", one).observation) for one in begun)
    assert first.new_ids == second.new_ids and first.images != second.images
    engines, calls = asyncio.run(asked(first))
    assert engines.requests[0].vision.images == first.images
    recorded = calls.state_dict()
    assert not asyncio.run(asked(first, recorded))[0].requests
    assert asyncio.run(asked(second, recorded))[0].requests[0].vision.images == second.images


def test_rows_of_verls_tool_agent_have_their_images(template: ChatTemplate) -> None:
    """In the place of each ``<image>``, counted for the longest prompt; more or fewer than places are an error."""
    data = lake_picture().data.tobytes()
    row = {
        "prompt": [{"role": "system", "content": "Look."}, {"role": "user", "content": "<image>Where?<image>"}],
        "images": [{"bytes": data, "path": None}, {"bytes": data, "path": "b.png"}],
        "reward_model": {"ground_truth": "2"},
    }

    def episode_of(row: dict[str, Any], engine: Walker, **options: Any) -> tuple[Any, VerlAgent]:
        options = VerlOptions(**{"response_length": 64, "filter_overlong_prompts": True, **options})
        agent = VerlAgent(options, make_verifier({"worker_cls": "gsm8k_rule"}), [], {})
        model = Model(engine, template, "hermes", Limits(context=4096))
        return asyncio.run(run_episode(Task("t", 0, row), agent, model, Limits(context=4096))), agent

    engine = Walker(template)
    episode, _ = episode_of(row, engine)
    assert episode.outcome == "terminated", episode.error
    ids, vision = engine.prompts[0]
    assert_goes_together(template, ids, vision, 2)
    text = template.decode(ids)
    assert text.index("vision_end") < text.index("Where?") < text.rindex("vision_start")
    for most, fits in ((len(ids), True), (len(ids) - 1, False)):
        assert episode_of(row, Walker(template), prompt_length=most)[1].fits(row, template) is fits
    episode, _ = episode_of({**row, "images": row["images"][:1]}, Walker(template))
    assert "has 1 images, and the conversation 2 times <image>" in str(episode.error)
    episode, _ = episode_of({**row, "index": "a", "pictures": row["images"]}, Walker(template), image_key="pictures")
    assert episode.outcome == "terminated"


@pytest.mark.parametrize("form", ["bytes", "uri", "pil", "openai"])
def test_images_of_agents_come_in_many_forms(template: ChatTemplate, form: str) -> None:
    picture = lake_picture()
    data = picture.data.tobytes()
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    value = {"bytes": data, "uri": uri, "pil": picture.decode(), "openai": {"url": uri}}[form]
    part = {"type": "image_url", "image_url": value} if form == "openai" else {"type": "image", "image": value}
    conversations = Conversations(template)
    call = conversations.ask([{"role": "user", "content": [part, {"type": "text", "text": "Where?"}]}])
    assert_goes_together(template, call.new_ids, conversations.vision(call), 1)
    assert form == "pil" or call.images == (picture,)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([{"type": "image", "image": "/etc/passwd"}], "found str"),
        ([{"type": "image", "image": b"no picture"}], "UnidentifiedImageError"),
        ([{"type": "video", "video": ["0.png", "1.png"]}], "part of type 'video'; agents show texts and images"),
        ([{"type": "text", "text": "a"}, {"type": "video_url", "video_url": {"url": "data:"}}], "of type 'video_url'"),
        ("a text with <|image_pad|> in it", "1 placeholders of images and 0 images"),
    ],
)
def test_what_is_no_image_is_refused(template: ChatTemplate, content: Any, said: str) -> None:
    with pytest.raises(TemplateError, match=said):
        Conversations(template).ask([{"role": "user", "content": content}])


def test_an_environment_with_a_broken_picture_or_a_video_is_named() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "video", "video": []}]}
    for shown, said in (
        (np.zeros((4, 4)), r"mine: an image in the observation of reset: .*float64 \(4, 4\)"),
        ([message], "mine: the observation of reset has a part of type 'video'; texts and"),
    ):
        with pytest.raises(BrokenContract, match=said):
            read_reset("mine", (shown, {}))


def test_programs_show_images_in_the_form_of_openai(template: ChatTemplate) -> None:
    """A conversation that a client sends again goes on from its ids; a policy of text says that it sees none."""
    data = lake_picture().data.tobytes()
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()}}
    content = [{"type": "text", "text": "Where?"}, picture]

    async def asked(chat: ChatTemplate) -> tuple[Walker, Model]:
        engine = Walker(chat)
        model = Model(engine, chat, "hermes", Limits(context=4096))
        session = Session(Task("t", 0), model)
        messages: list[Any] = [{"role": "user", "content": content}]
        reply = await session.answer(read_chat({"messages": messages}))
        again = [*messages, reply.message, {"role": "user", "content": [picture]}]
        await session.answer(read_chat({"messages": again}))
        return engine, model

    engine, model = asyncio.run(asked(template))
    for images, (ids, vision) in enumerate(engine.prompts, 1):
        assert_goes_together(template, ids, vision, images)
    assert model.conversations.calls[1].parent == 0
    blind = ChatTemplate(tokenizer())
    with pytest.raises(Refusal, match="the policy is a model of text"):
        asyncio.run(asked(blind))
    with pytest.raises(Exception, match=r"the policy is a model of text.*vision-language"):
        play(blind, Walker(blind))
    elsewhere = [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]
    with pytest.raises(BadRequest, match="only content of type text"):
        read_chat({"messages": [{"role": "user", "content": elsewhere}]})
