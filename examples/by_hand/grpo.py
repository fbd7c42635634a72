"""GRPO by hand: the run of examples/tiny/rlvr_config.yaml as a loop on one page.

    python examples/by_hand/grpo.py max_steps=50

The configuration says which models there are, on which devices and under which strategies; words of the command line
change it, as of `roll run`. What is learnt, and from what, is written out here, and the numbers are those of the
pipeline to the last bit.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import torch

import roll
from roll.algorithms.advantages import AdvantageInputs, estimate_advantages
from roll.algorithms.losses import actor_loss_options
from roll.algorithms.samples import RewardOptions, RewardPostprocessor
from roll.config.algorithm import PPOConfig
from roll.config.reading.fields import Choice
from roll.datasets.types import PromptRow
from roll.methods.base import PolicyLoss
from roll.pipelines.rlvr.data import load_data
from roll.rewards import build_section
from roll.rollout.flow import sampling_params
from roll.rollout.groups import Group, build_batch
from roll.rollout.loops import GroupSettings

logger = logging.getLogger("roll.by_hand")

PROMPTS, SAMPLES = 32, 8  # prompts a step, samples of each


def main(overrides: Sequence[str]) -> None:
    with roll.Workers("tiny/rlvr_config", overrides) as workers:
        config, plan = workers.config, workers.plan
        policy, reference = roll.TrainClient(workers, "actor_train"), roll.TrainClient(workers, "reference")
        engine = roll.EngineClient(workers)

        # Prompts, how they are answered, and how answers are scored.
        data = load_data(config, plan)
        settings = GroupSettings(SAMPLES, sampling_params(config.actor_infer.generating_args, 36), config.seed)
        reward = build_section("word_problems", config.rewards["word_problems"])

        # The algorithm: advantages within groups, a clipped surrogate, and a divergence from the reference.
        normalise = RewardPostprocessor(RewardOptions(norm_mean_type="group", norm_std_type="group"))
        estimator = PPOConfig(estimator=Choice("grpo"))
        options = PPOConfig(loss=Choice("ppo", {"clip": 0.2}), use_kl_loss=True, kl_loss_coef=0.001)
        loss = PolicyLoss(options=actor_loss_options(options))

        for step in range(plan.max_steps):
            # The engines take over the policy's weights, and answer. Each prompt has random streams of its own.
            policy.send_weights(engine).result()
            prompts: list[PromptRow] = data.sampler.next_batch(PROMPTS)
            numbers = range(step * PROMPTS, (step + 1) * PROMPTS)
            params = [settings.params_of(number) for number in numbers]
            answers = engine.sample([prompt.token_ids for prompt in prompts], params, SAMPLES).result()

            # Scores.
            samples = [answer.samples(prompt) for prompt, answer in zip(prompts, answers, strict=True)]
            groups = [Group(*drawn) for drawn in zip(numbers, prompts, samples, strict=True)]
            asked = [one for group in groups for one in group.members]
            for sample, result in zip(asked, reward([one.for_reward() for one in asked]), strict=True):
                sample.reward = result

            # One row a sample: input_ids, attention_mask, response_mask, scores, group_ids ...
            batch = build_batch(groups, workers.pad_token_id)
            columns = batch.batch
            columns["ref_log_probs"] = reference.forward(batch).result()["log_probs"]

            # Rewards become advantages.
            rewards, _ = normalise(columns["scores"], columns["group_ids"])
            inputs = AdvantageInputs(rewards, columns["response_mask"], columns["group_ids"])
            columns["advantages"] = estimate_advantages(inputs, estimator).advantages
            columns["loss_mask"] = columns["response_mask"]  # tokens that the loss uses

            # The policy learns.
            metrics = policy.step(batch, loss).result()
            metrics["critic/score/mean"] = float(columns["scores"].mean(dtype=torch.float64))
            workers.log(metrics, step)
            shown = metrics["critic/score/mean"], metrics["actor/total_loss"], metrics["actor/grad_norm"]
            logger.info("step %d: score %.3f, loss %.4f, gradient %.3f", step, *shown)

        policy.export(plan.output_dir / "model").result()


if __name__ == "__main__":
    main(sys.argv[1:])
