"""The shell text that makes a sandboxed bash record its commands: stand-ins for programs, and the files around them.

Programs that only work on text are the real ones. Every other command becomes a stand-in that writes down what it was
called with and succeeds: nothing is installed, downloaded, started or slept.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping

LAUNCHERS = ("python", "python3", "uv", "torchrun", "accelerate", "deepspeed", "trl", "ray")
"""Programs that start a run, or something around one."""
DESCRIPTOR = 50
"""Descriptor that stand-ins write to; high enough to be out of the way of a script's own redirections."""
READY = "READY"
"""The first word of every record: this shell can start processes."""
DEVICES = 8
"""Accelerators, of which a script that counts them finds a whole node."""
TEXT_TOOLS = """
    awk gawk mawk base64 basename bc cat cmp column comm cut date diff dirname egrep expand expr false fgrep find fmt
    fold getopt grep head id jq join ls md5sum mktemp nl numfmt od paste printf readlink realpath rev sed seq sha256sum
    shuf sort stat strings sum tac tail tr true uname uniq wc xargs
"""
FILE_TOOLS = "chmod cp ln mkdir mv rm rmdir touch"
"""Real within the scratch folder, and successful elsewhere."""
WRAPPERS = "env nice nohup numactl nsys setsid srun stdbuf sudo taskset time timeout unbuffer mpirun"
"""Commands that start the command behind their own options."""
SILENT = "sleep nvidia-smi rocm-smi npu-smi nproc hostname scontrol which tee uvx pip pip3 conda git curl wget"

NOT_SET = "variable_not_set_"
"""Computing with a marker ends in bash's complaint about this word with the name behind it."""
_UNSET = "__UNSET_{}__"

_STAND_IN = r"""#!/bin/bash
name=${0##*/}
write_down() {
    local tries=0
    until "$ROLL_TOOLS/mkdir" "$ROLL_BASE/.lock" 2>/dev/null || ((++tries > 200)); do "$ROLL_TOOLS/sleep" 0.01; done
    {
        printf 'CALL\0%s\0%s\0%s\0' "$name" "$PWD" "$#"
        (($#)) && printf '%s\0' "$@"
        "$ROLL_TOOLS/env" -0
        printf '\0'
    } >&@DESCRIPTOR@
    "$ROLL_TOOLS/rmdir" "$ROLL_BASE/.lock"
}
start_behind_options() {
    while (($#)); do
        case ${1##*/} in
            python|python[0-9]*|uv|torchrun|accelerate|deepspeed|trl|ray|bash|sh) exec "${1##*/}" "${@:2}" ;;
            *.sh) exec bash "$@" ;;
            [A-Za-z_]*=*) export "$1" ;;
        esac
        shift
    done
}
case $name in
    unknown) name=$1; shift; write_down "$@" ;;
    python*)
        case ${1-} in
            -c|-|'') PYTHONHOME='' PYTHONPATH="$ROLL_BASE/.bin/modules" exec "@PYTHON@" -B -P -s -S "$@" ;;
            *) write_down "$@" ;;
        esac ;;
    bash|sh)
        for word in "$@"; do
            case $word in
                -c) break ;;
                -*) continue ;;
                *) [[ -e $word ]] || { write_down "$@"; exit 0; }; break ;;
            esac
        done
        exec "$ROLL_TOOLS/bash" "$@" ;;
    ray)
        write_down "$@"
        if [[ "${1-} ${2-}" == "job submit" ]]; then
            while (($#)) && [[ $1 != -- ]]; do shift; done
            (($#)) && shift && start_behind_options "$@"
        fi ;;
    tee) exec "$ROLL_TOOLS/cat" ;;
    sleep) ;;
    nproc) echo @DEVICES@ ;;
    hostname) case ${1-} in -i|-I|-y) echo 127.0.0.1 ;; *) echo localhost ;; esac ;;
    scontrol) echo localhost ;;
    which) [[ -n ${1-} ]] && echo "/usr/bin/$1" ;;
    nvidia-smi)
        for ((i = 0; i < @DEVICES@; i++)); do
            case "$*" in
                *--query-gpu=count*) echo @DEVICES@ ;;
                *--query-gpu=memory*) echo 81559 ;;
                *--query-gpu*) echo "NVIDIA H100 80GB HBM3" ;;
                *) echo "GPU $i: NVIDIA H100 80GB HBM3" ;;
            esac
        done ;;
    @WRAPPERS@) start_behind_options "$@"; write_down "$@" ;;
    @FILE_TOOLS@) "$ROLL_TOOLS/$name" "$@" 2>/dev/null; exit 0 ;;
    *) write_down "$@" ;;
esac
exit 0
"""

_MODULES = {
    "torch/__init__.py": "from . import cuda\n",
    "torch/cuda.py": f"def is_available():\n    return True\ndef device_count():\n    return {DEVICES}\n",
    "verl/__init__.py": "",
    "verl/utils/__init__.py": "",
    "verl/utils/device.py": (
        "is_cuda_available, is_npu_available = True, False\ndef get_device_name():\n    return 'cuda'\n"
    ),
}
"""Of the Python that runs what ``python3 -c`` and ``python3 -`` are given: a machine with CUDA devices."""

_EVERY_SHELL = r"""
cd() { builtin cd "$@" 2>/dev/null; return 0; }
pushd() { builtin pushd "$@" >/dev/null 2>&1; return 0; }
popd() { builtin popd >/dev/null 2>&1; return 0; }
ulimit() { return 0; }
command_not_found_handle() { "$ROLL_BASE/.bin/unknown" "$@"; return 0; }
"""
_GO_ON = r"""
exit() { if ((${1:-0} == 0)); then builtin exit 0; fi; return 0; }
"""
"""For a second try: what a script checks before the launch is not here."""


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
    """A bash program that lays out the files below the working folder and runs one of them under stand-ins.

    Args:
        script: path of the script below the root folder; it is one of ``files``.
        arguments: of the script.
        environment: variables set in front of it.
        unset: names of variables that get a marker for a value.
        absolute: programs that the script names by their paths.
        go_on: whether an ``exit`` with an error is passed over.
    """
    base = 'ROLL_BASE=$PWD\nmkdir -p "$ROLL_BASE/.bin" "$ROLL_BASE/.tools" "$ROLL_BASE/root"\n'
    lines = ["umask 022", "exec @DESCRIPTOR@>&4 4>&- 3<&-".replace("@DESCRIPTOR@", str(DESCRIPTOR)), base]
    lines += [f"[ \"$(echo runs)\" = runs ] && printf '{READY}\\0' >&{DESCRIPTOR}"]
    lines += [_put(f".bin/modules/{path}", text) for path, text in _MODULES.items()]
    lines += [_put(".bin/every-shell", _every_shell(absolute, go_on)), f"stand_in={shlex.quote(_stand_in())}"]
    names = shlex.join([*LAUNCHERS, "bash", "sh", "unknown", *FILE_TOOLS.split(), *WRAPPERS.split(), *SILENT.split()])
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
    lines += [f'export {name}="{value}"' for name, value in own.items()]
    lines += [f"export {name}={shlex.quote(marker(name))}" for name in unset]
    lines += [f"export {_UNSET.format(name)}={shlex.quote(f'1 {NOT_SET}{name}')}" for name in unset]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    lines += ['cd "$ROLL_BASE/root"', f'exec "$ROLL_TOOLS/bash" {shlex.join([script, *arguments])}']
    return "\n".join(lines) + "\n"


def _stand_in() -> str:
    # The real interpreter works out what `python3 -c` prints; it is in the sandbox as well.
    named = {"DESCRIPTOR": str(DESCRIPTOR), "DEVICES": str(DEVICES), "PYTHON": sys.executable}
    named |= {"WRAPPERS": "|".join(WRAPPERS.split()), "FILE_TOOLS": "|".join(FILE_TOOLS.split())}
    text = _STAND_IN
    for name, value in named.items():
        text = text.replace(f"@{name}@", value)
    return text


def _every_shell(absolute: list[str], go_on: bool) -> str:
    own = [f'{path}() {{ {path.rpartition("/")[2]} "$@"; }}\n' for path in absolute]
    return _EVERY_SHELL + "".join(own) + (_GO_ON if go_on else "")


def _links(into: str, tools: Iterable[str]) -> str:
    """Links to those of the tools that the host has, by one command."""
    folders = "/usr/local/bin /usr/bin /bin"
    search = f'for folder in {folders}; do [ -x "$folder/$tool" ] && paths+=("$folder/$tool") && break; done'
    return f'paths=(); for tool in {shlex.join(tools)}; do {search}; done; ln -s -t "$ROLL_BASE/{into}" "${{paths[@]}}"'


def _put(path: str, text: str) -> str:
    folder = shlex.quote(path.rpartition("/")[0])
    return f'mkdir -p "$ROLL_BASE/"{folder} && printf %s {shlex.quote(text)} > "$ROLL_BASE/"{shlex.quote(path)}'
