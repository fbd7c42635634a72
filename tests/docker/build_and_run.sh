#!/usr/bin/env bash
# Builds the Dockerfile and runs its image for real, without a container engine: debootstrap makes the base image,
# buildah builds and runs with chroot isolation. Needs root on Debian 12 or later, and about 5 GB of disk meanwhile.
#
#   tests/docker/build_and_run.sh                      `roll doctor` must be in order, and the tiny pipeline must learn
#   tests/docker/build_and_run.sh COMMAND [ARGS]...    another command in the image
#
# pip's configuration on this machine (files and PIP_* variables) reaches the build as a secret, and local folders that
# it names as read-only mounts; so neither the Dockerfile nor the image holds anything of this machine.
# WORK_DIR: where images are kept (default: a new folder, removed at the end). A kept one saves the base image's making.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
keep_work_dir=${WORK_DIR:+yes}
work_dir=${WORK_DIR:-$(mktemp -d)}
mkdir -p "$work_dir"
work_dir=$(cd "$work_dir" && pwd)
base_image=localhost/roll-base:bookworm
image=localhost/roll:test
container=
# A word that only the build's secret holds, to be looked for in the image.
planted=planted-$(od -An -N12 -tx1 /dev/urandom | tr -d ' \n')
# Layers over each other where the kernel can (an eighth of the disk and of the time), else a copy for each.
driver=overlay
buildah_can() { buildah --root "$work_dir/storage" --runroot "$work_dir/run" --storage-driver "$1" info >/dev/null 2>&1; }

step() { printf '== %s\n' "$*"; }

images() { buildah --root "$work_dir/storage" --runroot "$work_dir/run" --storage-driver "$driver" "$@"; }

cleanup() {
    [[ -z $container ]] || images rm "$container" >/dev/null
    [[ -n $keep_work_dir ]] || rm -rf "$work_dir"
}
trap cleanup EXIT

install_tools() {
    if command -v buildah >/dev/null && command -v debootstrap >/dev/null; then
        return
    fi
    step "installing buildah and debootstrap"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends buildah debootstrap >/dev/null
}

make_base_image() {
    if images images --quiet "$base_image" >/dev/null 2>&1; then
        return
    fi
    step "bootstrapping the base image"
    local root=$work_dir/base container
    rm -rf "$root"
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$root" >"$work_dir/debootstrap.log"
    container=$(images from scratch)
    images copy --quiet "$container" "$root" / >/dev/null
    images commit --quiet --rm "$container" "$base_image" >/dev/null
    rm -rf "$root"
}

# One pip.conf with all that pip knows here: "global.cert='/x'" and ":env:.find-links='/y'" become "cert = /x" ...; the
# environment comes first, as it does for pip. Options that hold for one subcommand only are left out.
write_pip_configuration() {
    printf '# %s\n[global]\n' "$planted" >"$work_dir/pip.conf"
    python3 -m pip config list | LC_ALL=C sort | sed -nE "s/^(:env:|global)\.([a-z-]+)='(.*)'$/\2 = \3/p" |
        awk '!seen[$1]++' >>"$work_dir/pip.conf"
}

# Local files and folders that pip's configuration names, as --volume arguments. Of a local index (file:///x/simple) the
# folder above: its pages link to files beside them.
local_mounts() {
    tr ' =' '\n' <"$work_dir/pip.conf" | sed -E 's#^file://(/.+)/[^/]+/?$#\1#' | grep '^/' | sort -u | while read -r path; do
        [[ ! -e $path ]] || printf -- '--volume\n%s\n' "$path:$path:ro"
    done
}

build_image() {
    step "building the image"
    write_pip_configuration
    local mounts
    mapfile -t mounts < <(local_mounts)
    images build --layers --isolation chroot --build-arg "BASE_IMAGE=$base_image" --secret "id=pip.conf,src=$work_dir/pip.conf" \
        "${mounts[@]}" --tag "$image" "$repository"
}

in_image() { images run --isolation chroot "$container" -- "$@"; }

check_image() {
    container=$(images from "$image")
    step "who runs: $(in_image id -un)"
    [[ $(in_image id -u) != 0 ]] || { echo "the image runs as root" >&2; exit 1; }
    step "looking for the build's secret in the image"
    local root
    root=$(images mount "$container")
    if grep -rqF "$planted" "$root" || images inspect "$container" | grep -qF "$planted"; then
        echo "the image holds the pip configuration of its build" >&2
        exit 1
    fi
    images umount "$container" >/dev/null
    step "size: $(images images --format '{{.Size}}' "$image")"
}

run_command() {
    step "running: $*"
    in_image "$@"
}

# Sampled accuracy on problems that training has not shown; 40 steps bring it from about .37 to .8.
has_learnt='
import json
rows = [json.loads(line) for line in open("output/tiny_grpo/seed0/logs/metrics.jsonl")]
values = [row["val/sampled/accuracy"] for row in rows if "val/sampled/accuracy" in row]
print("sampled accuracy on validation problems:", values)
assert values[-1] > values[0] + 0.2, "it has not learnt"
'

run_image() {
    if [[ $# -gt 0 ]]; then
        run_command "$@"
        return
    fi
    run_command roll doctor
    run_command python examples/start_rlvr_pipeline.py max_steps=40
    run_command python -c "$has_learnt"
}

install_tools
buildah_can overlay || driver=vfs
make_base_image
build_image
check_image
run_image "$@"
step "the image was built and its command ended well"
