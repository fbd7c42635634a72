"""Hides secrets wherever a configuration, an error or a log is shown or written.

Four things are known to be secret: the value of a key or variable whose name says so; what has the form of a
credential (a token of a well-known form, the password of a URL, an ``Authorization`` header); a random text under any
key that the schema does not know (:mod:`roll.config.reading.secrecy`), and every header; and, in any text, the values
that were met there (:func:`register_secrets`, and the environment).  Where the schema knows a key, it decides: see
:func:`know_keys`."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from roll.config.reading.secrecy import (
    ENVIRONMENT,
    SHORT,
    Secrecy,
    is_digest,
    looks_random,
    secrecy,
    tells_secret,
    word_set,
)

MASK = "********"
_LEAST_LENGTH = 8  # least length of a value that is hidden in any text: shorter ones are parts of words
_OF_VARIABLES = 12  # letters and digits in a row that make a variable's value suspicious; its name is nobody's column
_HEADERS = re.compile(r"(^|_)headers?$", re.IGNORECASE)
_VARIABLES = re.compile(r"(^|_)(envs?|environ|environment|env_?vars|environment_variables)$", re.IGNORECASE)
_PUBLIC_HEADERS = word_set(
    """
    accept accept-charset accept-encoding accept-language cache-control connection content-encoding content-length
    content-type host origin referer user-agent
    """
)
_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)"
    r"|\b(?:sk-[\w-]{16,}|hf_\w{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}"
    r"|(?:npm|gsk|xai|pplx|glsa|pypi|nvapi|r8|dop_v1|tgp_v1|shp(?:at|ss)|sq0\w{3}|[rs]k_(?:live|test))[_-][\w-]{16,}"
    r"|(?:ya29|hv[sb]|SG)\.[\w.-]{16,}|(?:AKIA|ASIA|AIDA|AROA)[0-9A-Z]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*){0,3})",
    re.DOTALL,
)
# The form that most services have chosen, those to come as well: a short prefix, then a random text.
_PREFIXED = re.compile(r"(?<![\w/.-])(?:[A-Za-z][A-Za-z0-9]{1,9}[_-]){1,3}(?P<random>[A-Za-z0-9]{16,})")
_WEBHOOK = re.compile(r"(?P<host>\bhttps?://(?:hooks\.[\w.-]+|[\w.-]+/(?:api/)?webhooks?))/[^\s'\"]+")
_URL = re.compile(r"(?P<scheme>\b[a-zA-Z][\w+.-]*://)(?P<user>[^\s/@:'\"]*)(?P<password>:[^\s/@'\"]+)?@")
_LONG_USER = 20  # a URL's user without a password is a token from this length on
_HEADER = re.compile(
    r"(?P<name>\b(?:proxy-)?authorization|\bx-api-key|\bapi-key|\b(?:set-)?cookie)(?P<between>['\"]?\s*[:=]\s*['\"]?)"
    r"(?P<scheme>(?:bearer|basic|token|digest)\s+)?(?P<value>[^\s'\",;]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(?P<scheme>bearer\s+)(?P<value>[\w.~+/=-]{8,})", re.IGNORECASE)
_ASSIGNED = re.compile(
    r"(?P<query>[?&]?)(?P<name>[\w-]+)(?P<between>=|['\"]\s*[:,]\s*|:\s+)(?P<quote>b?['\"]?)(?P<value>[^\s&'\"\\,;}\])]+)"
)
# Names that are a secret's in the query of a URL, and an argument's like any other in a traceback.
_EVERYDAY = frozenset({"key", "pass", "pat", "sig", "signature", "auth"})

_registered: set[str] = set()
_known: dict[str, bool] = {}


def know_keys(keys: Mapping[str, bool]) -> None:
    """Take over the keys of a schema: those that are declared secret are hidden, and what another one holds is hidden
    only where it has the form of a credential."""
    _known.update(keys)


def is_secret(key: str, value: object = None) -> bool:
    """True for the names of secrets, such as ``judge_api_key``, ``WANDB_API_KEY``, ``GITHUB_TOKEN_2``, ``PASSWORD_DB``.

    Args:
        value: decides where the name leaves it open: ``system_key: system`` names a column, ``service_key: 7f3a...``
            does not. None: such a name counts as a secret's.
    """
    return _known[key] if key in _known else tells_secret(key, value)


def masked(data: object, key: str = "") -> Any:
    """A copy of a configuration tree, which is at ``key``, with the values of secret keys, and secrets in other texts,
    replaced."""
    if isinstance(data, Mapping):
        return {
            name: MASK if value and _is_hidden(str(name), value, key) else masked(value, str(name))
            for name, value in data.items()
        }
    if isinstance(data, list | tuple):
        found = []
        option = ""  # of a command line: what follows --token
        for entry in data:
            is_argument = option.startswith("-") and "=" not in option and isinstance(entry, str)
            is_secrets = (is_argument and is_secret(option, entry)) or _is_hidden(key, entry)
            found.append(MASK if entry and is_secrets else masked(entry, key))
            option = entry if isinstance(entry, str) else ""
        return found
    return masked_text(data) if isinstance(data, str) else data


def _is_hidden(key: str, value: object, section: str = "") -> bool:
    """A value is a secret, by its key, the section of that key, or its form."""
    if isinstance(value, str) and _HEADERS.search(section):
        return key.lower() not in _PUBLIC_HEADERS
    if is_secret(key, value):
        return True
    if not isinstance(value, str) or not key or key in _known or is_digest(key, value):
        return False
    is_variable = ENVIRONMENT.fullmatch(key) or _VARIABLES.search(section)
    return looks_random(value, _OF_VARIABLES) if is_variable else looks_random(value)


def masked_text(text: str) -> str:
    """A text, of whatever kind, without the secrets that can be recognised in it."""
    exported = {value for name, value in os.environ.items() if is_secret(name, value) and _is_telling(name, value)}
    for value in sorted(_registered | exported, key=len, reverse=True):
        if value in text:
            text = text.replace(value, MASK)
    text = _URL.sub(_masked_url, text)
    text = _WEBHOOK.sub(rf"\g<host>/{MASK}", text)
    text = _HEADER.sub(rf"\g<name>\g<between>\g<scheme>{MASK}", text)
    text = _BEARER.sub(rf"\g<scheme>{MASK}", text)
    text = _ASSIGNED.sub(_masked_assignment, text)
    text = _SHAPES.sub(MASK, text)
    return _PREFIXED.sub(_masked_prefixed, text)


class MaskingFormatter(logging.Formatter):
    """Formats a record, its traceback included, without the secrets in it."""

    def format(self, record: logging.LogRecord) -> str:
        return masked_text(super().format(record))


def register_secrets(data: object) -> None:
    """Remember what is hidden in a tree, so that :func:`masked_text` hides it wherever it turns up."""
    _registered.update(_values(data))


def _values(data: object, key: str = "", name: str = "") -> Iterator[str]:
    """Values to hide wherever they occur: ``key`` is their key, ``name`` the one that makes them secret."""
    if isinstance(data, Mapping):
        for own, value in data.items():
            yield from _values(value, str(own), str(own) if _is_hidden(str(own), value, key) else name)
    elif isinstance(data, list | tuple):
        for entry in data:
            yield from _values(entry, key, name)
    elif isinstance(data, str):
        if name and _is_telling(name, data):
            yield data
        yield from (
            found["password"][1:] for found in _URL.finditer(data) if len(found["password"] or "") > _LEAST_LENGTH
        )


def _is_telling(name: str, value: str) -> bool:
    """A value to hide wherever it occurs; the value of a key may be an everyday word."""
    if len(value) < _LEAST_LENGTH or value == MASK:
        return False
    return secrecy(name) is Secrecy.YES or looks_random(value, SHORT)


def _masked_url(found: re.Match[str]) -> str:
    if found["password"]:
        return f"{found['scheme']}{found['user']}:{MASK}@"
    return f"{found['scheme']}{MASK}@" if len(found["user"]) >= _LONG_USER else found[0]


def _masked_prefixed(found: re.Match[str]) -> str:
    random = found["random"]
    is_mixed = any(map(str.isdigit, random)) and not re.fullmatch(r"[0-9a-f]+", random) and looks_random(random)
    return MASK if is_mixed else found[0]


def _masked_assignment(found: re.Match[str]) -> str:
    name, between = found["name"], found["between"]
    if not is_secret(name, None if found["query"] else found["value"]) or MASK in found["value"]:
        return found[0]
    is_prose = between.startswith(":") and not re.search(r"[_-]|passw", name, re.IGNORECASE)  # "unexpected token: x"
    is_argument = between == "=" and not found["query"] and name.lower() in _EVERYDAY
    return found[0] if is_prose or is_argument else f"{found['query']}{name}{between}{found['quote']}{MASK}"
