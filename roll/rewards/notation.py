"""Spellings of mathematics: characters and commands that mean the same, brought to one LaTeX form."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from importlib import resources

from roll.rewards.answers import in_words, without_periods

_STYLED = re.compile(r"\\[dtc]frac")
_NAMES = {"~": " ", "\\#": ""}
# Other spellings of a symbol, and the usual one.
for _line in (resources.files("roll.rewards") / "notation.table").read_text(encoding="utf-8").splitlines():
    *_names, _, _usual = _line.split()
    # A command ends where a letter would go on with it.
    _NAMES |= dict.fromkeys(_names, _usual + " " * _usual[1:].isalpha())
_PLAIN_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_ROOTS = {"√": "\\sqrt", "∛": "\\sqrt[3]", "∜": "\\sqrt[4]"}
_ROOT = re.compile(r"([√∛∜])\s*(\{[^{}]*\}|\([^()]*\)|[0-9]+(?:\.[0-9]+)?|[A-Za-zα-ω]|\\pi)?")
_TAGGED = {"<super>": "^", "<sub>": "_"}
_WHOLE = re.compile(r"([0-9]{1,15})\s*$")
_GROUP = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"  # contents of braces, with two further levels of them
_SEPARATE = re.compile(r"[0-9]+(?:\s+[0-9]+)+")
_GROUPS = re.compile(r"[0-9]{1,3}(?:\s[0-9]{3})+")
_BUILDER = re.compile(
    r"\\?\{\s*([a-zA-Z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid|\\colon|:|\|)"
    r"\s*((?=.*(?<![A-Za-z\\])\1(?![A-Za-z])).+?)\s*\\?\}"
)
_NO_SOLUTION = re.compile(
    r"(?:\\text\s*\{)?\s*(?:there (?:is|are) )?(?:no (?:real )?solutions?|(?:the )?empty set)\s*\}?", re.I
)
_ALL_REALS = re.compile(
    r"(?:\\text\s*\{)?\s*all real(?:s| numbers)\s*"
    r"(?:(?:except|but)(?: for)?\s*\}?\s*(?:[a-z] ?= ?)?(?P<but>[^{}]{1,40}))?\}?",
    re.IGNORECASE,
)
_NO_LIMIT = re.compile(r"(?:\\text\s*\{)?\s*(?:(?:the )?limit )?(?:DNE|(?:does|do) not exist)\s*\}?", re.IGNORECASE)
_ARITHMETIC, _FACTOR = re.compile(r"[-+*/^(). 0-9]+"), re.compile(r"(?<=[0-9)])\s*\((?=[-0-9(])")
_MARKDOWN = re.compile(r"(?:\*\*|__|`)(?P<inner>[^*`]+)(?:\*\*|__|`)")
_LETTER = re.compile(r"(?:(?:option|choice|answer)\s+)?\(?([A-J])\s*[).]?", re.IGNORECASE)
_ABOUT = re.compile(r"(?<![A-Za-z\\])(?:about|approximately|approx\.?|roughly|around)\s+(?=[-0-9\\$])", re.IGNORECASE)
_FUNCTION = re.compile(r"(?<![A-Za-z\\])(exp|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|pi)(?![A-Za-z])")
_ROOT_OF = re.compile(r"(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)")
_DIGITS_OF_ROOT = re.compile(r"\\?sqrt\s*([0-9]+(?:\.[0-9]+)?)")
_WHOLE_NUMBERS = re.compile(
    r" ?[,;]? ?\(? ?(?:\\text ?\{ ?)?(?:(?:where|for|with|any|all) )*\}? ?([a-z]) ?(?:\\in ?(?:\\mathbb ?\{?[ZN]\}?|Z)"
    r"|(?:\\text ?\{ ?)?(?:is )?(?:an? |any )?integers? ?\}?) ?\)?$"
)
# By convention k and n are any integer where they count periods, declared or not.
_PERIODS, _COUNTS = re.compile(r"\\pi|\\circ"), re.compile(r"(?<![\\A-Za-z{])[kn](?![A-Za-z])")
_MINUTES = re.compile(
    r"([0-9]{1,6}) ?\^ ?\{?\\circ\}? ?([0-9]{1,2}) ?(?:['′]|\^ ?\{?\\prime\}?)(?! ?['′])"
    r"(?: ?([0-9]{1,2}) ?(?:''|\"|′′|\^ ?\{?(?:\\prime ?){2}\}?))?"
)
_CLOCK = re.compile(r"([0-9]{1,2}(?::[0-9]{2})?) ?(?:\\text ?\{)? ?([ap])\.? ?m\b\.? ?\}?", re.IGNORECASE)
_OUTWARD = re.compile(r" ?([](\[])([^][(){}]*,[^][(){}]*)([])\[]) ?")
_COMMAND = r"\\(?!sqrt|[dtc]?frac|left|text|math)[a-z]+"
_BARE_FRACTION = re.compile(
    rf"(\\[dtc]?frac|\\[dt]?binom)(?: ([A-Za-z])| ?([0-9]|{_COMMAND})) ?([A-Za-z0-9]|{_COMMAND}|\{{[^{{}}]*\}})"
)
_LABEL = re.compile(r"^(?:the )?(?:final )?answer ?(?:is\b ?:?|[:=]) ?(?=\S)", re.IGNORECASE)
_ANGLE = re.compile(r"(\\(?:sin|cos|tan|cot|sec|csc)\s*[({]?\s*)([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*\^\s*\{?\\circ\}?")
_EMPHASIS = re.compile(
    r"\\(?:boldsymbol|mathbf|bm|bf|pmb|underline|mathit|text(?:bf|it)?color\{[a-z]+\}|textcolor\{[a-z]+\}|color\{[a-z]+\})"
    rf"\s*{_GROUP}|\\(?:displaystyle|tiny|small|normalsize|large|Large|LARGE|huge|Huge)\b"
    r"|\\[hv]?phantom\s*\{[^{}]*\}|(?:\\q?quad|\\[ ,;:!]|\s)*\\(?:blacksquare|square|Box|qed|checkmark)\s*$"
)
_LINES = re.compile(r"\\begin\{(cases|aligned|align\*?|gathered|array)\}(?:\{[lcr]+\})?(.+?)\\end\{\1\}")
_ASSIGNED = re.compile(r" ?[A-Za-z](?:_\{?[0-9]\}?)? ?&?= ?[^&=<>]+")
# Numbers, and lists of letters, say the same as text.
_AS_TEXT = re.compile(
    r"\\(?:text|mathrm|textrm|mbox) ?"
    r"\{ ?([0-9][0-9A-F.,/]*|infinity|[A-J](?:(?: ?,| and) ?[A-J])+|(?:Option |Choice )[A-J]|[A-J]\.) ?\}"
    r"|^\\(?:text|mathrm|textrm|mbox) ?\{ ?((?:[^{}\\]|\\[$%])*[0-9](?:[^{}\\]|\\[$%])*)\}$"
)
_ROWS = re.compile(r"\[ ?\[[^][]*\](?: ?, ?\[[^][]*\])* ?\]")
_PAIRS_OF_SIGNS = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_NAMED_BASE = re.compile(r"_ ?\{? ?\\text ?\{ ?([a-z]{3,9}) ?\} ?\}?$")
_CONJUGATE = re.compile(rf"\\(?:overline|bar) ?{_GROUP}")
_UNIT_I, _OTHER_LETTER = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])"), re.compile(r"(?<![A-Za-z\\])[A-DF-Za-df-hj-z]")
_REWRITTEN = [
    (re.compile(pattern), written)
    for pattern, written in (
        # 1\,000 and 1{,}000
        (r"(?<=[0-9])(?:\\[,;:! ]|\{,\})(?=[0-9]{3}(?![0-9]))", ","),
        (r"(\\sqrt ?\[[0-9n]{1,3}\]) ?([0-9A-Za-z])", r"\1{\2}"),
        # Odd roots are real: \sqrt[3]{-8} is -2.
        (r"\\sqrt ?\[([0-9]?[13579])\] ?\{ ?- ?((?:[^{}+-]|\{[^{}]*\})+)\}", r"(-\\sqrt[\1]{\2})"),
        (r"(?<=[0-9])\^ ?\{? ?\\text ?\{ ?(?:st|nd|rd|th) ?\} ?\}?", ""),
        (r"^\\text ?\{[^{}]*\b(?:is|are|equals)[: ]*\} ?(?=\S)", ""),
        (r"(?<![A-Za-z\\])(?:negative|minus) (?=infinity)", "-"),
        (r"(?<![A-Za-z\\])(?:\+|positive |plus )?infinity(?![A-Za-z])", r"\\infty "),
        (r"(\\mathbb ?\{[A-Z]\}) ?- ?(?=\\\{)", r"\1\\setminus "),
    )
]
_PERCENT = re.compile(r"\s*(?:\\text\{\s*)?per\s?cent(?:\s*\})?\s*$", re.IGNORECASE)
# "\textbf{(C)}\ 5", as the answers of multiple-choice contests are printed, and "(C) 5": the letter does not count.
_CHOICE = re.compile(
    r"^\\(?:text|textbf|mathrm|mathbf)\s*\{\s*\(?[A-Z]\)?\s*\}\s*(?:\\[ ,;:!]|\\q?quad|[:.)])?\s*(?=\S)"
    r"|^(?:\([A-J]\)|[A-J][.:)])\s+(?=[-$0-9]|\\d?frac|\\sqrt)"
)
_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|[,;:! ])|\\?\$|\\[()\[\]]|\s+|\.$")


def _improper(found: re.Match[str]) -> str:
    """A mixed number as a single fraction."""
    whole, numerator, denominator = map(int, found.groups())
    return f"{whole * denominator + numerator}/{denominator}" if numerator < denominator else found.group()


def _choice(found: re.Match[str]) -> str:
    """Combinations or permutations, as in ``5C2`` and ``5P2``."""
    if found[2] == "C":
        return rf"\binom{{{found[1]}}}{{{found[3]}}}"
    return rf"\frac{{{found[1]}!}}{{({found[1]}-{found[3]})!}}"


_USUAL: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), written)
    for pattern, written in (
        (r"(?<=[0-9])\s*(?:[xX*])\s*(?=10\s*\^)", r"\\times "),
        (
            r"(?<![A-Za-z0-9.,_\\])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([-+]?[0-9]{1,4})(?![A-Za-z0-9._])",
            r"\1\\times 10^{\2}",
        ),
        (r"(?<![0-9.,/^_])([0-9]{1,15})\s+([0-9]{1,15})\s*/\s*([0-9]{1,15})(?![0-9.])", _improper),
        (r"\\dot ?\{?([0-9])\}? ?([0-9]{0,12}) ?\\dot ?\{?([0-9])\}?", r"\\overline{\1\2\3}"),
        # Three times, or twice with no other digit after the point: e begins with 2.718281828.
        (
            r"(?<![0-9.])(?:([0-9]{1,15}\.[0-9]{0,15}?)([0-9]{1,6}?)\2{2,}|([0-9]{1,15}\.)([0-9]{1,6})\4)\s*\.\.\.",
            lambda found: f"{found[1] or found[3]}\\overline{{{found[2] or found[4]}}}",
        ),
        (r"\A([0-9]+)\s*(?:\\text\s*\{)?\s*\bto\b\s*\}?\s*([0-9]+)\Z", r"\1:\2"),
        (r"(?<![A-Za-z\\])C\(\s*([0-9]{1,6})\s*,\s*([0-9]{1,6})\s*\)", r"\\binom{\1}{\2}"),
        (r"^[A-Z] ?(?=\([^()]*,[^()]*\)$)", ""),
        (r"(?<![A-Za-z\\])([CP]) ?_ ?\{?([0-9]{1,6})\}? ?\^ ?\{?([0-9]{1,6})\}?(?![0-9])", r"\2\1\3"),
        (r"(?<!\w)(?:\{\}\s*)?[_^]?\{?([0-9]{1,6})\}?\s*([CP])\s*_?\{?([0-9]{1,6})\}?(?!\w)", _choice),
        (r"(\\d?binom\{[^{}]*\}\{[^{}]*\})\s*(?=\\d?binom)", r"\1\\cdot "),
        (r"(?<![0-9.])([0-9]{1,15}\.)\(([0-9]{1,6})\)", r"\1\\overline{\2}"),
        (
            r"\\(?:vec|overrightarrow)\s*\{([A-Za-z]+)\}|\\overline\s*\{([A-Z]{2,3})\}",
            lambda found: found[1] or found[2],
        ),
    )
]
"""Numbers, fractions and combinations in the form that comparisons know, in this order."""


def canonical(expression: str) -> str:
    """The expression without emphasis, a choice's letter in front, and other names of the same symbol."""
    expression = expression.strip().rstrip(";\\ ").rstrip()
    if _PLAIN_NUMBER.fullmatch(expression):
        return expression
    if (marked := _MARKDOWN.fullmatch(expression)) is not None:
        expression = marked["inner"].strip()
    expression = _AS_TEXT.sub(lambda found: found[1] or found[2], expression)
    if (choice := _LETTER.fullmatch(expression)) is not None:
        return choice[1]
    if not expression.isascii():
        expression = _in_latex(expression)
    for name, usual in _NAMES.items():
        if name in expression:
            expression = expression.replace(name, usual)
    # Single spaces: patterns search a run of them in every way that it can be divided.
    expression = _CHOICE.sub("", _LABEL.sub("", " ".join(expression.split())), count=1)
    while (simpler := _EMPHASIS.sub(lambda found: found.group(1) or "", expression).strip()) != expression:
        expression = simpler
    expression = _ABOUT.sub("", expression, count=1)
    for pattern, written in _REWRITTEN:
        expression = pattern.sub(written, expression)
    expression = _in_usual_form(expression)
    if "\\text" not in expression:
        expression = _ROOT_OF.sub(r"\\sqrt{\1}", expression)
        expression = _FUNCTION.sub(r"\\\1", expression).replace("**", "^")
        expression = _DIGITS_OF_ROOT.sub(r"\\sqrt{\1}", expression) if "sqrt" in expression else expression
    for pattern, form in _USUAL:
        expression = pattern.sub(form, expression)
    expression = _as_set(expression)
    if _ARITHMETIC.fullmatch(expression):
        expression = _FACTOR.sub("*(", expression)
    expression = _CONJUGATE.sub(_conjugate, _ANGLE.sub(r"\1(\2\\pi/180)", expression))
    return _both_signs(without_periods(_PERCENT.sub(r"\\%", expression)))


def choice_in_front(expression: str) -> str | None:
    """The letter of a choice whose value follows it, as in ``(C) 5``."""
    found = _CHOICE.match(expression.strip().strip("$*").strip())
    return next(filter(str.isupper, found.group())) if found else None


def _as_set(expression: str) -> str:
    """Lists, sets and their names in words as LaTeX has them."""
    if _SEPARATE.fullmatch(expression) and not _GROUPS.fullmatch(expression):
        return ", ".join(expression.split())
    if (built := _BUILDER.fullmatch(expression)) is not None:
        return built[2]
    if _NO_SOLUTION.fullmatch(expression):
        return "\\emptyset"
    if _NO_LIMIT.fullmatch(expression):
        return r"\text{does not exist}"
    if (reals := _ALL_REALS.fullmatch(expression)) is not None:
        return "\\mathbb{R}" + (rf"\setminus\{{{reals['but']}\}}" if reals["but"] else "")
    return expression


def _both_signs(expression: str) -> str:
    """Both values of what is written with one plus-minus sign (and signs that go with it)."""
    if "\\pm" not in expression or "\\begin" in expression:
        return expression
    written = []
    for item in top_level_items(expression):
        if _PAIRS_OF_SIGNS.findall(item).count("pm") == 1:
            written += [_PAIRS_OF_SIGNS.sub(lambda found: "+" if found[1] == "pm" else "-", item)]
            written += [_PAIRS_OF_SIGNS.sub(lambda found: "-" if found[1] == "pm" else "+", item)]
        else:
            written.append(item)
    return ", ".join(written)


def top_level_items(expression: str) -> list[str]:
    """Texts between the commas that stand in no bracket."""
    items, depth = [""], 0
    for character in expression:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return [item.strip() for item in items]


def _conjugate(found: re.Match[str]) -> str:
    """The conjugate of a number that is written with ``i``; a line over anything else is a name."""
    inner = found[1]
    if not _UNIT_I.search(inner) or _OTHER_LETTER.search(inner):
        return found.group()
    return f"({_UNIT_I.sub('(-i)', inner)})"


def _assignments(found: re.Match[str]) -> str:
    """Lines that each give a value to a letter, as a list; other lines as they are."""
    lines = [line for line in found[2].split("\\\\") if line.strip()]
    if not all(_ASSIGNED.fullmatch(line) for line in lines):
        return found.group()
    return ", ".join(line.replace("&", "").strip().rstrip(",") for line in lines)


def _in_usual_form(expression: str) -> str:
    """Free integers, angles, fractions, times, intervals, matrices and systems in the form that comparisons know."""
    expression = _LINES.sub(_assignments, expression)
    if _ROWS.fullmatch(expression):
        rows = [row.strip("[] ") for row in re.findall(r"\[[^][]*\]", expression[1:-1])]
        if len({row.count(",") for row in rows}) == 1:
            expression = "\\begin{pmatrix}" + "\\\\".join(row.replace(",", "&") for row in rows) + "\\end{pmatrix}"
    if ";" in expression and "," not in expression:
        expression = expression.replace(";", ",")
    expression = _NAMED_BASE.sub(lambda found: f"_{in_words(found[1]) or found[1]}", expression)
    counts = set(_COUNTS.findall(expression)) if _PERIODS.search(expression) else set()
    if (declared := _WHOLE_NUMBERS.search(expression)) is not None:
        expression, counts = expression[: declared.start()], {*counts, declared[1]}
    if len(counts) == 1:
        expression = re.sub(rf"(?<![\\A-Za-z{{]){counts.pop()}(?![A-Za-z])", "n", expression)
    expression = _MINUTES.sub(_in_degrees, expression)
    expression = _BARE_FRACTION.sub(
        lambda found: f"{found[1]}{{{found[2] or found[3]}}}{{{found[4].strip('{}')}}}", expression
    )
    if (clock := _CLOCK.fullmatch(expression)) is not None:
        expression = f"{clock[1]}{':00' * (':' not in clock[1])} {clock[2].upper()}M"
    parts = expression.split("\\cup")
    intervals = [found for part in parts if (found := _OUTWARD.fullmatch(part))]
    if len(intervals) == len(parts):
        expression = "\\cup ".join(f"{x[1].replace(']', '(')}{x[2]}{x[3].replace('[', ')')}" for x in intervals)
    return expression


def _in_degrees(found: re.Match[str]) -> str:
    """Degrees, minutes and seconds as one number of degrees."""
    degrees, minutes, seconds = (int(part or 0) for part in found.groups())
    return rf"{degrees + Fraction(60 * minutes + seconds, 3600)}^\circ"


def _in_latex(expression: str) -> str:
    """Roots, vulgar fractions, raised and lowered characters, Greek letters and wide ones as LaTeX has them."""
    for found in reversed(list(_ROOT.finditer(expression))):
        sign, radicand = found.groups()
        inner = radicand[1:-1] if radicand and radicand[0] in "({" else radicand
        root = _ROOTS[sign] + (f"{{{inner}}}" if inner is not None else "")
        expression = expression[: found.start()] + root + expression[found.end() :]
    written, open_tag = "", ""
    for character in expression:
        tag = "" if character.isascii() else unicodedata.decomposition(character).partition(" ")[0]
        usual, name = unicodedata.normalize("NFKC", character), unicodedata.name(character, "")
        if open_tag and tag != open_tag:
            written, open_tag = written + "}", ""
        if tag == "<fraction>":
            numerator, _, denominator = usual.partition("⁄")
            whole = _WHOLE.search(written)  # "2¼" is a mixed number
            value = (int(whole[1]) if whole else 0) + Fraction(int(numerator), int(denominator or 1))
            written = written[: whole.start()] if whole else written
            written += f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
        elif tag in _TAGGED:
            raised = usual.replace("−", "-")
            written += raised if open_tag else f"{_TAGGED[tag]}{{{raised}"
            open_tag = tag
        elif character.isascii() or character in _NAMES:
            written += character
        elif name.startswith("GREEK") and " LETTER " in name:
            letter = name.rpartition(" ")[2].lower()
            written += f"\\{letter.capitalize() if 'CAPITAL' in name else letter} "
        else:
            written += usual
    return written + ("}" if open_tag else "")


def plain(expression: str) -> str:
    """Spelling without layout: spaces, dollars, ``\\left``, ``\\dfrac`` for ``\\frac``."""
    return _LAYOUT.sub("", _STYLED.sub(r"\\frac", expression).strip())
