"""``roll serve-training``: load a model, and answer the ``tinker`` SDK until interrupted."""

from __future__ import annotations

import argparse
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from roll.config.reading.errors import ConfigError, Problem

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from roll.config.roles import ModelArguments
    from roll.serving.http import HttpServer

OUTPUT = "output/training-service"
# Tokens of a datum, or of prompt and response, where the model has more positions and the command says nothing.
DEFAULT_LENGTH = 4096


@dataclass(frozen=True)
class Options:
    """The command line after it has been checked."""

    args: ModelArguments
    name: str
    max_length: int | None
    output: Path = Path(OUTPUT)
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    max_models: int = 16
    max_open_requests: int = 1024
    max_num_seqs: int = 64


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "roll serve-training", description="train LoRA adapters for clients of the tinker SDK"
    )
    parser.add_argument(
        "model", help="model folder, GGUF file or hub name, or a YAML file whose actor_infer names the model"
    )
    parser.add_argument("overrides", nargs="*", default=(), metavar="key=value", help="changes of the YAML file")
    parser.add_argument("--model-name", help="name that clients give (default: the model as written)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="of the base model (default: bf16, or the file's)")
    parser.add_argument(
        "--max-length", type=int, help=f"tokens of a sequence (default: the model's, at most {DEFAULT_LENGTH})"
    )
    parser.add_argument("--output", default=OUTPUT, help="folder of checkpoints (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0: a free one (default: %(default)s)")
    parser.add_argument("--api-key-env", help="environment variable with the key that clients must send (tml-...)")
    parser.add_argument("--max-models", type=int, default=16, help="models under training at a time (default: 16)")
    parser.add_argument(
        "--max-open-requests", type=int, default=1024, help="requests that wait, of a model (default: 1024)"
    )
    parser.add_argument("--max-num-seqs", type=int, default=64, help="samples generated at a time (default: 64)")
    return parser


def main(words: Sequence[str]) -> int:
    """The exit status. Raises ``ConfigError``: every mistake of the command line."""
    from roll.cli import EXIT_FAILED, say, show_error

    options = read_options(build_parser().parse_args(words))
    from roll.tracking import setup_logging

    setup_logging(options.output / "logs")
    try:
        server = start(options)
    except (OSError, ValueError, ImportError) as error:
        show_error(error)
        return EXIT_FAILED
    say(f"{options.name} for the tinker SDK: base_url={server.url}")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.close()
    return 0


def read_options(arguments: argparse.Namespace) -> Options:
    """Check the command line. Raises ``ConfigError``: every mistake."""
    from roll.cli import server_key

    key = server_key(arguments.host, arguments.api_key_env, "train and sample")
    if key and not key.startswith("tml-"):
        rule = "the variable's value must begin with tml-, or the SDK does not send it"
        raise ConfigError([Problem("--api-key-env", arguments.api_key_env, rule, "tml-" + "x" * 8)])
    for flag in ("max_length", "max_models", "max_open_requests", "max_num_seqs"):
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            raise ConfigError([Problem(f"--{flag.replace('_', '-')}", value, "must be at least 1", 1)])
    args, length = read_model(arguments.model, arguments.overrides)
    if arguments.dtype is not None:
        args = replace(args, dtype=arguments.dtype)
    names = ("host", "port", "max_models", "max_open_requests", "max_num_seqs")
    given = {name: getattr(arguments, name) for name in names}
    name, longest = arguments.model_name or str(args.model_name_or_path), arguments.max_length or length
    return Options(args, name, longest, Path(arguments.output), api_key=key, **given)


def read_model(model: str, overrides: Sequence[str]) -> tuple[ModelArguments, int | None]:
    """The base model of a folder, a hub name or a YAML file, and the file's ``max_model_len``. Raises ``ConfigError``:
    a file that cannot be read, or whose engines are others; overrides without a file."""
    from roll.config.roles import ModelArguments

    if not model.endswith((".yaml", ".yml")):
        if overrides:
            raise ConfigError([Problem(overrides[0], model, "is read with a YAML file only; this is a model")])
        return ModelArguments(model_name_or_path=model), None
    from roll.config.loader import load_config
    from roll.config.strategies.engines import HfInferStrategyConfig
    from roll.config.strategies.registry import typed_strategy_config
    from roll.pipelines.serve import served_role

    role = served_role(load_config(None, model, None, list(overrides), check_files=False), "actor_infer")
    config = typed_strategy_config(role.strategy_args)
    if not isinstance(config, HfInferStrategyConfig):
        name = role.strategy_args.strategy_name
        rule = "samples of this service come from hf_infer"
        raise ConfigError([Problem("actor_infer.strategy_args.strategy_name", name, rule, "hf_infer")])
    if role.model_args.lora_target or role.model_args.adapter_name_or_path:
        raise ConfigError([Problem("actor_infer.model_args", "", "adapters are chosen by the clients of this service")])
    return role.model_args, config.max_model_len


def start(options: Options) -> HttpServer:
    """Load the model and serve it. Raises ``ValueError``: a model that cannot be trained here. OSError: no such model,
    or the port is taken."""
    from roll.models.build import load_config
    from roll.models.gguf_reading import dequantised_path
    from roll.serving.http import HttpServer
    from roll.strategies.engines.requests import longest_sequence
    from roll.training_service.adapters import Base
    from roll.training_service.app import Endpoint
    from roll.training_service.checkpoints import Store
    from roll.training_service.sampling import Sampler
    from roll.training_service.service import Service

    http = HttpServer(options.host, options.port)
    path = dequantised_path(str(options.args.model_name_or_path))
    args = replace(options.args, model_name_or_path=path)
    config = load_config(args)
    length = longest_sequence(options.max_length, config, path)
    if options.max_length is None:
        length = min(length, DEFAULT_LENGTH)
    base = Base(args, length)
    sampler = Sampler(base, options.max_num_seqs, options.output / ".base")
    store = Store(options.output)

    def make_app() -> Starlette:
        limits = (options.max_models, options.max_open_requests)
        service = Service(base, sampler, store, options.name, *limits)
        return Endpoint(service, options.api_key, secrets.token_bytes(32), path).app()

    http.start(make_app)
    return http
