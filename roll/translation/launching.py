"""Words of shell text, and the Python that a command starts: a module or a script with its arguments."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

PYTHON = re.compile(r"python[\d.]*|pypy\d?")
# Options of `uv run` that take the next word.
UV_VALUES = """
    --extra --with --with-editable --with-requirements --python -p --project --directory --group --only-group --no-group
    --no-extra --env-file --index --index-url --index-strategy --extra-index-url --find-links -f --cache-dir
    --config-file --prerelease --resolution --link-mode --package -P --upgrade-package --refresh-package
    --reinstall-package --no-build-package
"""
PYTHON_VALUES = {"-W", "-X", "--check-hash-based-pycs"}
# Modules that start Python on a further module or script: launchers, and tools that measure it or wait for it.
LAUNCHING_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "coverage",
    "cProfile",
    "debugpy",
    "viztracer",
)
# Options of `torchrun`, `accelerate launch` and `deepspeed` that take no value.
LAUNCHER_SWITCHES = """
    --standalone --no_python --no-python --run_path --multi_gpu --multi-gpu --cpu --use_deepspeed --use_fsdp --quiet -q
    --same_network --debug --tpu --mps --no_local_rank --enable_each_rank_log --use_megatron_lm --use_xpu --save_pid
    --force_multi --bind_cores_to_rank --no_ssh --fsdp_cpu_ram_efficient_loading
"""
# Modules that train; paths of scripts are read as modules.
TRAINING = re.compile(
    r"(?:verl|recipe|skyrl|skyrl_train)(?:\.[\w-]+)*"
    r"\.(?:main\w*|train\w*|\w*_trainer)"
    r"|examples(?:\.[\w-]+)*\.main\w*"
)
OF_DATA = re.compile(r"data(?:set)?|preprocess|prepare|download|merge|convert", re.IGNORECASE)


@dataclass(frozen=True)
class Launch:
    """Python, started on something."""

    program: str  # a dotted module, or the path of a script
    is_module: bool
    arguments: tuple[str, ...]
    # Options of `torchrun`, `accelerate launch` or `deepspeed`, which start a process on each device.
    options: tuple[tuple[str, str], ...] = ()

    @property
    def module(self) -> str:
        """The program as a dotted name."""
        return self.program if self.is_module else ".".join(PurePath(self.program).with_suffix("").parts).strip(".")

    @property
    def is_foreign(self) -> bool:
        """Return true for a program that is not known and reads ``--name value``."""
        flags = any(re.match(r"--[a-z]", word) and not word.startswith("--config-") for word in self.arguments)
        return flags and not self.trains and not OF_DATA.search(self.module.rpartition(".")[2])

    @property
    def trains(self) -> bool:
        """Return true for the modules of the projects that are known, and for scripts that take ``key=value`` words."""
        if OF_DATA.search(self.module.rpartition(".")[2]):
            return False
        own = r"[+~]{0,2}(?:trainer|actor_rollout_ref|algorithm|data|generator)\.[\w.]+="
        return bool(TRAINING.search(self.module)) or any(re.match(own, word) for word in self.arguments)


def launch_of(words: Sequence[str]) -> Launch | None:
    """The Python that a command starts; None: it starts none, or not on a module or script."""
    if not words:
        return None
    name, rest = PurePath(words[0]).name, list(words[1:])
    if PYTHON.fullmatch(name):
        found = _started(rest, PYTHON_VALUES)
        if found is None or not found.is_module or found.program not in LAUNCHING_MODULES:
            return found
        return _started(list(found.arguments[found.arguments[:1] == ("run",) :]))
    if name == "uv" and rest[:1] == ["run"]:
        found = _started(rest[1:], UV_VALUES.split())
        is_command = found is not None and not found.is_module and not found.program.endswith(".py")
        return launch_of([found.program, *found.arguments]) if found is not None and is_command else found
    if name in ("torchrun", "deepspeed") or [name, *rest[:1]] in (["accelerate", "launch"], ["coverage", "run"]):
        return _started(rest[name in ("accelerate", "coverage") :])
    if name in ("bash", "sh"):
        place = next((place for place, word in enumerate(rest) if word.endswith(".sh")), None)
        return None if place is None else Launch(rest[place], False, tuple(rest[place + 1 :]))
    if name == "trl" and rest:
        return Launch(f"trl.{rest[0]}", True, tuple(rest[1:]))
    return None


def _started(words: list[str], with_values: Collection[str] | None = None) -> Launch | None:
    """Program after options: ``-m MODULE``, a script, or for ``uv`` a command; None: program text. ``with_values``:
    options that take the next word; None for ``torchrun``, ``accelerate launch`` and ``deepspeed``, whose options are
    kept and take a value unless they are known as switches."""
    options: list[tuple[str, str]] = []
    while words:
        word = words.pop(0)
        if word in ("-m", "--module") and words:
            return Launch(words[0], True, tuple(words[1:]), tuple(options))
        if not word.startswith("-"):
            return Launch(word, False, tuple(words), tuple(options))
        if with_values is not None:
            if word in ("-c", "-"):
                return None
            words = words[word in with_values :]
            continue
        flag, equals, value = word.partition("=")
        if not equals and flag not in LAUNCHER_SWITCHES.split() and words and not words[0].startswith("-"):
            # An unknown switch right before the script.
            if words[0].endswith(".py"):
                continue
            value = words.pop(0)
        options.append((flag.lstrip("-").replace("-", "_"), value))
    return None


VARIABLE = re.compile(
    r"\$(?:\{(?P<braced>[A-Za-z_]\w*)(?P<operator>:?[-=](?P<default>[^}]*))?\}|(?P<plain>[A-Za-z_]\w*))"
)
ARGUMENTS = re.compile(r"\$(?:\{[@*]\}|[@*])")  # `$@`: the arguments that the script passes on
# Signs of a shell program, which has to be run to be understood: branches, loops, arithmetic, arrays, substitutions,
# other files.
PROGRAM = re.compile(
    r"\$\(|`|\(\(|\[\[|<<|=\(|\(\)|\$\{[#!]|\$\{\w+(?:\[|[#%/^,]|:?[+?]|:\s*-?\d)|\$\{\w+:?[-=][^}]*\$\{"
    r"|^\s*(?:if|for|while|until|case|function|source|\.|read|local|declare|eval|\[)\s",
    re.MULTILINE,
)


@dataclass
class Variables:
    """Shell variables that a text sets, and the names that it uses without setting them."""

    values: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def expand(self, text: str) -> str:
        """``$NAME``, ``${NAME}``, ``${NAME:-default}`` and ``${NAME:=default}`` replaced; ``$@`` by nothing."""

        def replace(match: re.Match[str]) -> str:
            name = match["braced"] or match["plain"]
            if name in self.values:
                return self.values[name]
            if match["operator"] is not None:
                default = self.expand(match["default"].strip("\"'"))
                if "=" in match["operator"]:
                    self.values[name] = default
                return default
            if name not in self.unknown:
                self.unknown.append(name)
            return f"${{oc.env:{name}}}"

        return VARIABLE.sub(replace, ARGUMENTS.sub("", text))


# `#` begins a comment only where a word would begin; `${...}` belongs to a word whatever it holds.
TOKEN = re.compile(
    r"(?P<comment>(?<![^ \t\r\n;&|])#[^\n]*)"
    r"|'(?P<single>[^']*)'"
    r'|"(?P<double>(?:\\.|[^"\\])*)"'
    r"|(?P<separator>[ \t\r\n;&|])"
    r"|(?P<plain>(?:\$\{[^}]*\}|[^ \t\r\n;&|'\"])+)",
    re.DOTALL,
)


def commands(text: str, variables: Variables) -> Iterator[list[str]]:
    """The words of each command, expanded; a newline, ``;``, ``&`` and ``|`` end one. Assignments take effect when the
    caller has put them into ``variables``. Raises ``ValueError``: a quote that is not closed."""
    text = re.sub(r"\\\r?\n", " ", text) + "\n"
    words: list[str] = []
    word: list[str] = []  # several where an unquoted variable holds several words
    quoted, position = False, 0
    while position < len(text):
        token = TOKEN.match(text, position)
        if token is None:
            line = text.count("\n", 0, position) + 1
            raise ValueError(f"the quote {text[position]} in line {line} is not closed")
        position = token.end()
        kind, part = token.lastgroup, token[token.lastgroup or 0]
        if kind == "separator":
            words += [one for one in word if one or (quoted and len(word) == 1)]
            word, quoted = [], False
            if part in "\n;&|" and words:
                yield words
                words = []
        elif kind != "comment":
            if kind == "double":
                part = re.sub(r'\\(["$`\\])', r"\1", part)
            expanded = part if kind == "single" else variables.expand(part)
            more = re.split(r"\s+", expanded) if kind == "plain" and expanded != part else [expanded]
            word[-1:] = ["".join(word[-1:]) + more[0], *more[1:]]
            quoted = quoted or kind != "plain"
