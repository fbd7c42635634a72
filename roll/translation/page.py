"""Writes the documentation of the tables: ``python -m roll.translation.page > docs/translation.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from roll.translation.openrlhf import OPENRLHF
from roll.translation.rules import Dialect, Rule, Section
from roll.translation.skyrl import SKYRL, SKYRL_TRAIN
from roll.translation.trl import TRL_GRPO, TRL_SFT
from roll.translation.verl import VERL

INTRODUCTION = """# Coming from verl, SkyRL, TRL or OpenRLHF

`roll translate` turns their keys and commands into keys of this project, says what each became, and refuses what it
does not know, with the nearest key that it does. Files written for ROLL need no translation: they load as they are.

```bash
roll translate python3 -m verl.trainer.main_ppo data.train_batch_size=64 trainer.n_gpus_per_node=2 ...
roll translate run_gsm8k.sh                     # a launch script, run in a sandbox
roll translate NNODES=2 bash run_gsm8k.sh data.train_batch_size=64   # with variables in front and arguments behind
roll translate trl grpo --config grpo.yaml      # TRL: arguments, or its YAML file
roll translate python3 -m openrlhf.cli.train_ppo_ray --pretrain ...
roll translate --yaml run_gsm8k.sh > mine.yaml  # a file of its own; then: roll run mine.yaml
roll translate trainer.strategy=deepspeed       # single keys: changes to a recipe
```

Text on standard input works too, so that a command with `CUDA_VISIBLE_DEVICES=4,5` and other variables in front can
be pasted whole. Keys go to standard output, one `key=value` a line, quoted for a shell; the table of notes goes to
standard error. The result is checked as `roll check` would; with a mistake in it the exit status is 2.

| option | does |
|---|---|
| `--yaml` | prints YAML instead of `key=value` lines |
| `--from NAME` | whose keys: `verl`, `skyrl_train`, `skyrl`, `trl`, `trl_sft`, `openrlhf`; default: the text tells |
| `--call N` | which run of a script that starts several |
| `--recipe FILE` | what single keys change (the quickstart, `gsm8k/rlvr_config`), for its sizes and devices |
| `--train-rows N` | rows of the training data, so that epochs become steps |
| `--quiet` | no notes |

## Whole runs and changes

A command that starts their program (`-m verl.trainer.main_ppo`), and any text that names the model, is a **whole run**:
their defaults are written out where they differ from ours, and the table marks them. Anything else is a **change** to a
recipe: only the keys that are given are translated, with the recipe's sizes where the arithmetic needs more. Engines'
parallel sizes are not taken from their defaults: an engine has one device unless the command says otherwise.

## Scripts

A launch script is run, not parsed: bash works out its arithmetic, arrays, branches, defaults, functions and sourced
files, and what it calls Python with is translated. Launchers (`python3 -m`, `uv run`, `torchrun`, `accelerate
launch`, `deepspeed`, `ray job submit`, `trl`), package managers, downloads and services are stand-ins that write down
their words and succeed; tools that work on text are real; `python3 -c` works out what it prints. Nothing is
installed, started, downloaded or trained.

The script runs where model-written code runs ([the sandbox](code-rewards.md)): no network, none of your files, your
environment or your processes, a scratch folder that is thrown away, and limits on time, memory and output. Where the
host cannot give that (no namespaces and no user of its own, another system than Linux), **no script is run**: give
the command line itself, which needs no shell. What the script sees of your folder are the shell files that it names
(`source env.sh`, `bash run_all.sh`), from its repository or its own folder.

- A variable that is used and never set becomes `${oc.env:NAME}`, read where the translated run starts; computing with
  it is an error. Put it in front: `roll translate NAME=value run.sh`. For numbers of nodes and devices their default
  holds, and a note says so.
- Where a script starts several runs, `--call N` takes one; without it they are listed.
- A script that checks for files before it launches is run a second time without these checks, with a note.
- Programs that are not the projects' own trainers (recipes, examples with code of their own) are refused: what they
  train is in their code. Mixtures of experts, images, tools and several turns are refused as long as they are not
  supported.

## What is more than a name

- **Batches.** Their mini-batches count prompts; an optimizer step here is `per_device_train_batch_size` x
  `gradient_accumulation_steps` x data-parallel ranks, in samples. So
  `gradient_accumulation_steps` = prompts x samples of a prompt / (micro-batch x ranks), and what does not divide is
  refused with the numbers.
- **Algorithms.** Their keys act on one another, so they are translated together: what comes out has the loss and the
  gradient of the formula there, defaults included. Clip ranges go to the options of the loss that is used. verl's
  `gspo`, `sapo` and `geo_mean` take the mean over responses whatever `loss_agg_mode` says, and SkyRL's KL is always
  such a mean, so KL, entropy and critic may get a mode of their own. SkyRL's `kl_loss_coef` is the weight of the KL in
  the reward, too. What has no equal here is refused with the reason, for one `grpo` with the KL in the reward, which
  is inside the rewards that a group compares there and outside here. Denominators are always those of a whole optimizer
  step, however it is split.
- **Devices.** Nodes x devices of a node become lists: `device_mapping: list(range(0,2))`. Roles that share devices name
  the same ones. `CUDA_VISIBLE_DEVICES` stays in the environment, and lists count within it: with `4,5`, device 0 is the
  fourth GPU.
- **`fsdp`.** Next to `fsdp2` (verl, `skyrl_train`) it is the legacy wrapper, `fsdp_train` here. In `skyrl`, where it
  stands next to Megatron, it is the FSDP2 API, `fsdp2_train` here. Where a text does not tell which SkyRL it comes
  from, it is taken for `skyrl_train`; `--from skyrl` says otherwise.
- **Parameters in host memory** during a pass (`cpu_offload`, `offload_policy`) are one thing, moving states off the
  devices between phases (verl's `param_offload`, SkyRL's colocation) another: the second happens by itself where
  roles share devices.
- **A critic** runs with `gae`, a reference where a KL is used. Keys of a role that does not run are left out.
- **Lengths.** A `max_model_len` below prompt plus response is accepted, and cuts responses.
- **Never** is 0 or -1 in `save_steps` and `eval_steps`.
- **Numbers** such as `1e8` reach DeepSpeed as whole numbers.
- **Data.** Their Parquet files are read as they are: the conversation in `prompt`, the ground truth in
  `reward_model.ground_truth` or `reward_spec.ground_truth`. `roll prepare-data gsm8k` makes files of our own.
- **Rewards.** Theirs are chosen by a column of the data, ours in the configuration. Files with `gsm8k` in their name
  get `gsm8k_rule`; others are assumed to be mathematics, and the note says so. A `custom_reward_function` of verl is
  called from its file as verl calls it (`roll.rewards.function_file.score`); a reward model gets the role
  `reward_model`.
- **TRL.** Batches count completions and processes: a rollout has `per_device_train_batch_size` x processes x
  `steps_per_generation` of them. Steps (`max_steps`, `save_steps`) are optimizer steps there and rollouts here. To the
  spread of a group 1e-4 is added there and 1e-6 here: advantages of rewards of 0 and 1 differ by less than one part in
  2,000. `bnpo`, which divides by the tokens of one micro-batch, is refused where there are several.
- **OpenRLHF.** Its means are over the tokens of one micro-batch, averaged; here they are over the whole optimizer
  step: the same where micro-batches have as many tokens. Its whitening divides by N, ours by N - 1. The other
  algorithms are the same, which the tests compute on both sides.
"""
END = """## Adding a key

The tables are data: `roll/translation/verl.py`, `skyrl.py` and the files next to them. A `Rule` has their key, ours, a
conversion and a note; where several keys play together it states a fact, `roll/translation/assembly.py` does the
arithmetic, and `algorithms.py` and `sampling.py` that of the algorithm. A row of the algorithm needs one in
`tests/translation/test_algorithms.py`, which compares loss and gradient with the formula. This page is made from the
tables: `python -m roll.translation.page > docs/translation.md`.
"""


def page() -> str:
    """The whole page as Markdown."""
    lines = [INTRODUCTION]
    lines += dialect_lines(VERL)
    lines += ["## SkyRL", "", "Both packages, unless a row says otherwise.", ""]
    older = {section.title: section for section in SKYRL_TRAIN.sections}
    for section in SKYRL.sections:
        lines += [f"### SkyRL: {section.title.lower()}", "", *table(older[section.title], section), ""]
    lines += defaults(SKYRL_TRAIN, "Defaults of SkyRL")
    lines += dialect_lines(TRL_GRPO)
    for section in TRL_SFT.sections:
        lines += [f"### {section.title}", "", *table(section), ""]
    lines += dialect_lines(OPENRLHF)
    lines.append(END)
    return "\n".join(lines)


def dialect_lines(dialect: Dialect) -> Iterator[str]:
    yield from (f"## {dialect.title}", "")
    for section in dialect.sections:
        yield from (f"### {dialect.title}: {section.title.lower()}", "", *table(section), "")
    yield from defaults(dialect, f"Defaults of {dialect.title}")


def table(section: Section, newer: Section | None = None) -> Iterator[str]:
    """The rules of a section; notes of ``newer`` that differ are said beside the first."""
    yield from ("| theirs | ours | note |", "|---|---|---|")
    others = {rule.theirs: rule for rule in newer.rules} if newer else {}
    for rule in section.rules:
        note = rule.note
        other = others.get(rule.theirs, rule)
        if other.note != note:
            note = f"`skyrl_train`: {note}. `skyrl`: {other.note}"
        cells = ("<br>".join(f"`{name}`" for name in rule.spellings), ours_of(rule), note)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def ours_of(rule: Rule) -> str:
    return "<br>".join(f"`{key.replace('{rest}', '*')}`" for key in rule.ours) or "none"


def defaults(dialect: Dialect, title: str) -> Iterator[str]:
    values: Mapping[str, object] = dict(dialect.defaults)
    yield from (f"### {title}", "", "Written out in a whole run, where their key is not given.", "")
    yield from ("| theirs | default |", "|---|---|")
    for key, value in values.items():
        yield f"| `{key}` | `{value}` |"
    yield ""


if __name__ == "__main__":
    sys.stdout.write(page())
