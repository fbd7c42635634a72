"""A role of the run as the service that its LLM judges ask."""

from __future__ import annotations

import secrets

import ray

from roll.config.plan.plan import Plan
from roll.config.policy import PolicyRunConfig
from roll.distributed import Cluster
from roll.pipelines.files import load_tokenizer
from roll.serving.server import FrontOptions, HttpFront


class JudgeService:
    """One address for the reward workers that ask a role, with a key that only this run knows.

    The address is taken at once, so that reward workers can have it while the engines still load.

    Args:
        name: the role, ``reward_model`` or one that belongs to a single domain.
    """

    def __init__(self, config: PolicyRunConfig, plan: Plan, name: str) -> None:
        key = secrets.token_urlsafe(32)
        limit = config.router_args.max_running_requests or config.max_running_requests
        options = FrontOptions(
            model=name,
            api_key=key,
            max_running_requests=limit,
            max_open_requests=1 << 20,
            # A new process would load its model while others have the devices.
            max_restarts=0 if plan.roles[name].colocated_with else config.actor_infer.max_restarts,
        )
        # Reward workers of several nodes must reach it; else nobody outside this host needs to.
        self._front = HttpFront(options, ray.util.get_node_ip_address() if plan.num_nodes > 1 else "127.0.0.1")
        self._key = key
        self.name = name
        self.cluster: Cluster | None = None

    @property
    def options(self) -> dict[str, str]:
        """The same as options of a judge."""
        return {"base_url": self._front.base_url, "api_key": self._key, "model": self.name}

    @property
    def address(self) -> dict[str, str]:
        """Keys of a reward section, for the workers whose judges ask this service: known only while it runs."""
        return {"judge_api_url": self._front.base_url, "judge_api_key": self._key, "judge_model_name": self.name}

    def open(self, cluster: Cluster) -> None:
        """Answer by the engines of ``cluster``, which have loaded their model."""
        self.cluster = cluster
        arguments = cluster.role.model_args
        self._front.open(cluster, load_tokenizer(arguments.model_name_or_path, arguments.trust_remote_code))

    def resume(self) -> None:
        """Go on answering after :meth:`pause`."""
        self._front.resume()

    def pause(self) -> None:
        """Let the engines leave their devices: drop what nobody waits for any more.

        Raises:
            RemoteError: what ended the engines, if anything has.
        """
        self._front.check()
        self._front.pause()

    def check(self) -> None:
        """Raise what ended the engines, if anything has."""
        self._front.check()

    def close(self) -> None:
        """Before the engines end."""
        self._front.close()
