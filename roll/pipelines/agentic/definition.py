"""The definition of the agentic pipeline, and its checks that build or import parts of a run before anything starts:
environments, filters, templates. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from roll.agents.agent_options import AgentOptionError, ToolWrapperArguments, uses_tools
from roll.agents.chat_ids import ChatTemplate, TemplateError, check_template
from roll.agents.images import ChatImages
from roll.agents.programs import TasksetError, is_taskset, number_of_tasks
from roll.config.data import TEMPLATE_ENDINGS
from roll.config.loader import LoadedConfig
from roll.config.model_files import model_config, model_folder
from roll.config.objects import imported
from roll.config.pipelines import (
    COMPUTES_LOG_PROBS,
    GENERATES,
    TRAINS,
    Headline,
    Panel,
    Role,
    Written,
    find_own_modules,
)
from roll.config.plan.planning import shared_plan, validation_sampling
from roll.config.reading.errors import ConfigError, Problem, count
from roll.config.reading.fields import DOTTED_PATH
from roll.config.reading.masking import masked
from roll.config.reading.yaml_files import shown
from roll.config.roles import WorkerConfig
from roll.environments.base import EnvironmentOptionError, check_environment_options
from roll.methods.policy_plan import POLICY_PANELS, PolicyConfig, PolicyDefinition, policy_plan, policy_training_plans
from roll.pipelines.agentic.checks import check_agentic
from roll.pipelines.agentic.config import (
    REWARD,
    AgenticConfig,
    AgenticPlan,
    CustomEnvConfig,
    EnvManagerConfig,
    ManagerPlan,
    RewardNormalizationConfig,
    ToolArgumentsConfig,
    ToolWrapperConfig,
    agent_of,
    entry_plan,
    finished,
    managers,
    model_roles,
    partition,
    training_sampling,
    used_entries,
)
from roll.pipelines.policy_preflight import BUILD_FILTER, check_policy_host, late, policy_functions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Agentic(PolicyDefinition[AgenticConfig, AgenticPlan]):
    """Reinforcement learning from episodes of many turns."""

    name = "agentic"
    config_class = AgenticConfig
    pipeline_class = "roll.pipelines.agentic.pipeline.AgenticPipeline"
    roles: ClassVar[tuple[Role, ...]] = (
        Role("actor_train", TRAINS),
        Role("actor_infer", GENERATES),
        Role("reference", COMPUTES_LOG_PROBS, optional=True),
        Role("critic", TRAINS, optional=True, has_own_head=True),
        Role(REWARD, GENERATES, optional=True),
    )
    headlines: ClassVar[tuple[Headline, ...]] = (
        Headline("critic/score/mean", "reward"),
        Headline("episode/success", "success"),
        Headline("episode/turns", "turns", "{:.1f}"),
        Headline("critic/kl", "kl", "{:.4f}"),
        Headline("system/tps", "tok/s", "{:,.0f}"),
    )
    panels: ClassVar[tuple[Panel, ...]] = (
        Panel("Return", ("critic/score/mean",), smooth=True),
        Panel("Success", ("episode/*/success", "val/*/success"), unit_range=True, smooth=True),
        Panel("Turns", ("episode/*/turns",), smooth=True),
        *POLICY_PANELS,
    )
    reference: ClassVar[tuple[tuple[str, type, tuple[type, ...]], ...]] = (
        ("Agentic: batches, environments (top level)", AgenticConfig, (PolicyConfig,)),
    )
    section_tables: ClassVar[tuple[tuple[str, type, tuple[type, ...]], ...]] = (
        (
            "`train_env_manager` and `val_env_manager` (in addition to the keys of a role)",
            EnvManagerConfig,
            (WorkerConfig,),
        ),
        ("`custom_envs.<tag>`", CustomEnvConfig, ()),
        ("`custom_envs.<tag>.tool_wrapper`", ToolWrapperConfig, ()),
        ("`custom_envs.<tag>.tool_wrapper.wrapper_args`", ToolWrapperArguments, ()),
        ("`custom_envs.<tag>.tool_wrapper.tool_configs[]`", ToolArgumentsConfig, ()),
        ("`reward_normalization`", RewardNormalizationConfig, ()),
    )

    check = staticmethod(check_agentic)
    models = staticmethod(model_roles)

    def plan(self, config: AgenticConfig, exp_name: str, written: Written) -> AgenticPlan:
        sampling = training_sampling(config, written)
        plans = {
            key: ManagerPlan(
                section=section,
                groups_by_tag=partition(section),
                group_size=section.group_size,
                redundancy=section.group_size_redundancy,
                episodes=episodes,
                # Of validation, keys that are left out are those of training.
                generating_args=sampling
                if key == "train_env_manager"
                else validation_sampling(f"{key}.generating_args", section.generating_args, sampling, written),
            )
            for key, section, episodes in managers(config)
        }
        entries = {tag: entry_plan(config, tag, sampling.max_new_tokens) for tag in used_entries(config)}
        train, section = plans["train_env_manager"], config.reward_normalization
        longest = max(entries[tag].new_tokens for tag in train.groups_by_tag)
        return AgenticPlan(
            **shared_plan(self, config, exp_name, written, partial(finished, config)),
            **policy_plan(config) | {"norm_types": norm_types(config)},
            training=policy_training_plans(config),
            max_steps=config.max_steps,
            eval_steps=max(0, config.eval_steps) if config.val_env_manager is not None else 0,
            prompts_per_step=train.groups,
            group_size=train.group_size,
            max_new_tokens=longest,
            norm_length=config.loss_norm_length or config.sequence_length,
            validates_concurrently=False,
            num_additional_prompts=0,
            entries=entries,
            train=train,
            validation=plans.get("val_env_manager"),
            normalizes_by_tag=section is not None and section.grouping == "tags",
        )

    def default_model(self, config: AgenticConfig, role: str) -> tuple[str, str | None]:
        if role in ("critic", REWARD) and config.reward_pretrain:
            return "reward_pretrain", config.reward_pretrain
        return super().default_model(config, role)

    def reads(self, key: str, section: WorkerConfig, config: AgenticConfig) -> frozenset[str]:
        if isinstance(section, EnvManagerConfig):
            return frozenset(("generating_args", "system_envs"))
        return super().reads(key, section, config)

    def batch_facts(self, plan: AgenticPlan) -> list[tuple[str, str]]:
        """Optimizer steps are counted in episodes; their rows may be of any number."""
        # Of an episode whose conversation does not branch.
        entries = (plan.entries[tag] for tag in plan.train.groups_by_tag)
        most = plan.train.episodes * max(entry.turns if entry.samples == "step" else 1 for entry in entries)
        rows = f"{count(plan.train.episodes, 'episode')}, at most {count(most, 'row')}"
        return [
            ("batch" if name == "actor_train" else name, f"{rows}; {training.sentence()} (by episodes)")
            for name, training in plan.training.items()
        ]

    def facts(self, plan: AgenticPlan) -> list[tuple[str, str]]:
        facts = [("episodes", played_sentence(plan, plan.train, "step"))]
        if plan.validation is not None and plan.eval_steps:
            facts.append(("validation", played_sentence(plan, plan.validation, "validation")))
        for entry in plan.entries.values():
            seconds = f", {entry.seconds:g} s" if entry.seconds is not None else ""
            rows = "a row a conversation" if entry.samples == "trajectory" else "a row a turn"
            name = entry.section.env_type or f"agent {entry.agent}"
            limits = f"at most {count(entry.turns, 'turn')} of {entry.new_tokens} tokens, {plan.sequence_length} tokens"
            text = f"{entry.tag}: {name}; {limits} of context{seconds}; context {entry.context}, {rows}"
            facts.append(("environment", text))
        return facts + self.shared_facts(plan, "episodes", "group")

    def filtered_sections(self, config: AgenticConfig) -> dict[str, Any]:
        return {}

    def check_parts(self, loaded: LoadedConfig[AgenticConfig]) -> None:
        check_environments(loaded)
        super().check_parts(loaded)

    def check_host(self, loaded: LoadedConfig[AgenticConfig]) -> None:
        check_policy_host(loaded)
        check_chat_template(loaded)

    def own_functions(self, loaded: LoadedConfig[AgenticConfig]) -> Iterator[tuple[str, Any, Callable[[], object]]]:
        config = loaded.config
        yield from policy_functions(config)
        for name, section, _ in managers(config):
            own, path = section.group_filter_config, section.group_filter_cls
            if DOTTED_PATH.fullmatch(own.type):
                yield f"{name}.group_filter_config", own.type, partial(late, BUILD_FILTER, own.type, own.filter_args)
            if path is not None:
                yield f"{name}.group_filter_cls", path, partial(own_group_filter, path)


def norm_types(config: AgenticConfig) -> tuple[str | None, str | None]:
    """``norm_mean_type`` and ``norm_std_type`` of the rewards, from ``reward_normalization`` where it is set."""
    section = config.reward_normalization
    if section is None:
        return config.norm_mean_type, config.norm_std_type
    kind = "group" if section.grouping == "traj_group_id" else "batch"
    if section.norm_mean_type is not None or section.norm_std_type is not None:
        kinds = {None: None, "group": kind, "batch": "batch"}
        return kinds[section.norm_mean_type], kinds[section.norm_std_type]
    method = section.method or "identity"
    return (None if method == "identity" else kind), (kind if method in ("mean_std", "asym_clip") else None)


def played_sentence(plan: AgenticPlan, manager: ManagerPlan, of: str) -> str:
    size = f"{manager.group_size}" + (f" + {manager.redundancy}" if manager.redundancy else "")
    shares = ", ".join(f"{tag} {number}" for tag, number in manager.groups_by_tag.items())
    tokens = 0.0
    for tag, number in manager.groups_by_tag.items():
        entry = plan.entries[tag]
        most = entry.turns * entry.new_tokens
        # Where everything is kept, an episode samples no more than one conversation has room for.
        most = min(most, plan.sequence_length) if entry.context == "append" else most
        tokens += manager.episodes * number / manager.num_groups * most
    total = f"{count(manager.groups, 'task')} x {manager.group_size} = {count(manager.episodes, 'episode')} a {of}"
    at_a_time = f"{count(manager.num_groups, 'group')} of {size} at a time ({shares})"
    return f"{total}, at most {tokens:,.0f} new tokens; {at_a_time}"


CHATML = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
_THINKING = {"qwen3": True, "qwen3_nothink": False}


class OwnGroupFilter(Protocol):
    """``group_filter_cls``: an object of a user's class, built without arguments."""

    def filter(self, group_id: str, episode_id: int, group: Sequence[Any]) -> bool:
        """Return true to drop the group; ``group`` holds its :class:`~roll.agents.episode.Episode` objects."""
        ...


def check_environments(loaded: LoadedConfig[AgenticConfig]) -> None:
    """The environments and agents that are played exist and have the options that their sections set. Raises
    ``ConfigError``: with every problem."""
    find_own_modules()
    problems: list[Problem] = []
    for tag, section in used_entries(loaded.config).items():
        problems += agent_problems(f"custom_envs.{tag}", section)
        if section.env_type is not None and not is_taskset(section.env_type):
            policy = loaded.plan.roles.get("actor_train") or loaded.plan.roles["actor_infer"]
            problems += environment_problems(f"custom_envs.{tag}", section, policy.model_path)
    if problems:
        raise ConfigError([replace(problem, source=shown(loaded.source)) for problem in problems])


def agent_problems(key: str, section: CustomEnvConfig) -> Iterator[Problem]:
    """Problems of an entry's agent, or of its environment's verifier, and their options."""
    agent, options = agent_of(section)
    if agent is None and not section.verifier:
        return
    from roll.agents.registry import check_agent, make_verifier

    try:
        if is_taskset(section.env_type):
            number_of_tasks(options)
        if agent is not None:
            check_agent(agent, options)
        else:
            make_verifier(section.verifier, key="verifier", of_environment=True)
    except TasksetError as error:
        yield from (Problem(f"{key}.{name}", None, rule, has_value=False) for name, rule in error.problems)
    except AgentOptionError as error:
        name, colon, rule = str(error).partition(": ")
        if agent is None:
            name = "verifier" + name.removeprefix("verifier")
        elif not colon or " " in name:
            name, rule = "agent", str(error)
        yield Problem(f"{key}.{name}", None, rule, has_value=False)


def environment_problems(key: str, section: CustomEnvConfig, model_path: str | None) -> Iterator[Problem]:
    """Problems of an entry's environment: tools around it that lack something, pictures that a text model cannot see,
    options."""
    from roll.agents.text_tools import text_tool
    from roll.agents.tools import ToolError

    assert section.env_type is not None
    for index, tool in enumerate(section.tool_wrapper.tool_configs if section.tool_wrapper is not None else ()):
        try:
            text_tool(tool.tool_id, tool.tool_args)
        except ToolError as error:
            yield Problem(f"{key}.tool_wrapper.tool_configs[{index}]", None, str(error), has_value=False)
    config, options = model_config(model_path), section.env_config
    for option, value in (("render_mode", "rgb_array"), ("pictures", True)):
        if config is not None and "vision_config" not in config and options.get(option) == value:
            rule = f"shows pictures, and {model_path} is a model of text; a vision-language model sees them"
            yield Problem(f"{key}.env_config.{option}", value, rule)
    try:
        check_environment_options(section.env_type, options)
    except EnvironmentOptionError as error:
        text, begun = str(error), f"env_type {section.env_type!r}"
        if error.option is not None:
            rule = text.removeprefix(f"env_config.{error.option}: ")
            yield Problem(f"{key}.env_config.{error.option}", masked(options[error.option]), rule)
        elif text.startswith(f"{begun}: "):
            yield Problem(f"{key}.env_config", None, text.removeprefix(f"{begun}: "), has_value=False)
        else:
            yield Problem(f"{key}.env_type", section.env_type, text.removeprefix(begun).strip())


def chat_template(
    config: AgenticConfig, tokenizer: PreTrainedTokenizerBase, images: ChatImages | None = None
) -> ChatTemplate:
    """The template that the run names, with the variables of ``data_args.chat_template_kwargs``; ``images``: as the
    policy sees them."""
    data_args = config.actor_train.data_args
    name = config.global_template or data_args.template
    arguments: dict[str, Any] = dict(data_args.chat_template_kwargs)
    if name == "chatml":
        arguments = {"chat_template": CHATML} | arguments
    elif name is not None and name.endswith(TEMPLATE_ENDINGS):
        from roll.datasets.templates import template_text

        arguments = {"chat_template": template_text(name)} | arguments
    elif name in _THINKING:
        arguments = {"enable_thinking": _THINKING[name]} | arguments
    stops = config.actor_infer.generating_args.stop_token_ids or ()
    ends = [token for token in (tokenizer.eos_token_id, *stops) if token is not None]
    return ChatTemplate(tokenizer, ends, arguments=arguments, images=images)


def check_chat_template(loaded: LoadedConfig[AgenticConfig]) -> None:
    """Conversations of more than one turn can grow with the chat template. The tokenizer of a model that is not on this
    machine yet is checked when the run starts. Raises ``ConfigError``: they cannot."""
    assert isinstance(loaded.plan, AgenticPlan)
    role = loaded.plan.roles.get("actor_train") or loaded.plan.roles["actor_infer"]
    folder = model_folder(role.model_path) if role.model_path is not None else None
    if folder is None or not os.path.isfile(folder / "tokenizer_config.json"):
        return
    entries = [one for one in loaded.plan.entries.values() if one.turns > 1 and one.context in ("append", "last")]
    if not entries:
        return
    from roll.agents.template_files import TemplateFiles

    tokenizer: Any = TemplateFiles(folder)
    if tokenizer.has_own_code or not tokenizer.chat_template:  # a class of a tokenizer may bring a template
        from roll.pipelines.files import load_tokenizer

        tokenizer = load_tokenizer(role.model_path, role.section.model_args.trust_remote_code)
    for entry in entries:
        try:
            template = chat_template(loaded.config, tokenizer)
            check_template(template, entry.section.thinking, uses_tools(entry.agent))
        except TemplateError as error:
            key, value = f"custom_envs.{entry.tag}.thinking", entry.section.thinking
            raise ConfigError([loaded.problem(key, value, str(error))]) from error


def own_group_filter(path: str) -> OwnGroupFilter:
    """An object of the class at a dotted path; ValueError: there is no such class, or it has no method ``filter``."""
    try:
        built = imported(path)()
    except (ImportError, TypeError) as error:
        raise ValueError(f"{path!r} cannot be built: {error}") from error
    if not callable(getattr(built, "filter", None)):
        raise ValueError(f"{path!r} has no method filter(group_id, episode_id, group) -> bool")
    own: OwnGroupFilter = built
    return own
