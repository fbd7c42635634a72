"""Checkpoints: the state that a run writes to be resumed from.

:mod:`~roll.checkpoint.manager` owns the folders, :mod:`~roll.checkpoint.state` writes the pipeline's own state and
captures random number generators. That module imports torch, so it is not imported here.
"""

from roll.checkpoint.folders import Checkpoint, CheckpointDamagedError
from roll.checkpoint.manager import CheckpointManager

__all__ = ["Checkpoint", "CheckpointDamagedError", "CheckpointManager"]
