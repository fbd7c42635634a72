"""``roll export --push``: an exported model at the Hugging Face hub, with a model card written from its run."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from roll import __version__
from roll.checkpoint.trained_model import TrainedModel, config_error
from roll.config.model_files import looks_like_folder
from roll.config.run import RESOLVED_CONFIG
from roll.tracking.records import METRICS_NAME, read_metrics
from roll.tracking.run_record import RECORD_FOLDER

logger = logging.getLogger(__name__)

CARD = "README.md"
TRAINING_CONFIG = "training_config.yaml"
_LIBRARIES = {"hf": "transformers", "peft": "peft", "gguf": "gguf"}
_TASKS = {"causal_lm": "text-generation", "score": "text-classification", "value": "token-classification"}


def check_repository(repository: str) -> None:
    """
    Raises:
        ConfigError: no name of a repository, or no token in the environment.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise config_error("--push", repository, str(error).splitlines()[0], "me/my-model") from error
    if get_token() is None:
        rule = "needs a token of the hub with write access: set HF_TOKEN, or log in with `hf auth login`"
        raise config_error("--push", repository, rule)


def push(folder: Path, repository: str, public: bool) -> str:
    """Upload a folder as one commit, to a repository that is made if need be (one that exists keeps its visibility);
    its URL. Raises ``OSError``: the hub refuses, or cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the httpx that it was built on

    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="roll", library_version=__version__)
    try:
        made = hub.create_repo(repository, private=not public, exist_ok=True)
        hub.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=f"Exported by roll {__version__}")
    except HTTPError as error:
        raise OSError(f"the hub cannot be reached: {error}") from error
    return str(made)


def add_card(trained: TrainedModel, form: str, folder: Path, repository: str) -> None:
    """Write the model card into an export, and beside it the configuration of the run, where that is still there."""
    run = trained.folder.resolve().parent.parent.parent
    resolved = run / RESOLVED_CONFIG
    if resolved.is_file():
        shutil.copyfile(resolved, folder / TRAINING_CONFIG)
    (folder / CARD).write_text(model_card(trained, form, repository, run), encoding="utf-8")


def _name(choice: Any) -> Any:
    return choice.get("name") if isinstance(choice, dict) else choice


def model_card(trained: TrainedModel, form: str, repository: str, run: Path) -> str:
    """The model card: base model, data, algorithm, the first and last values of the curves, and the command; what the
    folder of the ``run`` does not have (any more) is left out."""
    config = _mapping(run / RESOLVED_CONFIG)
    about = _mapping(run / RECORD_FOLDER / "run.json")
    base = str(config.get("pretrain") or trained.contents.path or trained.model)
    pipeline = str(about.get("pipeline") or config.get("pipeline") or "")
    estimator = _name(config.get("estimator") or config.get("adv_estimator"))
    files = list(dict.fromkeys(_data_files(config)))
    at_hub = [name.removeprefix("hub:") for name in files if name.startswith("hub:")]
    head: dict[str, Any] = {"library_name": _LIBRARIES[form], "pipeline_tag": _TASKS[trained.head]}
    if not looks_like_folder(base) and not Path(base).exists():
        head["base_model"] = base
    if at_hub:
        head["datasets"] = at_hub
    head["tags"] = ["roll", *filter(None, (pipeline, estimator))]
    # Folders of one's own host say nothing to others.
    shown = {
        "base model": head.get("base_model", Path(base).name),
        "data": ", ".join(at_hub + [Path(name).name for name in files if not name.startswith("hub:")]),
        "pipeline": pipeline,
        "advantages": estimator,
        "loss": _name(config.get("loss") or config.get("pg_variant")),
        "steps": trained.state.get("step"),
        "seed": config.get("seed"),
    }
    lines = ["---", yaml.safe_dump(head, sort_keys=False, allow_unicode=True).rstrip(), "---", ""]
    lines += [f"# {repository.rpartition('/')[2]}", "", f"Trained with roll {__version__}.", "", "| | |", "|---|---|"]
    for name, value in shown.items():
        if value not in (None, ""):
            cell = str(value).replace("|", "\\|").replace("\n", " ")
            lines.append(f"| {name} | {cell} |")
    metrics = run / str(about.get("log_dir", "logs")) / METRICS_NAME
    rows = read_metrics(metrics) if metrics.is_file() else []
    present = list(dict.fromkeys(name for row in rows for name in row))
    curves = []
    for key in dict.fromkeys(key for panel in about.get("panels", ()) for key in panel["keys"]):
        shape = re.compile(re.escape(key).replace(r"\*", "[^/]+"))
        for metric in filter(shape.fullmatch, present):
            points = [(row["step"], row[metric]) for row in rows if metric in row]
            ends = [f"{value:.4g} (step {step})" for step, value in (points[0], points[-1])]
            curves.append(f"| `{metric}` | {ends[0]} | {ends[1]} |")
    if curves:
        lines += ["", "## Curves", "", "| metric | first | last |", "|---|---|---|", *curves]
    if config:
        lines += ["", "## Training", "", "```bash", f"roll run {TRAINING_CONFIG}", "```"]
    return "\n".join([*lines, ""])


def _data_files(section: Mapping[str, Any]) -> Iterator[str]:
    for key, value in section.items():
        if key == "data_args" and isinstance(value, Mapping):
            names = value.get("file_name") or []
            yield from [names] if isinstance(names, str) else map(str, names)
        elif key != "validation" and isinstance(value, Mapping):
            yield from _data_files(value)


def _mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML too
    return found if isinstance(found, dict) else {}
