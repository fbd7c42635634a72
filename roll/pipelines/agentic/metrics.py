"""Metrics and tables of episodes: success by task, outcomes, shares of time, and every turn as text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roll.agents.chat_ids import ChatTemplate
from roll.agents.conversation import Call
from roll.agents.episode import Episode
from roll.agents.images import content_text
from roll.pipelines.files import write_images
from roll.protocol import DataProto
from roll.protocol.metrics import Max, Mean, Metrics, Min
from roll.rollout.episodes import EpisodeGroup


def episode_metrics(groups: Sequence[EpisodeGroup]) -> Metrics:
    """Metrics of all episodes and by tag: rollout, episode, env, turn, agent, shares of time."""
    everything = [episode for group in groups for episode in group.members]
    metrics: Metrics = {}
    scores = [episode.reward for episode in everything if not episode.failed]
    lengths = [sum(len(call.response_ids) for call in episode.calls) for episode in everything]
    prompts = [len(episode.calls[0].new_ids) if episode.calls else 0 for episode in everything]
    for name, values in (("score", scores), ("response_length", lengths), ("prompt_length", prompts)):
        if values:
            metrics[f"rollout/{name}/mean"] = Mean(float(sum(values)), len(values))
            metrics[f"rollout/{name}/max"] = Max(float(max(values)))
            metrics[f"rollout/{name}/min"] = Min(float(min(values)))
    metrics |= _outcomes(everything, "episode") | _tokens_and_times(everything)
    by_tag: dict[str, list[Episode]] = defaultdict(list)
    for episode in everything:
        by_tag[episode.task.tag].append(episode)
    for tag, members in by_tag.items():
        metrics |= _outcomes(members, f"episode/{tag}") | _environment(members, f"env/{tag}")
    sound = ([one.reward for one in group.members if not one.failed] for group in groups)
    spreads = [float(np.std(rewards)) for rewards in sound if rewards]
    metrics["group/spread"] = Mean(sum(spreads), len(spreads))
    metrics["group/dead"] = Mean(float(sum(spread == 0 for spread in spreads)), len(spreads))
    return metrics


def validation_metrics(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """``val/score/*`` over groups, and by tag ``val/<tag>/success``, ``val/<tag>/score/mean`` and so forth."""
    metrics = _scores(groups, "val/")
    for tag in dict.fromkeys(group.item.tag for group in groups):
        metrics |= _scores([group for group in groups if group.item.tag == tag], f"val/{tag}/")
    return metrics


def _scores(groups: Sequence[EpisodeGroup], prefix: str) -> dict[str, float]:
    episodes = [episode for group in groups for episode in group.members]
    scores = [group.mean_score() for group in groups]
    # Groups all of whose episodes failed have no score, and would make every mean NaN.
    known = [score for score in scores if not np.isnan(score)] or [float("nan")]
    turns = float(np.mean([len(episode.calls) for episode in episodes]))
    found = {
        f"{prefix}score/mean": float(np.mean(known)),
        f"{prefix}score/max": float(np.max(known)),
        f"{prefix}score/min": float(np.min(known)),
        f"{prefix}turns": turns,
    }
    successes = [episode.success for episode in episodes if episode.success is not None]
    if successes:
        found[f"{prefix}success"] = float(np.mean(successes))
    failed = sum(episode.failed for episode in episodes)
    return found | {f"{prefix}failed": failed / len(episodes)}


def _outcomes(episodes: Sequence[Episode], prefix: str) -> Metrics:
    number = len(episodes)
    scores = [episode.reward for episode in episodes if not episode.failed]
    successes = [episode.success for episode in episodes if episode.success is not None]
    turns = sum(len(episode.calls) for episode in episodes)
    metrics: Metrics = {
        f"{prefix}/return": Mean(float(sum(scores)), len(scores)),
        f"{prefix}/turns": Mean(float(turns), number),
        f"{prefix}/seconds": Mean(sum(episode.seconds.total for episode in episodes), number),
    }
    if successes:
        metrics[f"{prefix}/success"] = Mean(float(sum(successes)), len(successes))
    counts = Counter(episode.outcome for episode in episodes)
    return metrics | {f"{prefix}/outcome/{name}": Mean(float(count), number) for name, count in counts.items()}


def _environment(episodes: Sequence[Episode], prefix: str) -> Metrics:
    """Numbers of whole episodes as means over the episodes that have them, what is counted over turns (calls of tools)
    as means over turns, and success under the name that ROLL's dashboards use."""
    numbers: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, value in episode.metrics.items():
            numbers[name].append(value / max(1, len(episode.calls)) if name in episode.over_turns else value)
        if episode.success is not None:
            numbers["success"].append(float(episode.success))
        numbers["num_actions"].append(float(len(episode.calls)))
    return {f"{prefix}/{name}": Mean(sum(values), len(values)) for name, values in numbers.items()}


def _tokens_and_times(episodes: Sequence[Episode]) -> Metrics:
    """Tokens of turns; and shares of the episodes' time: responses (queue and generation), environments, the rest."""
    calls = [call for episode in episodes for call in episode.calls]
    counts = [episode.conversations.counts for episode in episodes]
    answers = [call for call in calls if call.parent is not None]
    number = len(episodes)
    total = sum(episode.seconds.total for episode in episodes) or 1.0
    model = sum(episode.seconds.model for episode in episodes)
    environment = sum(episode.seconds.environment for episode in episodes)
    return {
        "turn/sampled_tokens": Mean(float(sum(len(call.response_ids) for call in calls)), len(calls)),
        "turn/observation_tokens": Mean(float(sum(len(call.new_ids) for call in answers)), len(answers)),
        "turn/cut": Mean(float(sum(call.finish_reason == "length" for call in calls)), len(calls)),
        "agent/breaks": Mean(float(sum(one.breaks for one in counts)), number),
        "agent/kept_thoughts": Mean(float(sum(one.kept_thoughts for one in counts)), number),
        "agent/foreign_responses": Mean(float(sum(one.foreign_responses for one in counts)), number),
        "time/share/model": Mean(model, total),
        "time/share/env": Mean(environment, total),
        "time/share/wait": Mean(max(0.0, total - model - environment), total),
    }


def token_checks(batch: DataProto, groups: Sequence[EpisodeGroup]) -> Metrics:
    """Compare the trained tokens with those that the engines sampled: trained tokens with another id
    (``agent/retokenized_tokens``), sampled tokens that are not trained exactly once
    (``agent/trained_once_violations``); both are 0 unless something is wrong."""
    tensors = batch.batch
    mask, ids = tensors["response_mask"].numpy(), tensors["input_ids"].numpy()
    turns, number = tensors["turn_ids"].numpy(), tensors["episode_ids"].numpy()
    episodes = [episode for group in groups for episode in group.members]
    trained: Counter[tuple[int, int]] = Counter()
    changed = 0
    for row in range(len(batch)):
        calls = episodes[int(number[row])].conversations.calls
        own, sampled = turns[row][mask[row]], ids[row][mask[row]]
        for turn in np.unique(own).tolist():
            expected = calls[turn].response_ids
            here = sampled[own == turn].tolist()
            trained[int(number[row]), turn] += 1
            changed += sum(one != other for one, other in zip(here, expected, strict=False))
            # zip stops at the end of the shorter list: missing and surplus tokens count as well.
            changed += abs(len(here) - len(expected))
    # A turn that is never trained counts like one that is trained twice.
    twice = sum(
        abs(trained[index, call.index] - 1) * len(call.response_ids)
        for index, episode in enumerate(episodes)
        for call in episode.calls
    )
    return {
        "agent/retokenized_tokens": Mean(float(changed)),
        "agent/trained_once_violations": Mean(float(twice)),
        "agent/samples_per_episode": Mean(float(len(batch)), len(episodes)),
    }


def episode_table(
    groups: Sequence[EpisodeGroup], templates: dict[str, ChatTemplate], dump_dir: Path | None = None
) -> list[dict[str, Any]]:
    """One row per episode, with every turn: new messages, ids of prompt and response, the response's text, reward,
    versions. Where samples are dumped, the images of observations are written as well."""
    if dump_dir is not None:
        episodes = (episode for group in groups for episode in group.members)
        write_images(dump_dir / "images", (image for one in episodes for call in one.calls for image in call.images))
    rows = []
    for group, member, episode in ((one, *numbered) for one in groups for numbered in enumerate(one.members)):
        calls, template, seconds = episode.calls, templates[group.item.tag], episode.seconds
        # File names in the order in which they were shown.
        images = list(dict.fromkeys(image.file_name for call in calls for image in call.images))
        prompt = [content_text(one.get("content", "")) for call in calls[:1] for one in call.messages]
        row = {
            "group": group.order,
            "member": member,
            "tag": group.item.tag,
            "seed": group.item.seed,
            "prompt_id": f"{group.order}",
            "prompt": "\n".join(prompt),
            "response": "\n".join(template.decode(call.response_ids) for call in calls),
            "score": episode.reward,
            "success": episode.success,
            "outcome": episode.outcome,
            "error": episode.error,
            "seconds": {"total": seconds.total, "model": seconds.model, "environment": seconds.environment},
            "metrics": episode.metrics,
            "turns": [_turn(call, template) for call in calls],
        }
        rows.append(row | ({"images": images} if images else {}))
    return rows


def _turn(call: Call, template: ChatTemplate) -> dict[str, Any]:
    return {
        "parent": call.parent,
        "role": call.role,
        "prompt": template.decode(call.new_ids),
        "response": template.decode(call.response_ids),
        "prompt_ids": list(call.new_ids),
        "response_ids": list(call.response_ids),
        "log_probs": [round(value, 6) for value in call.log_probs],
        "versions": list(call.versions),
        "finish_reason": call.finish_reason,
        "reward": call.reward,
        "state": call.state,
        **({"images": [image.file_name for image in call.images]} if call.images else {}),
    }
