"""Every key of ROLL's published RLVR and SFT files loads here, or is refused as not available yet: never unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config.good import GOOD_SFT, changed, mistakes

DATA = Path(__file__).parent / "data"
FREE_NAMES = {"<domain>": "math", "<name>": "math", "<VAR>": "NCCL_DEBUG"}
REASONABLE: dict[str, Any] = {
    "device_mapping": "list(range(0,2))",
    "async_generation_ratio": 0,  # as all roles are on the same devices
    "rollout_batch_size": 64,
    "num_return_sequences_in_group": 4,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 8,
    "file_name": ["data.jsonl"],
    "worker_cls": "roll.pipeline.base_worker.ActorWorker",
    "max_model_len": 512,
    "file_names": "data.jsonl",
    "prompt_length": 128,
    "response_length": 128,
    "sequence_length": 256,
    "domain_interleave_probs": None,
    "tag_included": ["math"],
    "num_gpus_per_worker": 1,
    "difficulty_low_threshold": 0.0,
    "advantage_clip": 2.0,
    "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
    "max_new_tokens": 64,
    "max_packed_sequence_length_train": 256,
    "max_tokens_per_microbatch_in_train": 256,
    "max_tokens_per_microbatch_in_infer": 256,
    "max_packed_sequence_length_forward": 256,
    "device_map": "balanced",
    "eval_steps": 10,
    "video_max_frames": 16,
    "cuda_graph_sizes": [1, 8],
    "cudagraph_capture_sizes": [1, 8],
}
CRITIC = {"device_mapping": [0], "training_args": {"per_device_train_batch_size": 8}}
BY_KIND: dict[str, Any] = {"int": 1, "float": 0.5, "bool": True, "null": None, "list": ["x"], "map": {}, "str": "x"}


def rounds(group: str) -> list[dict[str, Any]]:
    """Changes that set every published key at once; further rounds bring a key's further values."""
    found: list[dict[str, Any]] = []
    for line in (DATA / f"keys_in_use_{group}.tsv").read_text(encoding="utf-8").splitlines():
        key, kinds, texts = line.split("\t")
        for free, name in FREE_NAMES.items():
            key = key.replace(free, name)
        for number, value in enumerate(values(key, kinds.split("/"), texts)):
            while len(found) <= number:
                found.append({})
            found[number][key] = value
    return found


APART = {
    ("freeze_module_prefix",): "lora_target",
    ("use_dynamic_batching_in_", "max_tokens_per_microbatch_in_"): "sequence_packing_args.algorithm",
}
"""Keys that have no place next to others."""


def files(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rounds as files that can be: keys that others exclude get one of their own."""
    moved = [
        {key: changes.pop(key) for key in list(changes) if any(f".{name}" in key for name in names)}
        for names, other in APART.items()
        for changes in found
        if any(key.endswith(f".{other}") for key in changes)
    ]
    return [*found, *(changes for changes in moved if changes)]


def values(key: str, kinds: list[str], texts: str) -> list[Any]:
    last = key.rsplit(".", 1)[-1]
    written = [text.strip() for text in texts.split(",") if text.strip()]
    if key.endswith("domain_interleave_probs.math"):
        return [1.0]
    if key == "rewards.math.worker_cls":
        return ["math_rule"]
    if written and not last.startswith("transformer"):
        return written
    return [REASONABLE[last]] if last in REASONABLE else [BY_KIND[kind] for kind in kinds]


CASES = [(group, number, changes) for group in ("rlvr", "sft") for number, changes in enumerate(files(rounds(group)))]


@pytest.mark.parametrize(("group", "number", "changes"), CASES, ids=[f"{group}-{number}" for group, number, _ in CASES])
def test_published_keys_load_or_are_not_available_yet(
    tmp_path: Path, group: str, number: int, changes: dict[str, Any]
) -> None:
    base = changed({"critic": CRITIC}) if group == "rlvr" else GOOD_SFT
    base = {key: value for key, value in base.items() if key != "estimator"}
    problems = mistakes(tmp_path, changed(changes, base))
    assert [str(problem) for problem in problems if "not available yet" not in problem.rule] == []


def test_the_lists_are_whole() -> None:
    assert len(rounds("rlvr")[0]) == 333
    assert len(rounds("sft")[0]) == 61
