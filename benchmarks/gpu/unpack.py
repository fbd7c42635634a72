"""Unpack the groups of a bundle whose parts are all there; ones that arrive later are unpacked by a later call.

    python -m benchmarks.gpu.unpack build/gpu/parts /opt/site

Needs nothing but Python.  A part whose checksum differs from the manifest's ends it with the part's name.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import tarfile
from pathlib import Path


def unpack(parts: Path, folder: Path) -> list[str]:
    """Names of the groups that were unpacked now."""
    rows = json.loads((parts / "manifest.json").read_text())["parts"]
    folder.mkdir(parents=True, exist_ok=True)
    unpacked = []
    for group, members in itertools.groupby(rows, key=lambda row: row["group"]):
        files = list(members)
        done = folder / f".{group}"
        if done.exists() or not all((parts / row["file"]).is_file() for row in files):
            continue
        joined = folder / Path(files[0]["file"]).stem
        with joined.open("wb") as stream:
            for row in files:
                data = (parts / row["file"]).read_bytes()
                if hashlib.sha256(data).hexdigest() != row["sha256"]:
                    sys.exit(
                        f"{parts / row['file']}: the checksum differs from the manifest's: carry this part once more"
                    )
                stream.write(data)
        if joined.suffix == ".xz":
            with tarfile.open(joined) as tar:
                tar.extractall(folder, filter="data")
            joined.unlink()
        done.touch()
        unpacked.append(group)
    return unpacked


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print("unpacked:", *unpack(Path(sys.argv[1]), Path(sys.argv[2])))
