"""The registry of pipelines: the only list of them outside their folders.

A line names a pipeline, the keys by which its files are recognised, and where its definition is. A definition is
imported when it is asked for, by its path: nothing on this floor imports a pipeline.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from dataclasses import dataclass
from functools import cache

from roll.config.definition import PipelineDefinition


@dataclass(frozen=True)
class PipelineEntry:
    """A line of the registry."""

    name: str
    start_keys: tuple[str, ...]
    """A file that sets one of these is for this pipeline; the first line with one that is set counts."""
    definition: str | None = None
    """Dotted path of its :class:`PipelineDefinition`."""
    missing: str | None = None
    """Of a pipeline of ROLL's files that is still to come: what it does."""


PIPELINES = (
    PipelineEntry("sft", ("sft_train",), "roll.pipelines.sft.definition.SFT"),
    PipelineEntry(
        "agentic",
        ("train_env_manager", "val_env_manager", "custom_envs", "env_manager_cls", "max_actions_per_traj"),
        missing="agents in environments",
    ),
    PipelineEntry("dpo", ("chosen_key", "rejected_key", "ipo"), missing="preference optimisation"),
    PipelineEntry(
        "distill",
        ("student", "kd_objective", "distill_loss_weight", "student_pretrain"),
        missing="distillation from recorded logits",
    ),
    PipelineEntry(
        "onpolicy_distill",
        ("student_train", "student_infer", "is_pure_opd", "use_opd", "pure_opd_pipeline_type"),
        missing="on-policy distillation",
    ),
    PipelineEntry("rlvr", ("rewards", "actor_infer", "rollout_batch_size"), "roll.pipelines.rlvr.definition.RLVR"),
)
NAMES = tuple(sorted(entry.name for entry in PIPELINES if entry.definition is not None))
"""The pipelines that there are."""
MISSING = {entry.name: entry.missing for entry in PIPELINES if entry.missing is not None}


@cache
def definition_of(name: str) -> PipelineDefinition:
    """The definition of one of :data:`NAMES`."""
    path = next(entry.definition for entry in PIPELINES if entry.name == name)
    assert path is not None
    return _load(path)


def definitions() -> tuple[PipelineDefinition, ...]:
    """All of them."""
    return tuple(definition_of(name) for name in NAMES)


def own_definition(path: str) -> PipelineDefinition:
    """The definition at a dotted path, such as ``my_module.MyPipeline``.

    Raises:
        ValueError: there is nothing at the path, or no complete subclass of :class:`PipelineDefinition`.
    """
    find_own_modules()
    return _load(path)


def _load(path: str) -> PipelineDefinition:
    module_name, _, attribute = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, PipelineDefinition)):
        raise ValueError("must be a subclass of roll.config.definition.PipelineDefinition")
    lacking = sorted(found.__abstractmethods__)
    lacking += [name for name in ("name", "config_class", "roles") if not hasattr(found, name)]
    if inspect.isabstract(found) or lacking:
        raise ValueError(f"is not complete: it has no {', '.join(lacking)}")
    return found()


def find_own_modules() -> None:
    """Let a user's modules be found in the working directory, as Ray's workers and ``python -m`` do.

    An installed command and a script start with their own folder on the path instead.
    """
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
