"""Command lines: ``--config_path DIR --config_name NAME key=value ...`` of the launchers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LauncherArgs:
    """Which configuration a launcher was asked for."""

    config_path: str
    config_name: str
    overrides: tuple[str, ...]
    is_default: bool
    """Neither flag was given."""


def parse_launcher_args(argv: Sequence[str] | None, default_path: str, default_name: str) -> LauncherArgs:
    """Read a launcher's command line; exits with a usage message on a flag it does not know."""
    parser = argparse.ArgumentParser(
        description="Run a pipeline from a YAML configuration.",
        epilog="Overrides: key=value (any key of the schema), +new.key=value, '~key'. See docs/configuration.md.",
    )
    parser.add_argument("--config_path", "--config-path", help=f"folder of the configuration (default {default_path})")
    parser.add_argument("--config_name", "--config-name", help=f"its name, with or without .yaml ({default_name})")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the configuration")
    known, rest = parser.parse_known_intermixed_args(argv)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        parser.error(f"unknown flag {unknown[0]}; overrides are written key=value")
    return LauncherArgs(
        config_path=known.config_path or default_path,
        config_name=known.config_name or default_name,
        overrides=tuple(known.overrides),
        is_default=known.config_path is None and known.config_name is None,
    )
