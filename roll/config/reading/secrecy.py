"""Recognition of secrets: by the words of its name, and by the form of a value that nobody has thought up."""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


WORKING_DIRECTORY = frozenset({"PWD", "OLDPWD"})  # the shell's variables, whose names look like a password's
ENVIRONMENT = re.compile(r"[A-Z][A-Z0-9_]*")  # the name of a variable of the environment
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Words that say it wherever they are in a name.
_SECRET = word_set("password passwd pwd passphrase passcode secret credential cred cookie authorization bearer apikey")
_GLUED = re.compile(r"(password|passwd|passphrase|secret|credential|(api|access|private|secret|auth)key)$")
# Words that go with `key` and `token`: an `api_key` opens something, a `sort_key` does not.
_KINDS = word_set(
    """
    api access private secret auth signing encryption master ssh service account session refresh deploy client app
    admin root license gpg pgp hmac jwt shared subscription storage bot
    """
)
# Words that say it at the end, or anywhere in the name of a variable of the environment.
_SECRET_ENDS = frozenset({"pat", "pass", "auth"})
# A credential, or the name of a column, the head of a function: the value tells.
_PERHAPS = frozenset({"key", "signature", "sig"})
# At the end of a name: where a secret is, or something about it.
_REFERS = word_set(
    """
    env name file path dir folder id ids length len limit count type url uri format field column index size mode
    method scheme timeout ttl version role required enabled prefix suffix variable var
    """
)
# With `token` in a name: a piece of text is meant.
_OF_TEXT = word_set(
    """
    eos bos pad unk sep cls mask image video audio stop start end begin turn boi eoi im think thinking special extra
    num max min total count number per new level loss id ids type reward kl weight prob logprob logit dispatcher
    classification budget batch length drop embedding embed cache capacity ratio penalty norm entropy position index
    first last next prompt response completion input output padding bucket mean sum avg group rollout generated all
    """
)
_OF_DIGESTS = word_set("hash sha md digest checksum revision rev commit ref uuid guid id fingerprint etag run")

_UNBROKEN = re.compile(r"[\w+/=.~:@%\-]+")
_PIECE = re.compile(r"[A-Za-z0-9]+")
_TURN = re.compile(r"(?<=[a-z])(?=[A-Z0-9])|(?<=[A-Z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])")
_CONSONANTS = re.compile(r"[b-df-hj-np-tv-xz]{7}|[B-DF-HJ-NP-TV-XZ]{8}")
_HEXADECIMAL = re.compile(r"[0-9a-fA-F-]+")
_PLACE = re.compile(r"(/|\./|\.\./|~|[A-Za-z]:[/\\]).*|.*://.*|.*\.[a-z][a-z0-9]{1,11}")
_READABLE = re.compile(r"(?<![A-Za-z0-9])[A-Za-z]?[a-z]{2,}(?![A-Za-z0-9])")
_BASE64 = re.compile(r"[A-Za-z0-9+/]{32,}={0,2}")
_BASE64URL = re.compile(r"[A-Za-z0-9_-]{20,}")
_CAPITALISED = re.compile(r"[A-Z][a-z]{2,}|[a-z]{3,}")
_SPECIAL = re.compile(r"<.*>|\[.*\]", re.DOTALL)
_NUMBER = re.compile(r"[+-]?[\d.,]+(e[+-]?\d+)?%?|true|false|none|null", re.IGNORECASE)
_LONG = 16  # letters and digits in a row, from which on a mixture of them is nobody's word
_VERY_LONG, _LONGEST_NAME = 24, 9
SHORT = 8  # likewise of a value whose name has raised suspicion

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ROWS = (
    "04540240403645040656331130 62326200530621520552500040 60316006405410610426400020 52147130700310430452421020 "
    "41563331200446142664132410 50226610700511620534500020 52217145501434430652400020 62017100600230600435400020 "
    "33544340001447530355040203 50117000400000621152701000 40137120600403341162323030 61147110600520620144420040 "
    "64117000601242560042400010 51555361403213420156330010 33442330313557440644534200 60126113500510650645400030 "
    "50000000103200001330703000 61347130502343520454321030 40416215503331441156502030 50317105600321520554301030 "
    "44444330400556250556000000 60007010600321420210000000 60136005601205510541001000 50526113601220360226000420 "
    "43335220500455560266114000 60007102500301400020030032"
)
# log2 of how much likelier the second letter is after the first in words than in random text, -4 to 3 bits; a row for
# each first letter. Counted in 8,100 words of this documentation and source, Python's documentation, and model names.
_PAIRS = {
    first + second: int(bits) - 4
    for first, row in zip(_LETTERS, _ROWS.split(), strict=True)
    for second, bits in zip(_LETTERS, row, strict=True)
}
_FEWEST_PAIRS = 9
# Mean bits of pairs below which letters are no words: random ones have -1.1, names in published files 0 or more.
_UNLIKE_WORDS = -0.35


class Secrecy(IntEnum):
    """Verdict of a name on its value."""

    NO = 0
    PERHAPS = 1  # the value tells
    LIKELY = 2  # a secret, unless it is a number or a special token of a vocabulary
    YES = 3


@lru_cache(maxsize=4096)
def words(name: str) -> tuple[str, ...]:
    """The words of a name in lower case and the singular: ``hf`` and ``token`` of ``HF_TOKENS``, ``hfToken2``."""
    found: list[str] = []
    for part in _WORDS.findall(name):
        word = part.lower()
        if len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
            word = word[:-1]
        glued = word.endswith("token") and word != "token"
        found += [word.removesuffix("token"), "token"] if glued else [word]
    return tuple(found)


@lru_cache(maxsize=4096)
def secrecy(name: str) -> Secrecy:
    """Verdict of a name on its value, by its words."""
    parts = words(name)
    is_variable = ENVIRONMENT.fullmatch(name) is not None
    if not parts or name in WORKING_DIRECTORY or parts[-1] in _REFERS:
        return Secrecy.NO
    if "token" in parts and not _OF_TEXT.isdisjoint(parts):
        return Secrecy.NO
    pairs = pairwise(parts)
    if not _SECRET.isdisjoint(parts) or any(map(_GLUED.search, parts)):
        return Secrecy.YES
    if any(kind in _KINDS and what in ("key", "token") for kind, what in pairs):
        return Secrecy.YES
    if parts[-1] in _SECRET_ENDS or (is_variable and not _SECRET_ENDS.isdisjoint(parts)):
        return Secrecy.YES
    if ("token" in parts and name != "tokens") or (is_variable and "key" in parts):
        return Secrecy.LIKELY
    return Secrecy.PERHAPS if parts[-1] in _PERHAPS else Secrecy.NO


def tells_secret(name: str, value: object) -> bool:
    """A name and its value are a secret's; a value of None is not known."""
    said = secrecy(name)
    if value is None or said is Secrecy.NO:
        return said is not Secrecy.NO
    if isinstance(value, bool) or (isinstance(value, int | float) and said is not Secrecy.YES):
        return False
    if said is Secrecy.PERHAPS:
        return isinstance(value, str) and looks_random(value, SHORT)
    if said is Secrecy.LIKELY and isinstance(value, str):
        return not (_SPECIAL.fullmatch(value) or _NUMBER.fullmatch(value))
    return True


def looks_random(value: str, least: int = _LONG) -> bool:
    """A text without spaces, no path, URL or file, that has ``least`` letters and digits in a row which change between
    cases and digits, or follow each other, as in no word, name of a class or of a model."""
    if len(value) < least or not _UNBROKEN.fullmatch(value):
        return False
    if _PLACE.fullmatch(value) and _READABLE.search(value):
        return False
    if len(value) >= _VERY_LONG:
        least = min(least, _LONGEST_NAME)  # base64url has its dash or underscore somewhere
    pieces = [piece for piece in _PIECE.findall(value) if len(piece) >= least]
    if _BASE64.fullmatch(value) and not _READABLE.search(value):
        pieces.append(re.sub(r"[+/=]", "", value))
    return any(map(_is_mixed, pieces)) or _are_no_words(pieces, _FEWEST_PAIRS) or _is_base64url(value)


def _are_no_words(pieces: list[str], fewest: int) -> bool:
    """A likelihood test of the pairs of letters in all pieces together."""
    bits = [_PAIRS[pair] for piece in pieces for pair in map("".join, pairwise(piece.lower())) if pair in _PAIRS]
    return len(bits) >= fewest and sum(bits) < _UNLIKE_WORDS * len(bits)


def _is_base64url(value: str) -> bool:
    """Its dashes and underscores may leave no piece that is long enough to tell by itself."""
    pieces = _PIECE.findall(value)
    if (
        not _BASE64URL.fullmatch(value)
        or len(pieces) > len(value) / 4
        or len({(one.isdigit(), one.isupper()) for one in "".join(pieces)}) < 3
    ):
        return False
    turns = sum(len(_TURN.findall(piece)) for piece in pieces) / max(sum(map(len, pieces)) - len(pieces), 1)
    return turns >= 0.3 and _are_no_words(pieces, 4)


def _is_mixed(piece: str) -> bool:
    is_long, has_cases = len(piece) >= _LONG, piece not in (piece.lower(), piece.upper())
    turns = len(_TURN.findall(piece)) / (len(piece) - 1)
    in_words = sum(map(len, _CAPITALISED.findall(piece))) / len(piece) if has_cases else 0
    if turns >= (0.2 if is_long else 0.3) and in_words < 0.7:
        return True
    return is_long and (_CONSONANTS.search(piece) is not None or (has_cases and in_words < 0.4))


def is_digest(name: str, value: str) -> bool:
    """A hash or a UUID under a name that says so."""
    return not _OF_DIGESTS.isdisjoint(words(name)) and _HEXADECIMAL.fullmatch(value) is not None
