"""The language model of a checkpoint that also holds a vision tower, where transformers has a class for it alone.

Qwen3.5 is published so: ``config.json`` describes both parts, and the language model's tensors are named
``model.language_model.*``.  The rest (the tower, layers that predict several tokens) is neither loaded nor trained.
What is written has the published form again: the same names, the source's other tensors bit by bit, its configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from roll.config.model_files import VISION_FAMILIES

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def text_part(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a configuration that a language model by itself is made of; the whole where there is no such part, or
    where images are read (:data:`~roll.config.model_files.VISION_FAMILIES`)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    part_class = config.sub_configs.get("text_config")
    if part_class is None or config.model_type in VISION_FAMILIES or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    language_model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if language_model.config_class is not part_class:
        return config
    part = config.get_text_config()
    # What only the whole may say: transformers takes the part at its word.
    part.tie_word_embeddings = part.tie_word_embeddings or config.tie_word_embeddings
    for name in ("dtype", "architectures", "quantization_config"):
        if getattr(part, name, None) is None and getattr(config, name, None) is not None:
            setattr(part, name, getattr(config, name))
    return part


def whole_config(whole: PretrainedConfig, part: PretrainedConfig) -> PretrainedConfig:
    """The configuration of a folder that holds a trained language model: ``part``, in its place in ``whole``."""
    if text_part(whole) is whole:
        return part
    whole.text_config, whole.dtype, whole.tie_word_embeddings = part, part.dtype, part.tie_word_embeddings
    return whole


def use_names_of(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Note in the model what its files' names differ by from its own, as ``from_pretrained`` does: a prefix, or experts
    as single matrices. :class:`~roll.models.stored.StoredLayout` goes by it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    table = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [one for one in table if isinstance(one, WeightRenaming)]
    converters = [one for one in table if isinstance(one, WeightConverter)]
    for name in names:
        rename_source_key(name, renamings, converters)
    made: Any = model
    made._weight_conversions = [one for one in table if one.was_used()]


def other_names(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Those of a folder's tensors that belong to parts which ``model`` does not have."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]
