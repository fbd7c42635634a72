"""A small configuration that loads, and ways to damage it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from roll.config.loader import LoadedConfig, load_composed, load_config
from roll.config.reading.compose import Composed
from roll.config.reading.errors import ConfigError, Problem, Problems
from roll.config.reading.yaml_files import SourceFile

GONE = object()
"""In a change: take the key out."""

GOOD: dict[str, Any] = {
    "exp_name": "good",
    "pretrain": "owner/model",
    "num_gpus_per_node": 8,
    "max_steps": 10,
    "rollout_batch_size": 64,
    "num_return_sequences_in_group": 4,
    "prompt_length": 128,
    "response_length": 128,
    "estimator": "grpo",
    "actor_train": {
        "device_mapping": "list(range(0,2))",
        "training_args": {
            "learning_rate": 1.0e-6,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 8,
        },
        "data_args": {"file_name": ["train.jsonl"], "messages": "messages"},
        "strategy_args": {"strategy_name": "fsdp2_train", "strategy_config": {"fsdp_size": 1}},
    },
    "actor_infer": {
        "device_mapping": [0, 1],
        "generating_args": {"temperature": 1.0, "top_p": 1.0, "top_k": -1},
        "strategy_args": {"strategy_name": "hf_infer", "strategy_config": {"max_num_seqs": 64}},
    },
    "reference": {
        "device_mapping": [0, 1],
        "strategy_args": {"strategy_name": "fsdp2_infer", "strategy_config": {}},
    },
    "rewards": {
        "math": {"worker_cls": "math_rule", "tag_included": ["math", "gsm8k"]},
        "choice": {"worker_cls": "multiple_choice", "tag_included": ["choice"]},
    },
    "validation": {"data_args": {"file_name": "val.jsonl"}},
}

GOOD_SFT: dict[str, Any] = {
    "pretrain": "owner/model",
    "sequence_length": 256,
    "max_steps": 10,
    "sft_train": {
        "device_mapping": [0],
        "training_args": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        "data_args": {"file_name": "train.jsonl", "messages": "messages"},
    },
}

GOOD_RM: dict[str, Any] = {
    "pretrain": "owner/model",
    "max_steps": 10,
    "reward_train": {
        "device_mapping": [0, 1],
        "model_args": {"model_type": "auto_sequence_classification"},
        "training_args": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        "data_args": {"file_name": "train.jsonl"},
        "strategy_args": {"strategy_name": "fsdp2_train", "strategy_config": {}},
    },
}

LAKE: dict[str, Any] = {
    "exp_name": "lake",
    "pretrain": "owner/model",
    "rollout_batch_size": 64,
    "val_batch_size": 32,
    "sequence_length": 512,
    "max_steps": 10,
    "estimator": "grpo",
    "actor_train": {"device_mapping": [0, 1], "training_args": {"per_device_train_batch_size": 16}},
    "actor_infer": {"device_mapping": [0, 1], "generating_args": {"max_new_tokens": 64, "top_p": 1.0, "top_k": -1}},
    "train_env_manager": {"num_env_groups": 8, "group_size": 8, "tags": ["lake"], "num_groups_partition": [8]},
    "val_env_manager": {"num_env_groups": 32, "tags": ["lake", "box"]},
    "custom_envs": {
        "lake": {"env_type": "frozen_lake", "max_steps": 5, "max_tokens_per_step": 32},
        "box": {"env_type": "sokoban", "max_tokens_per_step": 128},
    },
}


TEACHER = {
    "model_args": {"model_name_or_path": "my/teacher"},
    "strategy_args": {"strategy_name": "fsdp2_infer"},
    "device_mapping": [0],
}
DISTILL: dict[str, Any] = {
    "pipeline": "distill",
    "student_pretrain": "my/student",
    "teacher_pretrain": "my/teacher",
    "student": {
        "data_args": {"file_name": "rows.jsonl"},
        "strategy_args": {"strategy_name": "fsdp2_train"},
        "training_args": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        "device_mapping": [0, 1],
    },
    "teacher": {"strategy_args": {"strategy_name": "fsdp2_infer"}, "device_mapping": [2]},
}


def opd(**keys: Any) -> dict[str, Any]:
    """A good RLVR file whose roles have ROLL's names for a student, with a teacher."""
    data = changed({})
    data["student_train"], data["student_infer"] = data.pop("actor_train"), data.pop("actor_infer")
    return {**data, "is_pure_opd": True, "teacher": TEACHER, **keys}


def read_table(name: str) -> Any:
    """``data/NAME.yaml``, where ``!gone ''`` takes a key out."""

    class Table(yaml.SafeLoader):
        pass

    Table.add_constructor("!gone", lambda loader, node: GONE)
    return yaml.load((Path(__file__).parent / f"data/{name}.yaml").read_text(encoding="utf-8"), Table)


def write_rows(folder: Path = Path()) -> None:
    """The data files that :data:`GOOD` and :data:`GOOD_SFT` name, with a row each."""
    messages = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
    for name in ("train.jsonl", "val.jsonl"):
        (folder / name).write_text(json.dumps({"tag": "math", "messages": messages, "ground_truth": "5"}))


def changed(changes: Mapping[str, Any], base: Mapping[str, Any] = GOOD) -> dict[str, Any]:
    """``base`` with dotted keys set to other values."""
    data: dict[str, Any] = copy.deepcopy(dict(base))
    for path, value in changes.items():
        *sections, last = path.split(".")
        node = data
        for name in sections:
            if not isinstance(node.get(name), dict):
                node[name] = {}
            node = node[name]
        if value is GONE:
            node.pop(last)
        else:
            node[last] = copy.deepcopy(value)
    return data


def load(folder: Path, data: Mapping[str, Any], *overrides: str, check_files: bool = False) -> LoadedConfig[Any]:
    """Load ``data`` from a file. Without anything for hydra to do, composition (most of the time) is left out."""
    file = folder / "config.yaml"
    text = yaml.safe_dump(dict(data), sort_keys=False)
    file.write_text(text, encoding="utf-8")
    if overrides or "${" in text or "???" in text:
        return load_config(None, file, None, overrides, check_files=check_files)
    composed = Composed(yaml.safe_load(text), SourceFile(file))
    return load_composed(None, composed, Problems(), check_files=check_files)


def mistakes(folder: Path, data: Mapping[str, Any], *overrides: str, check_files: bool = False) -> tuple[Problem, ...]:
    """Every problem of a configuration; empty when it loads."""
    try:
        load(folder, data, *overrides, check_files=check_files)
    except ConfigError as error:
        return error.problems
    return ()


SMALLEST: dict[str, Any] = {
    "pretrain": "owner/model",
    "rollout_batch_size": 6,
    "prompt_length": 16,
    "response_length": 16,
    "actor_train": {"data_args": {"file_name": "train.jsonl"}, "strategy_args": {"strategy_name": "fsdp2_train"}},
    "actor_infer": {"strategy_args": {"strategy_name": "hf_infer"}},
    "rewards": {"math": {"worker_cls": "math_rule"}},
}
"""Everything else by default."""
BASES: dict[str, dict[str, Any]] = {
    "rlvr": GOOD,
    "sft": GOOD_SFT,
    "rm": GOOD_RM,
    "agentic": LAKE,
    "opd": opd(),
    "distill": DISTILL,
    "smallest": SMALLEST,
}
"""Files that load, by the name that tables have for them."""
