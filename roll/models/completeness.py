"""The comparison of a folder's tensors with those of the model that its ``config.json`` describes.

transformers fills a tensor that is missing with random numbers and passes over one that the model has no use for, with
a warning each. Its own loader says which they are, also for families whose files have other names than the model: it is
given the names and shapes of the files' headers, on torch's ``meta`` device, so that no weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from roll.config.weight_files import how_to_unwrap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def incomplete(
    model: PreTrainedModel,
    missing: Collection[str],
    unexpected: Collection[str],
    mismatched: Iterable[tuple[str, Any, Any]],
    overridden: bool,
) -> str | None:
    """The meaning of a loader's report; None: the model is whole.

    A tensor that the model has no use for is ignored where it belongs to a part that the model does not have (the score
    head of a reward model, a tower of another modality). It is a fault where it is one more of what the model has: a
    layer beyond ``num_hidden_layers``, a bias that ``config.json`` denies.

    Args:
        model: that was built.
        missing, unexpected: names.
        mismatched: names with the shape in the files and in the model.
        overridden: ``model_config_kwargs`` changes ``config.json``, so that layers may be left out on purpose.
    """
    parts = []
    if missing:
        parts.append(f"lacks {_some(missing)}")
    for name, stored, expected in mismatched:
        parts.append(f"holds {name} of shape {list(stored)}, and the model has {list(expected)}")
        break
    # The model has a module of this name with parameters, apart from the number of the layer.
    known = {_NUMBER.sub("#", name.rpartition(".")[0]) for name, _ in model.named_parameters()}
    more = [name for name in unexpected if not overridden and _NUMBER.sub("#", name.rpartition(".")[0]) in known]
    if missing and unexpected:
        parts.append(f"holds {_some(unexpected)}, which the model does not have")
    elif more:
        parts.append(f"holds {_some(more)}, which this model has no place for")
    if not parts:
        return None
    remedy = how_to_unwrap(unexpected) or (
        "download the folder again, or save the bare model (no wrapper, adapters merged) by save_pretrained"
    )
    return f"{'; it '.join(parts)}: config.json describes another model. To mend it, {remedy}"


def _some(names: Collection[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
