"""Hides secrets wherever a configuration, an error or a log is shown or written.

Three things are known to be secret: the value of a key or variable whose name says so, or leaves it open while the
value looks random; a credential in any text (a token of a well-known form, or shuffled letters and digits, the password
of a URL, an ``Authorization`` header); and, in any text, the values that were met under such names
(:func:`register_secrets`, and the environment)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

import yaml

MASK = "********"
WORKING_DIRECTORY = frozenset({"PWD", "OLDPWD"})
"""The shell's variables, whose names look like a password's."""
_ALWAYS = frozenset(
    (
        *("password", "passwd", "passwor", "passphrase", "pwd", "pgpassword", "secret", "credential", "cred"),
        *("cookie", "authorization", "bearer", "apikey", "apitoken", "accesstoken", "authtoken", "refreshtoken"),
    )
)
"""Words, in the singular, that say it wherever they are in a name."""
_OF_SERVICES = frozenset(
    (
        *("api", "access", "private", "secret", "auth", "signing", "encryption", "master", "ssh", "service", "account"),
        *("session", "refresh", "webhook", "license", "client"),
    )
)
"""Before ``key`` or ``token``: a credential's."""
_AT_THE_END = frozenset({"token", "pat", "pass", "auth", "sig"})
"""Say it as the last word of a name, but for a stage or number after it."""
_OPEN = frozenset({"key", "token", "signature", *_AT_THE_END})
"""Of a service, of text or of a table: the value tells."""
_STAGES = frozenset({"old", "new", "dev", "prod", "live", "test", "ci", "main", "backup", "b64", "base64"})
_REFERS = frozenset({"env", "name", "file", "path", "dir", "id", "ids", "length", "limit", "count", "type"})
"""At the end of a name: it says where a secret is, or something about it."""
_OF_TEXT = frozenset(
    (
        *("eos", "bos", "pad", "unk", "sep", "cls", "mask", "image", "video", "audio", "stop", "boi", "eoi", "think"),
        *("thinking", "start", "end", "begin", "turn", "special", "vision", "tool", "assistant", "user", "system"),
    )
)
"""Before ``token``: a token of a vocabulary."""
_CREDENTIALS_LIVE_IN = frozenset({"env", "envs", "environment", "environ", "header", "headers", "secrets"})
"""Last word of a section whose values are credentials where they look random, whatever their names."""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ENVIRONMENT = re.compile(r"[A-Z][A-Z0-9_]*")

_LEAST_LENGTH = 8
"""Of a value that is hidden in any text: shorter ones are parts of words."""
_NO_WORD = 20
"""Letters in a row, without a break, that no word has."""
_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)"
    r"|https://hooks\.slack\.com/(?:services|workflows|triggers)/[\w/]+"
    r"|https://(?:\w+\.)?discord(?:app)?\.com/api/webhooks/[\w/-]+"
    r"|\bya29\.[\w-]{16,}|\bhv[sb]\.[\w-]{16,}|\bSG\.[\w-]{16,}\.[\w-]{16,}|\b(?:xai|pplx|sk|key|tok)-[\w-]{16,}"
    r"|\b(?:npm|gsk|pypi|dop_v1|shp(?:at|ss)|sq0\w{3}|[rs]k_(?:live|test)|whsec|tgp_v1|r8|nvapi|glsa|lin_api|figd)[_-][\w-]{16,}"
    r"|\bhf_\w{16,}|\bgh[pousr]_\w{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bxox[abeprs]-[\w-]{10,}|\bxapp-[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}|\bAIza[\w-]{30,}|\bdapi[0-9a-f]{32}|\b\d{8,10}:AA[\w-]{30,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
    re.DOTALL,
)
_RUN = re.compile(r"(?<![\w/.-])[\w+-]*?(?P<run>[A-Za-z0-9]{24,})[\w+-]*={0,2}(?![\w/.-])")
"""A word with many letters and digits in a row; see :func:`_is_shuffled`."""
_URL = re.compile(r"(?P<scheme>\b[a-zA-Z][\w+.-]*://)(?P<user>[^\s/@:'\"]*)(?P<password>:[^\s/@'\"]+)?@")
_LONG_USER = 20
"""A URL's user without a password is a token from this length on."""
_HEADER = re.compile(
    r"(?P<name>\b(?:proxy-)?authorization|\bx-api-key|\bapi-key|\b(?:set-)?cookie)(?P<between>['\"]?\s*[:=]\s*['\"]?)"
    r"(?P<scheme>(?:bearer|basic|token|digest)\s+)?(?P<value>[^\s'\",;]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(?P<scheme>bearer\s+)(?P<value>[\w.~+/=-]{8,})", re.IGNORECASE)
_ASSIGNED = re.compile(
    r"(?P<query>[?&]?)(?P<name>[\w-]+)(?P<between>=|['\"]\s*[:,]\s*|:\s+)(?P<quote>b?['\"]?)(?P<value>[^\s&'\"\\,;}\])]+)"
)
_EVERYDAY = frozenset({"key", "pass", "pat", "sig", "signature", "auth"})
"""Names that are a secret's in the query of a URL, and an argument's like any other in a traceback."""

_registered: set[str] = set()


@lru_cache(maxsize=4096)
def _secrecy(name: str) -> str:
    """``yes``, ``perhaps`` (the value tells; without one it is taken for a secret's), ``hardly`` (only a value that
    looks random is one) or ``no``."""
    words = [_singular(word.lower()) for word in _WORDS.findall(name)]
    is_variable = _ENVIRONMENT.fullmatch(name) is not None
    if name in WORKING_DIRECTORY or not words or (_REFERS & {words[-1]} and len(words) > 1):
        return "no"
    pairs = set(pairwise(words))
    if _ALWAYS & set(words) or any(first in _OF_SERVICES and last in ("key", "token") for first, last in pairs):
        return "hardly" if _counts(words, name) else "yes"
    if not _OPEN & set(words):
        return "no"
    if any(word in _OF_TEXT for word in words) and "token" in words:
        return "no"
    while len(words) > 1 and (
        words[-1] in _STAGES or words[-1].isdigit() or (len(words[-1]) == 1 and words[-2] != "pass")
    ):
        words.pop()
    if _counts(words, name) or (name.islower() and name.endswith("tokens")):
        return "hardly"
    if words[-1] in _AT_THE_END or (is_variable and _AT_THE_END & set(words)):
        return "yes"
    return "perhaps" if words[-1] == "key" or (is_variable and "key" in words) else "hardly"


def _singular(word: str) -> str:
    return word[:-1] if word.endswith("s") and word[:-1] in _ALWAYS | _OPEN else word


def _counts(words: list[str], name: str) -> bool:
    """``num_access_tokens``: a number of something."""
    return bool({"num", "max", "min", "total", "per", "count", "length"} & set(words)) and name.lower().endswith("s")


def is_secret(key: str, value: object = None) -> bool:
    """True for the names of secrets, such as ``judge_api_key``, ``WANDB_API_KEY``, ``my_token_x``, ``dbPassword2``.

    Args:
        value: decides where the name leaves it open: ``system_key: system`` names a column, ``service_key: 7f3a...``
            does not. None: such a name counts as a secret's.
    """
    secrecy = _secrecy(key)
    if secrecy in ("yes", "no"):
        return secrecy == "yes"
    return _is_random(value) if value is not None or secrecy == "hardly" else True


def _is_random(value: object) -> bool:
    """A value that is no word, name, path or number."""
    if isinstance(value, list | tuple):
        return any(map(_is_random, value))
    if isinstance(value, Mapping):
        return any(map(_is_random, value.values()))
    if not isinstance(value, str) or len(value) < _LEAST_LENGTH or "://" in value:
        return False
    words = re.split(r"[^A-Za-z0-9]+", value)
    if any(character.isspace() for character in value.strip()) or value.startswith(("/", "./", "~")):
        return False
    return any(
        len(word) >= _NO_WORD
        or (len(word) >= _LEAST_LENGTH and any(map(str.isdigit, word)) and any(map(str.isalpha, word)))
        for word in words
    )


def _is_shuffled(run: str) -> bool:
    """Digits and letters of both cases that change places more often than in any name made of words."""
    kinds = ["digit" if c.isdigit() else "upper" if c.isupper() else "lower" for c in run]
    changes = sum(first != last for first, last in pairwise(kinds))
    return len(set(kinds)) == 3 and changes > 0.42 * len(run)


def masked(data: Any, of_credentials: bool = False) -> Any:
    """A copy of a configuration tree with the values of secret keys, and secrets in other texts, replaced.

    Args:
        of_credentials: ``data`` is in a section such as ``env`` or ``headers``, where all that looks random is such.
    """
    if isinstance(data, Mapping):
        return {
            key: MASK
            if value and (is_secret(str(key), value) or (of_credentials and _is_long_random(value)))
            else masked(value, of_credentials or _holds_credentials(str(key)))
            for key, value in data.items()
        }
    if isinstance(data, list | tuple):
        return [masked(entry, of_credentials) for entry in data]
    return masked_text(data) if isinstance(data, str) else data


def _holds_credentials(key: str) -> bool:
    words = _WORDS.findall(key)
    return bool(words) and words[-1].lower() in _CREDENTIALS_LIVE_IN


def _is_long_random(value: object) -> bool:
    return isinstance(value, str) and len(value) >= 2 * _LEAST_LENGTH and _is_random(value)


def masked_text(text: str) -> str:
    """A text, of whatever kind, without the secrets that can be recognised in it."""
    known = sorted(_registered.union(_of_environment()), key=len, reverse=True)
    for value in known:
        if value in text:
            text = text.replace(value, MASK)
    text = _URL.sub(_masked_url, text)
    text = _HEADER.sub(rf"\g<name>\g<between>\g<scheme>{MASK}", text)
    text = _BEARER.sub(rf"\g<scheme>{MASK}", text)
    text = _ASSIGNED.sub(_masked_assignment, text)
    text = _SHAPES.sub(MASK, text)
    return _RUN.sub(lambda found: MASK if _is_shuffled(found["run"]) else found[0], text)


def register_secrets(data: Any) -> None:
    """Remember what stands under secret keys of a tree, so that :func:`masked_text` hides it wherever it turns up."""
    _registered.update(_values(data))


def dump_yaml(data: Mapping[str, Any]) -> str:
    """The tree as YAML, secrets masked."""
    return yaml.safe_dump(masked(data), sort_keys=False, allow_unicode=True, width=120)


def _values(data: Any, name: str = "") -> Iterator[str]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _values(value, str(key) if is_secret(str(key), value) else name)
    elif isinstance(data, list | tuple):
        for entry in data:
            yield from _values(entry, name)
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
    return _secrecy(name) == "yes" or _is_random(value)


def _of_environment() -> Iterator[str]:
    for name, value in os.environ.items():
        if is_secret(name, value) and _is_telling(name, value):
            yield value


def _masked_url(found: re.Match[str]) -> str:
    if found["password"]:
        return f"{found['scheme']}{found['user']}:{MASK}@"
    return f"{found['scheme']}{MASK}@" if len(found["user"]) >= _LONG_USER else found[0]


def _masked_assignment(found: re.Match[str]) -> str:
    name, between = found["name"], found["between"]
    if not is_secret(name, None if found["query"] else found["value"]) or MASK in found["value"]:
        return found[0]
    is_prose = between.startswith(":") and not re.search(r"[_-]|passw", name, re.IGNORECASE)  # "unexpected token: x"
    is_argument = between == "=" and not found["query"] and name.lower() in _EVERYDAY
    return found[0] if is_prose or is_argument else f"{found['query']}{name}{between}{found['quote']}{MASK}"
