"""Checks of every run whose policy learns from its own samples by its parts, before anything starts: own functions, how
weights can travel, and what ``strict_on_policy`` can compute with the same bits on both sides. Torch-free until a
start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from roll.config.checks.base import Checks
from roll.config.lora import adapts_experts, uses_lora
from roll.config.model_files import EXPERTS, model_config, needed
from roll.config.reading.errors import ConfigError
from roll.config.reading.fields import DOTTED_PATH
from roll.config.roles import KERNELS, WorkerConfig
from roll.config.run import PolicyRunConfig
from roll.methods.policy_plan import PolicyConfig

if TYPE_CHECKING:
    from roll.config.loader import LoadedConfig

KEY = "strict_on_policy"
ENGINE = "hf_infer"
MEGATRON = "megatron_train"
TRAINERS = ("fsdp2_train", "fsdp_train", "deepspeed_train", MEGATRON)
BUILD_FILTER, BUILD_ROUTER = "roll.rollout.flow.build_filter", "roll.rollout.routing.build_router"
# Keys at the top that take the dotted path of a function; losses, estimators and filters bring options along.
OWN_FUNCTION_KEYS = (
    *("entropy_loss_agg_mode", "kl_loss_agg_mode", "kl_loss_type", "kl_penalty", "loss_agg_mode"),
    *("train_infer_correction", "value_loss_agg_mode"),
)
CHOICES = {
    "estimator": "roll.algorithms.advantages.advantage_estimators.options_of",
    "loss": "roll.algorithms.policy_losses.policy_losses.options_of",
}


def policy_functions(config: PolicyConfig) -> Iterator[tuple[str, Any, Callable[[], object]]]:
    """(key, value, look-up) of what a user may have written a function for; nothing is imported for the known names."""

    def resolve(key: str, path: str) -> object:
        from roll.algorithms.registry import Registry

        return Registry(key).resolve(path)

    for key in OWN_FUNCTION_KEYS:
        value = getattr(config, key)
        if isinstance(value, str) and DOTTED_PATH.fullmatch(value):
            yield key, value, partial(resolve, key, value)
    for key, options_of in CHOICES.items():
        choice = getattr(config, key)
        if isinstance(choice.options, Mapping):  # of a function that is not imported yet
            yield key, choice.name, partial(late, options_of, choice)
    router = config.router_args
    if router.router_config or DOTTED_PATH.fullmatch(router.router_name or ""):
        key = "router_config" if router.router_config else "router_name"
        build = partial(late, BUILD_ROUTER, router.router_name, router.router_config)
        yield f"router_args.{key}", getattr(router, key), build


def late(path: str, *arguments: Any) -> Any:
    """Call the function at a dotted path, which is imported only now: it needs torch."""
    return resolve_name(path)(*arguments)


def check_strict(config: PolicyRunConfig, checks: Checks) -> None:
    if not config.strict_on_policy:
        return
    for key, value, rule, works in _obstacles(config):
        if not checks.broken(key):
            checks.add(key, value, f"{rule} ({KEY}: true)", works)
    for name, role in (("actor_train", config.actor_train), ("actor_infer", config.actor_infer)):
        if role.model_args.attn_implementation not in (None, "auto"):
            checks.note(f"{name}.model_args.attn_implementation", f"has no effect with {KEY}: true")
        path = role.model_args.model_name_or_path or config.pretrain
        model = model_config(path) or {}
        text = model.get("text_config") or model
        # Layers that are computed by other operations than plain attention, in words.
        layers = set(text.get("layer_types") or ()) - {"full_attention"}
        if text.get("layer_types") is None and text.get("sliding_window") and text.get("use_sliding_window", True):
            layers = {"sliding_attention"}
        kinds = [kind for kind in needed(model) if kind != EXPERTS] if model else []
        kinds += [f"layers of type {kind}" for kind in sorted(layers)]
        caps = {"attn_logit_softcapping": "capped attention scores", "final_logit_softcapping": "capped logits"}
        kinds += [what for cap, what in caps.items() if text.get(cap) is not None]
        if kinds:
            rule = f"must be a model of text whose layers are full attention; this one has {kinds[0]} ({KEY})"
            key = f"{name}.model_args.model_name_or_path" if role.model_args.model_name_or_path else "pretrain"
            checks.add(key, path, rule, "Qwen/Qwen2.5-0.5B-Instruct")


def _obstacles(config: PolicyRunConfig) -> Iterator[tuple[str, Any, str, Any]]:
    """Key, value, rule and a value that works."""
    trainer, engine = config.actor_train, config.actor_infer
    own, other = trainer.strategy_args.strategy_name, engine.strategy_args.strategy_name
    if other != ENGINE:
        yield "actor_infer.strategy_args.strategy_name", other, "computes with kernels of its own", ENGINE
    if own not in TRAINERS:
        rule = f"computes with layers of its own, which are not the engine's; {', '.join(TRAINERS)} work"
        yield "actor_train.strategy_args.strategy_name", own, rule, TRAINERS[0]
    dtype, computed = trainer.model_args.dtype, trainer.strategy_args.strategy_config.get("param_dtype")
    for name, role in (("actor_train", trainer), ("actor_infer", engine)):
        for key in KERNELS if role is trainer else ():
            if getattr(role.model_args, key):
                yield f"{name}.model_args.{key}", True, "computes with other kernels than the engine", False
        if role.model_args.dtype == "fp16":
            yield f"{name}.model_args.dtype", "fp16", "must be bf16 or fp32", "bf16"
    if computed not in (None, dtype):
        key = "actor_train.strategy_args.strategy_config.param_dtype"
        yield key, computed, f"must be model_args.dtype, {dtype}, which the engine computes in", dtype
    if trainer.model_args.model_config_kwargs != engine.model_args.model_config_kwargs:
        key = "actor_infer.model_args.model_config_kwargs"
        wanted = trainer.model_args.model_config_kwargs
        yield key, engine.model_args.model_config_kwargs, "must be actor_train's", wanted
    if config.weight_sync.lora == "adapter":
        yield "weight_sync.lora", "adapter", "must be merged: the trainer computes with the merged weights", "merged"
    if config.weight_sync.quantization is not None:
        yield "weight_sync.quantization", config.weight_sync.quantization, "gives the engine other weights", "~"
    if engine.strategy_args.strategy_config.get("in_flight_update") == "keep":
        key = "actor_infer.strategy_args.strategy_config.in_flight_update"
        yield key, "keep", "leaves keys and values of older weights in the cache", "recompute"
    if config.train_infer_correction:
        yield "train_infer_correction", config.train_infer_correction, "must be null: nothing is left to correct", "~"
    if config.rollout_mock.enable and config.rollout_mock.mode == "mock":
        yield "rollout_mock.mode", "mock", "reads samples of other weights", "dump"
    yield from _of_megatron(config)
    yield from _of_experts(trainer)
    yield from _changed_distributions(config)


def _of_megatron(config: PolicyRunConfig) -> Iterator[tuple[str, Any, str, Any]]:
    trainer = config.actor_train
    if trainer.strategy_args.strategy_name != MEGATRON:
        return
    args, options = trainer.model_args, trainer.strategy_args.strategy_config
    section = "actor_train.strategy_args"
    if (size := options.get("tensor_model_parallel_size") or 1) != 1:
        rule = "must be 1: ranks add parts of a product, which the engine computes whole"
        yield f"{section}.strategy_config.tensor_model_parallel_size", size, rule, 1
    if uses_lora(args):
        key = "adapter_name_or_path" if args.adapter_name_or_path else "lora_target"
        rule = f"is not for {MEGATRON}, which adds B (A x) to W x, where the engine has one matrix"
        yield f"actor_train.model_args.{key}", getattr(args, key), rule, "~"
    model = model_config(args.model_name_or_path or config.pretrain)
    if model is not None and EXPERTS in needed(model):
        rule = "weighs an expert's activations, where the engine weighs its output; models with experts need another"
        yield f"{section}.strategy_name", MEGATRON, rule, TRAINERS[0]


def _of_experts(trainer: WorkerConfig) -> Iterator[tuple[str, Any, str, Any]]:
    if trainer.strategy_args.strategy_config.get("moe_use_grouped_mm"):
        key = "actor_train.strategy_args.strategy_config.moe_use_grouped_mm"
        yield key, True, "sums an expert's products by the number of its tokens", False
    if adapts_experts(trainer.model_args):
        rule = "must not adapt experts, whose adapters the engine gets merged by other operations"
        yield "actor_train.model_args.lora_target", trainer.model_args.lora_target, rule, "all-linear"


def _changed_distributions(config: PolicyRunConfig) -> Iterator[tuple[str, Any, str, Any]]:
    drawn = config.actor_infer.generating_args
    for name, value, changes, works in (
        ("top_p", drawn.top_p, drawn.top_p < 1, 1.0),
        ("top_k", drawn.top_k, drawn.top_k > 0, 0),
        ("min_p", drawn.min_p, drawn.min_p > 0, 0),
        ("repetition_penalty", drawn.repetition_penalty, drawn.repetition_penalty != 1, 1.0),
        ("min_new_tokens", drawn.min_new_tokens, drawn.min_new_tokens > 0, 0),
    ):
        if changes:
            yield f"actor_infer.generating_args.{name}", value, "changes the distribution that is sampled from", works


def check_policy_host(loaded: LoadedConfig[Any]) -> None:
    """Weights can travel on this host, and ``strict_on_policy`` works with a small copy of the model. Raises
    ``ConfigError``: ``cuda_ipc`` on a host without CUDA; with ``strict_on_policy`` devices other than a CPU, or
    log-probs that are not equal."""
    config, transport = loaded.config, loaded.config.weight_sync.transport
    if transport != "cuda_ipc" and not config.strict_on_policy:
        return
    from roll.platforms import current_platform

    device_type = current_platform().device_type
    if transport == "cuda_ipc" and device_type != "cuda":
        rule = f"needs CUDA devices, this host's are of type {device_type}; object_store works everywhere"
        raise ConfigError([loaded.problem("weight_sync.transport", "cuda_ipc", rule)])
    if not config.strict_on_policy:
        return
    if device_type != "cpu":
        rule = f"is for CPUs; this host's devices are of type {device_type}, so set it to false"
        raise ConfigError([loaded.problem(KEY, True, rule)])
    from roll.strategies.hf_infer.strategy import check_strict_copy

    try:
        check_strict_copy(loaded.plan.roles["actor_infer"].section)
    except ValueError as error:
        raise ConfigError([loaded.problem(KEY, True, f"does not work here: {error}")]) from None
