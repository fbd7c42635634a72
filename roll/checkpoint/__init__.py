"""Checkpoints: what a run must write to be continued, and how it is found again.

:mod:`~roll.checkpoint.manager` owns the folders, :mod:`~roll.checkpoint.state` writes the pipeline's own state and
captures random number generators; it imports torch, so it is not imported here.
"""

from roll.checkpoint.folders import CheckpointDamagedError
from roll.checkpoint.manager import Checkpoint, CheckpointManager

__all__ = ["Checkpoint", "CheckpointDamagedError", "CheckpointManager"]
