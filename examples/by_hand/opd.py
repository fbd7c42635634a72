"""On-policy distillation by hand: the run of examples/tiny_distill/opd_config.yaml as a loop on one page.

    python examples/by_hand/opd.py max_steps=20

The configuration says which models there are, on which devices and under which strategies; words of the command line
change it, as of `roll run`. What is learnt, and from what, is written out here, and the numbers are those of the
pipeline to the last bit.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import roll
from roll.algorithms.advantages import AdvantageInputs, estimate_advantages
from roll.algorithms.losses import actor_loss_options
from roll.config.algorithm import PPOConfig
from roll.config.reading.fields import Choice
from roll.datasets.types import PromptRow
from roll.methods.base import PolicyLoss
from roll.pipelines.rlvr.data import load_data
from roll.rollout.flow import sampling_params
from roll.rollout.groups import Group, build_batch
from roll.rollout.loops import GroupSettings

logger = logging.getLogger("roll.by_hand")

PROMPTS, SAMPLES = 32, 8  # prompts a step, samples of each


def main(overrides: Sequence[str]) -> None:
    with roll.Workers("tiny_distill/opd_config", overrides) as workers:
        config, plan = workers.config, workers.plan
        policy, teacher = roll.TrainClient(workers, "actor_train"), roll.TrainClient(workers, "teacher")
        engine = roll.EngineClient(workers)

        # Prompts, and how they are answered.
        data = load_data(config, plan)
        settings = GroupSettings(SAMPLES, sampling_params(config.actor_infer.generating_args, 36), config.seed)

        # The algorithm: the teacher's log-ratio to the student is the advantage of each sampled token.
        estimator = PPOConfig(estimator=Choice("reinforce", {"gamma": 0.0}))
        options = PPOConfig(loss=Choice("ppo", {"clip": 0.2}), loss_agg_mode="seq-mean-token-mean")
        loss = PolicyLoss(options=actor_loss_options(options))

        for step in range(plan.max_steps):
            # The engines take over the policy's weights, and answer. Each prompt has random streams of its own.
            policy.send_weights(engine).result()
            prompts: list[PromptRow] = data.sampler.next_batch(PROMPTS)
            numbers = range(step * PROMPTS, (step + 1) * PROMPTS)
            params = [settings.params_of(number) for number in numbers]
            answers = engine.sample([prompt.token_ids for prompt in prompts], params, SAMPLES).result()

            samples = [answer.samples(prompt) for prompt, answer in zip(prompts, answers, strict=True)]
            groups = [Group(*drawn) for drawn in zip(numbers, prompts, samples, strict=True)]  # nobody scores them

            # One row a sample: input_ids, attention_mask, response_mask, group_ids ...
            batch = build_batch(groups, workers.pad_token_id)
            columns = batch.batch
            theirs, own = teacher.forward(batch), policy.forward(batch)  # both at the same time
            columns["old_log_probs"] = own.result()["log_probs"]

            # What the teacher would rather have said becomes advantages.
            mask = columns["response_mask"]
            divergence = (columns["old_log_probs"] - theirs.result()["log_probs"]) * mask
            inputs = AdvantageInputs(-divergence, mask, columns["group_ids"])
            columns["advantages"] = estimate_advantages(inputs, estimator).advantages
            columns["loss_mask"] = mask  # tokens that the loss uses

            # The policy learns.
            metrics = policy.step(batch, loss).result()
            metrics["opd/kl"] = float(divergence.sum()) / float(mask.sum())
            workers.log(metrics, step)
            shown = metrics["opd/kl"], metrics["actor/total_loss"], metrics["actor/grad_norm"]
            logger.info("step %d: divergence %.3f, loss %.4f, gradient %.3f", step, *shown)

        policy.export(plan.output_dir / "model").result()


if __name__ == "__main__":
    main(sys.argv[1:])
