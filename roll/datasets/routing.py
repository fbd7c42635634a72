"""Which reward domain a row belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roll.datasets.reading import SourceRow
from roll.datasets.types import DataError


class DomainRouter:
    """Sends a row to a domain: by its ``domain`` column, else by its tag, else (one domain only) to that domain.

    There is no default domain beyond that: a row that nothing claims is an error that lists what is known, because a
    row scored by the wrong rule teaches the wrong thing without anyone noticing.
    """

    def __init__(self, domains: Mapping[str, Sequence[str] | None]) -> None:
        """
        Args:
            domains: each domain's ``tag_included``. Null or empty: claims no tag by name.

        Raises:
            DataError: no domain at all, or a tag claimed by two.
        """
        if not domains:
            raise DataError("rewards: no domain configured; for example rewards: {math_rule: {tag_included: [gsm8k]}}")
        self._domains = list(domains)
        self._by_tag: dict[str, str] = {}
        for domain, tags in domains.items():
            for tag in tags or ():
                if tag in self._by_tag:
                    first = self._by_tag[tag]
                    raise DataError(f"rewards.{domain}.tag_included: tag {tag!r} already belongs to rewards.{first}")
                self._by_tag[tag] = domain
        self._only_domain = self._domains[0] if len(domains) == 1 and not self._by_tag else None

    def route(self, source: SourceRow, tag: str) -> str:
        """The domain of a row.

        Raises:
            DataError: an unknown domain, or an unknown tag in a row without domain.
        """
        domain = source.row.get("domain")
        if domain:
            if domain not in self._domains:
                known = ", ".join(self._domains)
                raise DataError(f"{source.place}: unknown domain {domain!r}; the configured rewards are {known}")
            return str(domain)
        if tag in self._by_tag:
            return self._by_tag[tag]
        if self._only_domain is not None:
            return self._only_domain
        known = ", ".join(sorted(self._by_tag)) or "none"
        shown = f"unknown tag {tag!r}" if tag else "no tag and no domain"
        raise DataError(
            f"{source.place}: {shown}; known tags are {known}; add it to tag_included of the reward that scores it"
        )
