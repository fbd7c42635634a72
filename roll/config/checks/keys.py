"""Keys whose feature this version does not have: refused at load, never ignored.

One table. An entry goes when its feature comes.  Keys that merely have their neutral value are accepted."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any

from roll.config.checks.base import Checks
from roll.config.pipelines import PipelineDefinition
from roll.config.reading.errors import Problems, plain_words
from roll.config.reading.fields import DOTTED_PATH, Choice
from roll.config.reading.schema import rules_of, says_no
from roll.config.rewards import CLASSIFIER
from roll.config.roles import KERNELS, StrategyArguments, WorkerConfig
from roll.config.run import RunConfig
from roll.config.strategies.base import Backend, StrategyConfig
from roll.config.strategies.registry import BACKENDS

Test = Callable[[Any], bool]


def is_set(value: object) -> bool:
    return value not in (None, False, "", [], {}, "None")


def above(limit: float) -> Test:
    return lambda value: isinstance(value, int | float) and value > limit


def one_of(*names: str) -> Test:
    return lambda value: any(name in names for name in (value if isinstance(value, list) else [value]))


def other_than(neutral: str) -> Test:
    return lambda value: is_set(value) and value != neutral


@dataclass(frozen=True)
class Refusal:
    """A key (``*`` matches one name, ``**`` any number) that is refused when ``applies`` to its value."""

    pattern: str
    feature: str
    # A value that loads; None: the file is for a model that this version does not train, whatever it says.
    instead: Any = None
    applies: Test = is_set
    except_under: Callable[[Backend], bool] | None = None  # backends that deal with the key themselves

    @cached_property
    def regex(self) -> re.Pattern[str]:
        escaped = re.escape(self.pattern).replace(r"\*\*\.", r"(?:[^.]+\.)*").replace(r"\*", "[^.]*")
        return re.compile(escaped)


WITH_MEGATRON = "images with Megatron, which has no vision tower; fsdp2_train, fsdp_train and deepspeed_train have one"
NO_POLICY = "responses of another player than the policy, which are no samples of it"
COPIES = "copies inside an engine; every worker of the role is an engine of its own"


def _not_megatron(backend: Backend) -> bool:
    return not backend.name.startswith("megatron")


REFUSALS = (
    Refusal("router_args.router_name", "this router", "~", one_of("SglangRouter")),
    Refusal("kl_penalty", "KL over the whole vocabulary", "k1", one_of("full")),
    Refusal("kl_loss_type", "KL over the whole vocabulary", "k3", one_of("full")),
    Refusal("transfer_backend.backend_name", "another transfer backend", "~"),
    Refusal("rewards.*.reward_manager_config", "remote reward systems; http_reward asks a service of yours", "{}"),
    Refusal("**.model_update_frequency", "weight transfers that skip steps", 1, above(1)),
    Refusal("**.mtp_training_mode", "multi-token prediction", "disabled", other_than("disabled")),
    Refusal(
        "**.model_args.ulysses_size", "context parallelism", 1, above(1), except_under=lambda backend: backend.ulysses
    ),
    *(
        Refusal(f"**.model_args.{key}", "kernels for Megatron, which has its own", False, except_under=_not_megatron)
        for key in KERNELS
    ),
    Refusal("*_env_manager.llm_proxy.proxy_type", NO_POLICY, "policy", other_than("policy")),
    Refusal(
        "custom_envs.*.agent_runner_cls",
        "agents that use ROLL's proxy: command (a program) or agent (a coroutine) is the way here",
        "~",
        lambda value: is_set(value) and not str(value).endswith("GEMRunner"),
    ),
    Refusal("**.model_args.num_labels", "classification heads", 1, above(1)),
    *(
        Refusal(f"{role}.model_args.model_type", f"{CLASSIFIER} but for reward_model", "~", one_of(CLASSIFIER))
        for role in ("actor_train", "sft_train", "*_infer", "reference", "critic", "validation")
    ),
    Refusal("**.strategy_config.mtp_num_layers", "multi-token prediction", "~"),
    Refusal("**.strategy_config.fp8", "fp8 computation", "~"),
    Refusal(
        "**.strategy_config.tp_size",
        "tensor parallelism in training but by megatron_train (tensor_model_parallel_size)",
        1,
        above(1),
        except_under=lambda backend: "tp_size" in backend.size_keys,
    ),
    Refusal("**.strategy_config.optimizer", "other optimizers than Adam", "adam", other_than("adam"), _not_megatron),
    Refusal("**.strategy_config.pp_size", "pipeline parallelism of an SGLang engine", 1, above(1)),
    *(Refusal(f"**.strategy_config.{name}", COPIES, 1, above(1)) for name in ("data_parallel_size", "dp_size")),
    Refusal("**.generating_args.num_beams", "beam search", 1, above(1)),
    Refusal("**.data_args.image_folder", WITH_MEGATRON, except_under=_not_megatron),
    Refusal("**.data_args.image_m*_pixels", WITH_MEGATRON, except_under=_not_megatron),
    Refusal("**.data_args.video_folder", WITH_MEGATRON, except_under=_not_megatron),
    Refusal("**.data_args.video_*_pixels", WITH_MEGATRON, except_under=_not_megatron),
    Refusal("**.data_args.audio_folder", "audio models"),
    Refusal("**.data_args.custom_data_kwargs_func", "data sets of sounds, and processor arguments of a row"),
)


def leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key path that is written, sections included, with its value."""
    for key, value in data.items():
        path = f"{prefix}{key}"
        yield path, value
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}.")


def refuse_unavailable(data: Mapping[str, Any], problems: Problems) -> None:
    """Add a problem for every written key that needs a feature still to come."""
    for path, value in leaves(data):
        for refusal in REFUSALS:
            if not refusal.regex.fullmatch(path) or not refusal.applies(value):
                continue
            if refusal.except_under is not None:
                node: Any = data
                for name in (path.partition(".")[0], "strategy_args", "strategy_name"):
                    node = node.get(name) if isinstance(node, Mapping) else None
                backend = BACKENDS.get(node if isinstance(node, str) else StrategyArguments().strategy_name)
                # An unknown name has a message of its own.
                if backend is None or refusal.except_under(backend):
                    continue
            problems.not_available(path, value, refusal.feature, refusal.instead)


_ELSEWHERE = frozenset(("tag_included", "router_replay"))  # keys that other tables speak of, by name
_OF_ROLES = frozenset(item.name for item in fields(WorkerConfig))
_TRAINING_MODEL = ("disable_gradient_checkpointing", "gradient_checkpointing_use_reentrant", "freeze_module_prefix")
TRAINS = "only roles that train have use for it"
_WHY = {
    "data_args": "only roles that read data have use for it",
    "generating_args": "only roles that generate have use for it",
    "training_args": TRAINS,
    "model_args": "only roles that hold a model have use for it",
    "strategy_args": "only roles that hold a model have use for it",
}


def note_unread(config: RunConfig, options: Mapping[str, StrategyConfig], checks: Checks) -> None:
    """A note for every written key that nothing reads. ``options``: those of each role's strategy, by its section."""
    facts = checks.pipeline.effective(config)
    strategies = ((f"{name}.strategy_args.strategy_config", one) for name, one in options.items())
    for path, section in (*sections_of(config, ""), *strategies):
        for item in fields(section):
            key = f"{path}.{item.name}" if path else item.name
            names = (item.name, *rules_of(item).aliases)
            if any(checks.written(key.removesuffix(item.name) + name) for name in names) and checks.is_own(key):
                says = not says_no(item, getattr(section, item.name))
                reason = unmet_condition(item, section, config, facts) if says else None
                # A check that knows more of the key may have spoken of it.
                if reason is not None and not checks.problems.noted(key):
                    checks.note(key, f"has no effect {reason}")
    grouped: dict[str, list[str]] = defaultdict(list)
    for name, role in roles_of(config):
        for key, reason in unread_of_role(name, role, config, checks):
            grouped[reason].append(key)
    for reason, keys in grouped.items():
        checks.note(", ".join(keys), f"{'has' if len(keys) == 1 else 'have'} no effect: {reason}")


def sections_of(section: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every dataclass of a loaded configuration, with its path."""
    yield path, section
    for item in fields(section):
        value, inner = getattr(section, item.name), f"{path}.{item.name}" if path else item.name
        value = value.options if isinstance(value, Choice) else value
        if is_dataclass(value):
            yield from sections_of(value, inner)
        elif isinstance(value, dict):
            for name, one in value.items():
                if is_dataclass(one):
                    yield from sections_of(one, f"{inner}.{name}")


def unmet_condition(item: Field[Any], section: object, config: RunConfig, facts: Mapping[str, Any]) -> str | None:
    """The reason why a key is not read, whatever its value: ``without use_kl_loss: true``; None for one that is."""
    for other, wanted in rules_of(item).read_if.items():
        value = facts[other] if other in facts else getattr(section, other, getattr(config, other, None))
        # Nobody knows which keys a function of the user's own reads.
        if isinstance(value, str) and DOTTED_PATH.fullmatch(value) and "." in value:
            return None
        if not wanted and value in (None, False, 0, "", [], {}):
            return f"without {other}"
        if wanted and value not in wanted:
            if wanted == (True,):
                return f"without {other}: true"
            readers = ", ".join("null" if one is None else str(one).lower() for one in wanted)
            return f"with {other}: {plain_words(value)} (read with {readers})"
    return None


def roles_of(config: RunConfig) -> Iterator[tuple[str, WorkerConfig]]:
    """Every section that is built like a role's."""
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    yield from ((name, value) for name, value in values.items() if isinstance(value, WorkerConfig))
    for name, value in values.items():
        for inner, section in value.items() if isinstance(value, dict) else ():
            if isinstance(section, WorkerConfig):
                yield f"{name}.{inner}", section


def has_use(key: str, name: str, role: WorkerConfig, config: RunConfig, pipeline: PipelineDefinition) -> bool:
    """Return true when the role at ``name`` reads the key at this path below its section."""
    reads = pipeline.reads(name, role, config)
    first, _, rest = key.partition(".")
    if first == "model_args" and rest in _TRAINING_MODEL:
        return "training_args" in reads
    if first == "router_replay":  # of the trainer and of the engines
        return "model_args" in reads
    return first in reads or first not in _OF_ROLES


def unread_of_role(name: str, role: WorkerConfig, config: RunConfig, checks: Checks) -> Iterator[tuple[str, str]]:
    """Keys of a role's section that it has no use for, with the reason."""

    def unread(key: str) -> bool:
        full = f"{name}.{key}"
        is_set = checks.written(full) and checks.is_own(full) and not checks.problems.noted(full)
        return is_set and not has_use(key, name, role, config, checks.pipeline)

    def readers(key: str) -> str:
        others = [other for other, section in roles_of(config) if has_use(key, other, section, config, checks.pipeline)]
        return f" ({', '.join(others)})" if others else ""

    for item in fields(WorkerConfig):
        if item.name not in _ELSEWHERE and getattr(role, item.name) != default_of(item) and unread(item.name):
            why = _WHY.get(item.name, "only roles that compute log-probs or train have use for it")
            yield f"{name}.{item.name}", why + readers(item.name)
    for short in _TRAINING_MODEL:
        key = f"model_args.{short}"
        holds_model = "model_args" in checks.pipeline.reads(name, role, config)
        if holds_model and getattr(role.model_args, short) not in (None, False) and unread(key):
            yield f"{name}.{key}", TRAINS + readers(key)


def default_of(item: Field[Any]) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default
