"""Plays tasksets of the package ``verifiers`` with the policy as their model.

It runs in an interpreter that has the package, where ``roll`` need not be installed, and imports nothing of it:
``python -P taskset_program.py OPTIONS``. It serves a whole run as docs/black-box.md describes; with ``--describe`` it
prints how many tasks there are, or what is wrong with the options, and leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import signal
import statistics
import sys
import types
from collections.abc import Mapping
from typing import Any

# The folder of the run has modules of the user, for tool servers as well, which are processes of their own.
sys.path.insert(0, os.getcwd())
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))

try:
    import httpx
    import verifiers.v1 as vf
    from openai import APIStatusError, AsyncOpenAI, omit
    from pydantic import ValidationError
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
except ImportError as error:
    rule = f"has no verifiers 0.4 or later ({error}): pip install verifiers, with the packages of your environments"
    sys.stdout.write(json.dumps({"problems": [["python", rule]]}))
    raise SystemExit from None

CHAT_LOOP = "roll_chat_loop"
_keys = itertools.count()


class OptionError(ValueError):
    """A wrong option: its key within ``env_config`` (empty: ``env_type``), and the rule."""


class ChatLoop(vf.Harness[vf.HarnessConfig]):
    """The conversation of a task with its tools, until a response calls none.

    It is the package's ``null`` without a program for every episode, and without what that has to install.
    """

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False
    connections: Any = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> Any:
        """Have one conversation; limits and failures of the model are recorded by the package's own proxy."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=self.connections)
        urls = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with contextlib.AsyncExitStack() as stack:
            tools, names, servers = await connect_mcp({"mcpServers": urls}, stack)
            with contextlib.suppress(APIStatusError):
                while messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
                    reply = await client.chat.completions.create(
                        model=ctx.model, messages=messages, tools=tools or omit
                    )
                    message: Any = reply.choices[0].message
                    messages.append(message.model_dump(exclude_none=True))
                    for call in message.tool_calls or ():
                        content = await tool_result(servers, names, call.function)
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


# The package imports a harness by the name of its module.
sys.modules[CHAT_LOOP] = types.ModuleType(CHAT_LOOP)
vars(sys.modules[CHAT_LOOP]).update(ChatLoop=ChatLoop, __all__=["ChatLoop"])


async def tool_result(servers: Any, names: Mapping[str, Any], function: Any) -> Any:
    """Return the answer of a tool; a call that cannot be made is told to the model."""
    if function.name not in names:
        return f"error: there is no tool {function.name!r}; there are {', '.join(names)}"
    try:
        arguments = json.loads(function.arguments or "{}")
    except json.JSONDecodeError as error:
        return f"error: the arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments must be a JSON object"
    return await call_mcp(servers, names, function.name, arguments)


class Played:
    """An environment with its tasks, and the seat that the policy has in it. ``options``: ``id`` of the taskset, most
    ``turns`` of the policy, ``select`` and ``env`` as the package's configuration files have them. Raises
    ``OptionError``: it cannot be played so; ``ValidationError``: options that the package rejects."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        section = json.loads(json.dumps(options["env"]))
        taskset = section.setdefault("taskset", {})
        taskset["id"] = options["id"]
        check_installed("", options["id"], "tasksets")
        check_installed("id", section.get("id"), "envs")
        try:
            vf.task_type(options["id"])
            fields = vf.env_config_type(options["id"], section.get("id", "")).model_fields
        except (AttributeError, TypeError, ValueError) as error:
            raise OptionError("", f"is no taskset of verifiers 0.4: {error}") from error
        seats = {name: one.default for name, one in fields.items() if isinstance(one.default, vf.AgentConfig)}
        own = [name for name, seat in seats.items() if not (section.get(name, {}).get("client") or seat.client)]
        if len(own) != 1:
            raise OptionError(
                f"{own[-1] if own else next(iter(seats))}.client",
                f"the policy has one seat, and without a client there are {', '.join(own) or 'none'}: name the "
                "endpoint of every other one, as in {type: eval, base_url: 'http://host:8000/v1', api_key_var: NAME}",
            )
        self.seat = own[0]
        seat, default = section.setdefault(self.seat, {}), seats[self.seat]
        check_installed(f"{self.seat}.harness.id", (seat.get("harness") or {}).get("id"), "harnesses")
        if not seat.get("harness") and default.harness is None and vf.default_harness_id(options["id"]) == "bash":
            seat["harness"] = {"id": CHAT_LOOP}
        seat["max_turns"] = min(options["turns"], seat.get("max_turns", default.max_turns) or options["turns"])
        config = vf.resolve_env_config(section)
        harness = vf.load_harness(getattr(config, self.seat).harness or vf.default_agent_harness(options["id"]))
        if not seat.get("runtime") and not harness.EXECUTES_CODE:
            seat["runtime"] = {"type": "subprocess"}
            config = vf.resolve_env_config(section)
        needs = [one for one in (harness, vf.task_type(options["id"])) if one.NEEDS_CONTAINER]
        if needs and getattr(config, self.seat).runtime.type == "subprocess":
            name = getattr(needs[0], "__name__", type(needs[0]).__name__)
            raise OptionError(f"{self.seat}.runtime.type", f"{name} needs a container; docker or podman gives it one")
        self.environment = vf.load_environment(config)
        select = dict(options["select"])
        try:
            tasks = self.environment.taskset.select(vf.SelectConfig.model_validate(select))
        except ValidationError as error:
            raise OptionError(*located(error, "select")[0]) from error
        if not tasks.bounded:
            raise OptionError("select.limit", "is needed: the taskset has no end; 1000 takes its first thousand tasks")
        self.tasks = list(tasks)
        if not self.tasks:
            raise OptionError("select", f"leaves no task: {json.dumps(select)}")

    async def play(self, web: httpx.AsyncClient, given: Mapping[str, Any]) -> None:
        """Play an episode and tell the run what came of it."""
        variable = f"ROLL_API_KEY_{next(_keys)}"  # a name of which the package's programs inherit nothing
        os.environ[variable] = given["key"]
        client = vf.EvalClientConfig(base_url=f"{given['base_url']}/v1", api_key_var=variable)
        try:
            task = self.tasks[given["task"]["index"]]
            episode = await self.environment.run_episode(task, vf.ModelContext(model="policy", client=client))
            body = outcome(episode, self.seat)
        except Exception as error:
            body = {"error": f"{type(error).__name__}: {error}"}
        finally:
            del os.environ[variable]
        key = {"Authorization": f"Bearer {given['key']}"}
        with contextlib.suppress(httpx.HTTPError):  # the run may have given the episode up
            await web.post(f"{given['base_url']}/reward", headers=key, json=body)

    async def serve(self) -> None:
        """Play whatever episodes the run has, until it ends this process."""
        task = asyncio.current_task()
        assert task is not None
        # Tool servers are in sessions of their own: they end with this block only.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        url, key = os.environ.pop("ROLL_EPISODES_URL"), os.environ.pop("ROLL_WORKER_KEY")
        async with self.environment.serving(), httpx.AsyncClient(timeout=None) as web, asyncio.TaskGroup() as episodes:
            # Each conversation has a proxy of its own, which ends with it: a common one would keep a client, of 0.7 MB,
            # for the key of every episode.
            self.environment._interception = None
            while True:
                answer = await web.post(url, params={"wait": 30}, headers={"Authorization": f"Bearer {key}"})
                if answer.raise_for_status().status_code == httpx.codes.OK:
                    episodes.create_task(self.play(web, answer.json()))


def check_installed(key: str, identifier: str | None, folder: str) -> None:
    """Raise ``OptionError`` where neither the package's ``folder`` nor this interpreter has the module of a name."""
    module = (identifier or "").rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    if module and not any(map(importlib.util.find_spec, (f"verifiers.v1.{folder}.{module}", module))):
        remedy = "install its package there, or start the run in the folder of its module"
        raise OptionError(key, f"there is no module {module} for {sys.executable}: {remedy}")


def outcome(episode: Any, seat: str) -> dict[str, Any]:
    """Body of ``POST /reward``: means over the runs of the policy's seat, or the error that left one without reward."""
    traces = [trace for trace in episode.traces if trace.agent.name == seat]
    errors = [error for one in (episode, *episode.traces) for error in one.errors]
    if errors or not traces:
        return {"error": f"{errors[-1].type}: {errors[-1].message}" if errors else f"the seat {seat} did not play"}
    numbers: dict[str, list[float]] = {}
    for trace in traces:
        scores = {name: None if reward is None else reward.score for name, reward in trace.rewards.items()}
        for name, value in {**trace.metrics, **scores}.items():
            if value is not None:
                numbers.setdefault(name, []).append(value)
    metrics = {name: statistics.fmean(values) for name, values in numbers.items()}
    return {"reward": statistics.fmean(trace.reward for trace in traces), "metrics": metrics}


def located(error: ValidationError, *parents: str) -> list[tuple[str, str]]:
    """Keys and rules of what the package rejects."""
    return [(".".join(map(str, (*parents, *one["loc"]))), one["msg"]) for one in error.errors()]


def loaded(options: Mapping[str, Any]) -> tuple[Played | None, list[tuple[str, ...]]]:
    """The environment of the options, or else what is wrong with them: keys and rules."""
    try:
        return Played(options), []
    except OptionError as error:
        return None, [error.args]
    except ValidationError as error:
        return None, list(located(error))
    except ModuleNotFoundError as error:
        missing = getattr(error.__cause__ or error, "name", None)
        return None, [("python", f"{options['id']} needs the package {missing}: pip install it there")]
    except Exception as error:
        return None, [("taskset", f"its tasks cannot be loaded: {type(error).__name__}: {error}")]


def main() -> None:
    played, problems = loaded(json.loads(sys.argv[1]))
    if "--describe" in sys.argv:
        sys.stdout.write(json.dumps({"problems": problems} if played is None else {"tasks": len(played.tasks)}))
    elif played is None:
        sys.exit(": ".join(problems[0]))
    else:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(played.serve())


if __name__ == "__main__":
    main()
