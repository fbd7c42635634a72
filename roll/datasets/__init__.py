"""Data sets: reading, templates, tokenising, filtering, domain mixing, stateful sampling."""

from roll.datasets.sampling import DomainSampler, EpochOrder, PromptDataset, ShuffledEpochs
from roll.datasets.sft import SftDataset
from roll.datasets.types import DataError, LoadCounts, PromptRow, SftRow

__all__ = [
    "DataError",
    "DomainSampler",
    "EpochOrder",
    "LoadCounts",
    "PromptDataset",
    "PromptRow",
    "SftDataset",
    "SftRow",
    "ShuffledEpochs",
]
