"""SGLang as a generation engine: token ids in, token ids out; its schedulers are processes of the role's worker.

Raises:
    ImportError: on import, where SGLang is not installed.
"""

import os

from roll.config.installation import install_command
from roll.platforms import current_platform

if current_platform().device_type == "cpu":
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # read when SGLang is imported, here and in its processes

# A sequence is given two tokens more than it is filled with, also where these are all positions of the model.
os.environ.setdefault("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")

try:
    import sglang  # noqa: F401
except ImportError as error:
    raise ImportError(
        "strategy_args.strategy_name: sglang needs SGLang; install it on GPUs with "
        f"{install_command('sglang')}, on a CPU see docs/sglang.md ({error})"
    ) from error

from roll.strategies.sglang.strategy import SglangStrategy

__all__ = ["SglangStrategy"]
