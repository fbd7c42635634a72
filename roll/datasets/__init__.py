"""Data sets: reading, templates, tokenising, filtering, domain mixing, stateful sampling."""

from roll.datasets.prompts import LoadCounts, PromptDataset
from roll.datasets.sampling import DomainSampler, ShuffledEpochs
from roll.datasets.sft import SftDataset
from roll.datasets.types import DataError, PromptRow, SftRow

__all__ = [
    "DataError",
    "DomainSampler",
    "LoadCounts",
    "PromptDataset",
    "PromptRow",
    "SftDataset",
    "SftRow",
    "ShuffledEpochs",
]
