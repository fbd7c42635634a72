"""Teachers of on-policy distillation: their keys, what a run starts for them, and the checks. Torch-free.

The student samples; at every token that it sampled, or for every distribution that it sampled from, a teacher says what
it would have done. Arithmetic is in :mod:`roll.methods.opd`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, Literal

from roll.config.checks.base import Checks
from roll.config.losses import KD_OBJECTIVES, TOPK_TAILS, DivergenceConfig
from roll.config.reading.errors import closest
from roll.config.reading.fields import rules, setting
from roll.config.roles import GeneratingArguments, ReferenceWorkerConfig
from roll.config.run import PolicyRunConfig
from roll.methods.teachers import TEACHER, check_temperature

# Keys of reward shaping, from which pure distillation learns nothing.
REWARD_KEYS = (
    *("norm_mean_type", "norm_std_type", "reward_clip", "overlong_buffer_length"),
    "add_token_level_kl",
)
OPD_FORMS = ("advantage", "topk", "full_vocabulary")


def parse_opd_form(value: object) -> Any:
    """One of :data:`OPD_FORMS`; sampled estimators as losses are refused with the reason."""
    name = str(value)
    if name.removesuffix("_loss") in ("k1", "kl", "k3", "low_var_kl"):
        expected = "zero" if "3" not in name and "low" not in name else "that of the forward KL, not of the reverse"
        raise ValueError(
            f"must be one of {', '.join(OPD_FORMS)}: {name} differentiated on samples of the student has "
            f"the expected gradient {expected}; as an advantage, without gradient, k1 gives the reverse KL's"
        )
    if name not in OPD_FORMS:
        raise ValueError(f"must be one of {', '.join(OPD_FORMS)}")
    return name


@dataclass(frozen=True)
class TeacherConfig(ReferenceWorkerConfig):
    """A teacher's section."""

    opd_kl_coef: float | None = setting(None, ge=0)
    """On-policy distillation: weight of this teacher's KL."""


@dataclass(frozen=True)
class TaughtConfig(PolicyRunConfig):
    """Keys of on-policy distillation, at the top."""

    teacher: dict[str, TeacherConfig] = field(default_factory=dict, metadata=rules(or_one=True))
    """On-policy distillation: a teacher's section, or several by name. ``tag_included`` routes rows to each (empty:
    all); a row may have several teachers, whose terms add up."""
    is_pure_opd: bool = False
    """On-policy distillation alone: rewards are measured and not learnt from. The launcher
    ``start_onpolicy_distill_pipeline.py`` sets it."""
    use_opd: bool = False
    """On-policy distillation in addition to the rewards."""
    opd_kl_coef: float = setting(1.0, ge=0, read_if={"teacher": ()})
    """Weight of the divergence from a teacher whose section does not say it."""
    opd_form: str = setting("advantage", parse=parse_opd_form, read_if={"teacher": ()})
    """``advantage`` puts minus the log-ratio to the teacher (``kl_penalty``) into the advantage of each sampled token;
    ``topk`` and ``full_vocabulary`` differentiate a divergence of whole distributions at the student's own states."""
    opd_objective: str = setting("reverse_kl", choices=KD_OBJECTIVES, read_if={"opd_form": ("topk", "full_vocabulary")})
    """``opd_form: topk`` and ``full_vocabulary``: the divergence, as ``kd_objective`` of distillation."""
    opd_topk: int = setting(64, ge=1, read_if={"opd_form": ("topk",)})
    """``opd_form: topk``: the teacher's most probable tokens that are compared, the rest as one bucket."""
    opd_topk_tail: str = setting("bucket", choices=TOPK_TAILS, read_if={"opd_form": ("topk",)})
    """``opd_form: topk``: the rest of the vocabulary, as ``topk_tail`` of distillation."""
    opd_log_prob_floor: float | None = setting(None, lt=0, read_if={"opd_form": ("topk", "full_vocabulary")})
    """``opd_form: topk`` and ``full_vocabulary``: log-probs that are compared are this at least; null: as they are."""
    opd_clamp: float | None = setting(None, gt=0, read_if={"teacher": ()})
    """The divergence of a token from its teacher, or the log-ratio in its advantage, is held within +- this bound."""
    lmbda: float = setting(1.0, ge=0, le=1, read_if={"is_pure_opd": (True,)})
    """``opd_form: topk`` and ``full_vocabulary``: share of the prompts that the student answers; the others come with
    the responses of their rows, as in GKD."""
    opd_teacher_prompt: str | None = setting(None, read_if={"teacher": ()})
    """Text that teachers see in place of a prompt's last user message, with columns of the row, ``prompt`` (the message
    itself) and ``ground_truth`` in braces, such as ``"{prompt} The answer is {ground_truth}."`` null: what the student
    sees."""
    pure_opd_pipeline_type: Literal["rlvr", "agentic"] | None = None
    """On-policy distillation: the pipeline it runs on, which a file's other keys say as well."""


def is_taught(config: TaughtConfig) -> bool:
    """True if teachers take part in the run: on-policy distillation."""
    return bool(config.teacher) and (config.use_opd or config.is_pure_opd)


def taught_by_advantage(config: TaughtConfig) -> bool:
    """True if teachers act on the advantages of sampled tokens, by their log-ratio to the student's log-probs."""
    return is_taught(config) and config.opd_form == "advantage"


def teacher_role(name: str) -> str:
    """The role of a teacher."""
    return TEACHER if name == TEACHER else f"{TEACHER}.{name}"


def coefficients(config: TaughtConfig) -> dict[str, float]:
    """The weight of each teacher, by name."""
    return {
        name: config.opd_kl_coef if section.opd_kl_coef is None else section.opd_kl_coef
        for name, section in config.teacher.items()
    }


def opd_divergence(config: TaughtConfig) -> DivergenceConfig:
    """The divergence of ``opd_form: topk`` and ``full_vocabulary``."""
    count = config.opd_topk if config.opd_form == "topk" else 0
    objective: Any = config.opd_objective
    tail: Any = config.opd_topk_tail
    return DivergenceConfig(
        kd_objective=objective,
        logits_topk=count,
        topk_tail=tail,
        log_prob_floor=config.opd_log_prob_floor,
        divergence_clamp=config.opd_clamp,
    )


def check_opd(
    config: TaughtConfig,
    checks: Checks,
    arguments: GeneratingArguments,
    sampling_key: str,
    runs_as: str,
    tags: Sequence[str] = (),
) -> None:
    """The keys of on-policy distillation against one another.

    Args:
        arguments: how the student samples.
        sampling_key: their key.
        runs_as: what ``pure_opd_pipeline_type`` may say.
        tags: of the samples, where they are known.
    """
    if config.pure_opd_pipeline_type not in (None, runs_as):
        rule = (
            "is a file of the agentic pipeline: write pipeline: agentic and is_pure_opd: true, and start it with roll "
            "run or start_agentic_pipeline.py"
            if runs_as == "rlvr"
            else "is for files of prompts; this one has environments"
        )
        checks.add("pure_opd_pipeline_type", config.pure_opd_pipeline_type, rule, runs_as)
    wanted = "is_pure_opd" if config.is_pure_opd else "use_opd"
    if config.is_pure_opd and config.use_opd:
        checks.add("use_opd", True, "excludes is_pure_opd, which learns from no rewards; keep one of them", False)
    if (config.is_pure_opd or config.use_opd) and not config.teacher:
        example = "{model_args: {model_name_or_path: my/teacher}, device_mapping: [0]}"
        checks.missing(TEACHER, f"is needed by {wanted}: the section of a teacher, or several by name", example)
    if config.teacher and not (config.is_pure_opd or config.use_opd):
        checks.note(TEACHER, "not started: neither use_opd nor is_pure_opd is true")
    if not is_taught(config):
        return
    for name, section in config.teacher.items():
        key = f"{teacher_role(name)}.model_args.model_name_or_path"
        if section.model_args.model_name_or_path is None:
            checks.missing(key, "is needed: the teacher's model, a folder or a hub name", "my/teacher")
    if all(weight == 0 for weight in coefficients(config).values()) and not config.use_opd:
        checks.add("opd_kl_coef", 0.0, "leaves nothing to learn from: every teacher's weight is 0", 1.0)
    # Greedy sampling has no temperature: log-probs are then those of the plain distribution.
    temperature = arguments.temperature if arguments.do_sample else 1.0
    for name, section in config.teacher.items():
        whole, instead = config.opd_form == "full_vocabulary", "; opd_form full_vocabulary allows any"
        key = f"{sampling_key}.temperature"
        check_temperature(teacher_role(name), section, temperature, whole, key, instead, checks)
    _check_rows(config, checks, runs_as)
    if config.opd_form != "advantage":
        _check_routes(config, checks)
    _note_estimator(config, checks, arguments, sampling_key)
    if tags:
        _check_tags(config, checks, tags)


def unrouted(config: TaughtConfig, tags: Collection[str]) -> tuple[list[str], list[str]]:
    """Roles of teachers that see no row of these tags, and tags whose rows no teacher sees."""
    wanted = {teacher_role(name): section.tag_included for name, section in config.teacher.items()}
    idle = [role for role, own in wanted.items() if own and not set(own) & set(tags)]
    return idle, [tag for tag in tags if all(own and tag not in own for own in wanted.values())]


def _check_tags(config: TaughtConfig, checks: Checks, tags: Sequence[str]) -> None:
    """``tag_included`` of teachers against the tags that the training samples will have."""
    idle, untaught = unrouted(config, tags)
    for role in idle:
        own = config.teacher[role.partition(".")[2] or TEACHER].tag_included or []
        near = next((found for tag in own if (found := closest(tag, tags))), tags[0])
        rule = f"names no tag that is trained on: there are {', '.join(tags)}"
        checks.add(f"{role}.tag_included", own, rule, f"[{near}]")
    if untaught and not idle and config.is_pure_opd:
        checks.note(TEACHER, f"no teacher sees samples of {', '.join(untaught)}: nothing is learnt from them")


def _check_rows(config: TaughtConfig, checks: Checks, runs_as: str) -> None:
    """``lmbda`` and ``opd_teacher_prompt``, which need more than prompts from the rows."""
    if config.opd_teacher_prompt is not None:
        try:
            names = {name for _, name, _, _ in Formatter().parse(config.opd_teacher_prompt) if name is not None}
            wrong = None if all(name.isidentifier() for name in names) else "has braces that hold no column's name"
        except ValueError as error:
            names, wrong = set(), f"is no text with columns in braces: {error}"
        if wrong is None and not names:
            wrong = "names no column in braces, so that every prompt would look the same"
        if runs_as != "rlvr":
            wrong = "is for prompts from rows; episodes have none"
        if wrong is not None:
            example = "~" if runs_as != "rlvr" else "{prompt} The answer is {ground_truth}."
            checks.add("opd_teacher_prompt", config.opd_teacher_prompt, wrong, example)
    if config.lmbda == 1.0:
        return
    group = config.group_size
    rules = (
        (runs_as == "rlvr", "must be 1 for episodes, of which the data has none"),
        (config.is_pure_opd, "must be 1 with use_opd: rewards and advantages are for what the student sampled"),
        (config.opd_form != "advantage", "must be 1 with opd_form advantage, an estimate from the student's samples"),
        (config.async_generation_ratio == 0, "must be 1 where generation runs ahead (async_generation_ratio above 0)"),
        (group == 1, f"needs num_return_sequences_in_group 1, not {group}: a row has one response"),
        (getattr(config, "user_defined_rollout_loop_cls", None) is None, "must be 1 with a rollout loop of your own"),
    )
    rule = next((text for holds, text in rules if not holds), None)
    if rule is not None:
        checks.add("lmbda", config.lmbda, rule, 1.0)


def _check_routes(config: TaughtConfig, checks: Checks) -> None:
    """A row is compared with one distribution: teachers that share a tag would need several."""
    sections = list(config.teacher.items())
    for place, (name, section) in enumerate(sections):
        for other, before in sections[:place]:
            tags, others = section.tag_included, before.tag_included
            if not tags or not others or set(tags) & set(others):
                rule = (
                    f"shares rows with {teacher_role(other)}: opd_form {config.opd_form} compares a row with one "
                    "teacher; give each its own tags, or add teachers up with opd_form: advantage"
                )
                checks.add(f"{teacher_role(name)}.tag_included", tags, rule, f"[{name}]")
                return


def _note_estimator(config: TaughtConfig, checks: Checks, arguments: GeneratingArguments, key: str) -> None:
    truncates = arguments.do_sample and (arguments.top_p < 1 or arguments.top_k > 0 or arguments.min_p > 0)
    if taught_by_advantage(config) and config.force_disable_old_logprobs_recompute:
        rule = "leaves only the engine's log-probs to compare with the teacher's, which are of another distribution"
        checks.add("force_disable_old_logprobs_recompute", True, rule, False)
    if taught_by_advantage(config) and truncates:
        text = (
            "truncated sampling: tokens come from a distribution that neither side's log-probs belong to, which biases "
            "the divergence from the teacher; top_p 1 and top_k 0 do not"
        )
        checks.note(f"{key}.top_p", text)
    if taught_by_advantage(config) and config.kl_penalty not in ("kl", "k1"):
        text = f"{config.kl_penalty} as an advantage has another minimum than the reverse KL's; k1 is unbiased"
        checks.note("kl_penalty", text)
    if config.is_pure_opd:
        names = ("estimator", "adv_estimator") if config.estimator.name != "reinforce" else ()
        for name in filter(checks.written, (*names, "gamma", "estimator.gamma")):
            checks.note(name, "has no effect with is_pure_opd: each token answers for its own log-ratio")
        for name in REWARD_KEYS:
            if checks.written(name) and getattr(config, name) not in (None, False, "auto"):
                text = "has no effect with is_pure_opd: rewards are measured, and nothing is learnt from them"
                checks.note(name, text)
