"""Roles of a translated run: their backends, devices and batches.

Nodes times devices of a node become the lists that ``device_mapping`` takes, and mini-batches of prompts optimizer
steps of samples.
"""

from __future__ import annotations

import math
from fractions import Fraction

from roll.config.words import OPTIONS
from roll.translation.families import EMBEDDED_ENGINE, WEIGHTS_PER_DEVICE, strategy_of, weights_of, written_strategy
from roll.translation.reading import UNSET
from roll.translation.rules import Draft


def put_strategies(draft: Draft) -> None:
    for role, section in draft.sections():
        because = ["strategy", f"strategy.{role}", "config_name"]
        because += ["strategy.actor"] if role == "reference" and not draft.states("strategy.reference") else []
        because = [fact for fact in because if fact in draft.explicit] or because
        if draft.states(*because):
            kind = "infer" if role == "reference" else "train"
            draft.put(f"{section}.strategy_args.strategy_name", f"{strategy_of(draft, role)}_{kind}", *because)
        if strategy_of(draft, role) != written_strategy(draft, role):
            draft.facts[f"stands_in.{role}"] = True
            if (context := int(draft.get(f"context.{role}", default=1))) > 1:
                draft.facts[f"ulysses.{role}"] = context
                draft.put(f"{section}.model_args.ulysses_size", context, f"context.{role}")


def check_experts(draft: Draft) -> None:
    """Refuse expert-parallel sizes that Megatron refuses, there as here."""
    for role, _ in draft.sections():
        size = int(draft.get(f"expert.{role}", default=1))
        if strategy_of(draft, role) != "megatron" or size < 2 or not draft.whole:
            continue
        tensor = int(draft.get(f"expert_tensor.{role}", f"tensor.{role}", default=1))
        stages, count = int(draft.get(f"pipeline.{role}", default=1)), device_count(draft, role)
        if count % (size * tensor * stages):
            rule = f"x expert_tensor_parallel_size {tensor} x pipeline stages {stages} = {size * tensor * stages} must "
            draft.refuse(f"expert.{role}", f"{rule}divide the {count} devices of the role, in Megatron itself")


def put_options(draft: Draft) -> None:
    """Options of FSDP alone (parameters in host memory, type of the weights that the optimizer updates), and verl's
    environment variables for roles that train under DeepSpeed."""
    for role, section in draft.sections():
        strategy, options = strategy_of(draft, role), f"{section}.{OPTIONS}"
        offload, master, without = f"cpu_offload.{role}", f"master.{role}", f"left out: has no effect under {strategy}"
        is_fsdp, learns = strategy.startswith("fsdp"), role != "reference"
        if draft.states(offload) and strategy == "fsdp" and draft.names.get(offload, "").endswith(".offload_policy"):
            draft.remark([offload], "left out: fsdp2 alone reads it, there")
        elif draft.states(offload) and not is_fsdp:
            draft.remark([offload], without)
        elif draft.states(offload):
            draft.put(f"{options}.offload_policy", bool(draft.facts[offload]), offload)
        if draft.states(master) and not learns:
            draft.remark([master], "left out: a model that does not learn is held in the type that it computes in")
        elif draft.states(master) and not is_fsdp:
            draft.remark([master], without)
        elif draft.states(master) and (draft.facts[master] == "bf16" or not draft.whole):
            draft.put(f"{options}.master_dtype", draft.facts[master], master)
        for name in ("offload_param", "fp32_grad_accumulation", "step_each_micro_batch"):
            if draft.states(f"env.{name}") and learns and strategy == "deepspeed":
                draft.put(f"{options}.{name}", draft.facts[f"env.{name}"], f"env.{name}")


def device_count(draft: Draft, role: str) -> int:
    per_node = draft.get(f"gpus.{role}", "gpus", default=1)
    return int(per_node) * int(draft.get(f"nodes.{role}", "nodes", default=1))


def put_devices(draft: Draft) -> None:
    """``device_mapping`` of every role, as lists that start at 0 within ``CUDA_VISIBLE_DEVICES``."""
    own = [f"{name}{suffix}" for name in ("gpus", "nodes") for suffix in ("", ".actor", ".reference", ".critic")]
    because = [*own, "engines", "colocate", "colocate_reference", "engine_gpus", "engine_nodes"]
    if not draft.states(*because):
        return
    count, next_free = device_count(draft, "actor"), device_count(draft, "actor")
    draft.put("num_gpus_per_node", int(draft.get("gpus.actor", "gpus", default=count)), "gpus", "gpus.actor")
    draft.put("actor_train.device_mapping", devices(0, count), "gpus", "nodes", "gpus.actor", "nodes.actor")
    together = draft.get("colocate", default=True)
    for role, section in draft.sections()[1:]:
        size, shares = device_count(draft, role), together
        if role == "reference" and not together:
            shares = draft.get("colocate_reference", default=True)
        start = 0 if shares else next_free
        next_free += 0 if shares else size
        draft.put(f"{section}.device_mapping", devices(start, size), "gpus", "nodes", f"gpus.{role}", f"nodes.{role}")
    put_engine_devices(draft, count, together, next_free)
    visible = draft.get("visible", default="")
    names = [name for name in str(visible).split(",") if name.strip()]
    per_node = int(draft.get("gpus.actor", "gpus", default=count))
    if names and len(names) < per_node:
        rule = f"names {len(names)} devices, but a node is to have {per_node}"
        draft.problems.add("CUDA_VISIBLE_DEVICES", visible, rule)


def put_engine_devices(draft: Draft, trainers: int, together: bool, next_free: int) -> None:
    """Engines on the trainer's devices, or on those after all others."""
    size, engines = math.prod(engine_ranks(draft)), draft.get("engines")
    per_node = int(draft.get("gpus.actor", "gpus", default=trainers))
    if size > per_node and trainers > per_node:
        return  # fit_engines has refused it
    wanted = trainers if engines is None else engines * size
    if draft.states("engine_gpus"):
        wanted = int(draft.facts["engine_gpus"]) * int(draft.get("engine_nodes", default=1))
    elif not together and engines is None:
        draft.problems.missing("rollout.n_gpus_per_node", "is needed: engines have devices of their own", 1)
        return
    if together and wanted != trainers:
        rule = f"times {size} ranks of an engine take {wanted} devices, but the trainer they share has {trainers}"
        draft.problems.add("generator.num_inference_engines", engines, rule, max(1, trainers // size))
    elif wanted % size:
        rule = f"does not divide the {wanted} devices of the engines"
        draft.problems.add("actor_rollout_ref.rollout.tensor_model_parallel_size", size, rule, 1)
    else:
        mapping = devices(0 if together else next_free, wanted)
        because = ("gpus", "nodes", "engines", "colocate", "engine_gpus", "engine_nodes")
        draft.put("actor_infer.device_mapping", mapping, *because)
        draft.facts["devices"] = next_free if together else next_free + wanted


def engine_ranks(draft: Draft) -> tuple[int, int]:
    """Ranks of an engine that every matrix is sharded over, and its pipeline stages; an engine has as many devices as
    their product."""
    tensor, data, stages = (int(draft.get(f"engine_{name}", default=1)) for name in ("tensor", "data", "pipeline"))
    return tensor * data, stages


def find_engines(draft: Draft) -> None:
    """Take SkyRL's servers for engines of the run itself, on devices after the trainer's: one for each address."""
    facts = ("engines_local", "engine_urls", "engine_proxy")
    if draft.get("engines_local", default=True):
        return
    if draft.get("colocate", default=True):
        rule = "leaves the engines to servers of their own, which share no devices with the trainer"
        draft.refuse("engines_local", f"{rule}: trainer.placement.colocate_all=false")
        return
    if urls := draft.get("engine_urls"):
        draft.state("engines", len(urls))
        if unset := next((found[1] for url in urls if (found := UNSET.fullmatch(str(url)))), None):
            text = f"{unset} is not set, and one engine is taken: roll translate {unset}='[http://a:1,http://b:1]' ..."
            draft.remark(["engine_urls"], text)
    elif "engines" not in draft.explicit:
        draft.state("engines", 1)
    draft.remark(facts, "no server is asked: the run starts these engines itself, and its cluster needs their devices")


def devices(start: int, count: int) -> str:
    return f"list(range({start},{start + count}))"


def put_run_ahead(draft: Draft) -> None:
    """Generation ahead of training.

    SkyRL's fully asynchronous trainer holds ``max_staleness_steps`` + 1 batches at one version of the weights, and
    verl's V1 trainers ``num_warmup_batches`` + 1, as ``async_generation_ratio`` does here (docs/async.md); both update
    the weights between two tokens.
    """
    fully = draft.facts.get("fully_async") or draft.facts.get("runs_ahead")
    if not fully and not draft.facts.get("one_step_off"):
        return
    because = ("colocate", "staleness", "runs_ahead", "v1_mode", "warmup")
    draft.put("async_generation_ratio", draft.value_of("staleness") if fully else 1, *because)
    draft.put("partial_rollout", bool(fully), *because)
    if not draft.get("bypass"):
        draft.put("enable_old_logprobs_recompute", True, *because)
    text = "steps ahead" if fully else "a batch while it trains on the one before"
    draft.remark(because, f"their program generates {text}")


def fit_engines(draft: Draft) -> None:
    """Make engines that would span nodes smaller and more of them: an engine lies within one node here.

    How many devices share a model changes no sample. Engines whose weights do not fit on one node, by the size in the
    model's name, and sizes that nodes do not divide are refused.
    """
    size, trainers = math.prod(engine_ranks(draft)), device_count(draft, "actor")
    per_node = int(draft.get("gpus.actor", "gpus", default=trainers))
    if draft.get("engine") == EMBEDDED_ENGINE:
        # One device holds the model.
        draft.facts |= dict.fromkeys(("engine_tensor", "engine_data", "engine_pipeline"), 1)
        draft.facts["engines"] = engines * size if (engines := draft.get("engines")) else engines
        return
    if size <= per_node or trainers <= per_node:
        return
    rule = f"makes engines of {size} devices, which would span two nodes of {per_node}: an engine lies within one here"
    tensor = int(draft.get("engine_tensor", default=1))
    share = weights_of(draft) / per_node
    too_many, rest = divmod(size, per_node)
    if share > WEIGHTS_PER_DEVICE:
        rule += f", and {share:.0f} GB of weights a device leave no room for the cache: such a model has no translation"
        draft.refuse("engine_tensor", rule)
    elif rest or size // math.gcd(size, too_many) > per_node:
        draft.refuse("engine_tensor", rule, max(1, per_node * tensor // size))
    else:
        left = too_many
        for name in ("engine_pipeline", "engine_data", "engine_tensor"):
            ranks = int(draft.get(name, default=1))
            common = math.gcd(ranks, left)
            draft.facts[name], left = ranks // common, left // common
        if (engines := draft.get("engines")) is not None:
            draft.facts["engines"] = engines * too_many
        text = f"engines of {size} devices would span nodes of {per_node}: {too_many} times as many engines of "
        draft.remark(
            ["engine_tensor"], f"{text}{per_node} sample the same here, with less memory for the cache of each"
        )


def put_engine(draft: Draft) -> None:
    """Ranks of an engine, and a length that cuts responses."""
    because, (ranks, stages) = ("engine_tensor", "engine_data", "engine_pipeline"), engine_ranks(draft)
    if draft.states(*because) and draft.get("engine") != "hf_infer":
        name = "tp_size" if draft.get("engine") == "sglang" else "tensor_parallel_size"
        draft.put(f"actor_infer.{OPTIONS}.{name}", ranks, *because)
        draft.put("actor_infer.num_gpus_per_worker", ranks * stages, *because)
    if stages > 1 and draft.get("engine") != "vllm":
        draft.refuse("engine_pipeline", "needs the engine vllm: others have no pipeline stages here", 1)
    elif stages > 1:
        draft.put(f"actor_infer.{OPTIONS}.pipeline_parallel_size", stages, "engine_pipeline")
    if draft.get("engine_expert", default=1) > 1:
        if draft.get("engine") == "vllm":
            draft.put(f"actor_infer.{OPTIONS}.engine_args.enable_expert_parallel", True, "engine_expert")
        else:
            draft.remark(["engine_expert"], "left out: another way to place the same experts")
    longest = draft.get("max_model_len")
    if draft.states("max_model_len") and longest is not None:
        draft.put(f"actor_infer.{OPTIONS}.max_model_len", int(longest), "max_model_len")
        prompt, response = draft.get("prompt_length", default=0), draft.get("response_length", default=0)
        if longest < prompt + response:
            text = f"is less than prompt {prompt} + response {response}: a response after a prompt of {prompt} tokens "
            text += f"has at most {max(0, longest - prompt)} tokens"
            if longest <= prompt:
                kept = int(longest) - 1
                draft.put("prompt_length", kept, "max_model_len")
                text += f"; prompt_length becomes {kept}, which leaves room for one"
            draft.remark(["max_model_len"], text)


def data_parallel_size(draft: Draft, role: str) -> int:
    """Ranks that learn from different samples."""
    # Parallel sizes that leave fewer of them.
    names = {"megatron": ("tensor", "pipeline", "context"), "deepspeed": ()}.get(strategy_of(draft, role), ("ulysses",))
    cut = math.prod(int(draft.get(f"{name}.{role}", default=1)) for name in names)
    return max(1, device_count(draft, role) // cut)


def put_batches(draft: Draft) -> None:
    """Their mini-batches are prompts; our optimizer step is micro-batch x ``gradient_accumulation_steps`` x ranks."""
    if (generated := draft.get("generated")) is not None and not draft.get("filter_on"):
        draft.state("prompts", generated)
        draft.put("rollout_batch_size", generated, "generated")
    for role, section in draft.sections():
        sizes = (f"mini.{role}", f"micro.{role}", "micro", f"micro_of_all.{role}", "samples", f"dynamic.{role}")
        layout = ("gpus", "nodes", f"gpus.{role}", f"nodes.{role}", f"ulysses.{role}", f"tensor.{role}")
        if role == "reference" or not draft.states(*sizes, *layout, f"pipeline.{role}", f"context.{role}"):
            continue
        mini = draft.get(f"mini.{role}", "mini.actor")
        is_dynamic = draft.get(f"dynamic.{role}", "dynamic.actor")
        micro = draft.get(f"micro.{role}", "micro", default=1 if is_dynamic else None)
        of_all = draft.get(f"micro_of_all.{role}")
        if of_all is not None and draft.states(f"micro_of_all.{role}"):
            micro = max(1, of_all // device_count(draft, role))
        if mini is None or micro is None:
            draft.problems.missing(f"micro-batch of {section}", "is needed: samples of a micro-batch on one device", 1)
            continue
        prompts = draft.get("prompts")
        if draft.whole and prompts is not None and mini > prompts and f"mini.{role}" in draft.explicit:
            draft.refuse(f"mini.{role}", f"must be at most the prompts of a step, {prompts}, there as here", prompts)
            continue
        if is_dynamic:
            # Tokens form micro-batches, not a number of samples: 1 where that does not divide.
            own = Fraction(mini) * int(draft.get("samples", default=1)) / data_parallel_size(draft, role)
            micro = micro if (own / int(micro)).denominator == 1 else 1
        put_accumulation(draft, role, section, Fraction(mini), int(micro))


def put_accumulation(draft: Draft, role: str, section: str, mini: Fraction, micro: int) -> None:
    """Set the two keys of a trained role's batch, with the arithmetic as a remark."""
    samples, ranks = int(draft.get("samples", default=1)), data_parallel_size(draft, role)
    total = mini * samples
    if total / ranks < micro and (total / ranks).denominator == 1:
        micro = int(total / ranks)  # a rank has fewer samples than a micro-batch may hold
    text = f"{float(mini):g} prompts x {samples} = {float(total):g} samples an optimizer step"
    if draft.facts.get("ranks_round_down") and (total / ranks).denominator != 1 and total > ranks:
        total = Fraction(total // ranks * ranks)
        text += f", of which {total // ranks} go to each of {ranks} ranks there: {total}"
    own = total / ranks
    if own.denominator == 1 and own % micro and not str(draft.get("aggregation")).endswith("token_mean_legacy"):
        micro = next(size for size in range(micro, 0, -1) if own % size == 0)
        text += f", {own} a rank, which larger micro-batches do not divide"
    steps = total / (micro * ranks)
    because = (f"mini.{role}", f"micro.{role}", "micro", f"micro_of_all.{role}")
    if steps.denominator != 1:
        rule = f"{text} do not divide into micro-batches of {micro} on {ranks} ranks"
        draft.problems.add(f"{section}: mini-batch", float(mini), rule)
        return
    if draft.whole or draft.states(*because[1:], f"dynamic.{role}"):
        draft.put(f"{section}.training_args.per_device_train_batch_size", micro, *because[1:])
    draft.put(f"{section}.training_args.gradient_accumulation_steps", int(steps), *because)
    draft.remark(because, f"{section}: {text} = {int(steps)} micro-batches of {micro} on {ranks} ranks")


def put_forward_batches(draft: Draft) -> None:
    """Micro-batches of passes without gradient that are given for all devices together."""
    for role, section in draft.sections():
        fact = f"forward_of_all.{role}"
        if draft.states(fact) and draft.facts[fact] is not None:
            draft.put(f"{section}.infer_batch_size", max(1, draft.facts[fact] // device_count(draft, role)), fact)


def put_token_budgets(draft: Draft) -> None:
    """verl's token budgets count with ``use_dynamic_bsz`` only, which critic and reference have from the actor."""
    for role, section in draft.sections():
        own, dynamic = f"token_budget.{role}", (f"dynamic.{role}", "dynamic.actor")
        ranks = ranks_of_a_sequence(draft, role)
        forward: tuple[str, ...] = (f"forward_dynamic.{role}", *dynamic)
        phases: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
            "train": (dynamic, (own, "token_budget.actor")),
            "infer": (forward, (f"forward_budget.{role}", own, "token_budget.actor")),
        }
        for phase, (switches, budgets) in phases.items():
            if (role == "reference" and phase == "train") or not draft.states(*switches):
                continue
            enabled = bool(draft.get(*switches, default=False))
            if enabled or draft.get(*dynamic):
                draft.put(f"{section}.use_dynamic_batching_in_{phase}", enabled, *switches)
            budget = draft.get(*budgets)
            if enabled and budget is not None:
                draft.put(f"{section}.max_tokens_per_microbatch_in_{phase}", int(budget) * ranks, *budgets)
        counted: dict[str, tuple[str, ...]] = {own: dynamic, f"forward_budget.{role}": forward}
        for fact, switches in counted.items():
            if fact in draft.explicit and not (draft.states(*switches) and draft.get(*switches)):
                draft.remark([fact], "left out: without use_dynamic_bsz it has no effect")


def ranks_of_a_sequence(draft: Draft, role: str) -> int:
    """Ranks that share the tokens of one sequence."""
    strategy = strategy_of(draft, role)
    if strategy == "megatron":
        return int(draft.get(f"context.{role}", default=1))
    return 1 if strategy == "deepspeed" else int(draft.get(f"ulysses.{role}", default=1))


def put_optimizers(draft: Draft) -> None:
    for role, section in draft.sections():
        betas = draft.get(f"betas.{role}")
        if draft.states(f"betas.{role}") and betas is not None:
            for number, beta in enumerate(betas, start=1):
                draft.put(f"{section}.training_args.adam_beta{number}", float(beta), f"betas.{role}")
        floor, arguments = draft.get(f"floor.{role}"), f"{section}.training_args"
        peak = draft.keys.get(f"{arguments}.learning_rate")
        if floor and peak and draft.keys.get(f"{arguments}.lr_scheduler_type", "constant") != "constant":
            draft.put(f"{arguments}.min_lr_ratio", round(float(floor) / float(peak), 12), f"floor.{role}")
