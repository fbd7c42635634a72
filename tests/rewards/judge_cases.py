"""Texts of judges and their meaning: (extract, options, answer, score as the judge wrote it; None: no verdict)."""

from __future__ import annotations

from typing import Any

TEN: dict[str, Any] = {"min_score": 1.0, "max_score": 10.0, "rescale": False}
FIVE: dict[str, Any] = {"min_score": 0.0, "max_score": 5.0, "rescale": False}
HUNDRED: dict[str, Any] = {"min_score": 0.0, "max_score": 100.0, "rescale": False}
ONE: dict[str, Any] = {"min_score": 0.0, "max_score": 1.0, "rescale": False}
RIGHT_WRONG: dict[str, Any] = {"positive": "CORRECT", "negative": "INCORRECT"}

VERDICTS: list[tuple[str, dict[str, Any], str, float | None]] = [
    # numbers with a label
    ("number", TEN, "Score: 7", 7),
    ("number", TEN, "Score: 7 out of 10", 7),
    ("number", TEN, "Score: 8/10. I deducted 2 points.", 8),
    ("number", TEN, "Score: 8 / 10", 8),
    ("number", TEN, "**Score**: 4/10", 4),
    ("number", TEN, "**Score: 9**", 9),
    ("number", TEN, "**Score:** 9 out of 10.", 9),
    ("number", FIVE, "**Score**: 4/5", 4),
    ("number", TEN, "Rating: **6**", 6),
    ("number", TEN, "### Final score: 6\n\nIt misses 3 of 5 facts.", 6),
    ("number", TEN, "Final Rating - 5", 5),
    ("number", TEN, "Overall score = 5", 5),
    ("number", TEN, "The score is 7.", 7),
    ("number", TEN, "I give it a score of 7 because 2 facts are wrong.", 7),
    ("number", TEN, "Score (1-10): 7", 7),
    ("number", TEN, "`Score: 7`", 7),
    ("number", TEN, "Score:\n7", 7),
    ("number", TEN, "Score: [[7]]", 7),
    ("number", TEN, "Score: \\boxed{7}", 7),
    ("number", TEN, "score: 7.5/10", 7.5),
    ("number", FIVE, "Score: 3,5", 3.5),
    ("number", HUNDRED, "Score: 85%", 85),
    ("number", HUNDRED, "Grade: 85 / 100", 85),
    ("number", {}, "Score: 1,250", 1250),
    ("number", {}, "Score: -3", -3),
    ("number", {}, "Score: 8/10", 8),
    # without a label
    ("number", TEN, "7", 7),
    ("number", TEN, "**7**", 7),
    ("number", TEN, "7/10", 7),
    ("number", TEN, "It has 2 errors.\n\n7", 7),
    ("number", TEN, "I would rate it 7.", 7),
    ("number", TEN, "A solid 7 out of 10, with 2 small errors.", 7),
    ("number", TEN, "I'd say 8.", 8),
    ("number", TEN, "On a scale from 1 to 10, I rate this answer 6.", 6),
    # several: the last that is marked as one
    ("number", TEN, "Score: 3. On second thoughts, Score: 4", 4),
    ("number", TEN, "Clarity score: 3\nAccuracy score: 5\nFinal score: 4\nThat is 1 less than I thought at first.", 4),
    ("number", TEN, "Score: 9 would be wrong, as 2 of 3 facts are missing.\nScore: 2", 2),
    ("number", TEN, "7/10\nScore: 6", 6),
    # another scale than the one that was asked for
    ("number", TEN, "Score: 4/5", None),
    ("number", TEN, "Score: 85%", None),
    ("number", TEN, "Score: 70/100", None),
    ("number", TEN, "Score: 11", None),
    ("number", FIVE, "Score: -1", None),
    # no verdict
    ("number", TEN, "It has 3 errors and 2 omissions.", None),
    ("number", TEN, "I deducted 2 points.", None),
    ("number", TEN, "Score: between 7 and 8", None),
    ("number", TEN, "Score: 7-8", None),
    ("number", TEN, "Score: 7 or 8", None),
    ("number", TEN, "Score: N/A", None),
    ("number", TEN, "Score:", None),
    ("number", TEN, "", None),
    ("number", TEN, "v1.2.3 of 2024-05-06", None),
    # words
    ("yes_no", {}, "Yes", 1),
    ("yes_no", {}, "no.", 0),
    ("yes_no", {}, "Yes. No further comments.", 1),
    ("yes_no", {}, "No. Yes was what I expected to say.", 0),
    ("yes_no", {}, "**Yes**", 1),
    ("yes_no", {}, "> *No*", 0),
    ("yes_no", {}, "It agrees in all points.\nYes", 1),
    ("yes_no", {}, "There is no doubt that it agrees.\n\nYes.", 1),
    ("yes_no", {}, "Verdict: **No**. Yes, I am sure.", 0),
    ("yes_no", {}, "Final answer: Yes\n\nNo issues were found.", 1),
    ("yes_no", {}, "Is it right? Yes or No?\nNo", 0),
    ("yes_no", {}, "Yes/No: Yes", 1),
    ("yes_no", {}, "No, because the reference says 5.", 0),
    ("yes_no", {}, "Yes - it is the same number.", 1),
    ("yes_no", {}, "I would say yes.", 1),
    ("yes_no", {}, "Verdict: Yes\nWait, the sign differs.\nVerdict: No", 0),
    ("yes_no", {}, "\\boxed{No}", 0),
    ("yes_no", {}, "\\boxed{\\text{Yes}}", 1),
    ("yes_no", {}, "[[Yes]]", 1),
    ("yes_no", RIGHT_WRONG, "INCORRECT", 0),
    ("yes_no", RIGHT_WRONG, "The answer is CORRECT.", 1),
    ("yes_no", RIGHT_WRONG, "The answer is not correct.", None),
    ("yes_no", RIGHT_WRONG, "It isn't correct.", None),
    ("yes_no", {}, "There is no reason to doubt it", None),
    ("yes_no", {}, "Please answer Yes or No", None),
    ("yes_no", {}, "I cannot judge this.", None),
    ("yes_no", {}, "Nobody knows, yesterday or now.", None),
    # boxes, JSON, patterns
    ("boxed", TEN, "So \\boxed{7/10}.", 7),
    ("boxed", TEN, "So \\boxed{7 out of 10}.", 7),
    ("boxed", TEN, "So \\boxed{4/5}.", None),
    ("boxed", ONE, "So \\boxed{1/2}.", 0.5),
    ("boxed", TEN, "\\boxed{7} points, of \\boxed{10", 7),
    ("json", TEN, '{"reason": "2 errors", "score": 8}', 8),
    ("json", TEN, '```json\n{"score": "8/10"}\n```\nI deducted 2 points.', 8),
    ("json", TEN, '{"score": "**8**"}', 8),
    ("json", TEN, '{"score": "4/5"}', None),
    ("json", TEN, '{"score": "high"}', None),
    ("json", TEN, '{"score": 8', None),
    ("json", {}, '{"score": ' + "9" * 400 + "}", None),
    ("json", {}, '{"score": 1e999}', None),
    ("number", {}, "Score: " + "9" * 400, None),
    ("json", {}, '{"score": "Yes"}', 1),
    ("regex", {**TEN, "pattern": r"Grade (?P<score>\d+)"}, "Grade 3, then Grade 4 of 5", 4),
]

CUT: list[tuple[str, dict[str, Any], str, float | None]] = [
    ("number", TEN, "Score: 7\nThe answer names 3", 7),
    ("number", TEN, "The answer has 3 errors, 2", None),
    ("number", TEN, "Score: 1", None),  # perhaps of 10
    ("number", TEN, "I would rate it 7. There", None),
    ("number", TEN, "Score: 8/1", None),
    ("yes_no", {}, "Verdict: Yes. The", 1),
    ("yes_no", {}, "Yes\nThe", 1),
    ("yes_no", {}, "Verdict: No", None),  # perhaps "Not at all"
    ("yes_no", {}, "The question is whether it agrees. No", None),
    ("yes_no", {}, "No, wait. It says yes, and", None),
    ("json", TEN, '{"score": 8} and', 8),
    ("json", TEN, '{"reason": "...", "sco', None),
    ("boxed", TEN, "\\boxed{8} bec", 8),
    ("boxed", TEN, "\\boxed{8", None),
    ("regex", {**TEN, "pattern": r"Grade (?P<score>\d+)"}, "Grade 1", None),
    ("regex", {**TEN, "pattern": r"Grade (?P<score>\d+)"}, "Grade 1.", 1),
]
"""The same of answers that ``max_tokens`` has cut off."""
