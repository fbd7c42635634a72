"""Agents that are programs: unmodified, they talk to the policy over HTTP as they would to OpenAI or Anthropic."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
import time
from pathlib import Path

from roll.agents.agent_options import BlackBoxOptions
from roll.agents.endpoint import AgentEndpoint, Session
from roll.agents.episode import EngineFault, Episode, EpisodeOver, Model, Task
from roll.agents.programs import Exit, ProgramError, filled_command, program_environment, running
from roll.agents.verifiers import Verifier

logger = logging.getLogger(__name__)

# Time to exit for a program whose episode is over: it has posted its reward, or no turn is left.
_FAREWELL_SECONDS = 10.0
# Tracing would send every conversation to OpenAI, with the episode's key.
_COMMON = {"OPENAI_AGENTS_DISABLE_TRACING": "1"}
_MOST_FAILURES = 5  # most consecutive exits of a program that serves the whole run without an episode in between


class BlackBoxAgent:
    """Runs a program per episode, or hands the episode to one from elsewhere, and answers its model calls.

    The program gets ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY``; its task
    is the JSON on standard input and in the file ``ROLL_TASK_FILE``. It ends with its episode: at the deadline it is
    killed with everything it has started.
    """

    def __init__(self, options: BlackBoxOptions, verifier: Verifier | None = None) -> None:
        self._options, self._verifier = options, verifier
        self._endpoint = AgentEndpoint(options)
        self._workers: list[asyncio.Task[None]] = []  # each keeps a program that serves the whole run
        self._fault: EngineFault | None = None  # these programs ended too often without serving an episode

    @property
    def url(self) -> str:
        """Address of the endpoint, once an episode has begun."""
        return self._endpoint.url

    async def run(self, task: Task, model: Model, episode: Episode) -> float:
        """Answer the agent's calls until it is done; returns its reward. ``EngineFault`` where an engine failed during
        a call, ``EpisodeOver`` where the agent has not done its part."""
        self._endpoint.start()
        options = self._options
        session = Session(task, model, options.sampling, options.tool_choice, tuple(options.roles))
        self._endpoint.open(session)
        with tempfile.TemporaryDirectory(prefix="roll-episode-", ignore_cleanup_errors=True) as scratch:
            try:
                ended = None
                if options.command and not options.processes:
                    ended = await self._run_program(session, scratch)
                else:
                    self._endpoint.offer(session)
                    if self._fault is not None:
                        raise self._fault
                    if not self._workers:
                        self._workers = [asyncio.create_task(self._keep()) for _ in range(options.processes)]
                    await session.done.wait()
            finally:
                # On cancellation too: agents from elsewhere live on, and their calls must not reach the engines.
                self._endpoint.retire(session)
                if session.began is not None:
                    busy = time.perf_counter() - session.began - model.seconds.model
                    episode.seconds.environment += max(0.0, busy)
            if session.fault is not None:
                raise session.fault
            reward = await self._reward(session, ended, episode, scratch)
        if isinstance(reward, float) and not session.roles:
            return reward
        for role in session.roles:  # a single number goes to all of them
            model.as_(role).reward(reward.get(role, 0.0) if isinstance(reward, dict) else reward)
        return 0.0

    async def close(self) -> None:
        for task in self._workers:
            task.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._endpoint.close()
        if self._verifier is not None:
            self._verifier.close()

    async def _run_program(self, session: Session, scratch: str) -> Exit | None:
        """Run a program for the episode; returns its end, None where it was killed because the episode was over."""
        options, fields = self._options, session.task.body
        task_file = Path(scratch) / "task.json"
        task_file.write_text(json.dumps(fields, ensure_ascii=False, default=str), "utf-8")
        url = self._endpoint.url
        own = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": session.key,
            "ROLL_REWARD_URL": f"{url}/reward",
            "ROLL_SCRATCH": scratch,
            "ROLL_SEED": str(session.task.seed),
            "ROLL_TASK_FILE": str(task_file),
        }
        command = filled_command(options.command, fields)
        environment = program_environment(_COMMON | own | options.env, options.inherit_env)
        session.began = time.perf_counter()
        async with running(command, environment, fields, options.folder or os.getcwd()) as program:
            ending = asyncio.create_task(program.wait())
            over = asyncio.create_task(session.done.wait())
            try:
                await asyncio.wait((ending, over), return_when=asyncio.FIRST_COMPLETED)
                if session.fault is None and not ending.done():
                    await asyncio.wait((ending,), timeout=_FAREWELL_SECONDS)
                return ending.result() if ending.done() else None
            finally:
                ending.cancel()
                over.cancel()

    async def _reward(
        self, session: Session, ended: Exit | None, episode: Episode, scratch: str
    ) -> float | dict[str, float]:
        """The reward from the configured source; sets the episode's outcome, success and metrics."""
        episode.metrics |= session.metrics
        episode.count("overridden_sampling", session.overridden)
        episode.count("demanded_calls", session.demanded)
        episode.success = session.success
        if session.limit is not None:
            episode.outcome = session.limit.outcome
        if not episode.calls:
            raise self._not_done(session, episode, "made no model call", ended)
        source = self._options.reward
        if source == "verifier":
            assert self._verifier is not None
            return await self._verifier(session.task, session.model, episode, scratch)
        # Other statuses (a signal, 127) are faults of the program and say nothing about the policy.
        if source == "exit" and ended is not None and ended.status in (0, 1):
            episode.success = ended.status == 0
            return float(ended.status == 0)
        if source == "post" and session.reward is not None:
            return session.reward
        raise self._not_done(session, episode, "posted no reward" if source == "post" else "failed", ended)

    def _not_done(self, session: Session, episode: Episode, what: str, ended: Exit | None) -> EpisodeOver:
        """The end of an episode whose agent has not done its part: its limit, if it met one, else a fault."""
        if session.limit is not None:
            episode.success = False
            return session.limit
        name = self._options.command[0] if self._options.command else "the agent"
        how = session.lost or (str(ended) if ended is not None else "")
        episode.error = f"{name} {what}" + (f" ({how})" if how else "")
        return EpisodeOver("agent_error")

    async def _keep(self) -> None:
        """Run a program that serves the whole run, again and again where it ends."""
        url, options, failures = self._endpoint.url, self._options, 0
        own = {"ROLL_URL": url, "ROLL_EPISODES_URL": f"{url}/episodes"}
        while failures < _MOST_FAILURES:
            key = self._endpoint.admit_worker()
            variables = program_environment(_COMMON | own | {"ROLL_WORKER_KEY": key} | options.env, options.inherit_env)
            try:
                async with running(options.command, variables, None, options.folder or os.getcwd()) as program:
                    ended = str(await program.wait())
            except ProgramError as error:
                ended = str(error)
            unfinished, has_taken = self._endpoint.dismiss_worker(key)
            for session in unfinished:
                session.lost = ended
                session.done.set()
            failures = 0 if has_taken else failures + 1
            logger.warning("an agent's program has ended and is started again: %s", ended)
        self._fault = EngineFault()
        self._fault.__cause__ = ProgramError(f"{options.command[0]} ends again and again: {ended}")
        for session in list(self._endpoint.waiting):
            session.fault = self._fault
            session.done.set()
