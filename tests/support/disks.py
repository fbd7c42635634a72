"""A disk with little room left."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """As a quota does, or a disk with so much room left."""
    before, compiles = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    # Python 3.11 may write a part of a module's compiled form without noticing, and no later process can import it.
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        sys.dont_write_bytecode = compiles
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
