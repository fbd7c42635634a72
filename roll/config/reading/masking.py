"""Hides secrets wherever a configuration, an error or a log is shown or written.

Three things are known to be secret: what stands under a key or in a variable whose name says so; what looks like a
credential (a token of a well-known form, the password of a URL, an ``Authorization`` header); and, in any text, the
values that were met under such names (:func:`register_secrets`, and the environment)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import yaml

MASK = "********"
WORKING_DIRECTORY = frozenset({"PWD", "OLDPWD"})
"""The shell's variables, whose names look like a password's."""
_SECRET_WORDS = re.compile(
    r"(^|_)(passw(or)?ds?|passwd|pwd|passphrases?|secrets?|credentials?|cookies?|authorization|bearer"
    r"|(api|access|private|secret|auth|signing|encryption|master|ssh|service|account)_?(keys?|tokens?)"
    r"|pg_?password)(_|$)|password$|secret$|apikey$|(access|auth|refresh)token$",
    re.IGNORECASE,
)
"""Words that say it wherever they are in a name."""
_SECRET_ENDS = re.compile(r"(^|_)(token|pat|pass|auth|signature|sig)$", re.IGNORECASE)
"""Words that say it at the end, or anywhere in the name of a variable of the environment."""
_PERHAPS = re.compile(r"(^|_)keys?$", re.IGNORECASE)
"""The key of a service, or the name of a column: the value tells."""
_SUFFIX = re.compile(r"(_\d+|_[A-Z]|_(old|new|dev|prod|test|main|backup))+$")
_ENVIRONMENT = re.compile(r"[A-Z][A-Z0-9_]*")
_REFERS = re.compile(r"_(env|name|file|path|dir|id|ids|length|limit|count|type)$", re.IGNORECASE)
"""Says where a secret is, or something about it."""
_SPECIAL_TOKEN = re.compile(r"^(eos|bos|pad|unk|sep|cls|mask|image|video|audio|stop|boi|eoi|think\w*)_token$")

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_LEAST_LENGTH = 8
"""Of a value that is hidden in any text: shorter ones are parts of words."""
_LONG_KEY = 20
_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\bya29\.[\w-]{16,}|\b(?:sk-[\w-]{16,}|(?:npm|gsk|pypi|dop_v1|shp(?:at|ss)|sq0\w{3}|rk_live|sk_live|tgp_v1|r8|nvapi)[_-][\w-]{16,}|hf_\w{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)",
    re.DOTALL,
)
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
    """``yes``, ``perhaps`` (the value tells) or ``no``."""
    plain = _CAMEL.sub("_", name).replace("-", "_").replace(".", "_")
    stripped = _SUFFIX.sub("", plain)
    if name in WORKING_DIRECTORY or _SPECIAL_TOKEN.match(stripped) or _REFERS.search(plain):
        return "no"
    words = set(plain.split("_")) if _ENVIRONMENT.fullmatch(plain) else set()
    if _SECRET_WORDS.search(plain) or _SECRET_ENDS.search(stripped) or words & {"TOKEN", "PAT", "PASS", "AUTH"}:
        return "yes"
    return "perhaps" if _PERHAPS.search(stripped) or "KEY" in words else "no"


def is_secret(key: str, value: object = None) -> bool:
    """True for the names of secrets, such as ``judge_api_key``, ``WANDB_API_KEY``, ``GITHUB_TOKEN_2``, ``PASSWORD_DB``.

    Args:
        value: decides where the name leaves it open: ``system_key: system`` names a column, ``service_key: 7f3a...``
            does not. None: such a name counts as a secret's.
    """
    secrecy = _secrecy(key)
    return secrecy == "yes" or (secrecy == "perhaps" and (value is None or _is_random(value)))


def _is_random(value: object) -> bool:
    """A value that is no word or name: long, or with digits among its letters."""
    if not isinstance(value, str):
        return False
    return len(value) >= _LONG_KEY or (len(value) >= _LEAST_LENGTH and any(map(str.isdigit, value)))


def masked(data: Any) -> Any:
    """A copy of a configuration tree with the values of secret keys, and secrets in other texts, replaced."""
    if isinstance(data, Mapping):
        return {key: MASK if value and is_secret(str(key), value) else masked(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [masked(entry) for entry in data]
    return masked_text(data) if isinstance(data, str) else data


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
    return _SHAPES.sub(MASK, text)


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
    return not _PERHAPS.search(name) or _is_random(value)


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
