"""Teachers of on-policy distillation: their roles, and the checks of their keys. Torch-free.

The student samples; at every token that it sampled, or for every distribution that it sampled from, a teacher says what
it would have done. Arithmetic is in :mod:`roll.methods.opd_rows`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from string import Formatter
from typing import TYPE_CHECKING, Any

from roll.config.checks.base import Checks
from roll.config.losses import DivergenceConfig
from roll.config.policy import PolicyRunConfig
from roll.config.reading.errors import closest
from roll.config.roles import GeneratingArguments, WorkerConfig
from roll.methods.policy_plan import is_taught, taught_by_advantage
from roll.methods.teachers import check_teachers, check_temperature, check_vocabularies

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig
    from roll.config.pipelines import PipelineDefinition

TEACHER = "teacher"
"""The section, and the name of a teacher that is the only one."""
REWARD_KEYS = (
    *("norm_mean_type", "norm_std_type", "reward_clip", "reward_weights", "overlong_buffer_length"),
    "add_token_level_kl",
)
"""Keys of reward shaping, from which pure distillation learns nothing."""


def teacher_role(name: str) -> str:
    """The role of a teacher."""
    return TEACHER if name == TEACHER else f"{TEACHER}.{name}"


def teacher_roles(config: PolicyRunConfig) -> dict[str, WorkerConfig]:
    """The sections of the teachers that the run starts, by role."""
    return {teacher_role(name): section for name, section in config.teacher.items()} if is_taught(config) else {}


def coefficients(config: PolicyRunConfig) -> dict[str, float]:
    """The weight of each teacher, by name."""
    return {
        name: config.opd_kl_coef if section.opd_kl_coef is None else section.opd_kl_coef
        for name, section in config.teacher.items()
    }


def check_vocabularies_of(pipeline: PipelineDefinition, loaded: LoadedConfig[Any]) -> None:
    """Compare the vocabularies of student and teachers that are on this machine.

    Raises:
        ConfigError: two differ.
    """
    roles = loaded.plan.roles
    for name in _started(loaded):
        key, path = pipeline.model(loaded.config, name, roles[name].section)
        check_vocabularies(str(roles["actor_train"].model_path), str(path), key, loaded.source)


def _started(loaded: LoadedConfig[Any]) -> list[str]:
    """Teachers that the run starts: an evaluation of the same file has none."""
    return [name for name in teacher_roles(loaded.config) if name in loaded.plan.roles]


def check_teachers_of(pipeline: PipelineDefinition, loaded: LoadedConfig[Any]) -> None:
    """:func:`~roll.methods.teachers.check_teachers` of a run that learns on its own samples."""
    roles, config = loaded.plan.roles, loaded.config
    names = _started(loaded)
    if not names:
        return
    teachers = {name: (pipeline.model(config, name, roles[name].section)[0], roles[name]) for name in names}
    wanted = {"advantage": -1, "full_vocabulary": 0}.get(config.opd_form, config.opd_topk)
    student = str(roles["actor_train"].model_path)
    check_teachers(student, teachers, wanted, loaded.plan.sequence_length, loaded.source)


def opd_divergence(config: PolicyRunConfig) -> DivergenceConfig:
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
    config: PolicyRunConfig, checks: Checks, arguments: GeneratingArguments, sampling_key: str, runs_as: str = "rlvr"
) -> None:
    """The keys of on-policy distillation against one another.

    Args:
        arguments: how the student samples.
        sampling_key: their key.
        runs_as: what ``pure_opd_pipeline_type`` may say.
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
    temperature = arguments.temperature if arguments.do_sample else 1.0
    for name, section in config.teacher.items():
        whole, instead = config.opd_form == "full_vocabulary", "; opd_form full_vocabulary allows any"
        key = f"{sampling_key}.temperature"
        check_temperature(teacher_role(name), section, temperature, whole, key, instead, checks)
    _check_rows(config, checks, runs_as)
    if config.opd_form != "advantage":
        _check_routes(config, checks)
    _note_estimator(config, checks, arguments, sampling_key)


def unrouted(config: PolicyRunConfig, tags: Collection[str]) -> tuple[list[str], list[str]]:
    """Roles of teachers that see no row of these tags, and tags whose rows no teacher sees."""
    wanted = {teacher_role(name): section.tag_included for name, section in config.teacher.items()}
    idle = [role for role, own in wanted.items() if own and not set(own) & set(tags)]
    return idle, [tag for tag in tags if all(own and tag not in own for own in wanted.values())]


def check_teacher_tags(config: PolicyRunConfig, checks: Checks, tags: Sequence[str]) -> None:
    """``tag_included`` of teachers against the tags that the training samples will have."""
    if not is_taught(config) or not tags:
        return
    idle, untaught = unrouted(config, tags)
    for role in idle:
        own = config.teacher[role.partition(".")[2] or TEACHER].tag_included or []
        near = next((found for tag in own if (found := closest(tag, tags))), tags[0])
        rule = f"names no tag that is trained on: there are {', '.join(tags)}"
        checks.add(f"{role}.tag_included", own, rule, f"[{near}]")
    if untaught and not idle and config.is_pure_opd:
        checks.note(TEACHER, f"no teacher sees samples of {', '.join(untaught)}: nothing is learnt from them")


def _check_rows(config: PolicyRunConfig, checks: Checks, runs_as: str) -> None:
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


def _check_routes(config: PolicyRunConfig, checks: Checks) -> None:
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


def _note_estimator(config: PolicyRunConfig, checks: Checks, arguments: GeneratingArguments, key: str) -> None:
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
        for name in ("gamma", "adv_estimator") if config.adv_estimator != "reinforce" else ("gamma",):
            if checks.written(name):
                checks.note(name, "has no effect with is_pure_opd: opd_form and opd_gamma decide")
        for name in REWARD_KEYS:
            if checks.written(name) and getattr(config, name) not in (None, False, "auto"):
                text = "has no effect with is_pure_opd: rewards are measured, and nothing is learnt from them"
                checks.note(name, text)
