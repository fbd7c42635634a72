"""Agents that are programs: they speak to the policy over HTTP as they would to OpenAI or Anthropic, unmodified."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from roll.agents.endpoint import AgentEndpoint, Sampling, Session, task_body
from roll.agents.episode import Episode, EpisodeOver, Model, Task
from roll.agents.programs import Exit, filled_command, program_environment, running
from roll.agents.verifiers import Verifier

RewardSource = Literal["post", "exit", "verifier"]
_FAREWELL_SECONDS = 10.0
"""For a program whose episode is over: it has posted its reward, or no turn is left."""


@dataclass(frozen=True)
class BlackBoxOptions:
    """How an agent's program is run and rewarded."""

    command: Sequence[str] = ()
    """Program and arguments; ``{name}`` is a field of the task.  Empty: agents that are started elsewhere take the
    episodes by ``POST /episodes``."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of the program."""
    inherit_env: Sequence[str] = ()
    """Names of variables that it gets of this process's environment, besides ``PATH`` and its like."""
    folder: str | None = None
    """Working folder of the program; None: the one of the run."""
    reward: RewardSource = "post"
    """``post``: what the program sends to ``POST /reward``. ``exit``: 1 for exit status 0, 0 for status 1.
    ``verifier``: what the verifier says of the last answer and of the scratch folder."""
    sampling: Sampling = "run"
    """Where the program sets a temperature or its like: the ``run``'s hold all the same, or ``refuse`` the request."""

    def problems(self, has_verifier: bool, has_worker_key: bool) -> list[str]:
        """What is wrong with the options, in words; nothing is started for it."""
        found = []
        if not self.command and not has_worker_key:
            found.append(
                "an agent needs `command` (a program and its arguments), or `api_key_env` (the variable with the key "
                "that agents from elsewhere send)"
            )
        if not self.command and self.reward == "exit":
            found.append("reward: exit needs `command`: nothing is known of the exit of a program from elsewhere")
        if self.reward == "verifier" and not has_verifier:
            found.append("reward: verifier needs `verifier` (a reward or a command)")
        return found


class BlackBoxAgent:
    """Runs a program per episode, or lets one from elsewhere have it, and answers its model calls.

    The program is given ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY``; its
    task is the JSON on standard input and in the file ``ROLL_TASK_FILE``.  It ends with its episode: at the deadline it
    is killed with all that it has started.

    Raises:
        ValueError: options that contradict each other.
    """

    def __init__(self, endpoint: AgentEndpoint, options: BlackBoxOptions, verifier: Verifier | None = None) -> None:
        problems = options.problems(verifier is not None, endpoint.serves_workers)
        if problems:
            raise ValueError("; ".join(problems))
        self._endpoint, self._options, self._verifier = endpoint, options, verifier

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
