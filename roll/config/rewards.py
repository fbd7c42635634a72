"""Rewards by name, and ``rewards.<name>``: a reward domain, its rule and the rows that are routed to it; and which of
them ask a model.

A judge's engines are those of the role ``reward_model``, which all domains share (``judge_model_type: cluster``), or
engines on the devices of the domain's own section (``inference``). A reward model is the role ``reward_model``, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from roll.config.losses import SCORE_INPUT_DEFAULT
from roll.config.reading.fields import Named, Table, setting
from roll.config.roles import GeneratingArguments, GenerationWorkerConfig, WorkerConfig


@dataclass(frozen=True)
class BuiltInReward(Named):
    """A reward that ``worker_cls`` may name; a new one is its module and a row here."""

    target: str = ""  # module and class, imported when a worker uses it
    needs_truth: bool = False  # it cannot score a row without `ground_truth`
    published: tuple[str, ...] = ()  # reward classes of ROLL's published files that stand for it


def _rule(name: str, target: str, *published: str, needs_truth: bool = False) -> BuiltInReward:
    return BuiltInReward(name, target=f"roll.rewards.{target}", needs_truth=needs_truth, published=published)


# Rewards by short name.
REWARDS = Table(
    "worker_cls",
    _rule("gsm8k_rule", "text_rules.Gsm8kRule", needs_truth=True),
    _rule("math_rule", "math_rule.MathRule", "MathRuleRewardWorker", needs_truth=True),
    _rule(
        "multiple_choice",
        "text_rules.MultipleChoice",
        "MultipleChoiceBoxedRuleRewardWorker",
        "GeneralValRuleRewardWorker",
        needs_truth=True,
    ),
    _rule("format", "text_rules.FormatRule"),
    _rule("exact_match", "text_rules.ExactMatch", needs_truth=True),
    _rule("f1", "text_rules.F1", needs_truth=True),
    _rule("detection", "detection.Detection", "DetectionRewardWorker", needs_truth=True),
    _rule("ifeval", "ifeval.IFEval", "GeneralRuleRewardWorker"),
    _rule("reward_model", "http_reward.RewardModelScore"),
    _rule("crossthinkqa", "text_rules.CrossThinkQA", "CrossThinkQARuleRewardWorker", needs_truth=True),
    _rule("repetition_penalty", "text_rules.RepetitionPenalty"),
    _rule("length_penalty", "text_rules.LengthPenalty"),
    _rule("http_reward", "http_reward.HttpReward"),
    _rule("llm_judge", "judge.LLMJudge", "LLMJudgeRewardWorker"),
    _rule("code_sandbox", "code_sandbox.CodeSandbox", "CodeSandboxRewardWorker"),
)

# Reward classes of ROLL's published files that run here, with their short names.
PUBLISHED_REWARDS = {each: name for name, reward in REWARDS.items() for each in reward.published}

# Reward classes of ROLL's published files that do not run here.
PLANNED_REWARDS = {"RemoteRewardSystemWorker": "remote", "VideoR1RewardWorker": "video_r1"}
# For each of those: what it is, and a reward to use instead.
WHY_PLANNED = {
    "remote": ("the reward remote, a client of a service that is not public: http_reward asks your own", "http_reward"),
    "video_r1": ("the reward video_r1, for models that see videos", "math_rule"),
}
# Reward rules that read a column of their own in place of the ground truth.
RULE_OF_COLUMN = {"instruction_id_list": "ifeval", "test_cases": "code_sandbox"}

# Worker classes of ROLL's published files that stand for a role's own worker here.
PUBLISHED_WORKERS = ("ActorWorker", "ActorPGWorker", "CriticWorker", "InferWorker")
PUBLISHED_PREFIX = "roll.pipeline."

# Group filters and their arguments.
FILTER_ARGUMENTS = {
    "no_filter": (),
    "mean_filter": ("threshold_down", "threshold_up"),
    "std_filter": ("std_threshold",),
}


def worker_name(written: str | None, also: tuple[str, ...] = ()) -> str | None:
    """A worker or reward under this project's name: published class paths become short names, or None for the classes
    that stand for a role's own worker, ``also`` among them."""
    if written is None or not written.startswith(PUBLISHED_PREFIX):
        return written
    class_name = written.rpartition(".")[2]
    return None if class_name in (*PUBLISHED_WORKERS, *also) else PUBLISHED_REWARDS.get(class_name, written)


@dataclass(frozen=True)
class FilterConfig:
    """``query_filter_config`` and ``response_filter_config``: which groups of samples are kept for training."""

    type: str = setting("no_filter", choices=tuple(FILTER_ARGUMENTS), dotted_path=True)
    """``no_filter``; ``mean_filter`` keeps groups whose mean score lies between ``threshold_down`` and
    ``threshold_up``; ``std_filter`` keeps groups whose scores spread more than ``std_threshold``."""
    filter_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the filter: ``threshold_up``, ``threshold_down``; ``std_threshold``."""


@dataclass(frozen=True)
class RewardComponentConfig:
    """``rewards.<name>.components.<component>``: one of several rewards that make up a domain's score."""

    worker_cls: str | None = None
    """Which reward: as ``rewards.<name>.worker_cls``; null: the reward of the component's own name."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reward; checked by the reward itself."""
    weight: float = 1.0
    """Factor of its score in the domain's score, which is the sum over the components; 0: only logged."""
    gate: bool = False
    """Multiply the sum by this score (0 to 1) instead of adding it: a response without it earns nothing."""
    timeout: float | None = setting(None, gt=0)
    """Seconds that scoring one sample may take; null: the domain's ``timeout``."""
    error_value: float | None = None
    """Score of this component where it failed; null: the sample has failed, and the domain's ``on_error`` decides."""


@dataclass(frozen=True)
class RewardConfig(WorkerConfig):
    """A reward domain. Rows whose tag is in ``tag_included`` are scored by it."""

    worker_cls: str | None = None
    """Reward: a short name, a dotted path of your own, or one of ROLL's published paths."""
    components: dict[str, RewardComponentConfig] = field(default_factory=dict)
    """Several rewards in place of ``worker_cls``, by name: the score is their weighted sum, times every gate."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reward, such as ``method`` or ``format_score``; checked by the reward itself."""
    on_error: Literal["raise", "mask", "value"] = "mask"
    """Treatment of a sample whose reward failed: end the run, leave it out of the loss, or use ``error_value``."""
    error_value: float = setting(0.0, read_if={"on_error": ("value",)})
    """Score of a failed sample with ``on_error: value``."""
    timeout: float = setting(30.0, gt=0)
    """Seconds that scoring one sample may take."""
    concurrency: int = setting(32, ge=1)
    """Samples that one worker scores at a time where the reward waits for others (an async function, a service)."""
    query_filter_config: FilterConfig = field(default_factory=FilterConfig)
    """Which groups of samples are kept for training."""
    response_filter_config: FilterConfig = field(default_factory=FilterConfig)
    """Which single responses the loss uses; the others still count in the baseline of their group."""
    format_pattern: str | None = None
    """Regular expression of the format that a response must have."""
    reward_type: str | None = None
    """``crossthinkqa``: ``loose``, ``soft`` or ``strict``; no other reward has it."""
    response_length_penalty_coef: float | None = setting(None, ge=0)
    """``crossthinkqa``: weight of its length term; other rewards have none, and a component ``length_penalty``."""
    use_local: bool = True
    """``code_sandbox``: run programs on this host; false: by the service at ``code_url``."""
    code_url: str | None = setting(None, read_if={"use_local": (False,)})
    """``code_sandbox``: address of ``python -m roll.rewards.service code_sandbox`` on another host."""
    judge_prompt: str | None = None
    """``llm_judge``: ``correctness``, ``score_1_to_10``, ``yes_or_no``, a file with a Jinja template, or its text."""
    judge_model_type: str | None = setting(None, choices=("api", "inference", "cluster"))
    """``llm_judge``: ``api`` (also null), a service at ``judge_api_url``; ``cluster``, the role ``reward_model``;
    ``inference``, engines of this section alone."""
    judge_model_name: str | None = None
    """``llm_judge``: the model's name at the service."""
    judge_api_url: str | None = None
    """``llm_judge``: address of the service up to and with ``/v1``."""
    judge_api_key: str | None = setting(None, secret=True)
    """``llm_judge``: its key. Write ``${oc.env:NAME}``; it is masked wherever the configuration is shown."""


REWARD_MODEL = "reward_model"  # the reward's short name, and the role's
CLASSIFIER = "auto_sequence_classification"  # `model_args.model_type` of a reward model: a body with one score on top
TOKENS = "tokens"


def model_inputs(rewards: Mapping[str, RewardConfig]) -> dict[str, str]:
    """``chat`` or ``tokens`` for each domain that uses the role, from the option ``input`` of its reward."""
    inputs: dict[str, str] = {}
    for name, section in rewards.items():
        for worker_cls, options in rewards_of(name, section):
            if worker_cls == REWARD_MODEL:
                inputs.setdefault(name, str(options.get("input", SCORE_INPUT_DEFAULT)))
    return inputs


def rewards_of(name: str, section: RewardConfig) -> list[tuple[str, dict[str, Any]]]:
    """``worker_cls`` and ``reward_kwargs`` of every reward of a domain."""
    components = [(part.worker_cls or key, part.reward_kwargs) for key, part in section.components.items()]
    return components or [(section.worker_cls or name, section.reward_kwargs)]


LLM_JUDGE = "llm_judge"
CLUSTER, INFERENCE = "cluster", "inference"
JUDGE_ROLE = "reward_model"  # the role whose engines answer the judges of all domains
OWN_PREFIX = "judge."  # in front of a domain's name: the role whose engines answer the judges of this domain only
# Keys of a reward section that only judges read.
JUDGE_KEYS = ("judge_model_type", "judge_model_name", "judge_api_url", "judge_api_key", "judge_prompt")
TEMPLATE_TOKENS = 2048  # room for a judge's instructions and its answer


def judge_role(name: str, section: RewardConfig) -> str | None:
    """The role that the judges of a domain (or of its components) ask; None: no judge, or one outside the run."""
    types = judge_types(name, section)
    if CLUSTER in types:
        return JUDGE_ROLE
    return f"{OWN_PREFIX}{name}" if INFERENCE in types else None


def judge_types(name: str, section: RewardConfig) -> set[Any]:
    """``judge_model_type`` of every judge of a domain."""
    return {options.get("model_type", section.judge_model_type) for options in judges_of(name, section)}


def judges_of(name: str, section: RewardConfig) -> Iterator[dict[str, Any]]:
    """The ``reward_kwargs`` of every judge of a domain."""
    for worker_cls, options in rewards_of(name, section):
        if PUBLISHED_REWARDS.get(worker_cls.rpartition(".")[2], worker_cls) == LLM_JUDGE:
            yield options


def judged_domains(rewards: Mapping[str, RewardConfig]) -> list[str]:
    """The domains that ask the role ``reward_model``."""
    return [name for name, section in rewards.items() if judge_role(name, section) == JUDGE_ROLE]


def own_judges(rewards: Mapping[str, RewardConfig]) -> dict[str, GenerationWorkerConfig]:
    """The roles of judges that belong to one domain: model, engine and devices are those of its section."""
    roles = {}
    for name, section in rewards.items():
        role = judge_role(name, section)
        if role is not None and role != JUDGE_ROLE:
            shared = {item.name: getattr(section, item.name) for item in fields(WorkerConfig)}
            roles[role] = GenerationWorkerConfig(**shared | {"worker_cls": None, "tag_included": None})
    return roles


def section_of(role: str) -> str:
    """The key of the section that describes a role."""
    return f"rewards.{role.removeprefix(OWN_PREFIX)}" if role.startswith(OWN_PREFIX) else role


def reward_workers(name: str, section: RewardConfig) -> RewardConfig:
    """A domain's section as its reward workers get it: its devices belong to its judge's engines, each of which has a
    worker that asks."""
    if judge_role(name, section) in (None, JUDGE_ROLE):
        return section
    engines = max(1, len(section.device_mapping or ()) // section.num_gpus_per_worker)
    return replace(section, device_mapping=None, num_gpus_per_worker=1, world_size=engines)


def judge_sampling(name: str, section: RewardConfig) -> dict[str, Any]:
    """Options of a judge on its section's own devices that the section's ``generating_args`` stand for."""
    arguments = section.generating_args
    if judge_role(name, section) != f"{OWN_PREFIX}{name}" or not generates_otherwise(section):
        return {}
    options: dict[str, Any] = {"temperature": arguments.temperature if arguments.do_sample else 0.0}
    options |= {"top_p": arguments.top_p, "extra_body": {"top_k": arguments.top_k} if arguments.top_k > 0 else {}}
    return options | ({} if arguments.max_new_tokens is None else {"max_tokens": arguments.max_new_tokens})


def judge_length(sequence_length: int, positions: int | None) -> int:
    """Tokens of the longest question and answer of a judge, where its section does not say: a question and a response
    of the policy may become longer in the judge's own tokens. ``positions`` of its model: None: not known."""
    wanted = 2 * sequence_length + TEMPLATE_TOKENS
    return wanted if positions is None else min(wanted, positions)


def generates_otherwise(role: WorkerConfig) -> bool:
    """True if the role sets sampling parameters, which the reward decides for a judge."""
    return role.generating_args != GeneratingArguments()
