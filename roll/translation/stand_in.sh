#!/bin/bash
# Stands in for a program of a recorded launch script; recording.py fills in the names between @.
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
            [[ " $* " != *" -- "* ]] || until [[ $1 == -- ]]; do shift; done
            start_behind_options "$@"
        fi ;;
    uv)
        words=("$@")
        for ((i = 1; i < $#; i++)); do
            case "${words[i]} ${words[i + 1]-}" in python*" -c"|python*" -") exec "${words[i]}" "${words[@]:i + 1}" ;; esac
        done
        write_down "$@" ;;
    tee) exec "$ROLL_TOOLS/cat" ;;
    sleep) ;;
    nproc) echo @DEVICES@ ;;
    hostname) case ${1-} in -i|-I|-y) echo 127.0.0.1 ;; *) echo localhost ;; esac ;;
    scontrol) for ((i = 0; i < ROLL_NODES; i++)); do echo localhost; done ;;
    which) [[ -n ${1-} ]] && echo "/usr/bin/$1" ;;
    nvidia-smi)
        first=0 last=@DEVICES@ fields=
        while (($#)); do
            case $1 in
                -i|--id) first=$2 last=$(($2 + 1)) ;;
                --query-gpu=*) fields=${1#*=} ;;
            esac
            shift
        done
        for ((i = first; i < last; i++)); do
            [[ -n $fields ]] || echo "GPU $i: NVIDIA H100 80GB HBM3"
            answers=
            for field in ${fields//,/ }; do
                case $field in
                    index) answer=$i ;;
                    count) answer=@DEVICES@ ;;
                    memory.used|utilization*|temperature*|power*) answer=0 ;;
                    memory*) answer=81559 ;;
                    *) answer="NVIDIA H100 80GB HBM3" ;;
                esac
                answers+=${answers:+, }$answer
            done
            [[ -z $fields ]] || echo "$answers"
        done ;;
    @ENVIRONMENTS@) case ${1-} in run|exec) start_behind_options "$@" ;; esac; write_down "$@" ;;
    @WRAPPERS@) start_behind_options "$@"; write_down "$@" ;;
    @FILE_TOOLS@) "$ROLL_TOOLS/$name" "$@" 2>/dev/null; exit 0 ;;
    *) write_down "$@" ;;
esac
exit 0
