r"""Answers outside a box, as models phrase them, generated from phrasings and pairs of answer and truth.

``RIGHT`` and ``WRONG`` are (response, truth). The last number of every wrong response is its truth, as in
``$x = \frac{3}{4}$`` for 4.
"""

from __future__ import annotations

PHRASINGS = (
    "The final answer is ${}$.",
    "The final answer is ${}$. I hope it is correct.",
    "Therefore, the answer is \\({}\\).",
    "Answer: \\({}\\)",
    "**Answer:** ${}$",
    "**Answer: ${}$**",
    "### Final answer\n\n$${}$$",
    "So the answer is:\n\n\\[\n{}.\n\\]\n",
    "Adding both sides gives 10 = 10, and hence we obtain\n\\[ {} \\]",
    "Step 1. We know $a+b=7$.\nStep 2. We conclude that it is ${}$, as required.",
    "Thus the answer to part 2, where $t+1=3$, is ${}$ .",
    "Answer: {}",
    "The answer is **${}$**. This took 3 steps, checked against 2 sources!",
    "I first thought that the answer is $99$. No: the answer is ${}$.\n\nLet me know if step 3 needs more detail.",
)
"""With a place for the answer."""

RIGHT_PAIRS: tuple[tuple[str, str], ...] = (
    (r"\frac{3}{4}", "0.75"),
    (r"-\dfrac{7}{12}", r"-\frac{7}{12}"),
    (r"2\frac{1}{2}", r"\frac{5}{2}"),
    (r"3\sqrt{2}", r"\sqrt{18}"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    (r"2\pi", r"2\pi"),
    (r"-17", "-17"),
    (r"0.125", r"\frac{1}{8}"),
    (r"1{,}234", "1234"),
    (r"12,345,678", "12345678"),
    (r"2^{10}", "1024"),
    (r"6.02 \times 10^{23}", r"6.02\cdot 10^{23}"),
    (r"x = 5", "5"),
    (r"x = \frac{3}{4}", r"\frac{3}{4}"),
    (r"y = 2x + 1", "y=2x+1"),
    (r"x^2 + 2x + 1", "(x+1)^2"),
    (r"\sin^2 x", r"1-\cos^2 x"),
    (r"[0, 1)", "[0,1)"),
    (r"(-\infty, 2] \cup (5, \infty)", r"(-\infty,2]\cup(5,\infty)"),
    (r"x > 2", r"(2,\infty)"),
    (r"\{1, 2, 3\}", r"\{3,2,1\}"),
    (r"\left(\frac{1}{2}, 3\right)", "(0.5,3)"),
    (r"(1, -2, 3)", "(1,-2,3)"),
    (r"x = 2, x = -3", "2,-3"),
    (r"\pm 3", "3, -3"),
    (r"25\%", "25"),
    (r"90^\circ", "90"),
    (r"\$18.90", "18.90"),
    (r"12 \text{ cm}", "12"),
    (r"10\ \mathrm{m/s}", "10"),
    (r"9.8 \text{ m}^2", "9.8"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\begin{bmatrix} \frac12 \\ 2 \end{bmatrix}", r"\begin{pmatrix}0.5\\2\end{pmatrix}"),
    (r"3 + 4i", "4i+3"),
    (r"1011_2", "1011_2"),
    (r"3:2", "3:2"),
    (r"\text{Tuesday}", "Tuesday"),
    (r"\text{(C)}", "C"),
    (r"\binom{5}{2}", "10"),
    (r"5!", "120"),
    (r"\log_2 8", "3"),
    (r"\emptyset", r"\varnothing"),
    (r"a + b = 3 + 4 = 7", "7"),
)

OTHERS_RIGHT: tuple[tuple[str, str], ...] = (
    ("So the answer is 7.", "7"),
    ("So the answer is 3/4.", r"\frac{3}{4}"),
    ("Thus x = 3/4.", "0.75"),
    ("The answer is $18.90.", "18.90"),
    ("She pays $5 and then $6, so the answer is $11.", "11"),
    ("The total is $1,234.50 in all.", "1234.5"),
    ("The answer is 25%.", "0.25"),
    ("The answer is $25$%.", "25"),
    ("The answer is $25$ percent.", "25"),
    ("The angle is $45$ degrees.", "45"),
    ("The answer is 45°.", "45"),
    ("The distance is $12$ cm.", "12"),
    ("The final answer is 12 apples.", "12"),
    ("Since $2x = 8$, we see that x is 4.", "4"),
    ("Thus $x = 2$ or $x = -3$.", "2,-3"),
    ("The solutions are $1$, $2$, and $3$.", "1,2,3"),
    ("The answer is (3, 4).", "(3,4)"),
    ("So the interval is [0, 1).", "[0,1)"),
    ("The answer is Tuesday.", "Tuesday"),
    ("**Answer:** (C)", "C"),
    ("The answer is Yes.", "yes"),
    ("So 5 + 7 = 12 apples are left.", "12"),
    ("She has 3 * 4 = 12 dollars left", "12"),
    ("The answer is \\frac{3}{4}.", "0.75"),
    ("Thus, x = \\sqrt{2}.", r"\sqrt{2}"),
    ("We add them.\n\n7", "7"),
    ("$x = \\frac{3}{4}$", "0.75"),
    ("$$\\boldsymbol{7}$$", "7"),
    ("Total: 7\nI hope this helps!", "7"),
    ("answer: 1,234,567", "1234567"),
    ("The value is therefore -7.", "-7"),
    ("Hence the sum is 3.5 (see above).", "3.5"),
    ("The probability equals $\\frac{1}{6}$, i.e. about 17 in 100.", r"\frac{1}{6}"),
    ("so $\\angle ABC = 30^\\circ$.", "30"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
)
"""Phrasings that suit one answer only."""

WRONG_PAIRS: tuple[tuple[str, str], ...] = (
    (r"x = \frac{3}{4}", "4"),
    (r"\frac{22}{7}", "7"),
    (r"-\frac{1}{3}", "3"),
    (r"3\sqrt{2}", "2"),
    (r"\sqrt{12}", "12"),
    (r"2^{10}", "10"),
    (r"e^{2}", "2"),
    (r"6.02 \times 10^{23}", "23"),
    (r"10^{-3}", "3"),
    (r"(1, 2)", "2"),
    (r"[0, 5]", "5"),
    (r"\{1, 2, 3\}", "3"),
    (r"\binom{5}{2}", "2"),
    (r"\log_2 8", "8"),
    (r"12 + 5", "5"),
    (r"x^2 + 7", "7"),
    (r"1011_2", "2"),
    (r"5 \text{ or } 6", "6"),
    (r"\pm 3", "3"),
    (r"x \geq 4", "4"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "4"),
    (r"3:2", "2"),
    (r"-8", "8"),
    (r"2\frac{1}{2}", "2"),
)
WRONG_PHRASINGS = tuple(text for index, text in enumerate(PHRASINGS) if index not in (12, 13))
"""Without those that speak of other numbers behind the answer."""

OTHERS_WRONG: tuple[tuple[str, str], ...] = (
    ("So the answer is 2^10.", "10"),
    ("The answer is sqrt(12).", "12"),
    ("The answer is (1, 2).", "2"),
    ("So the interval is [0, 5].", "5"),
    ("So the answer is x^2 + 3.", "3"),
    ("The answer is 3:2.", "2"),
    ("It is 10:30.", "30"),
    ("The answer is 3/4.", "4"),
    ("So we get 3 + 4.", "4"),
    ("The answer is 3 or 4.", "4"),
    ("The answer is $\\frac{3}{4}$, found in 4 steps.", "4"),
    ("The answer is $\\frac{3}{4}$. This took 4 steps.", "4"),
    ("Thus $x = \\frac{3}{4}$ by step 4.", "4"),
    ("So the answer is \\frac{3}{4}", "4"),
    ("Thus x = \\frac{3}{4}.", "4"),
    ("$\\frac{3}{4}", "4"),
    ("\\(x = \\frac{3}{4}", "4"),
    ("The limit is \\infty as x goes to 0.", "0"),
    ("There is no x with f(x) = 3x + 5", "5"),
    ("a_1 = b_2", "2"),
)

RIGHT: list[tuple[str, str]] = [
    (phrasing.replace("{}", answer), truth)
    for row, (answer, truth) in enumerate(RIGHT_PAIRS)
    for column, phrasing in enumerate(PHRASINGS)
    if (row + column) % 2 == 0
] + list(OTHERS_RIGHT)

WRONG: list[tuple[str, str]] = [
    (phrasing.replace("{}", answer), truth)
    for row, (answer, truth) in enumerate(WRONG_PAIRS)
    for column, phrasing in enumerate(WRONG_PHRASINGS)
    if (row + column) % 2 == 0
] + list(OTHERS_WRONG)
