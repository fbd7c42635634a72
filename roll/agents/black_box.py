"""Agents that are programs: they speak to the policy over HTTP as they would to OpenAI or Anthropic, unmodified."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path

from roll.agents.agent_options import BlackBoxOptions
from roll.agents.endpoint import AgentEndpoint
from roll.agents.episode import Episode, EpisodeOver, Model, Task
from roll.agents.programs import Exit, filled_command, program_environment, running
from roll.agents.session import Session, task_body
from roll.agents.verifiers import Verifier

_FAREWELL_SECONDS = 10.0
"""For a program whose episode is over: it has posted its reward, or no turn is left."""


class BlackBoxAgent:
    """Runs a program per episode, or lets one from elsewhere have it, and answers its model calls.

    The program is given ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY``; its
    task is the JSON on standard input and in the file ``ROLL_TASK_FILE``.  It ends with its episode: at the deadline it
    is killed with all that it has started.
    """

    def __init__(self, options: BlackBoxOptions, verifier: Verifier | None = None) -> None:
        self._options, self._verifier = options, verifier
        self._endpoint = AgentEndpoint(options.host, options.port, options.worker_key, options.public_url)

    @property
    def url(self) -> str:
        """Address of the endpoint, once an episode has begun."""
        return self._endpoint.url

    async def run(self, task: Task, model: Model, episode: Episode) -> float:
        """Answer the agent's calls until it is done; returns its reward.

        Raises:
            EngineFault: of a call.
            EpisodeOver: the agent has made no use of its episode: nobody took it, or its program failed.
        """
        self._endpoint.start()
        session = Session(task, model, self._options.sampling)
        self._endpoint.open(session)
        with tempfile.TemporaryDirectory(prefix="roll-episode-", ignore_cleanup_errors=True) as scratch:
            try:
                ended = await (self._program(session, scratch) if self._options.command else self._elsewhere(session))
            finally:
                self._endpoint.retire(session)
            if session.fault is not None:
                raise session.fault
            return await self._reward(session, ended, episode, scratch)

    async def close(self) -> None:
        """Stop serving."""
        self._endpoint.close()

    async def _elsewhere(self, session: Session) -> None:
        self._endpoint.offer(session)
        await session.done.wait()

    async def _program(self, session: Session, scratch: str) -> Exit | None:
        """How the program ended; None for one that was ended because its episode was over."""
        options, fields = self._options, task_body(session.task)
        task_file = Path(scratch) / "task.json"
        task_file.write_text(json.dumps(fields, ensure_ascii=False, default=str), "utf-8")
        url = self._endpoint.url
        own = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": session.key,
            # It would send every run to OpenAI, with this key.
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "ROLL_REWARD_URL": f"{url}/reward",
            "ROLL_SCRATCH": scratch,
            "ROLL_SEED": str(session.task.seed),
            "ROLL_TASK_FILE": str(task_file),
            **options.env,
        }
        command = filled_command(options.command, fields)
        environment = program_environment(own, options.inherit_env)
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

    async def _reward(self, session: Session, ended: Exit | None, episode: Episode, scratch: str) -> float:
        """The reward by the configured source; the episode's outcome, success and metrics."""
        episode.metrics |= session.metrics
        if session.overridden:
            episode.metrics["overridden_sampling"] = float(session.overridden)
        episode.success = session.success
        if session.limit is not None:
            episode.outcome = session.limit.outcome
        if not episode.calls:
            raise self._fault(session, episode, "made no model call", ended)
        source = self._options.reward
        if source == "verifier":
            assert self._verifier is not None
            return await self._verifier(session.task, session.model, episode, scratch)
        if source == "exit" and ended is not None and ended.status in (0, 1):
            episode.success = ended.status == 0
            return float(ended.status == 0)
        if source == "post" and session.reward is not None:
            return session.reward
        raise self._fault(session, episode, "posted no reward" if source == "post" else "failed", ended)

    def _fault(self, session: Session, episode: Episode, what: str, ended: Exit | None) -> EpisodeOver:
        """The agent has not done its part: at a limit of the episode that is to be expected, otherwise a fault."""
        if session.limit is not None:
            return session.limit
        name = self._options.command[0] if self._options.command else "the agent"
        episode.error = f"{name} {what}" + (f" ({ended})" if ended is not None else "")
        return EpisodeOver("agent_error")
