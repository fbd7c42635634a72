"""Several domains in one run: the sections of the example, programs in the sandbox, a judge on a real service."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from roll.config.loader import load_config
from tests.pipelines.conftest import Run
from tests.rewards.http_service import Answer, completion, serving
from tests.support.tiny_runs import TinyWorld

pytestmark = [pytest.mark.e2e, pytest.mark.long]
ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples/rewards/multi_domain.yaml"
DOMAINS = ("word_problems", "equations", "code", "open", "echo")


def rows() -> list[dict[str, Any]]:
    files = [ROOT / "examples/rewards" / name for name in ("code.jsonl", "mixed.jsonl")]
    own = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    # An untrained model writes no Python; to a shell that counts characters its responses are data like any other.
    cases = json.dumps({"inputs": [""] * 4, "outputs": [str(n) for n in range(4)]})
    question = own[0]["messages"]
    echo = [{"id": f"echo-{i}", "tag": "echo", "messages": question, "test_cases": cases} for i in range(4)]
    words = [
        {"id": f"words-{i}", "tag": "tiny_word_problems", "messages": question, "ground_truth": "4"} for i in range(4)
    ]
    return [*own, *echo, *words]


def scored(number: int, body: Any) -> Answer:
    """Every third answer is nonsense."""
    return completion("I cannot say." if number % 3 == 2 else "Score: 7")


@pytest.mark.skipif(shutil.which("sh") is None, reason="the programs are shell scripts")
def test_every_domain_has_its_reward(run: Run, world: TinyWorld, tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")
    rewards = load_config(None, RECIPE, check_files=False).resolved["rewards"]
    length = "echo $(( $(wc -c < solution.py) % 4 ))"
    rewards["echo"] = {
        "worker_cls": "code_sandbox",
        "tag_included": ["echo"],
        "world_size": 1,
        "reward_kwargs": {"command": ["sh", "-c", length], "partial": True},
    }
    with serving(scored) as service:
        rewards["open"]["judge_api_url"] = service.url
        rewards["open"]["reward_kwargs"]["cache"] = False
        finished = run(
            {
                "rewards": rewards,
                "prompt_length": 512,
                "rollout_batch_size": 10,
                "actor_train.training_args.gradient_accumulation_steps": 5,
                "actor_train.data_args.file_name": [str(train)],
                "actor_train.data_args.domain_interleave_probs": dict.fromkeys(DOMAINS, 0.2),
            },
            output=tmp_path,
        )
    assert len(service.bodies) == 2 * 2 * 4, "each sample of the domain once, none of the others"
    for row in finished.steps:
        for domain in DOMAINS[:3]:
            assert row[f"reward/{domain}/error_rate"] == row[f"{domain}/score/max"] == 0.0
        assert row["reward/word_problems/correctness/score"] == row["reward/word_problems/form/score"] == 0.0
        assert row["reward/code/pass_rate"] == row["reward/equations/correct"] == 0.0
        assert row["echo/score/max"] == 0.25, "one of the four remainders"
        # Nonsense is an error of the sample, not a bad score: the others keep theirs, 7 of 1 to 10.
        assert row["reward/open/error_rate"] > 0
        assert row["open/score/min"] == row["open/score/max"] == pytest.approx(6 / 9)
