"""The Ray workers of each role: where a strategy meets an algorithm.

Modules are imported inside the workers' processes, by dotted path; nothing heavy is imported here.
"""

from roll.config.roles import WorkerConfig
from roll.config.strategies.registry import scoring_strategies

TRAIN_WORKER = "roll.workers.model.TrainWorker"
SCORING_WORKER = "roll.workers.model.ScoringWorker"
REFERENCE_WORKER = "roll.workers.model.ModelWorker"
GENERATION_WORKER = "roll.workers.generation.GenerationWorker"
REWARD_MODEL_WORKER = "roll.workers.model.RewardModelWorker"
REWARD_WORKER = "roll.rollout.rewarding.RewardWorker"
STORED_WEIGHTS_WORKER = "roll.workers.model.StoredWeightsWorker"


def only_scores(section: WorkerConfig) -> bool:
    """True for a role whose strategy scores tokens: it gives their log-probs and nothing else."""
    return section.strategy_args.strategy_name in scoring_strategies()


def frozen_worker(section: WorkerConfig) -> str:
    """The worker class of a role that never learns."""
    return SCORING_WORKER if only_scores(section) else REFERENCE_WORKER
