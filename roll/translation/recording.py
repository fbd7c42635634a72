"""Recording of a launch script in the sandbox: the programs that it calls, with their words and variables.

The script is text from anywhere. It runs where model-written code runs (:mod:`roll.rewards.sandbox`): without network,
without the user's files and processes, in a scratch folder that is thrown away, with little time and memory. Where the
host cannot give that, nothing runs.

Programs that only work on text are the real ones. Every other command becomes a stand-in (``stand_in.sh``) that writes
down what it was called with and succeeds: nothing is installed, downloaded, started or slept.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from roll.config.reading.errors import ConfigError, Problem
from roll.rewards.sandbox.client import Sandbox, SandboxError, Settings
from roll.rewards.sandbox.protections import PROTECTIONS, Limits, MissingProtection
from roll.translation.launching import launch_of

# Protections without which no script runs. A user id of its own and a private folder of limited size are other ways to
# what the rest gives; the size of each file is limited in any case.
REQUIRED = tuple(name for name in PROTECTIONS if name not in ("scratch", "user"))
LIMITS = Limits(wall=20.0, memory=1024 * 2**20, file_size=4 * 2**20, scratch=32 * 2**20, processes=64)
MAX_SCRIPT = 2**20
SHOWN = 2000  # characters of its output that are kept, the last ones
MAX_FILES = 64  # files that scripts name, which come along
INSTEAD = (
    "give the command line itself instead: roll translate python3 -m verl.trainer.main_ppo key=value ... "
    "(echo before the command in the script prints it)"
)

# Programs that start a run, or something around one.
LAUNCHERS = ("python", "python3", "uv", "torchrun", "accelerate", "deepspeed", "trl", "ray")
DESCRIPTOR = 50  # descriptor that stand-ins write to; high enough to be out of the way of a script's own redirections
READY = "READY"  # the first word of every record: this shell can start processes
DEVICES = 8  # accelerators, of which a script that counts them finds a whole node
# Options of a job that count nodes and devices, the number without them, and the variables that hold it.
SLURM = (
    ("--nodes|-N", 1, ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")),
    ("--gpus-per-node|--gres", DEVICES, ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")),
)
TEXT_TOOLS = """
    awk gawk mawk base64 basename bc cat cmp column comm cut date diff dirname egrep expand expr false fgrep find fmt
    fold getopt grep head id jq join ls md5sum mktemp nl numfmt od paste printf readlink realpath rev sed seq sha256sum
    shuf sort stat strings sum tac tail tr true uname uniq wc xargs
"""
FILE_TOOLS = "chmod cp ln mkdir mv rm rmdir touch"  # real within the scratch folder, and successful elsewhere
# Commands that start the command after their own options.
WRAPPERS = "env nice nohup numactl nsys setsid srun stdbuf sudo taskset time timeout unbuffer mpirun"
# Commands whose `run` or `exec` starts the command after their own options.
ENVIRONMENTS = "apptainer conda hatch mamba micromamba pdm pixi poetry singularity"
SILENT = "sleep nvidia-smi rocm-smi npu-smi nproc hostname scontrol which tee uvx pip pip3 git curl wget"

NOT_SET = "variable_not_set_"  # computing with a marker ends in bash's complaint about this word with the name after it
_UNSET = "__UNSET_{}__"

_STAND_IN = (Path(__file__).parent / "stand_in.sh").read_text(encoding="utf-8")
# Modules for `python3 -c` and `python3 -`, which run for real: those of a machine with CUDA devices.
_MODULES = {
    "torch/__init__.py": "from . import cuda\n",
    "torch/cuda.py": f"def is_available():\n    return True\ndef device_count():\n    return {DEVICES}\n",
    "verl/__init__.py": "",
    "verl/utils/__init__.py": "",
    "verl/utils/device.py": (
        "is_cuda_available, is_npu_available = True, False\ndef get_device_name():\n    return 'cuda'\n"
    ),
}

_EVERY_SHELL = r"""
cd() { builtin cd "$@" 2>/dev/null; return 0; }
pushd() { builtin pushd "$@" >/dev/null 2>&1; return 0; }
popd() { builtin popd >/dev/null 2>&1; return 0; }
ulimit() { return 0; }
command_not_found_handle() { "$ROLL_BASE/.bin/unknown" "$@"; return 0; }
"""
# For a second try, since the files that a script checks before its launch are missing here, and what it waits for in a
# loop never comes. In bash 4.3 `break` in a function ends the caller's loop.
_GO_ON = r"""
exit() { if ((${1:-0} == 0)); then builtin exit 0; fi; return 0; }
shopt -s compat43
sleep() { break 2>/dev/null; return 0; }
"""
_FIRST_NODE = {re.compile(r"(?:\w+_)?(?:RANK|PROCID|NODEID|NODE_ID|NODE_INDEX)"): "0"}
_FIRST_NODE |= {re.compile(r"(?:\w+_)?(?:MASTER|HEAD|LEADER)_?(?:NODE_?)?(?:ADDR|ADDRESS|IP|HOST|NODE)?"): "localhost"}
"""Values that a cluster gives the node that starts the run, for the second try."""

_NAME = r"[A-Za-z_]\w*"
_USED = re.compile(rf"\$(?:\{{({_NAME})\}}|({_NAME}))")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_SET_OR_TESTED = re.compile(
    rf"\$\{{[!#]?({_NAME})(?:\[[^\]]*\])?(?!:?\?)[^}}\w]|-[nzv]\s+\"?\$?\{{?({_NAME})|(?:^|[\s;({{&|])({_NAME})(?:\[[^\]]*\])?\+?="
    rf"|\bfor\s+({_NAME})|\b(?:read|mapfile|readarray|declare|local|typeset|getopts)\b([^\n;|]*)",
    re.MULTILINE,
)
_OF_THE_SHELL = re.compile(
    r"BASH\w*|PWD|OLDPWD|PATH|IFS|UID|EUID|PPID|RANDOM|SECONDS|LINENO|SHLVL|FUNCNAME|OPTARG|"
    r"OPTIND|HOSTNAME|HOSTTYPE|OSTYPE|MACHTYPE|REPLY|PIPESTATUS|SHELLOPTS|EPOCH\w*|TMPDIR|_|ROLL_\w+"
)
_ABSOLUTE = re.compile(r"(?:/[\w.+-]+)+/(?:python[\d.]*|torchrun|accelerate|deepspeed|trl|uv|ray)\b")
_MISSING = re.compile(r": (\S*/(?:python[\d.]*|torchrun|accelerate|deepspeed|trl|uv|ray)): No such file or directory")
_SHELL_FILE = re.compile(r"([\w./@+-]*[\w@+-]+\.(?:sh|bash|env))\b|(?<![\w/])((?:\.{0,2}/)?[\w./-]*\.env)\b")
_EXPANSION = re.compile(r"\$\((?:[^()]|\([^()]*\))*\)|\$\{[^}]*\}|\$\w+")
_COMPUTED = re.compile(rf".*\b{NOT_SET}(\w+).*")
_REDIRECTION = re.compile(r"(?<![<>&\d-])((?:[12&])?>>?\|?)[ \t]*(?![&>(])(\"[^\"\n]*\"|'[^'\n]*'|[^\s;&|()<>]+)")
_ERREXIT = re.compile(r"^(\s*set\s+-)(\w+)", re.MULTILINE)
_DEMANDED = re.compile(rf"\$\{{({_NAME}):?\?[^}}]*\}}")
UNSET_MARK = re.compile(r"/?__UNSET_([A-Za-z_0-9]+?)__")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Command:
    """A command that the script ran."""

    words: tuple[str, ...]
    environment: dict[str, str]  # variables exported to it, without those that the sandbox sets


@dataclass(frozen=True)
class Recording:
    """Commands and outcome of a script."""

    commands: tuple[Command, ...]
    status: int
    output: str  # the last lines that it printed, without those that trace it
    went_on: bool = False  # it ended before a launch at first; this is the second try, which passed over its checks


def record(
    script: Path,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    sandbox: Sandbox | None = None,
) -> Recording:
    """Run ``script`` as ``bash script arguments`` under stand-ins for all programs. ``environment``: variables set in
    front of it; nothing of the caller's own environment is passed on. Raises ``ConfigError``: a script that is too
    large, or a host that cannot confine it."""
    text = read_script(script)
    place = script.resolve().parent
    # The folder that the script sees: its repository, else the working folder above it, else its own.
    default = Path.cwd() if place.is_relative_to(Path.cwd()) else place
    root = next((folder for folder in (place, *place.parents) if (folder / ".git").exists()), default)
    files = {str(script.resolve().relative_to(root)): text} | companions(script, text, root)
    variables = of_slurm(text) | dict(environment or {})
    own = sandbox or Sandbox(Settings(require=REQUIRED))
    try:
        own.start()
        first = _run(own, script, root, files, arguments, variables, [], go_on=False)
        if has_launch(first[0]):
            return Recording(*first)
        calmed = {path: calm(content) for path, content in files.items()}
        missing, second = _MISSING.findall(first[2]), first
        for _ in range(2):  # an interpreter may be found missing only once the checks before it are passed over
            second = _run(own, script, root, calmed, arguments, variables, missing, go_on=True)
            if has_launch(second[0]) or not (more := _MISSING.findall(second[2])):
                break
            missing += more
        return Recording(*second, went_on=True) if has_launch(second[0]) else Recording(*first)
    except (SandboxError, MissingProtection) as error:
        text = f"is not run: scripts run only where they can be confined, and {error}; {INSTEAD}"
        raise ConfigError([Problem("(script)", str(script), text)]) from None
    finally:
        if sandbox is None:
            own.close()


def read_script(path: Path) -> str:
    """The text; ``ConfigError`` for anything but a text file of at most ``MAX_SCRIPT`` bytes."""
    with path.open("rb") as file:
        content = file.read(MAX_SCRIPT + 1)
    if len(content) > MAX_SCRIPT or b"\0" in content:
        raise ConfigError([Problem("(script)", str(path), f"must be a text file of at most {MAX_SCRIPT} bytes")])
    return content.decode("utf-8", errors="replace").replace("\r\n", "\n")


def companions(script: Path, text: str, root: Path) -> dict[str, str]:
    """Shell files within ``root`` that the text names, and those that they name: paths below ``root`` and contents."""
    found: dict[str, str] = {}
    waiting = [(script.resolve(), text)]
    while waiting and len(found) < MAX_FILES:
        place, content = waiting.pop()
        for match in _SHELL_FILE.finditer(_EXPANSION.sub("", content)):
            named = (match[1] or match[2]).lstrip("/")
            for folder in dict.fromkeys((place.parent, script.resolve().parent, Path.cwd(), root)):
                path = (folder / named).resolve()
                if not path.is_relative_to(root) or path == script.resolve() or not path.is_file():
                    continue
                below = str(path.relative_to(root))
                if below not in found and path.stat().st_size <= MAX_SCRIPT:
                    found[below] = read_script(path)
                    waiting.append((path, found[below]))
    return found


def unset_names(texts: Sequence[str]) -> list[str]:
    """Variables that are used plainly and neither set nor tested anywhere."""
    used, other = {"HOME", "USER"}, set()
    for text in (re.sub(r"(?m)^\s*#.*", "", text) for text in texts):
        used |= {match[1] or match[2] for match in _USED.finditer(text)}
        used |= {name for match in _ARITHMETIC.finditer(text) for name in re.findall(rf"(?<![\w$]){_NAME}", match[1])}
        for match in _SET_OR_TESTED.finditer(text):
            other |= {name for group in match.groups() if group for name in re.findall(_NAME, group)}
    return sorted(name for name in used - other if not _OF_THE_SHELL.fullmatch(name))


def of_slurm(text: str) -> dict[str, str]:
    """Variables that Slurm sets by the ``#SBATCH`` lines of a job; none where there are no such lines."""
    if "#SBATCH" not in text:
        return {}
    counted: dict[str, str] = {}
    for options, missing, names in SLURM:
        found = re.search(rf"(?m)^#SBATCH\s+(?:{options})[=\s]*(?:gpu:)?(?:\w+:)?(\d+)", text)
        counted |= dict.fromkeys(names, found[1] if found else str(missing))
    return counted


def calm(text: str) -> str:
    """The text without ``set -e``, ``-u`` and ``${NAME:?...}``, and with output going nowhere: its folders are not
    here."""
    text = _DEMANDED.sub(lambda match: f"${{{match[1]}:-{marker(match[1])}}}", text)
    text = _ERREXIT.sub(lambda match: match[1] + (re.sub("[eu]", "", match[2]) or "+e"), text)
    return _REDIRECTION.sub(lambda match: f"{match[1]}/dev/null" if "/dev/" not in match[2] else match[0], text)


def has_launch(commands: Iterable[Command]) -> bool:
    """True if one of the commands trains."""
    return any(launch is not None and launch.trains for launch in (launch_of(one.words) for one in commands))


def _run(
    sandbox: Sandbox,
    script: Path,
    root: Path,
    files: Mapping[str, str],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    missing: Sequence[str],
    go_on: bool,
) -> tuple[tuple[Command, ...], int, str]:
    """One run: commands, exit status, and the end of what was printed."""
    texts = list(files.values())
    unset = [name for name in unset_names(texts) if name not in environment]
    absolute = sorted({match for text in texts for match in _ABSOLUTE.findall(text)} | set(missing))
    below = str(script.resolve().relative_to(root))
    program = driver(below, files, list(arguments), environment, unset, absolute, go_on)
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as calls:
        source.write(program.encode("utf-8", errors="replace"))
        source.seek(0)
        with open(os.devnull, "rb") as nothing:
            descriptors = [file.fileno() for file in (nothing, out, out, source, calls)]
            more = {"file_name": "driver", "command": ["/bin/bash", "--norc", "driver"]}
            ended = sandbox.spawn("command", descriptors, LIMITS, more).wait()
        for file in (out, calls):
            file.seek(0)
        printed, recorded = (file.read(LIMITS.file_size).decode("utf-8", errors="replace") for file in (out, calls))
    ready, _, recorded = recorded.partition("\0")
    if ready != READY:
        raise SandboxError("this host lets it start no process of its own")
    if ended.timed_out:
        printed += f"\nended after {LIMITS.wall:g} s"
    printed = "\n".join(line for line in printed.splitlines() if not line.startswith("+"))  # set -x
    printed = _COMPUTED.sub(r"\1 is not set, and the script computes with it", _CONTROL.sub("?", printed.strip()))
    return tuple(_commands(recorded, root, environment)), ended.code, printed[-SHOWN:]


def _commands(recorded: str, root: Path, environment: Mapping[str, str]) -> list[Command]:
    """The records in order; a torn one at the end is left out."""
    fields = recorded.split("\0")
    found, place = [], 0
    while place + 4 <= len(fields) and fields[place] == "CALL" and fields[place + 3].isdecimal():
        name, count = fields[place + 1], int(fields[place + 3])
        start = place + 4
        end = next((i for i in range(start + count, len(fields)) if not fields[i]), None)
        if end is None:
            break
        variables = dict(entry.partition("=")[::2] for entry in fields[start + count : end])
        base = variables.get("ROLL_BASE", "\0")
        words = tuple(_outside(word, base, root) for word in (name, *fields[start : start + count]))
        kept = {
            key: _outside(value, base, root)
            for key, value in variables.items()
            if not _OF_THE_SHELL.fullmatch(key)
            and not key.startswith(("__UNSET_", "BASH_FUNC"))
            and not any(key in names for _, _, names in SLURM)
            and value != marker(key)
        }
        found.append(Command(words, kept))
        place = end + 1
    return found


def _outside(text: str, base: str, root: Path) -> str:
    """A recorded word with the paths and markers of the sandbox replaced. Raises ``ConfigError``: control characters,
    which would reach a terminal."""
    if _CONTROL.search(text):
        raise ConfigError([Problem("(script)", _CONTROL.sub("?", text)[:200], "holds control characters")])
    text = text.replace(f"{base}/root", str(root))
    return UNSET_MARK.sub(lambda match: f"${{oc.env:{match[1]}}}", text)


def marker(name: str) -> str:
    """Marker for a variable that the script uses and does not set."""
    return ("/" if name == "HOME" else "") + _UNSET.format(name)


def driver(
    script: str,
    files: Mapping[str, str],
    arguments: list[str],
    environment: Mapping[str, str],
    unset: list[str],
    absolute: list[str],
    go_on: bool,
) -> str:
    """A bash program that lays out the files below the working folder and runs ``script``, one of them, under
    stand-ins. Variables in ``unset`` get a marker for a value, ``absolute`` are programs that the script names by their
    paths, and with ``go_on`` an ``exit`` with an error is passed over."""
    base = 'ROLL_BASE=$PWD\nmkdir -p "$ROLL_BASE/.bin" "$ROLL_BASE/.tools" "$ROLL_BASE/root"\n'
    lines = ["umask 022", f"exec {DESCRIPTOR}>&4 4>&- 3<&-", base]
    lines += [f"[ \"$(echo runs)\" = runs ] && printf '{READY}\\0' >&{DESCRIPTOR}"]
    lines += [_put(f".bin/modules/{path}", text) for path, text in _MODULES.items()]
    every_shell = "".join(f'{path}() {{ {path.rpartition("/")[2]} "$@"; }}\n' for path in absolute)
    every_shell = _EVERY_SHELL + every_shell + (_GO_ON if go_on else "")
    # The real interpreter works out what `python3 -c` prints; it is in the sandbox as well.
    named = {"DESCRIPTOR": str(DESCRIPTOR), "DEVICES": str(DEVICES), "PYTHON": sys.executable}
    lists = {"WRAPPERS": WRAPPERS, "ENVIRONMENTS": ENVIRONMENTS, "FILE_TOOLS": FILE_TOOLS}
    named |= {name: "|".join(words.split()) for name, words in lists.items()}
    stand_in = re.sub("@([A-Z_]+)@", lambda match: named[match[1]], _STAND_IN)
    lines += [_put(".bin/every-shell", every_shell), f"stand_in={shlex.quote(stand_in)}"]
    groups = (FILE_TOOLS, WRAPPERS, ENVIRONMENTS, SILENT)
    names = shlex.join([*LAUNCHERS, "bash", "sh", "unknown", *" ".join(groups).split()])
    lines += [
        _links(".bin", TEXT_TOOLS.split()),
        _links(".tools", (*FILE_TOOLS.split(), "sleep", "env", "cat", "bash")),
        f'for name in {names}; do printf %s "$stand_in" > "$ROLL_BASE/.bin/$name"; done',
    ]
    for path, text in files.items():
        lines.append(_put(f"root/{path}", text))
    lines.append(f'chmod -R u+rwx "$ROLL_BASE/root"; (builtin cd "$ROLL_BASE/.bin" && chmod u+rx {names})')
    lines.append('for name in $(compgen -e); do unset "$name" 2>/dev/null; done')
    own = {"ROLL_BASE": "$ROLL_BASE", "ROLL_TOOLS": "$ROLL_BASE/.tools", "TMPDIR": "$ROLL_BASE"}
    own |= {"PATH": "$ROLL_BASE/.bin", "BASH_ENV": "$ROLL_BASE/.bin/every-shell"}
    own["ROLL_NODES"] = environment.get("SLURM_JOB_NUM_NODES", "1")
    lines += [f'export {name}="{value}"' for name, value in own.items()]
    given = {name: value for name in unset for one, value in _FIRST_NODE.items() if go_on and one.fullmatch(name)}
    lines += [f"export {name}={shlex.quote(given.get(name) or marker(name))}" for name in unset]
    lines += [f"export {_UNSET.format(name)}={shlex.quote(f'1 {NOT_SET}{name}')}" for name in unset]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    lines += ['cd "$ROLL_BASE/root"', f'exec "$ROLL_TOOLS/bash" {shlex.join([script, *arguments])}']
    return "\n".join(lines) + "\n"


def _links(into: str, tools: Iterable[str]) -> str:
    """Links to the tools that the host has, by one command."""
    folders = "/usr/local/bin /usr/bin /bin"
    search = f'for folder in {folders}; do [ -x "$folder/$tool" ] && paths+=("$folder/$tool") && break; done'
    return f'paths=(); for tool in {shlex.join(tools)}; do {search}; done; ln -s -t "$ROLL_BASE/{into}" "${{paths[@]}}"'


def _put(path: str, text: str) -> str:
    folder = shlex.quote(path.rpartition("/")[0])
    return f'mkdir -p "$ROLL_BASE/"{folder} && printf %s {shlex.quote(text)} > "$ROLL_BASE/"{shlex.quote(path)}'
