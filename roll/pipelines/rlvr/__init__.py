"""The RLVR pipeline."""

from __future__ import annotations

from roll.config.loader import LoadedConfig
from roll.config.rlvr import RLVRConfig


def run(loaded: LoadedConfig[RLVRConfig]) -> None:
    """Run the pipeline that ``loaded`` describes, to the end."""
    from roll.pipelines.rlvr.pipeline import RLVRPipeline

    RLVRPipeline(loaded).run()
