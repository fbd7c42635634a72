"""Rules on what comes before an update: what goes into the model, what the reward makes of what comes out, and whether
engine and trainer agree. See :mod:`roll.report.diagnosis`, which asks them."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from statistics import fmean, median

from roll.methods.policy_plan import learns_from_scores
from roll.report.evidence import LEAST_STEPS, MARKER, Facts, Finding, quoted, typical_of

# What goes into the model


def template(facts: Facts) -> Finding | None:
    texts = [text for _, text, _ in facts.prompts]
    if not texts:
        return None
    seen: Counter[str] = Counter()
    example: dict[str, str] = {}
    for text in texts:
        for kind in _template_mistakes(text, facts):
            seen[kind] += 1
            example.setdefault(kind, text)
    wrong = [(kind, count) for kind, count in seen.most_common() if count > 0.5 * len(texts)]
    if not wrong:
        return None
    evidence = [f"{count} of {len(texts)} prompts {kind}: {quoted(example[kind])}" for kind, count in wrong]
    return Finding(
        "template",
        "The prompts are not rendered as the model knows them",
        tuple(evidence),
        "look at a prompt in the report or with roll inspect-data; check template, global_template and the column that "
        "holds the messages, and render the chat template once, with its generation prompt",
    )


def _template_mistakes(text: str, facts: Facts) -> list[str]:
    found = []
    marks = MARKER.findall(text)
    bare = text.rstrip()
    if len(marks) > 1 and marks[0] == marks[1] and text.lstrip().startswith(marks[0] * 2):
        found.append("begin with the same special token twice")
    starts = [mark for mark in ("<|im_start|>", "<start_of_turn>", "<|start_header_id|>") if mark in marks]
    if starts:
        turns = text.split(starts[0])
        headers = [turn.strip().split("\n")[0].split("<")[0].strip() for turn in turns[1:]]
        if any(first and first == second for first, second in pairwise(headers)) and any(
            len(turn.strip()) == len(header) for turn, header in zip(turns[1:-1], headers, strict=False)
        ):
            found.append("open a turn inside a turn: the text was rendered before")
        if any(bare.endswith(mark) for mark in facts.end_markers) or headers[-1:] in (["user"], ["system"]):
            found.append("end without the header of the assistant's turn")
    if "{'role':" in text or '{"role":' in text:
        found.append("hold a list of messages as text")
    if "{{" in text and "}}" in text and ("{%" in text or "message" in text):
        found.append("hold the source of a template")
    return found


def tokeniser(facts: Facts) -> Finding | None:
    changed = [prompt for _, _, prompt in facts.prompts if prompt.get("decoded") is not None]
    evidence = []
    if facts.prompts and len(changed) > 0.05 * len(facts.prompts):
        evidence.append(f"{len(changed)} of {len(facts.prompts)} prompts do not survive the tokenizer")
        written, read = str(changed[0].get("text", "")), str(changed[0]["decoded"])
        letters = enumerate(zip(written, read, strict=False))
        place = next((i for i, (a, b) in letters if a != b), min(len(written), len(read)))
        around = slice(max(0, place - 20), place + 30)
        evidence.append(f"written: {written[around]!r}; read back: {read[around]!r}")
    changed_ids = sum(facts.values("agent/retokenized_tokens"))
    if changed_ids:
        evidence.append(f"{changed_ids:.0f} trained tokens have another id than the one that was sampled")
    if not evidence:
        return None
    return Finding(
        "tokeniser",
        "Text is lost or changed between the data, the tokenizer and the model",
        tuple(evidence),
        "use the tokenizer that belongs to the model; clean characters that it does not know from the data; train on "
        "the ids that were sampled, never on text tokenised again",
    )


def end_token(facts: Facts) -> Finding | None:
    limited = [sample for sample in facts.sampled if sample.fields.get("finish_reason") == "length" and sample.pieces]
    if len(limited) < 0.2 * max(1, len(facts.sampled)) or not facts.end_markers:
        return None
    passed = [sample for sample in limited if any(piece.strip() in facts.end_markers for piece in sample.pieces[:-1])]
    if len(passed) < 0.5 * len(limited):
        return None
    marks = Counter(piece.strip() for s in passed for piece in s.pieces if piece.strip() in facts.end_markers)
    return Finding(
        "end_token",
        "The engine does not stop at the token with which the model ends its turn",
        (
            f"{len(passed)} of {len(limited)} responses that ran to the length limit had said "
            f"{marks.most_common(1)[0][0]} before",
            f"for example: {quoted(passed[0].text)}",
        ),
        "set eos_token of the tokenizer and eos_token_id of generation_config.json to the token that closes a turn, or "
        "name it in generating_args.stop_token_ids",
    )


def repeated_prompts(facts: Facts) -> Finding | None:
    by_step: dict[int, list[str]] = defaultdict(list)
    for step, text, _ in facts.prompts:
        by_step[step].append(text)
    counted = [texts for texts in by_step.values() if len(texts) > 1]
    if not counted or not facts.sampled:
        return None
    repeated = fmean(1 - len(set(texts)) / len(texts) for texts in counted)
    everything = [text for texts in counted for text in texts]
    if repeated < 0.25:
        return None
    text, count = Counter(everything).most_common(1)[0]
    return Finding(
        "repeated_prompts",
        "The same prompts come again and again",
        (
            f"of the prompts of a step, {repeated:.0%} repeat another one of the same step",
            f"{len(set(everything))} different prompts among {len(everything)}; {count} times: {quoted(text)}",
        ),
        "remove duplicates from the data (roll inspect-data counts them), and check that the file is the whole set",
    )


# What the reward makes of it


def reward_fails(facts: Facts) -> Finding | None:
    rates = facts.matching(r"reward/.+/error_rate")
    bad = {name: fmean(values) for name, values in rates.items() if fmean(values) > 0.02}
    unscored = "no sample could be scored" in facts.outcome
    if not bad and not unscored:
        return None
    evidence = [f"the run ended with {quoted(facts.outcome, 400)}"] if unscored else []
    evidence += [f"{name} is {rate:.1%} on average" for name, rate in bad.items()]
    errors = Counter(str(sample.fields["error"]) for sample in facts.sampled if sample.fields.get("error"))
    evidence += [f"{count} times: {quoted(text)}" for text, count in errors.most_common(2)]
    return Finding(
        "reward_fails",
        "The reward fails",
        tuple(evidence),
        "mend what the messages say (the worker's log has the traceback); samples without a reward teach nothing",
    )


def reward_constant(facts: Facts) -> Finding | None:
    if len(facts.run.steps) < LEAST_STEPS or not learns_from_scores(facts.run.config):
        return None
    low, high = facts.values("critic/score/min"), facts.values("critic/score/max")
    same = [a for a, b in zip(low, high, strict=False) if a == b]
    # From the start: scores that become equal later are what something else has done.
    if len(low) < LEAST_STEPS or len(same) < 0.8 * len(low) or low[0] != high[0]:
        return None
    # Of what was cut off nobody knows the score that it would have had: truncation is a cause of its own.
    if sum(sample.fields.get("finish_reason") == "length" for sample in facts.sampled) > 0.9 * max(
        1, len(facts.sampled)
    ):
        return None
    value = median(same)
    what = {0.0: "no response is ever right", 1.0: "every response is right"}.get(value, "nothing tells them apart")
    evidence = [f"all samples have the same score in {len(same)} of {len(low)} steps: {value:g}, so {what}"]
    if facts.sampled:
        one = facts.sampled[-1]
        evidence.append(f"ground truth {quoted(str(one.prompt.get('truth')))} and response {quoted(one.text)}")
    return Finding(
        "reward_constant",
        "The reward is always the same value",
        tuple(evidence),
        "compare a response with its ground truth in the report: is the answer where the rule looks for it, and is the "
        "ground truth what the rule expects? If both are right, the prompts are too hard or too easy",
    )


def no_spread(facts: Facts) -> Finding | None:
    groups = [group for group in ([s.score for s in members] for members in facts.groups) if None not in group]
    if len(groups) < 8 or len(facts.run.steps) < LEAST_STEPS or not learns_from_scores(facts.run.config):
        return None
    flat = [group for group in groups if max(group) - min(group) < 1e-9]  # type: ignore[type-var,operator]
    if len(flat) < 0.9 * len(groups):
        return None
    values = Counter(round(float(group[0] or 0.0), 4) for group in flat)
    if len(values) < 2:
        return None  # a constant reward, which has a rule of its own
    return Finding(
        "no_spread",
        "The samples of a group all get the same reward",
        (
            f"{len(flat)} of {len(groups)} groups have no spread; their scores: "
            + ", ".join(f"{value:g} ({count} groups)" for value, count in values.most_common(4)),
            f"mean gradient norm {fmean(facts.values('actor/grad_norm') or [0.0]):.3g}",
        ),
        "a baseline over the group leaves nothing: choose prompts that are neither too easy nor too hard "
        "(query_filter_config, difficulty), sample more and hotter, or let the reward look at the response",
    )


# Whether engine and trainer agree


def mismatch(facts: Facts) -> Finding | None:
    """A difference that updates bring; what is there from the start is another cause."""
    values = facts.values("actor/train_infer_log_diff_abs_mean")
    if len(values) < LEAST_STEPS or _lag(facts) > 0:
        return None
    first, later = values[0], median(values[1:])
    if later < 0.02 or later < 10 * first:
        return None
    return Finding(
        "mismatch_after_update",
        "The engine does not compute with the weights that were sent to it",
        (
            f"mean |log-prob of trainer - engine|: {first:.2g} in the first step, {later:.2g} (median) after updates",
            f"correlation of the two {typical_of(facts, 'actor/train_infer_pearson')}",
            *_first_wrong_token(facts),
        ),
        "check weight_sync.verify and the engine's log of the update: tied, quantised or renamed tensors, adapters "
        "that are merged twice, a prefix cache that outlives the update",
    )


def sampling_mismatch(facts: Facts) -> Finding | None:
    values = facts.values("actor/train_infer_log_diff_abs_mean")
    if not values or _lag(facts) > 0 or values[0] < 0.03:
        return None
    # Rounding in bf16 is 0.05 in small models and falls on both sides, so that its mean is a few percent of that; what
    # samples from another distribution gives its own tokens more than the trainer does.
    excess = facts.values("actor/train_infer_kl_k1")
    if excess and abs(excess[0]) < 0.25 * values[0]:
        return None
    arguments = facts.setting("actor_infer.generating_args", {}) or {}
    shown = ", ".join(f"{key} {arguments[key]}" for key in ("temperature", "top_p", "top_k") if key in arguments)
    return Finding(
        "engine_mismatch",
        "Engine and trainer disagree about the log-probs from the first step on",
        (
            f"mean |log-prob of trainer - engine| is {values[0]:.2g} before any update (float32: 1e-6, bf16: to 0.05)",
            f"sampling: {shown or 'not in the configuration'}",
            *_first_wrong_token(facts),
        ),
        "sample from the whole distribution (top_p 1, top_k 0), compare dtypes and templates of both sides, or correct "
        "for it with train_infer_correction",
    )


def stale(facts: Facts) -> Finding | None:
    lag = _lag(facts)
    if lag < 2.0:
        return None
    return Finding(
        "stale_samples",
        "The samples come from weights that are several updates old",
        (
            f"mean lag {lag:.1f} versions, at most {max(facts.values('scheduler/version_lag/max') or [lag]):.0f}",
            f"share of samples with tokens of older weights {typical_of(facts, 'scheduler/off_policy_ratio')}",
            f"async_generation_ratio {facts.setting('async_generation_ratio')}",
        ),
        "lower async_generation_ratio, give the engines more devices, or correct with train_infer_correction",
    )


def _lag(facts: Facts) -> float:
    values = facts.values("scheduler/version_lag/mean")
    # The first steps have nothing old to train on yet.
    return fmean(values[len(values) // 2 :]) if values else 0.0


def _first_wrong_token(facts: Facts) -> list[str]:
    for sample in reversed(facts.sampled):
        for place, difference in enumerate(sample.fields.get("mismatch", ())):
            if abs(difference) > 5e3:
                piece = sample.pieces[place] if place < len(sample.pieces) else ""
                return [f"step {sample.step}: first at token {place} ({piece!r}), by {difference / 1e5:.3g}"]
    return []
