"""A trained model as a folder that every Hugging Face tool loads."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from roll.checkpoint.folders import atomic_folder
from roll.distributed import Cluster

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def export_model(cluster: Cluster, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights, config and tokenizer into ``folder``, which is there whole or not at all."""
    with atomic_folder(folder) as path:
        cluster.save_hf(str(path))
        tokenizer.save_pretrained(path)
    logger.info("model written to %s", folder)
