"""DPO by hand: the run of examples/tiny_dpo/dpo_config.yaml as a loop on one page.

    python examples/by_hand/dpo.py max_steps=50

The configuration says which models there are, on which devices and under which strategies; words of the command line
change it, as of `roll run`. What is learnt, and from what, is written out here, and the numbers are those of the
pipeline to the last bit.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import roll
from roll.config.losses import PreferenceLossConfig
from roll.datasets import ShuffledEpochs
from roll.methods.preferences import DPO, PairLoss, pair_batch
from roll.pipelines.model_calls import balanced_order

logger = logging.getLogger("roll.by_hand")

PAIRS = 32  # a step


def main(overrides: Sequence[str]) -> None:
    with roll.Workers("tiny_dpo/dpo_config", overrides) as workers:
        config, plan = workers.config, workers.plan
        policy, reference = roll.TrainClient(workers, "actor_train"), roll.TrainClient(workers, "reference")

        # Pairs of a preferred and a rejected response to a prompt, in an order that the seed decides.
        rows = DPO.read(config, plan, plan.data_args, workers.tokenizer)
        pairs = ShuffledEpochs(rows, config.seed, DPO.stream)

        # -log sigmoid(beta ((log pi(y+) - log ref(y+)) - (log pi(y-) - log ref(y-)))), arXiv 2305.18290 eq. 7.
        loss = PairLoss(options=PreferenceLossConfig(loss_type="sigmoid", beta=0.5))

        for step in range(plan.max_steps):
            # Ranks get consecutive rows: pairs are put into an order that gives each as much to do.
            drawn = pairs.next_batch(PAIRS)
            lengths = [sum(map(len, pair.sides)) for pair in drawn]
            dealt = [drawn[index] for index in balanced_order(lengths, policy.dp_size)]

            # Two rows a pair, the preferred response first: input_ids, attention_mask, response_mask, unit_ids.
            batch = pair_batch(dealt, workers.pad_token_id)
            batch.batch["ref_log_probs"] = reference.forward(batch).result()["log_probs"]

            # The policy learns.
            metrics = policy.step(batch, loss).result()
            workers.log(metrics, step)
            shown = metrics["actor/loss"], metrics["actor/acc"], metrics["actor/grad_norm"]
            logger.info("step %d: loss %.4f, accuracy %.3f, gradient %.3f", step, *shown)

        policy.export(plan.output_dir / "model").result()


if __name__ == "__main__":
    main(sys.argv[1:])
