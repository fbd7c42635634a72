"""Spellings of mathematics: characters and commands that mean the same, brought to one LaTeX form."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from roll.rewards.answers import without_periods

_STYLES = {"\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac"}
_TABLE = r"""
− – ‐ {-} = -
º ° \degree = ^\circ
× = \times
· ⋅ ∙ = \cdot
÷ ⁄ ∕ = /
± = \pm
∞ = \infty
≤ ⩽ = \le
≥ ⩾ = \ge
≠ = \ne
≈ = \approx
∪ = \cup
∩ = \cap
∈ = \in
∅ \varnothing = \emptyset
→ = \to
… \ldots \dots = ...
ℝ = \mathbb{R}
ℤ = \mathbb{Z}
ℕ = \mathbb{N}
ℚ = \mathbb{Q}
ℂ = \mathbb{C}
⟨ \langle = (
⟩ \rangle = )
⌊ = \lfloor
⌋ = \rfloor
⌈ = \lceil
⌉ = \rceil
µ = \mu
ϕ \varphi = \phi
\varepsilon = \epsilon
\mathrm{e} = e
\mathrm{i} = i
\lg = \log_{10}
"""
_NAMES = {"~": " ", "\\#": ""}
for _line in _TABLE.strip().splitlines():
    *_names, _, _usual = _line.split()
    # A command ends where a letter would go on with it.
    _NAMES |= dict.fromkeys(_names, _usual + " " * _usual[1:].isalpha())
_PLAIN_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_ROOTS = {"√": "\\sqrt", "∛": "\\sqrt[3]", "∜": "\\sqrt[4]"}
_ROOT = re.compile(r"([√∛∜])\s*(\{[^{}]*\}|\([^()]*\)|[0-9]+(?:\.[0-9]+)?|[A-Za-zα-ω]|\\pi)?")
_TAGGED = {"<super>": "^", "<sub>": "_"}
_WHOLE = re.compile(r"([0-9]{1,15})\s*$")
_MIXED = re.compile(r"(?<![0-9.,/^_])([0-9]{1,15})\s+([0-9]{1,15})\s*/\s*([0-9]{1,15})(?![0-9.])")
_SCIENTIFIC = re.compile(r"(?<![A-Za-z0-9.,_\\])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([-+]?[0-9]{1,4})(?![A-Za-z0-9._])")
_TIMES_TEN = re.compile(r"(?<=[0-9])\s*(?:[xX*])\s*(?=10\s*\^)")
_REPEATED = re.compile(r"(?<![0-9.])([0-9]{1,15}\.[0-9]{0,15}?)([0-9]{1,6}?)\2{2,}\s*\.\.\.")
_RATIO = re.compile(r"([0-9]+)\s*(?:\\text\s*\{)?\s*\bto\b\s*\}?\s*([0-9]+)")
_BRACKETED = re.compile(r"(?<![0-9.])([0-9]{1,15}\.)\(([0-9]{1,6})\)")
_SEPARATE = re.compile(r"[0-9]+(?:\s+[0-9]+)+")
_GROUPS = re.compile(r"[0-9]{1,3}(?:\s[0-9]{3})+")
_BUILDER = re.compile(
    r"\\?\{\s*([a-zA-Z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid|\\colon|:|\|)\s*(\1.+?|.+?\1)\s*\\?\}"
)
_NO_SOLUTION = re.compile(
    r"(?:\\text\s*\{)?\s*(?:there (?:is|are) )?(?:no (?:real )?solutions?|(?:the )?empty set)\s*\}?", re.I
)
_ALL_REALS = re.compile(r"(?:\\text\s*\{)?\s*all real(?:s| numbers)\s*\}?", re.IGNORECASE)
_ARITHMETIC, _FACTOR = re.compile(r"[-+*/^(). 0-9]+"), re.compile(r"(?<=[0-9)])\s*\((?=[-0-9(])")
_ARROW = re.compile(r"\\(?:vec|overrightarrow)\s*\{([A-Za-z]+)\}|\\overline\s*\{([A-Z]{2,3})\}")
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
_BINOMIALS = re.compile(r"(\\d?binom\{[^{}]*\}\{[^{}]*\})\s*(?=\\d?binom)")
_CHOSEN = re.compile(r"(?<!\w)(?:\{\}\s*)?[_^]?\{?([0-9]{1,6})\}?\s*C\s*_?\{?([0-9]{1,6})\}?(?!\w)")
_COMBINATIONS = re.compile(r"(?<![A-Za-z\\])C\(\s*([0-9]{1,6})\s*,\s*([0-9]{1,6})\s*\)")
_MINUTES = re.compile(
    r"([0-9]{1,6}) ?\^ ?\{?\\circ\}? ?([0-9]{1,2}) ?(?:['′]|\^ ?\{?\\prime\}?)(?! ?['′])"
    r"(?: ?([0-9]{1,2}) ?(?:''|\"|′′|\^ ?\{?(?:\\prime ?){2}\}?))?"
)
_CLOCK = re.compile(r"([0-9]{1,2}(?::[0-9]{2})?) ?(?:\\text ?\{)? ?([ap])\.? ?m\b\.? ?\}?", re.IGNORECASE)
_OUTWARD = re.compile(r" ?([](\[])([^][(){}]*,[^][(){}]*)([])\[]) ?")
_COMMAND = r"\\(?!sqrt|[dtc]?frac|left|text|math)[a-z]+"
_BARE_FRACTION = re.compile(
    rf"(\\[dtc]?frac)(?: ([A-Za-z])| ?([0-9]|{_COMMAND})) ?([A-Za-z0-9]|{_COMMAND}|\{{[^{{}}]*\}})"
)
_POINT = re.compile(r"^[A-Z] ?(?=\([^()]*,[^()]*\)$)")
_LABEL = re.compile(r"^(?:the )?(?:final )?answer ?(?:is\b ?:?|[:=]) ?(?=\S)", re.IGNORECASE)
_ANGLE = re.compile(r"(\\(?:sin|cos|tan|cot|sec|csc)\s*[({]?\s*)([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*\^\s*\{?\\circ\}?")
_EMPHASIS = re.compile(
    r"\\(?:boldsymbol|mathbf|bm|bf|pmb|underline|mathit|text(?:bf|it)?color\{[a-z]+\}|textcolor\{[a-z]+\}|color\{[a-z]+\})"
    r"\s*\{([^{}]*)\}|\\(?:displaystyle|tiny|small|normalsize|large|Large|LARGE|huge|Huge)\b"
)
_PERCENT = re.compile(r"\s*(?:\\text\{\s*)?per\s?cent(?:\s*\})?\s*$", re.IGNORECASE)
# "\textbf{(C)}\ 5", as the answers of multiple-choice contests are printed, and "(C) 5": the letter does not count.
_CHOICE = re.compile(
    r"^\\(?:text|textbf|mathrm|mathbf)\s*\{\s*\(?[A-Z]\)?\s*\}\s*(?:\\[ ,;:!]|\\q?quad|[:.)])?\s*(?=\S)"
    r"|^(?:\([A-J]\)|[A-J][.:)])\s+(?=[-$0-9]|\\d?frac|\\sqrt)"
)
_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|[,;:! ])|\\?\$|\\[()\[\]]|\s+|\.$")


def canonical(expression: str) -> str:
    """The expression without emphasis, a choice's letter in front, and other names of the same symbol."""
    expression = expression.strip().rstrip(";\\ ").rstrip()
    if _PLAIN_NUMBER.fullmatch(expression):
        return expression
    if (marked := _MARKDOWN.fullmatch(expression)) is not None:
        expression = marked["inner"].strip()
    if (choice := _LETTER.fullmatch(expression)) is not None:
        return choice[1]
    if not expression.isascii():
        expression = _in_latex(expression)
    for name, usual in _NAMES.items():
        if name in expression:
            expression = expression.replace(name, usual)
    # Single spaces: patterns search a run of them in every way that it can be divided.
    expression = _CHOICE.sub("", _LABEL.sub("", " ".join(expression.split())), count=1)
    expression = _EMPHASIS.sub(lambda found: found.group(1) or "", expression).strip()
    expression = _ABOUT.sub("", expression, count=1)
    expression = _in_usual_form(expression)
    if "\\text" not in expression:
        expression = _ROOT_OF.sub(r"\\sqrt{\1}", expression)
        expression = _FUNCTION.sub(r"\\\1", expression).replace("**", "^")
        expression = _DIGITS_OF_ROOT.sub(r"\\sqrt{\1}", expression) if "sqrt" in expression else expression
    expression = _TIMES_TEN.sub(r"\\times ", expression)
    expression = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", expression)
    expression = _MIXED.sub(_improper, expression)
    expression = _REPEATED.sub(r"\1\\overline{\2}", expression)
    if (ratio := _RATIO.fullmatch(expression)) is not None:
        expression = f"{ratio[1]}:{ratio[2]}"
    expression = _POINT.sub("", _COMBINATIONS.sub(r"\\binom{\1}{\2}", expression))
    expression = _BINOMIALS.sub(r"\1\\cdot ", _CHOSEN.sub(r"\\binom{\1}{\2}", expression))
    expression = _BRACKETED.sub(r"\1\\overline{\2}", expression)
    expression = _ARROW.sub(lambda found: found[1] or found[2], expression)
    if _SEPARATE.fullmatch(expression) and not _GROUPS.fullmatch(expression):
        expression = ", ".join(expression.split())
    if (built := _BUILDER.fullmatch(expression)) is not None:
        expression = built[2]
    if _NO_SOLUTION.fullmatch(expression):
        expression = "\\emptyset"
    if _ALL_REALS.fullmatch(expression):
        expression = "\\mathbb{R}"
    if _ARITHMETIC.fullmatch(expression):
        expression = _FACTOR.sub("*(", expression)
    expression = _ANGLE.sub(r"\1(\2\\pi/180)", expression)
    return without_periods(_PERCENT.sub(r"\\%", expression))


def choice_in_front(expression: str) -> str | None:
    """The letter of a choice whose value follows it, as in ``(C) 5``."""
    found = _CHOICE.match(expression.strip().strip("$*").strip())
    return next(filter(str.isupper, found.group())) if found else None


def _in_usual_form(expression: str) -> str:
    """Free integers, angles, fractions, times and intervals in the form that comparisons know."""
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


def _improper(found: re.Match[str]) -> str:
    """A mixed number as a single fraction."""
    whole, numerator, denominator = map(int, found.groups())
    return f"{whole * denominator + numerator}/{denominator}" if numerator < denominator else found.group()


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
    for styled, simple in _STYLES.items():
        expression = expression.replace(styled, simple)
    return _LAYOUT.sub("", expression.strip())
