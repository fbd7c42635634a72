"""Rewards that ask a service: one client with retries, deadlines, bounded concurrency and a cache of answers."""

from roll.rewards.http.cache import AnswerCache
from roll.rewards.http.client import HttpSettings, JsonClient, Reply, settings_of

__all__ = ["AnswerCache", "HttpSettings", "JsonClient", "Reply", "settings_of"]
