"""The command line: which model, and whom the service lets in."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.config.reading.errors import ConfigError
from roll.training_service.command import Options, build_parser, read_options


def read(*words: str) -> Options:
    return read_options(build_parser().parse_args(words))


def test_a_model_by_its_name() -> None:
    options = read("org/name", "--max-models", "2", "--port", "0")
    assert (options.name, options.args.model_name_or_path, options.args.dtype) == ("org/name", "org/name", "bf16")
    assert (options.host, options.port, options.max_models, options.api_key) == ("127.0.0.1", 0, 2, "")


def test_a_model_by_a_configuration(base_folder: Path) -> None:
    options = read("examples/tiny/rlvr_config.yaml", f"pretrain={base_folder}", "--model-name", "tiny")
    assert (options.name, options.args.model_name_or_path) == ("tiny", str(base_folder))
    assert options.args.dtype == "fp32" and options.max_length is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("m", "--host", "0.0.0.0"), "who reaches this port may train and sample"),
        (("m", "--api-key-env", "ROLL_NO_SUCH_KEY"), "no such variable"),
        (("m", "--api-key-env", "ROLL_SHORT_KEY"), "must begin with tml-"),
        (("m", "--max-models", "0"), "must be at least 1"),
        (("m", "pretrain=x"), "is read with a YAML file only"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLL_SHORT_KEY", "secret")
    with pytest.raises(ConfigError, match=message):
        read(*words)


def test_another_host_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLL_KEY", "tml-secret")
    assert read("m", "--host", "0.0.0.0", "--api-key-env", "ROLL_KEY").api_key == "tml-secret"
