"""Code: the program in a response (fenced blocks, as models write them) runs in the sandbox against the row's cases."""

from __future__ import annotations

import logging
import re
import sys
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, fields
from typing import ClassVar

from roll.rewards.answers import after_thought
from roll.rewards.base import RewardOptionError, RewardResult, RewardRule, RewardSample, failure
from roll.rewards.http_reward import HttpReward
from roll.rewards.sandbox.client import Sandbox, SandboxError, Settings
from roll.rewards.sandbox.judging import JudgingOptions, judge, read_cases
from roll.rewards.sandbox.protections import MEBIBYTE, PROMISED, PROTECTIONS, Limits, MissingProtection, consequence
from roll.rewards.sandbox.snippets import CaseError

PYTHON = ("python", "python3", "py", "")
_DEEPEST_QUOTATION = 20
_ANY_PYTHON = re.compile(r"py(thon)?[\d.]*")
_LANGUAGE = re.compile(r"[{.\s]*([\w+#.-]*)")
_LIST_ITEM = re.compile(r"[-*+]|\d{1,9}[.)]")
_WORD = r"^[ \t]{0,100}(async def|def|class|import|from|for|while|if|with|try|print|raise|assert|return|@\w)\b"
_ASSIGNMENT = r"^[ \t]{0,100}[\w\[\], .]{1,200}[-+*/]?=[^=]"
_PROGRAM = re.compile(f"{_WORD}|{_ASSIGNMENT}", re.MULTILINE)


def last_code_block(text: str, languages: Sequence[str] = PYTHON) -> str | None:
    """The contents of the last fenced block in one of ``languages``, '' standing for none named.

    A block that names its language is preferred: what follows without one is mostly an output or an example. A block
    that is cut off counts; an empty one does not; without any block of these languages, None.
    """
    found = [(language, block) for language, block in code_blocks(text) if block.strip()]
    any_python = "python" in languages
    for language, block in reversed(found):
        if language and (language in languages or (any_python and _ANY_PYTHON.fullmatch(language))):
            return block
    plain = [block for language, block in found if not language] if "" in languages else []
    programs = [block for block in plain if _PROGRAM.search(block)] if any_python else []
    return (programs or plain)[-1] if plain else None


def code_blocks(text: str) -> list[tuple[str, str]]:
    """Language (in lower case; '' where none is written) and text of all fenced blocks; the last may be cut off."""
    found: list[tuple[str, str, list[str]]] = []
    mark = ""
    # Not splitlines(), which also splits at characters that may occur in a program's texts.
    for line in text.replace("\r\n", "\n").split("\n"):
        if not mark:
            if (opened := opening_fence(line)) is not None:
                before, mark, info = opened
                found.append((before, info, []))
            continue
        # A closing fence is at the end of a line; there may be text before it.
        stripped = line.rstrip()
        rest = stripped.rstrip(mark[0])
        if len(stripped) - len(rest) < len(mark):
            found[-1][2].append(line)
            continue
        found[-1][2].extend([rest] if rest.strip(" \t>") else [])
        mark = ""
    blocks = []
    for before, info, lines in found:
        quoted = min(before.count(">"), _DEEPEST_QUOTATION)
        bare = [re.sub(rf"^(?:\s*> ?){{1,{quoted}}}", "", line) for line in lines] if quoted else lines
        # "python", 'Python title="x"', "python:main.py", "{.python .numberLines}" and "main.py" all name Python.
        match = _LANGUAGE.match(info.partition(":")[0].strip().lower())
        name = match[1] if match else ""
        language = "python" if name.endswith(".py") else name
        blocks.append((language, textwrap.dedent("\n".join(bare)).strip("\n")))
    return blocks


def opening_fence(line: str) -> tuple[str, str, str] | None:
    """Text before a fence, its mark, and text after it; None for a line that opens no block.

    Only the mark of a list or a quotation may precede it, or a sentence if the fence names a language.
    """
    begin = min((line.find(mark) for mark in ("```", "~~~") if mark in line), default=-1)
    if begin < 0:
        return None
    before, rest = line[:begin], line[begin:]
    info = rest.lstrip(rest[0])
    marker = before.strip(" \t>")
    if "`" in info or (marker and not _LIST_ITEM.fullmatch(marker) and not info.strip().isalnum()):
        return None
    return before, rest[: len(rest) - len(info)], info


MAX_PARALLEL = 8  # samples at a time in one reward worker: more workers (`world_size`) take more
SERVICE_REQUESTS = 64  # requests to a service in flight at a time from one reward worker
SERVICE_PATIENCE = 10  # times `timeout` that a request to a service may take, its wait for a free sandbox included

logger = logging.getLogger(__name__)


@dataclass
class CodeSandbox(JudgingOptions, RewardRule):
    """``score`` times the share of passed cases; the program is the last fenced block after the thought."""

    numbers: ClassVar[tuple[str, ...]] = ("pass_rate", "passed", "answered", "compile_error", "timeout")
    client_options: ClassVar[tuple[str, ...]] = (
        *("score", "partial", "timeout", "case_timeout", "memory_mb", "output_mb", "processes", "tolerance"),
        *("command", "file_name", "languages", "object_operators", "require"),
    )
    score: float = 1.0
    timeout: float = 30.0  # seconds for all cases of a sample
    memory_mb: int = 1024  # address space of each process
    output_mb: int = 16  # size of the output and of any file
    processes: int = 1  # processes at a time, threads not counted; a command gets 32 where this says 1
    languages: list[str] = field(default_factory=lambda: list(PYTHON))
    """Languages of the fenced blocks that count as programs; '' is a block without a language."""
    preload: list[str] = field(default_factory=list)
    """Modules loaded once instead of by every program, such as ``[numpy]``."""
    readable: list[str] = field(default_factory=list)
    """Paths that programs may read besides the system's and Python's own."""
    require: list[str] = field(default_factory=lambda: list(PROMISED))
    """Protections without which nothing runs: ``limits``, ``network``, ``files``, ``private``, ``signals``,
    ``syscalls``, ``ends`` (the default), ``scratch``, ``user``. With fewer, programs that the model writes may do what
    the others would keep them from; with ``[]``, whatever this user may."""
    parallel: int = 2  # samples at a time in one reward worker
    service_url: str = ""  # a service on another host that runs the programs in place of this one; empty: none
    api_key_env: str = ""  # environment variable with the service's token

    def __post_init__(self) -> None:
        for name in ("timeout", "case_timeout", "memory_mb", "output_mb", "processes", "parallel"):
            if getattr(self, name) <= 0:
                raise RewardOptionError(f"code_sandbox: {name} = {getattr(self, name)}: must be more than 0")
        if self.parallel > MAX_PARALLEL:
            raise RewardOptionError(f"code_sandbox: parallel = {self.parallel}: must be at most {MAX_PARALLEL}")
        for name in self.require:
            if name not in PROTECTIONS:
                known = ", ".join(PROTECTIONS)
                raise RewardOptionError(f"code_sandbox: require = {self.require}: no protection {name!r}; {known}")
        if "/" in self.file_name or not self.file_name:
            raise RewardOptionError(f"code_sandbox: file_name = {self.file_name!r}: must be a plain name")
        self._service: HttpReward | None = None
        if self.service_url:
            # A program per request, with the options that are not the default.
            local = ("service_url", "api_key_env", "parallel")
            default = CodeSandbox()
            own = {item.name: getattr(self, item.name) for item in fields(self) if item.init and item.name not in local}
            changed = {name: value for name, value in own.items() if value != getattr(default, name)}
            wait = self.timeout * SERVICE_PATIENCE
            self._service = HttpReward(
                self.service_url, self.api_key_env, 1, options=changed, timeout=wait, concurrency=SERVICE_REQUESTS
            )
        memory, output = self.memory_mb * MEBIBYTE, self.output_mb * MEBIBYTE
        self.limits = Limits(self.timeout, memory, output, processes=self.processes)
        self._sandbox = Sandbox(Settings(tuple(self.preload), tuple(self.readable), tuple(self.require)))
        self._is_reported = False

    def check_host(self) -> None:
        """Find out, in a third of a second, whether this host gives what ``require`` names; a service has its own."""
        if self._service is not None or not sys.platform.startswith("linux"):
            return
        try:
            with closing(Sandbox(Settings(readable=tuple(self.readable), require=tuple(self.require)))) as sandbox:
                sandbox.start()
        except (MissingProtection, SandboxError) as error:
            raise RewardOptionError(f"code_sandbox: {error}") from error

    def prepare(self) -> str:
        """Start the sandbox and say what it gives; a service has its own. Raises ``MissingProtection``: this host lacks
        a protection that ``require`` names; ``SandboxError``: it does not start."""
        if self._service is not None:
            return ""
        report = self._sandbox.start()
        accepted = consequence([name for name in report.missing if name in PROMISED])
        line = f"code sandbox: {report.line()}" + (f"; accepted by require: {accepted}" if accepted else "")
        if not self._is_reported:
            self._is_reported = True
            logger.log(logging.WARNING if accepted else logging.INFO, "%s", line)
        return line

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        if self._service is not None:
            return self._service(samples)
        try:
            self.prepare()
        except SandboxError as error:
            return [failure(f"code_sandbox: {error}")] * len(samples)
        with ThreadPoolExecutor(max_workers=max(1, min(self.parallel, len(samples)))) as pool:
            return list(pool.map(self.judge, samples))

    def judge(self, sample: RewardSample) -> RewardResult:
        try:
            cases = read_cases(sample.ground_truth, sample.row)
        except CaseError as error:
            return failure(f"code_sandbox: {error}")
        if self.command and cases.kind != "io":
            return failure(f"code_sandbox: a command needs cases of input and output, this row has {cases.kind}")
        source = find_program(sample, self.languages)
        if not source:
            return RewardResult(0.0, dict.fromkeys(self.numbers, 0.0))
        try:
            outcome = judge(self._sandbox, source, cases, self)
        except (SandboxError, CaseError) as error:
            return failure(f"code_sandbox: {error}")
        all_passed = float(outcome.passed == outcome.total)
        values = (outcome.pass_rate, all_passed, 1.0, float(outcome.compile_error), float(outcome.timed_out))
        share = outcome.pass_rate if self.partial else all_passed
        return RewardResult(self.score * share, dict(zip(self.numbers, values, strict=True)))

    def close(self) -> None:
        self._sandbox.close()
        if self._service is not None:
            self._service.close()


def find_program(sample: RewardSample, languages: Sequence[str]) -> str | None:
    """The last fenced block after the thought; a text without any is a program as a whole."""
    text = after_thought(sample.response, sample.prompt)
    if text is None:
        return None
    return last_code_block(text, languages) if code_blocks(text) else text.strip()
