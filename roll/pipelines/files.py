"""Files of a run: the tokenizer that it reads; the checkpoints, the exported model and the samples that it writes."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.checkpoint.folders import atomic_folder
from roll.config.model_files import CONFIG, model_folder
from roll.rollout.groups import SampleGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.distributed import Cluster
    from roll.protocol.images import EncodedImage


logger = logging.getLogger(__name__)

# Files of a vision-language model besides its tokenizer's.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def export_model(
    cluster: Cluster, tokenizer: PreTrainedTokenizerBase, folder: Path, facts: Mapping[str, Any] | None = None
) -> None:
    """Write weights, config (with ``facts`` as further entries) and tokenizer into ``folder``, which is there whole or
    not at all."""
    from roll.workers.model import ModelWorker

    with atomic_folder(folder) as path:
        cluster.call_all(ModelWorker.save_hf, str(path)).result()
        tokenizer.save_pretrained(path)
        # How a vision-language model prepares its images, from the model that the run began with.
        source = model_folder(tokenizer.name_or_path)
        for file in [source / name for name in PROCESSOR_FILES] if source is not None else []:
            if file.is_file():
                shutil.copyfile(file, path / file.name)
        if facts:
            config = path / CONFIG
            content = json.loads(config.read_text(encoding="utf-8")) | dict(facts)
            config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    logger.info("model written to %s", folder)


def sample_table(groups: Sequence[SampleGroup], dump_dir: Path | None = None) -> list[dict[str, Any]]:
    """One row a sample. Where samples are dumped, the images of their prompts go alongside."""
    if dump_dir is not None:
        seen = (group.item.vision for group in groups if group.item.vision is not None)
        write_images(dump_dir / "images", (image for vision in seen for image in vision.pictures))
    return [
        {
            "prompt_id": one.prompt.prompt_id,
            "sample": index,
            "domain": one.prompt.domain,
            "tag": one.prompt.tag,
            "prompt": one.prompt.prompt_text,
            "response": one.text,
            "ground_truth": one.prompt.ground_truth,
            "score": one.reward.score,
            "error": one.error,
            "finish_reason": one.finish_reason,
            "response_tokens": len(one.response_ids),
            **({} if one.prompt.vision is None else {"images": one.prompt.vision.file_names}),
        }
        for group in groups
        for index, one in enumerate(group.members)
    ]


def write_images(folder: Path, images: Iterable[EncodedImage]) -> None:
    """Images as their files had them, under the names that tables of samples give."""
    for image in images:
        file = folder / image.file_name
        if file.is_file():
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_bytes(image.data.tobytes())
        except OSError as error:  # a full disk ends no run
            logger.error("%s was not written, nor the images after it: %s", file, error)
            with suppress(OSError):
                file.unlink(missing_ok=True)
            return


def load_tokenizer(model_path: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """From a model's folder or hub name."""
    from transformers import AutoTokenizer

    assert model_path is not None, "a role with a model has a model path"
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    return tokenizer


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's padding token, or its end token where it has none (padding is always masked)."""
    pad = tokenizer.pad_token_id
    return int(tokenizer.eos_token_id if pad is None else pad)
