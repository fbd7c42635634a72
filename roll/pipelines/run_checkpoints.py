"""Checkpoints of a run: written while training goes on, resumed at the start; a full disk costs only one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from roll.checkpoint import Checkpoint, CheckpointManager
from roll.checkpoint.folders import PIPELINE_FOLDER
from roll.checkpoint.state import save_state
from roll.config.plan.plan import Plan
from roll.config.run import RunConfig
from roll.distributed import Cluster, PendingCall, RemoteError, WorkerFailed
from roll.distributed.failures import free_room, missing_room
from roll.protocol.metrics import Metrics, Sum

logger = logging.getLogger(__name__)


class PendingCheckpoint:
    """A checkpoint folder under its hidden name (``writing`` gives it when it is entered, and publishes it when it is
    left), and the clusters of training workers that write into it."""

    def __init__(self, writing: AbstractContextManager[Path], writers: Sequence[Cluster], steps_done: int = 0) -> None:
        self._stack = ExitStack()
        self._writers = writers
        self.steps_done = steps_done
        self._polled: list[PendingCall[list[bool]]] = []
        self.path = self._stack.enter_context(writing)

    def is_written(self) -> bool:
        """True if all ranks were done when they were last polled; never waits, polls again where some were not. Raises
        what a rank does that could not write its part."""
        if not self._polled:
            self._polled = self._poll(wait=False)
        if not all(call.done() for call in self._polled):
            return False
        answers = [done for call in self._polled for done in call.result()]
        self._polled = []
        return all(answers)

    def publish(self) -> None:
        """Wait until all ranks are done, then let the checkpoint appear. Raises what a rank does that could not write
        its part, and OSError where the folder cannot be completed; nothing appears then."""
        try:
            # A rank raises once that it could not write: perhaps at a poll whose result was never read.
            for call in (*self._polled, *self._poll(wait=True)):
                call.result()
        except BaseException as error:
            # The run goes on, and so would the ranks, writing into the folder while it is removed.
            if missing_room(error):
                self.settle()
            self.discard()
            raise
        self._stack.close()

    def settle(self) -> None:
        """Wait until every rank has stopped to write, whatever came of it: one of them found no room."""
        from roll.workers.model import TrainWorker

        self._polled = []
        for cluster in self._writers:
            for rank in range(cluster.world_size):
                try:
                    cluster.submit(rank, TrainWorker.checkpoint_saved, True).result()
                except WorkerFailed as error:
                    logger.info("%s", error)

    def discard(self) -> None:
        """Remove the folder. To be called where an exception is handled, when all writers have ended."""
        error = sys.exc_info()
        assert error[0] is not None
        self._stack.__exit__(*error)

    def _poll(self, wait: bool) -> list[PendingCall[list[bool]]]:
        from roll.workers.model import TrainWorker

        return [cluster.call_all(TrainWorker.checkpoint_saved, wait) for cluster in self._writers]


class RunCheckpoints:
    """The checkpoint that is being written, the newest one (``published`` is told its steps when it has appeared), and
    the one that the run continues from; ``record`` takes metrics of the current step."""

    def __init__(
        self, config: RunConfig, plan: Plan, record: Callable[[Metrics], None], published: Callable[[int], None]
    ) -> None:
        self.manager = CheckpointManager(plan.checkpoint_dir, config.max_ckpt_to_keep, config.checkpoint_config)
        self.resume = self.manager.resolve(config.resume_from_checkpoint)
        self.pending: PendingCheckpoint | None = None
        self._record, self._published, self._max_steps = record, published, plan.max_steps

    def take_up(self) -> Checkpoint | None:
        """The checkpoint that ``resume_from_checkpoint`` names, if there is one; later checkpoints are renamed."""
        if self.resume is not None:
            self.manager.supersede_after(self.resume.step)
            logger.info("continuing from %s", self.resume.path)
            if self._max_steps is not None and self.resume.step >= self._max_steps:
                logger.warning("it has done the %s steps of max_steps: raise that, to train on", self._max_steps)
        return self.resume

    def places(self, steps_done: int | None) -> list[Path]:
        """Where the checkpoint after so many steps may be: it may move when it is copied away."""
        if steps_done is None:
            return []
        name, upload = f"checkpoint-{steps_done}", self.manager.upload_dir
        places = [folder / name for folder in (self.manager.root, *([upload] if upload else []))]
        if self.resume is not None and self.resume.step == steps_done:
            places.append(self.resume.path)
        return places

    @contextmanager
    def writing(self, steps_done: int, state: Mapping[str, Any], writers: Sequence[Cluster]) -> Iterator[Path]:
        # One at a time: ranks answer for their last `save_checkpoint` only.
        self.publish()
        pending = PendingCheckpoint(self.manager.writing(steps_done), writers, steps_done)
        try:
            yield pending.path
            save_state(pending.path / PIPELINE_FOLDER, state)
        except BaseException as error:
            if missing_room(error):
                pending.settle()
            pending.discard()
            self._go_on_without(pending, error)
            return
        self.pending = pending
        self.publish_if_written()

    def publish_if_written(self) -> None:
        """Let the pending checkpoint appear if all ranks are done; never waits."""
        pending = self.pending
        if pending is None:
            return
        try:
            written = pending.is_written()
        except RemoteError as error:
            if missing_room(error):
                self.pending = None
                pending.settle()
                pending.discard()
            self._go_on_without(pending, error)
            return
        if written:
            self.publish()

    def publish(self) -> None:
        """Wait until the pending checkpoint, if there is one, has appeared."""
        # Forgotten first: if it cannot be published, nothing may try to do so again.
        pending, self.pending = self.pending, None
        if pending is None:
            return
        try:
            pending.publish()
        except (RemoteError, OSError) as error:
            self._go_on_without(pending, error)
            return
        self._published(pending.steps_done)

    def _go_on_without(self, pending: PendingCheckpoint, error: BaseException) -> None:
        """A full disk costs a checkpoint, nothing else; any other error is raised."""
        reason = missing_room(error)
        if reason is None:
            raise error
        self._record({"system/lost_checkpoints": Sum(1.0)})
        text = "the disk is full: the checkpoint after %d steps is lost, and the run goes on without it (%s; %s): %s"
        logger.error(text, pending.steps_done, reason, free_room(self.manager.root), error)
