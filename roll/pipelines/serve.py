"""``roll serve``: the engines of one role as an HTTP service, without a training run around them."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from roll.config.loader import LoadedConfig
from roll.config.model_files import looks_like_folder
from roll.config.reading.errors import ConfigError, Problem
from roll.config.reading.yaml_files import shown
from roll.config.roles import WorkerConfig
from roll.config.strategies.registry import generation_strategies
from roll.distributed import Cluster, ResourceManager, ray_runtime
from roll.pipelines.files import load_tokenizer
from roll.serving.server import FrontOptions, HttpFront
from roll.tracking import setup_logging
from roll.workers import GENERATION_WORKER
from roll.workers.generation import GenerationWorker

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class ServeOptions:
    """The command line of ``roll serve``."""

    role: str = "actor_infer"
    host: str = "127.0.0.1"
    port: int = 8000
    model: str | None = None
    """The name that clients give; None: the last part of the model's path."""
    api_key: str = ""
    max_open_requests: int = 1024


def served_role(loaded: LoadedConfig[Any], name: str) -> WorkerConfig:
    """The section of the role as its engines get it.

    Raises:
        ConfigError: the configuration starts no such role, it does not generate, or its model is not there.
    """
    plan = loaded.plan
    generating = [role.name for role in plan.roles.values() if role.strategy_name in generation_strategies()]
    if name not in generating:
        rule = f"must be a role that generates; in this configuration: {', '.join(generating) or 'none'}"
        raise ConfigError([Problem("--role", name, rule, source=shown(loaded.source))])
    role_plan = plan.roles[name]
    path = role_plan.model_path
    if path is not None and looks_like_folder(path) and not os.path.isfile(Path(path).expanduser() / "config.json"):
        key = f"{role_plan.key}.model_args.model_name_or_path"
        rule = "is not a model folder: it has no config.json"
        raise ConfigError([Problem(key, path, rule, source=shown(loaded.source))])
    return loaded.pipeline.served_section(loaded, name)


def serve(loaded: LoadedConfig[Any], options: ServeOptions) -> None:
    """Start the engines and answer until the process is asked to end.

    Raises:
        ConfigError: see :func:`served_role`. RemoteError: the engines have failed. OSError: the port is taken.
    """
    role, config, plan = served_role(loaded, options.role), loaded.config, loaded.plan
    path = role.model_args.model_name_or_path
    model = options.model or Path(str(path)).name
    setup_logging(plan.log_dir)
    with ExitStack() as stack:
        front_options = FrontOptions(
            model=model,
            api_key=options.api_key,
            max_running_requests=loaded.pipeline.running_requests(config),
            max_open_requests=options.max_open_requests,
        )
        front = HttpFront(front_options, options.host, options.port)
        stack.callback(front.close)
        log_dir = plan.log_dir / "workers"
        stack.enter_context(ray_runtime(plan.num_devices_per_node, plan.num_nodes, config.system_envs, log_dir))
        resources = ResourceManager(plan.num_devices_per_node, plan.num_nodes)
        stack.callback(resources.close)
        cluster = Cluster(
            options.role, GENERATION_WORKER, resources, role, seed=config.seed, rpc_timeout=config.rpc_timeout
        )
        stack.callback(cluster.shutdown)
        cluster.call_all(GenerationWorker.initialize).result()
        front.open(cluster, load_tokenizer(path, role.model_args.trust_remote_code))
        stack.callback(front.close)
        console = Console(emoji=False, soft_wrap=True)
        console.print(f"{model} is served at {front.base_url} by {cluster.world_size} engines", markup=False)
        while front.failure is None:
            time.sleep(POLL_SECONDS)
        front.check()
