"""What a run must write to be continued, and how it is found again.

:mod:`~roll.checkpoint.manager` owns the folders, :mod:`~roll.checkpoint.state` writes the pipeline's own state,
:mod:`~roll.checkpoint.rng` captures random number generators.
The two latter import torch, so they are not imported here.
"""

from roll.checkpoint.manager import Checkpoint, CheckpointManager
from roll.checkpoint.manifest import CheckpointDamagedError

__all__ = ["Checkpoint", "CheckpointDamagedError", "CheckpointManager"]
