"""Supervised runs of verl (``verl.trainer.sft_trainer``, the older ``fsdp_sft_trainer``) and SkyRL
(``skyrl.train.main_sft``).

Their keys of model, optimizer and backend are those of a policy under shorter names, so the rules are those of its
table: only data, steps and defaults have tables of their own (``*_sft.table``). All take the mean over the answers'
tokens of a whole optimizer step, as here; the oldest versions that of each micro-batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roll.translation.assembly import put_adapters, put_tracking
from roll.translation.families import put_family
from roll.translation.placement import (
    check_experts,
    put_batches,
    put_devices,
    put_optimizers,
    put_options,
    put_strategies,
    put_token_budgets,
)
from roll.translation.recording import DEVICES
from roll.translation.rules import Dialect, Draft, Section, listed, read_table
from roll.translation.skyrl import SKYRL
from roll.translation.verl import VERL

SECTION = "sft_train"  # section of the model that learns, in place of `actor_train`


def shared(dialect: Dialect, names: Mapping[str, str], own: tuple[Section, ...], title: str) -> Section:
    """Rules of a policy's table under the names of a supervised run.

    Args:
        names: beginning of a key there, and its replacement here; the first that fits counts.
        own: rules that go first.
    """
    taken = {spelling for section in own for rule in section.rules for spelling in rule.spellings}
    # A group of another backend would take in every key of this one, misspelled ones as well.
    taken |= {f"{name.rstrip('.')}.*" for name in names.values() if name}
    rules = []
    for rule in (rule for section in dialect.sections for rule in section.rules):
        prefixes = [(next((p for p in names if spelling.startswith(p)), None), spelling) for spelling in rule.spellings]
        renamed = [names[p] + spelling.removeprefix(p) for p, spelling in prefixes if p is not None]
        spellings = tuple(name for name in dict.fromkeys(renamed) if name not in taken)
        # What belongs to other roles goes.
        ours = tuple(
            key.replace("actor_train", SECTION) for key in rule.ours if "." not in key or key.startswith("actor_train.")
        )
        if not spellings or (rule.ours and not ours and not rule.computed):
            continue
        taken |= set(spellings)
        rules.append(replace(rule, spellings=spellings, ours=ours, default=""))
    return Section(title, tuple(rules))


def find_verl_run(draft: Draft) -> None:
    """Devices of ``torchrun``, the backend, and what ``after_each_epoch`` means."""
    options = draft.facts["launcher_options"]
    for fact, name in (("gpus", "nproc_per_node"), ("nodes", "nnodes")):
        if str(options.get(name, "")).isdecimal():
            draft.state(fact, int(options[name]))
        elif fact not in draft.explicit:
            counted = name in options and fact == "gpus"  # by a word such as "gpu", or an argument that is not given
            draft.state(fact, DEVICES if counted else 1)
            draft.remark([fact] if counted else [], f"as many processes as a node of {DEVICES} devices takes")
    engine = draft.get("engine_group", default="fsdp")
    draft.state("strategy.actor", (draft.get("engine_strategy") if engine == "fsdp" else None) or engine)
    for fact, key in (("save_epoch", "save_steps"), ("test_epoch", "eval_steps")):
        interval = draft.get(fact, default=-1)
        if interval != "after_each_epoch" and not re.fullmatch(r"-?\d+", str(interval)):
            draft.refuse(fact, "must be a whole number or after_each_epoch", 100)
            continue
        if interval == "after_each_epoch":
            rows, size = draft.get("rows"), int(draft.get("mini.actor", default=256))
            interval = 0 if rows is None else max(1, int(rows) // size)
            draft.remark(
                [fact], "an epoch is as many steps" if interval else "give --train-rows, and an epoch has steps"
            )
        draft.put(key, max(0, int(interval)), fact)
    draft.put("train_on", "assistant", "messages")


def put_columns(draft: Draft, section: str) -> None:
    """The conversation, or the columns of one question and its answer, whose entries have dotted names here."""
    if draft.get("conversations", default=True):
        draft.put(f"{section}.data_args.messages", str(draft.get("messages", default="messages")), "messages")
        return
    for name in ("prompt", "response"):
        column, entries = draft.get(f"{name}_column"), draft.get(f"{name}_entries", default=[])
        keys = column if isinstance(column, list) else [column]
        if len(keys) > 1:
            draft.refuse(f"{name}_column", "must be one column")
        dotted = ".".join(map(str, (keys[0], *entries)))
        draft.put(f"{section}.data_args.{name}", dotted, f"{name}_column", f"{name}_entries")


def find_skyrl_run(draft: Draft) -> None:
    """Names of data sets with their splits, and the end of the run."""
    for files, splits in (("train_files", "train_splits"), ("val_files", "val_splits")):
        names = draft.get(files)
        if not names:
            draft.facts.pop(files, None)
            draft.written.discard(files)
            continue
        parts = draft.get(splits, default=[None])
        parts = list(parts) * len(names) if len(parts) == 1 else list(parts)
        # Data sets of the hub have their split in their name; files and folders stay as they are.
        of_hub = [not re.match(r"[./~$]", str(name)) and not re.search(r"\.\w+$", str(name)) for name in names]
        named = [
            f"hub:{name}:{part}" if is_set else str(name)
            for name, part, is_set in zip(names, parts, of_hub, strict=False)
        ]
        draft.state(files, named)
    limits = [draft.get(fact) for fact in ("steps", "step_limit") if draft.get(fact)]
    if limits:
        draft.state("steps", min(int(limit) for limit in limits))
    if draft.get("ckpt_path"):
        draft.put("output_dir", str(draft.facts["ckpt_path"]), "ckpt_path")
    if resume := draft.get("resume_from"):
        draft.put("resume_from_checkpoint", True if resume == "latest" else str(resume), "resume_from")
    if draft.get("dynamic.actor") and draft.get("token_budget.actor") is None:
        draft.state("token_budget.actor", draft.get("longest"))
    if draft.get("longest") is None:
        draft.problems.missing("max_length", "is needed: a run here has a longest row", 4096)


def splits(value: object) -> list[str]:
    """One split, or several; ``[train[:100]]`` is no list in hydra's grammar."""
    if isinstance(value, str) and value.startswith("["):
        return [part.strip() for part in value[1:-1].split(",")]
    return [str(part) for part in listed(value)]


def put_run(draft: Draft) -> None:
    """Data, steps and the end of the schedule."""
    for fact, section in (("train_files", SECTION), ("val_files", "validation")):
        if draft.get(fact):
            draft.put(f"{section}.data_args.file_name", draft.facts[fact], fact)
            put_columns(draft, section)
    if draft.get("steps"):
        draft.put("max_steps", int(draft.facts["steps"]), "steps")
    else:
        draft.put(
            f"{SECTION}.training_args.num_train_epochs",
            float(draft.get("passes_over_data", default=1)),
            "passes_over_data",
        )


STEPS = (
    put_strategies,
    put_options,
    put_devices,
    check_experts,
    put_batches,
    put_token_budgets,
    put_optimizers,
    put_family,
    put_adapters,
    put_run,
    put_tracking,
)


def _dialect(
    name: str,
    title: str,
    source: Dialect,
    names: Mapping[str, str],
    program: str,
    successor: Dialect | None = None,
    **rest: Any,
) -> Dialect:
    own = read_table(name, {"splits": splits})
    if successor is not None:
        taken = {spelling for section in own for rule in section.rules for spelling in rule.spellings}
        kept = (rule for rule in successor.sections[0].rules if taken.isdisjoint(rule.spellings))
        own = (*own, Section(f"{title}: rules of its successor", tuple(kept)))
    return Dialect(
        name,
        title,
        (*own, shared(source, names, own, f"{title}: rules of a policy's model")),
        "",
        programs=((program, {}),),
        steps=STEPS,
        pipeline="sft",
        learner=SECTION,
        **rest,
    )


VERL_SFT = _dialect(
    "verl_sft",
    "SFT of verl",
    VERL,
    {
        "actor_rollout_ref.model.": "model.",
        "actor_rollout_ref.actor.optim.": "optim.",
        **{
            f"actor_rollout_ref.actor.{name}.": "engine."
            for name in ("fsdp_config", "megatron", "veomni", "torchtitan", "automodel_config")
        },
        "trainer.": "trainer.",
        "VERL_": "VERL_",
    },
    r"verl\.trainer\.sft_trainer(?:_ray)?",
    prepare=find_verl_run,
    empty_is_false=True,
)
VERL_FSDP_SFT = _dialect(
    "verl_fsdp_sft",
    "Older SFT of verl",
    VERL,
    {
        "actor_rollout_ref.model.": "model.",
        "actor_rollout_ref.actor.optim.": "optim.",
        "actor_rollout_ref.actor.fsdp_config.": "model.fsdp_config.",
        "actor_rollout_ref.actor.ulysses_": "ulysses_",
        "trainer.": "trainer.",
        "VERL_": "VERL_",
    },
    r"verl\.trainer\.fsdp_sft_trainer",
    successor=VERL_SFT,
    prepare=find_verl_run,
    empty_is_false=True,
)
SKYRL_SFT = _dialect(
    "skyrl_sft",
    "SFT of SkyRL",
    SKYRL,
    {
        "trainer.placement.policy_": "placement.",
        "trainer.policy.": "",
        **{f"trainer.{name}.": f"{name}." for name in ("tracker",)},
        **{f"trainer.{name}": name for name in ("seed", "logger", "project_name", "run_name", "max_ckpts", "bf16")},
        **{f"trainer.{name}": name for name in ("hf_save", "export_path", "remove_micro", "use_sample", "gradient_")},
        **{
            f"trainer.{name}": name
            for name in ("flash_attn", "enable_ray", "logprobs_chunk", "fused_lm_head", "use_exp")
        },
    },
    r"skyrl\.train\.main_sft",
    prepare=find_skyrl_run,
)
