"""The Ray workers of each role: where a strategy meets an algorithm.

Modules are imported inside the workers' processes, by dotted path; nothing heavy is imported here.
"""

ACTOR_WORKER = "roll.workers.training.ActorWorker"
CRITIC_WORKER = "roll.workers.training.CriticWorker"
TEACHER_WORKER = "roll.workers.model.TeacherWorker"
REFERENCE_WORKER = "roll.workers.model.ModelWorker"
GENERATION_WORKER = "roll.workers.generation.GenerationWorker"
REWARD_MODEL_WORKER = "roll.workers.model.RewardModelWorker"
REWARD_WORKER = "roll.workers.reward.RewardWorker"
STORED_WEIGHTS_WORKER = "roll.workers.stored_weights.StoredWeightsWorker"
SFT_WORKER = "roll.workers.supervised.SftWorker"
PREFERENCE_WORKER = "roll.workers.supervised.PreferenceWorker"
REWARD_TRAIN_WORKER = "roll.workers.supervised.RewardTrainWorker"
DISTILL_WORKER = "roll.workers.supervised.DistillWorker"
