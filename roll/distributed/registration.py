"""``@register``: how a worker method is called through its cluster."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_ATTRIBUTE = "_roll_registration"


class Dispatch(StrEnum):
    """How arguments reach the ranks of a cluster, and how their results come back."""

    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments; a list with one result a rank."""
    ALL_TO_ALL = "all_to_all"
    """Every argument is a list with one entry a rank; a list with one result a rank."""
    RANK_ZERO = "rank_zero"
    """Only rank 0 is called; its result."""
    DP_MP_COMPUTE = "dp_mp_compute"
    """Every DataProto is cut into one chunk a data-parallel replica, and all ranks of a replica get its chunk; other
    arguments go to all. The results of each replica's data-source rank, joined in order (see :mod:`.dispatch`)."""
    DP_MP_DISPATCH_FIRST = "dp_mp_dispatch_first"
    """Like DP_MP_COMPUTE, but only the first rank of a replica gets the chunk; the others get a DataProto without
    columns (``meta_info`` only), for methods that pass the data on themselves."""


@dataclass(frozen=True)
class Registration:
    """What :func:`register` was told about a method."""

    dispatch: Dispatch
    columns: tuple[str, ...] | None = None
    deadline: float | None = None
    name: str | None = None


def register(
    dispatch: Dispatch,
    columns: tuple[str, ...] | None = None,
    deadline: float | None = None,
    name: str | None = None,
) -> Callable[[F], F]:
    """Make a worker method callable on its cluster.

    Args:
        dispatch: How arguments are spread and results joined.
        columns: The columns of DataProto arguments that the method reads; nothing else is shipped. A column that the
            batch does not have is left to the method to miss. None ships all.
        deadline: Seconds that a call may take; None: the cluster's ``rpc_timeout``.
        name: What messages call the method; None: its own name.

    Raises:
        ValueError: ``columns`` given to a mode that ships arguments as they are, or a deadline that is not positive.
    """
    if columns is not None and dispatch not in (Dispatch.DP_MP_COMPUTE, Dispatch.DP_MP_DISPATCH_FIRST):
        raise ValueError(f"columns go with a data-parallel dispatch, not with {dispatch.name}: leave them out")
    if deadline is not None and deadline <= 0:
        raise ValueError(f"deadline must be positive seconds, got {deadline}")

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, Registration(dispatch, columns, deadline, name))
        return method

    return mark


def registrations(cls: type) -> dict[str, Registration]:
    """The registered methods of a worker class by name; an override without ``@register`` keeps its base's mark."""
    found = {}
    for attribute, _ in inspect.getmembers(cls, callable):
        for owner in cls.__mro__:
            registration = getattr(owner.__dict__.get(attribute), _ATTRIBUTE, None)
            if registration is not None:
                found[attribute] = registration
                break
    return found
