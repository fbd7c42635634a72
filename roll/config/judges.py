"""Which rewards ask a judge whose engines the run starts itself: on the role ``reward_model``, which all domains share
(``judge_model_type: cluster``), or on the devices of their own section (``inference``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from roll.config.names import PUBLISHED_REWARDS
from roll.config.rewards import RewardConfig
from roll.config.rlvr import GenerationWorkerConfig, RLVRConfig
from roll.config.roles import GeneratingArguments, WorkerConfig

LLM_JUDGE = "llm_judge"
CLUSTER, INFERENCE = "cluster", "inference"
JUDGE_ROLE = "reward_model"
"""The role whose engines answer the judges of all domains."""
OWN_PREFIX = "judge."
"""In front of a domain's name: the role whose engines answer the judges of this domain only."""
JUDGE_KEYS = ("judge_model_type", "judge_model_name", "judge_api_url", "judge_api_key", "judge_prompt")
"""Keys of a reward section that only judges read."""
TEMPLATE_TOKENS = 2048
"""Room for a judge's instructions and its answer."""


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
    rewards = [(part.worker_cls or key, part.reward_kwargs) for key, part in section.components.items()]
    for worker_cls, options in rewards or [(section.worker_cls or name, section.reward_kwargs)]:
        if PUBLISHED_REWARDS.get(worker_cls.rpartition(".")[2], worker_cls) == LLM_JUDGE:
            yield options


def judged_domains(config: RLVRConfig) -> list[str]:
    """The domains that ask the role ``reward_model``."""
    return [name for name, section in config.rewards.items() if judge_role(name, section) == JUDGE_ROLE]


def own_judges(config: RLVRConfig) -> dict[str, GenerationWorkerConfig]:
    """The roles of judges that belong to one domain: model, engine and devices are those of its section."""
    roles = {}
    for name, section in config.rewards.items():
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
    of the policy may become longer in the judge's own tokens.

    Args:
        positions: what the judge's model was made for; None: not known.
    """
    wanted = 2 * sequence_length + TEMPLATE_TOKENS
    return wanted if positions is None else min(wanted, positions)


def generates_otherwise(role: WorkerConfig) -> bool:
    """Whether the role sets how it samples, which the reward decides for a judge."""
    return role.generating_args != GeneratingArguments()
