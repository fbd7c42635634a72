"""Diagnosis of a run: rules on its metrics, samples and times, which report what they find.

A rule stays silent unless its evidence is there.  The findings come in the order of :data:`RULES`, which is that of
causes: what goes into the model, what the reward makes of what comes out, whether engine and trainer agree, what the
update does, what becomes of the policy, and the machine.  So a consequence comes after its cause.  The
thresholds are those that separate the seeded pathologies of ``benchmarks/pathologies`` from healthy runs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median

from roll.report.diagnosis_inputs import (
    end_token,
    mismatch,
    no_spread,
    repeated_prompts,
    reward_constant,
    reward_fails,
    sampling_mismatch,
    stale,
    template,
    tokeniser,
)
from roll.report.evidence import LEAST_STEPS, Facts, Finding, Sample, correlation, ends, quoted, typical_of
from roll.report.run_files import Run

Rule = Callable[[Facts], Finding | None]


def diagnose(run: Run) -> list[Finding]:
    """The findings of all rules, the most probable first cause at the front; none for a healthy run."""
    facts = Facts(run)
    return [finding for rule in RULES if (finding := rule(facts)) is not None]


# What the update does


def learning_rate_high(facts: Facts) -> Finding | None:
    for family, loss in (("actor", "actor/loss"), ("sft_train", "sft_train/loss")):
        values = facts.values(loss)
        if len(values) >= LEAST_STEPS and not facts.values("critic/score/mean"):
            first, last = values[0], ends(values)[1]
            if last > first + max(0.5, 0.5 * abs(first)):
                return _rate_finding(facts, family, [f"{loss} rises from {first:.3g} to {last:.3g}"])
    scores = facts.values("critic/score/mean")
    if len(scores) < 2 * LEAST_STEPS:
        return None
    best, last = max(scores[: max(2, len(scores) // 3)]), ends(scores)[1]
    entropy = facts.values("actor/entropy")
    kl = facts.values("actor/kl_loss") or facts.values("critic/kl")
    leaps = bool(kl) and max(kl) > 1.0
    scrambled = len(entropy) > 2 and (max(entropy[1:]) > entropy[0] + 1.0 or min(entropy[1:]) < 0.02 * entropy[0])
    lost = last < 0.3 * best and best > 0
    if not (lost and (leaps or scrambled)):
        return None
    seen = [f"score falls from {best:.3g} to {last:.3g}"]
    if kl:
        seen.append(f"KL to the reference reaches {max(kl):.3g}")
    if entropy:
        seen.append(f"entropy goes from {entropy[0]:.3g} to {entropy[-1]:.3g} nats a token")
    return _rate_finding(facts, "actor", seen)


def _rate_finding(facts: Facts, family: str, evidence: Sequence[str]) -> Finding:
    norms, rates = facts.values(f"{family}/grad_norm"), facts.values(f"{family}/lr")
    seen = [*evidence]
    if norms:
        seen.append(f"gradient norm {norms[0]:.3g} at first, {max(norms):.3g} at most")
    if rates:
        seen.append(f"learning rate up to {max(rates):.3g}")
    return Finding(
        "learning_rate_high",
        "The updates destroy the model: the learning rate is too high",
        tuple(seen),
        "lower the learning rate by ten, warm up for some steps, keep max_grad_norm at 1",
    )


def ratio_drift(facts: Facts) -> Finding | None:
    divergence, clipped = facts.values("actor/approxkl"), facts.values("actor/clipfrac")
    if len(divergence) < LEAST_STEPS:
        return None
    typical = median(divergence)
    if typical < 0.03 and not (clipped and median(clipped) > 0.25):
        return None
    highest = max(facts.values("actor/ratio_max") or [1.0])
    return Finding(
        "ratio_drift",
        "The policy runs far away from its samples within a step",
        (
            f"approxkl {typical:.3g} (median; below 0.02 is usual), ratio up to {highest:.3g}",
            f"clipped tokens {typical_of(facts, 'actor/clipfrac')}; ppo_epochs {facts.setting('ppo_epochs', 1)}",
        ),
        "fewer passes over a batch (ppo_epochs), larger mini-batches, a lower learning rate",
    )


def learning_rate_low(facts: Facts) -> Finding | None:
    family = "sft_train" if facts.values("sft_train/loss") else "actor"
    rates, norms = facts.values(f"{family}/lr"), facts.values(f"{family}/grad_norm")
    if len(rates) < 2 * LEAST_STEPS or not norms or median(norms) <= 0:
        return None
    kl = facts.values("actor/kl_loss")
    still = len(kl) > 1 and max(kl[1:]) < 1e-7
    if not (max(rates) < 1e-9 or (still and max(rates) < 1e-6)):
        return None
    moved = (f"KL to the reference stays below {max(kl):.1g}",) if kl else ()
    return Finding(
        "learning_rate_low",
        "The policy does not move: the learning rate is too low",
        (f"learning rate {max(rates):.3g} at most; gradient norm {median(norms):.3g}", *moved),
        "raise the learning rate (1e-6 to 1e-5 for full weights of large models, more for adapters and small ones), "
        "and check schedule and warm-up",
    )


# What becomes of the policy


def entropy_collapse(facts: Facts) -> Finding | None:
    """Certain, but not right: a policy that has learned its task becomes certain as well.

    Either the samples of a prompt become one text that is not the best, and the entropy has fallen by more than half;
    or other prompts get the same text, which says it by itself, whatever the entropy of the model was to begin with.
    """
    entropy, scores = facts.values("actor/entropy"), facts.values("critic/score/mean")
    if len(entropy) < 2 * LEAST_STEPS or not facts.groups or not scores:
        return None
    first, last = entropy[0], ends(entropy)[1]
    late = [members for members in facts.groups if members[0].step >= facts.groups[-1][0].step - len(entropy) // 4]
    alike = [members for members in late if len({sample.text for sample in members}) <= 1 + len(members) // 5]
    top = max((sample.score for sample in facts.sampled if sample.score is not None), default=0.0)
    wrong = [usual for usual in map(_usual, alike) if (usual.score or 0.0) < 0.9 * top]
    early = [members for members in facts.groups if members[0].step <= facts.groups[0][0].step + len(entropy) // 4]
    elsewhere = _said_elsewhere(late)
    certain = last <= 0.4 * first and len(alike) >= 0.4 * len(late) > 0
    one_text = last < first and elsewhere >= max(0.4, 2 * _said_elsewhere(early))
    if not one_text and not (certain and len(wrong) >= 0.4 * len(alike)):
        return None
    shown = wrong[-1] if wrong else (alike or late)[-1][0]
    return Finding(
        "entropy_collapse",
        "The policy has become certain before it has become right",
        (
            f"entropy falls from {first:.3g} to {last:.3g} nats a token",
            f"score {scores[0]:.3g}, then {ends(scores)[1]:.3g}",
            f"in {len(alike)} of {len(late)} late groups nearly all samples are the same; {len(wrong)} of these have "
            f"less than the best score ({top:.3g}), such as {quoted(shown.text)}",
            f"{elsewhere:.0%} of the late responses are said in answer to another prompt, too",
        ),
        "a baseline (estimator), an entropy bonus (entropy_loss_coef, target_entropy), a higher upper clip "
        "(clip_high), KL to the reference, a lower learning rate; and see whether one text earns the reward",
    )


def _usual(members: list[Sample]) -> Sample:
    text = Counter(sample.text for sample in members).most_common(1)[0][0]
    return next(sample for sample in members if sample.text == text)


def _said_elsewhere(groups: list[list[Sample]]) -> float:
    """The share of responses that another prompt got as well; of more than a few tokens, since short ones may be."""
    prompts: dict[str, set[str]] = defaultdict(set)
    members = [sample for group in groups for sample in group if sample.length >= 8]
    for sample in members:
        prompts[sample.text].add(str(sample.prompt.get("text")))
    return sum(len(prompts[sample.text]) > 1 for sample in members) / max(1, len(members))


def length_hacking(facts: Facts) -> Finding | None:
    lengths = facts.values("token/response_length/mean")
    if len(lengths) < 2 * LEAST_STEPS or not facts.groups:
        return None
    first, last = ends(lengths)
    # Around the means of each group: prompts differ in length and difficulty, which says nothing about the reward.
    points: list[tuple[float, float]] = []
    for members in facts.groups:
        known = [(float(sample.length), float(sample.score)) for sample in members if sample.score is not None]
        if len(known) >= 2:
            length, score = fmean(x for x, _ in known), fmean(y for _, y in known)
            points += [(x - length, y - score) for x, y in known]
    related = correlation(points)
    change = last / max(first, 1e-9) - 1
    grows = related > 0.7 and change > 0.15
    shrinks = related < -0.7 and change < -0.3
    if not (grows or shrinks):
        return None
    return Finding(
        "length_hacking",
        "The policy earns its reward by length",
        (
            f"within groups, score and length correlate with {related:.2f}",
            f"mean response length goes from {first:.1f} to {last:.1f} tokens",
        ),
        "take length out of the reward (judges prefer long responses), use an aggregation without length bias "
        "(loss_agg_mode), or punish over-long responses (overlong_buffer)",
    )


def truncation(facts: Facts) -> Finding | None:
    values = facts.values("token/total_response_length/clip")
    if len(values) < LEAST_STEPS or fmean(values) < 0.25:
        return None
    evidence = [f"{fmean(values):.0%} of the responses end at the length limit ({ends(values)[1]:.0%} at last)"]
    limit = facts.setting("response_length")
    if limit:
        evidence.append(f"response_length {limit}")
    cut = [s.text for s in facts.sampled if s.fields.get("finish_reason") == "length"]
    if cut:
        evidence.append(f"one ends so: {quoted(cut[-1][-60:])}")
    return Finding(
        "truncation",
        "Responses are cut off at the length limit",
        tuple(evidence),
        "raise response_length (sequence_length in agentic runs), or make the responses shorter",
    )


# The machine


def dead_experts(facts: Facts) -> Finding | None:
    for family in ("actor", "sft_train"):
        dead = facts.values(f"{family}/moe_dead_experts")
        if len(dead) >= LEAST_STEPS and median(dead) >= 1:
            load = typical_of(facts, f"{family}/moe_load_max_over_mean")
            return Finding(
                "dead_experts",
                "Experts get no tokens",
                (
                    f"{median(dead):.0f} experts without a token in a typical step",
                    f"busiest expert over the mean: {load}",
                ),
                "train the balance loss (moe_aux_loss_coef), lower the learning rate of the router or freeze it, and "
                "check that the checkpoint's router was loaded",
            )
    return None


def straggler(facts: Facts) -> Finding | None:
    """A rank that the others wait for. Ranks that compute together wait for one another inside their calls, and the one
    that begins late has the *shorter* call: their process times decide (with ``memory_steps``), the length of calls
    only where no process time was measured."""
    step = median(facts.values("time/step_total") or [0.0])
    found: list[tuple[float, Finding]] = []
    measured: set[str] = set()
    seconds: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(dict)
    for name, values in facts.matching(r"time/[^/]+/.+/rank_\d+").items():
        _, phase, rest = name.split("/", 2)
        role, _, rank = rest.rpartition("/rank_")
        seconds[phase, role][int(rank)] = values
    remedy = "look at that host and process: other jobs, threads, preparation of data, its log and timeline"
    for (phase, role), ranks in seconds.items():
        measured.add(role)
        rows = [dict(zip(ranks, row, strict=True)) for row in zip(*ranks.values(), strict=False)][1:]
        seen = f"worked or was held up in {phase} for {{own:.2f}} s"
        found += _slow_rank(role, rows, 0.1 * step, seen, "steps that were measured", remedy)
    remedy = "look at that host and device (clocks, other jobs, storage) and at the rank's log and timeline"
    for role, ranks in facts.busy.items():
        steps = min((len(times) for times in ranks.values()), default=0)
        rows = [{rank: times[number] for rank, times in ranks.items()} for number in range(1, steps)]
        rows = [row for row in rows if max(row.values()) > 0.02]
        if role not in measured:
            found += _slow_rank(role, rows, 0.2 * step, "busy {own:.2f} s a step", f"steps of {step:.2f} s", remedy)
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _slow_rank(
    role: str, rows: Sequence[Mapping[int, float]], least: float, seen: str, steps: str, remedy: str
) -> Iterator[tuple[float, Finding]]:
    """At most one finding, with the seconds that are lost: a rank that is the slowest in four of five ``rows`` (seconds
    by rank, one row a step) and takes twice as long as the others, and ``least`` seconds longer."""
    if len(rows) < LEAST_STEPS or len(rows[0]) < 2:
        return
    rank, times = Counter(max(row, key=row.__getitem__) for row in rows).most_common(1)[0]
    own = median(row[rank] for row in rows)
    others = median(median(value for other, value in row.items() if other != rank) for row in rows)
    if times >= 0.8 * len(rows) and own > 2 * others and own - others > least:
        evidence = (
            f"{seen.format(own=own)}, the other ranks {others:.2f} s (medians)",
            f"it is the slowest in {times} of {len(rows)} {steps}",
        )
        title = f"Rank {rank} of {role} is slower than the others, which wait for it"
        yield own - others, Finding("straggler", title, evidence, remedy)


def memory_growth(facts: Facts) -> Finding | None:
    worst: tuple[float, str, list[float]] | None = None
    for name, values in facts.matching(r"memory/[^/]+/.+").items():
        if len(values) < 5:
            continue
        settled = values[1:]  # the first step allocates what stays
        rises = sum(b > a for a, b in pairwise(settled))
        growth = settled[-1] - settled[0]
        if rises >= 0.8 * (len(settled) - 1) and growth > 0.25 * settled[0] and growth > 100e6:
            worst = max(worst, (growth, name, settled)) if worst else (growth, name, settled)
    if worst is None:
        return None
    _, name, values = worst
    role = name.split("/", 2)[2]
    return Finding(
        "memory_growth",
        f"The memory of {role} grows from step to step",
        (
            f"{name}: {values[0] / 1e6:.0f} MB, then {values[-1] / 1e6:.0f} MB {len(values) - 1} measurements later",
            f"it rose in {sum(b > a for a, b in pairwise(values))} of {len(values) - 1} intervals",
        ),
        "something keeps what it should let go: caches and lists in rewards and environments of your own first, then "
        "metrics or tensors that hold on to a graph",
    )


def ended_early(facts: Facts) -> Finding | None:
    if facts.outcome in ("", "finished") or facts.outcome.startswith("Interrupted"):
        return None
    return Finding(
        "ended_early",
        "The run ended with an error",
        (quoted(facts.outcome, 600),),
        "what the message says; run.log and the workers' logs have the tracebacks",
    )


RULES: tuple[Rule, ...] = (
    template,
    tokeniser,
    end_token,
    reward_fails,
    repeated_prompts,
    reward_constant,
    no_spread,
    mismatch,
    sampling_mismatch,
    dead_experts,
    stale,
    ratio_drift,
    learning_rate_high,
    learning_rate_low,
    length_hacking,
    entropy_collapse,
    truncation,
    straggler,
    memory_growth,
    ended_early,
)
