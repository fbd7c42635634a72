"""Data of a run: training prompts by domain, validation prompts, the tokenizer that reads both."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from roll.config.plan.plan import Plan
from roll.config.reading.errors import count
from roll.config.rewards import REWARDS, rewards_of, worker_name
from roll.config.roles import DataArguments, WorkerConfig
from roll.config.strategies.engines import VllmStrategyConfig
from roll.config.strategies.registry import typed_strategy_config
from roll.datasets import DataError, DomainSampler, LoadCounts, PromptDataset
from roll.datasets.vision_model import VisionModel
from roll.methods.policy import check_rows
from roll.pipelines.files import load_tokenizer
from roll.pipelines.rlvr.config import RLVRConfig, RLVRPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunData:
    """Prompts that a run draws from."""

    tokenizer: PreTrainedTokenizerBase
    sampler: DomainSampler
    validation: dict[str, PromptDataset]  # by the set's name


def load_data(config: RLVRConfig, plan: RLVRPlan) -> RunData:
    """Read, route, tokenise and filter all sets; DataError: a file, row, tag or template that cannot be used."""
    model_path = plan.roles["actor_train"].model_path
    tokenizer = load_tokenizer(model_path, config.actor_train.model_args.trust_remote_code)
    training = read_training_prompts(config, plan, tokenizer)
    sets = plan.validation_sets
    validation = {one.name: read_prompts(config, plan, one.data_args, one.prompt_length, tokenizer) for one in sets}
    data_args = config.actor_train.data_args
    sampler = DomainSampler(training.by_domain(), data_args.domain_interleave_probs, config.seed, data_args)
    return RunData(tokenizer, sampler, validation)


def read_training_prompts(config: RLVRConfig, plan: RLVRPlan, tokenizer: PreTrainedTokenizerBase) -> PromptDataset:
    """:func:`read_prompts` of the set that is trained on; rows of which nothing is learnt are logged. DataError: also
    where a role that should look at rows of a tag would see none."""
    data_args = config.actor_train.data_args
    dataset = read_prompts(config, plan, data_args, plan.prompt_length, tokenizer)
    check_rows(config, dataset.tags(), str(data_args.file_name))
    return dataset


def read_prompts(
    config: RLVRConfig, plan: Plan, data_args: DataArguments, prompt_length: int, tokenizer: PreTrainedTokenizerBase
) -> PromptDataset:
    """One set, routed to the domains of the run and rendered by its templates; what is odd about its rows is logged.
    DataError: as :func:`load_data`, or a domain none of whose rows can be scored."""
    # An evaluation starts no trainer.
    policy = plan.roles.get("actor_train") or plan.roles["actor_infer"]
    model_args = policy.section.model_args
    vision = VisionModel.load(str(policy.model_path), tokenizer, model_args.trust_remote_code)
    if vision is not None:
        vision = seen_by_engine(vision, config.actor_infer)
    dataset = PromptDataset.build(
        data_args,
        tokenizer,
        prompt_length,
        {name: section.tag_included for name, section in config.rewards.items()},
        global_template=config.global_template,
        tag_to_template=config.tag_to_template,
        vision=vision,
    )
    for remark in remarks(config, dataset.counts):
        logger.warning("%s: %s", data_args.file_name, remark)
    return dataset


def seen_by_engine(vision: VisionModel, infer: WorkerConfig) -> VisionModel:
    """The model with the limits of the engine that generates from its rows."""
    from roll.models.build import DTYPES
    from roll.protocol.images import EngineTime

    engine = infer.strategy_args.strategy_name
    if engine == "hf_infer":
        return vision
    where = f"{infer.name}.strategy_args"
    if engine != "vllm":
        reason = f"{engine} does not generate from videos; {where}.strategy_name: hf_infer and vllm do"
        return replace(vision, without_videos=reason)
    options = typed_strategy_config(infer.strategy_args)
    assert isinstance(options, VllmStrategyConfig)
    most = options.limit_mm_per_prompt
    vision = replace(vision, most_images=most.get("image"), most_videos=most.get("video"))
    if vision.video.timed:
        return vision
    dtype = str(DTYPES[infer.model_args.dtype]).removeprefix("torch.")
    return replace(vision, engine_time=EngineTime(vision.tokens_per_second, dtype))


def remarks(config: RLVRConfig, counts: LoadCounts) -> list[str]:
    """Problems of rows that the rewards cannot score or that are hardly meant as prompts; DataError: no row of a domain
    has the ground truth that its reward needs."""
    found = []
    for domain, number in counts.without_truth.items():
        names = (worker_name(one) for one, _ in rewards_of(domain, config.rewards[domain]))
        reward = next((one for one in names if one and one in REWARDS and REWARDS[one].needs_truth), None)
        if reward is None:
            continue
        if number == counts.kept[domain]:
            raise DataError(
                f"rewards.{domain}: {reward} needs a ground_truth, and none of its {number} rows has one (a column "
                "ground_truth, or an entry of that name in reward_model or reward_spec)"
            )
        found.append(
            f"{domain}: {count(number, 'row')} of {counts.kept[domain]:,} without ground_truth: {reward} cannot score "
            "them, and their samples take no part in the loss"
        )
    for domain, number in counts.answered.items():
        found.append(
            f"{domain}: {count(number, 'prompt')} of {counts.kept[domain]:,} with an assistant's turn at the end: the "
            "policy would be asked after an answer that is there already; leave that turn out"
        )
    return found
