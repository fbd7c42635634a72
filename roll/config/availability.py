"""Keys whose feature this version does not have: refused at load, never ignored.

One table. An entry goes when its feature comes.  Keys that merely have their neutral value are accepted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roll.config.errors import Problems
from roll.config.reward_models import CLASSIFIER
from roll.config.roles import StrategyArguments

Test = Callable[[Any], bool]


def is_set(value: Any) -> bool:
    return value not in (None, False, "", [], {}, "None")


def above(limit: float) -> Test:
    return lambda value: isinstance(value, int | float) and value > limit


def one_of(*names: str) -> Test:
    return lambda value: any(name in names for name in (value if isinstance(value, list) else [value]))


def other_than(neutral: str) -> Test:
    return lambda value: is_set(value) and value != neutral


@dataclass(frozen=True)
class Refusal:
    """A key (``*`` stands for one name, ``**`` for any number) that is refused when ``applies`` to its value."""

    pattern: str
    feature: str
    instead: Any = None
    """A value that loads; None where the file is for a model that this version does not train, whatever stands here."""
    applies: Test = is_set
    except_under: tuple[str, ...] = ()
    """Strategies (by the beginning of their name) that deal with the key themselves."""

    @property
    def regex(self) -> re.Pattern[str]:
        escaped = re.escape(self.pattern).replace(r"\*\*\.", r"(?:[^.]+\.)*").replace(r"\*", "[^.]*")
        return re.compile(escaped)


REFUSALS = (
    Refusal("router_args.router_name", "this router", "~", one_of("EnvAffinityRouter", "SglangRouter")),
    Refusal("kl_penalty", "KL over the whole vocabulary", "k1", one_of("full")),
    Refusal("kl_loss_type", "KL over the whole vocabulary", "k3", one_of("full")),
    Refusal("transfer_backend.backend_name", "another transfer backend", "~"),
    Refusal("profiler_timeline", "profiler timelines", False),
    Refusal("profiler_memory", "memory snapshots", False),
    Refusal("otlp_output_dir", "OpenTelemetry traces", "~"),
    Refusal("is_offload_optimizer_states_in_train_step", "optimizer states off the device inside a step", False),
    Refusal("student_train", "on-policy distillation", "~"),
    Refusal("student_infer", "on-policy distillation", "~"),
    Refusal("teacher", "on-policy distillation", "~"),
    Refusal("is_pure_opd", "on-policy distillation", False),
    Refusal("use_opd", "on-policy distillation", False),
    Refusal("pure_opd_pipeline_type", "on-policy distillation", "~"),
    Refusal("rewards.*.reward_manager_config", "remote reward systems; http_reward asks a service of yours", "{}"),
    Refusal("**.model_update_frequency", "weight transfers that skip steps", 1, above(1)),
    Refusal("**.router_replay.mode", "router replay", "disabled", other_than("disabled")),
    Refusal("**.mtp_training_mode", "multi-token prediction", "disabled", other_than("disabled")),
    Refusal("**.model_args.ulysses_size", "context parallelism", 1, above(1), except_under=("deepspeed_", "fsdp")),
    Refusal("**.model_args.num_labels", "classification heads", 1, above(1)),
    Refusal("**.model_args.moe_aux_loss_coef", "mixture-of-experts training"),
    *(
        Refusal(f"{role}.model_args.model_type", f"{CLASSIFIER} but for reward_model", "~", one_of(CLASSIFIER))
        for role in ("*_train", "*_infer", "reference", "critic", "validation")
    ),
    Refusal("**.strategy_config.ep_size", "expert parallelism", applies=above(1)),
    Refusal("**.strategy_config.expert_model_parallel_size", "expert parallelism", applies=above(1)),
    Refusal("**.strategy_config.expert_tensor_parallel_size", "expert parallelism", applies=above(1)),
    Refusal("**.strategy_config.mtp_num_layers", "multi-token prediction", "~"),
    Refusal("**.strategy_config.fp8", "fp8 computation", "~"),
    Refusal("**.strategy_config.optimizer_cpu_offload", "optimizer states in host memory under Megatron", False),
    Refusal("**.strategy_config.efsdp_size", "expert parallelism", applies=above(1)),
    Refusal("**.strategy_config.apply_expert_patch", "mixture-of-experts training"),
    Refusal("**.strategy_config.moe_use_grouped_mm", "mixture-of-experts training"),
    Refusal("**.strategy_config.wrap_policy.moe_experts", "mixture-of-experts training"),
    Refusal(
        "**.strategy_config.tp_size",
        "tensor parallelism in training but by megatron_train (tensor_model_parallel_size)",
        1,
        above(1),
        except_under=("sglang",),
    ),
    Refusal("**.generating_args.num_beams", "beam search", 1, above(1)),
    Refusal("**.data_args.image_folder", "vision-language models"),
    Refusal("**.data_args.video_folder", "vision-language models"),
    Refusal("**.data_args.audio_folder", "audio models"),
    Refusal("**.data_args.image_m*_pixels", "vision-language models"),
    Refusal("**.data_args.video_*_pixels", "vision-language models"),
    Refusal("**.data_args.custom_data_kwargs_func", "vision-language models"),
)
_COMPILED = tuple((refusal, refusal.regex) for refusal in REFUSALS)


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
        for refusal, regex in _COMPILED:
            if regex.fullmatch(path) and refusal.applies(value) and not _excepted(refusal, data, path):
                problems.not_available(path, value, refusal.feature, refusal.instead)


def _excepted(refusal: Refusal, data: Mapping[str, Any], path: str) -> bool:
    node: Any = data
    for name in (path.partition(".")[0], "strategy_args", "strategy_name"):
        node = node.get(name) if isinstance(node, Mapping) else None
    strategy = node if isinstance(node, str) else StrategyArguments().strategy_name
    return strategy.startswith(refusal.except_under)
