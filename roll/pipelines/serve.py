"""``roll serve``: the engines of one role, or of a model, as an HTTP service without a training run around them."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from roll.config.loader import LoadedConfig
from roll.config.model_files import is_installed, require_model
from roll.config.reading.errors import ConfigError, Problem
from roll.config.roles import WorkerConfig
from roll.config.run import RunConfig
from roll.config.strategies.registry import BACKENDS, generation_strategies
from roll.distributed import ResourceManager, ray_runtime
from roll.pipelines.files import load_tokenizer
from roll.pipelines.model_calls import start_cluster
from roll.platforms import current_platform
from roll.serving.chat import engine_section
from roll.serving.server import HttpFront
from roll.tracking import setup_logging
from roll.workers import GENERATION_WORKER
from roll.workers.generation import GenerationWorker

POLL_SECONDS = 0.5
MODEL_SAMPLES = 32  # samples at a time of an engine that no file describes


def served_role(loaded: LoadedConfig[Any], name: str) -> WorkerConfig:
    """The section of the role as its engines get it. Raises ``ConfigError``: the configuration starts no such role, it
    does not generate, or its model is not there."""
    plan = loaded.plan
    generating = [role.name for role in plan.roles.values() if role.strategy_name in generation_strategies()]
    if name not in generating:
        rule = f"must be a role that generates; in this configuration: {', '.join(generating) or 'none'}"
        raise ConfigError([loaded.problem("--role", name, rule)])
    role_plan = plan.roles[name]
    try:
        require_model(str(role_plan.model_path))
    except ValueError as error:
        key = f"{role_plan.key}.model_args.model_name_or_path"
        raise ConfigError([loaded.problem(key, role_plan.model_path, str(error))]) from error
    return loaded.pipeline.served_section(loaded, name)


@dataclass(frozen=True)
class Served:
    """Engines to serve, and where they run."""

    role: WorkerConfig
    model: str  # the model's path as written
    config: RunConfig
    log_dir: Path
    shape: tuple[int, int] = (1, 1)  # devices of a node, nodes
    running_requests: int = 128


def of_file(loaded: LoadedConfig[Any], name: str) -> Served:
    """The engines of a configuration's role; ConfigError: see :func:`served_role`."""
    role, config, plan = replace(served_role(loaded, name), name=name), loaded.config, loaded.plan
    shape, running = (plan.num_devices_per_node, plan.num_nodes), loaded.pipeline.running_requests(config)
    return Served(role, str(plan.roles[name].model_path), config, plan.log_dir, shape, running)


def of_model(path: str, strategy: str | None) -> Served:
    """One engine for a model folder, GGUF file or hub name; ``strategy`` None: ``vllm`` on an accelerator where it is
    installed, else ``hf_infer``. Raises ``ConfigError``: a strategy whose package is missing; no such model."""
    strategy = strategy or ("vllm" if current_platform().name != "cpu" and is_installed("vllm") else "hf_infer")
    if (package := BACKENDS[strategy].package) is not None and not is_installed(package.module):
        raise ConfigError(
            [Problem("--strategy", strategy, f"needs a package that is not installed: {package.install}")]
        )
    try:
        role = engine_section(path, strategy, {"max_num_seqs": MODEL_SAMPLES})
    except (OSError, ValueError) as error:
        raise ConfigError([Problem("MODEL", path, str(error))]) from error
    return Served(role, path, RunConfig(), Path("output/logs/serve"))


def serve(served: Served, front: HttpFront) -> None:
    """Start the engines and answer until the process is asked to end.

    Raises:
        RemoteError: the engines have failed.
    """
    role, config = served.role, served.config
    setup_logging(served.log_dir)
    with ExitStack() as stack:
        stack.callback(front.close)
        stack.enter_context(ray_runtime(*served.shape, config.system_envs, served.log_dir / "workers"))
        resources = ResourceManager(*served.shape)
        stack.callback(resources.close)
        cluster = start_cluster(config, role.name, GENERATION_WORKER, resources, role)
        stack.callback(cluster.shutdown)
        cluster.call_all(GenerationWorker.initialize).result()
        front.open(cluster, load_tokenizer(role.model_args.model_name_or_path, role.model_args.trust_remote_code))
        stack.callback(front.close)
        engines = f"{cluster.world_size} engine{'s' if cluster.world_size > 1 else ''}"
        console = Console(emoji=False, soft_wrap=True)
        console.print(f"{front.model} is served at {front.base_url} by {engines}", markup=False)
        while front.failure is None:
            time.sleep(POLL_SECONDS)
        front.check()
