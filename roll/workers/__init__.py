"""The Ray workers of each role: where a strategy meets an algorithm.

Modules are imported inside the workers' processes, by dotted path; nothing heavy is imported here.
"""

TRAIN_WORKER = "roll.workers.training.TrainWorker"
SCORING_WORKER = "roll.workers.model.ScoringWorker"
REFERENCE_WORKER = "roll.workers.model.ModelWorker"
GENERATION_WORKER = "roll.workers.generation.GenerationWorker"
REWARD_MODEL_WORKER = "roll.workers.model.RewardModelWorker"
REWARD_WORKER = "roll.workers.reward.RewardWorker"
STORED_WEIGHTS_WORKER = "roll.workers.stored_weights.StoredWeightsWorker"
