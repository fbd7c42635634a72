"""The log-probs of a configuration's engine and trainer: the certificate of a run with ``strict_on_policy``, which says
which had the same bits, and the operation in which two of them part.

For the latter engine and trainer are built in this process, as a worker builds them, with the trainer's weights in
both.  The engine answers some prompts of the data; the trainer computes the same tokens.  With ``hf_infer`` and a
trainer of Hugging Face modules what single operations compute for a sequence is compared as well, in the order of
computation.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from roll.checkpoint.folders import atomic_file
from roll.config.loader import LoadedConfig
from roll.config.reading.errors import ConfigError, Problem
from roll.config.run import PolicyRunConfig
from roll.distributed.nodes import environment, worker_threads
from roll.methods.base import COMPARED_TOKENS, SAME_WEIGHTS, UNEQUAL
from roll.methods.policy_plan import PolicyPlan
from roll.platforms import current_platform
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics
from roll.rollout.flow import sampling_params
from roll.strategies.base import ALL_WEIGHTS, ModelStrategy, Output, create_generation_strategy, create_strategy
from roll.strategies.engines.base import GenerationStrategy
from roll.strategies.engines.requests import GenerationOutput, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from roll.strategies.hf_infer.tracing import Trace

CERTIFICATE = "strict_on_policy.json"
ENGINE, TRAINER = "actor_infer", "actor_train"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_REASONS = {"o_proj in": "attention", "down_proj in": "the activation", "norm in": "the sum of the residual"}


class LogProbsDiffer(RuntimeError):
    """Engine and trainer gave a token log-probs of different bits."""


class Certificate:
    """Record of what a run has compared, in ``strict_on_policy.json`` of its output folder."""

    def __init__(self, config: PolicyRunConfig, plan: PolicyPlan) -> None:
        self._path = plan.output_dir / CERTIFICATE
        self._older = 0
        trainer, engine = config.actor_train, config.actor_infer
        lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
        # Which instructions torch uses decides the last bits, and with them whom the certificate is for.
        processor = {"name": name, "instructions": torch.backends.cpu.get_cpu_capability(), "cores": os.cpu_count()}
        self._facts: dict[str, Any] = {
            "compared": "the engine's log-prob of each sampled token with the trainer's in the first optimizer step of "
            "a batch, for tokens that were sampled with the weights of that step",
            "equal": True,
            "steps": 0,
            "tokens": 0,
            "tokens_of_older_weights": 0,
            "engine": engine.strategy_args.strategy_name,
            "trainer": trainer.strategy_args.strategy_name,
            "ranks": len(trainer.device_mapping or [0]),
            "dtype": trainer.model_args.dtype,
            "model": plan.roles["actor_train"].section.model_args.model_name_or_path,
            "versions": {name: version(name) for name in ("torch", "transformers")},
            "processor": processor,
        }

    def go_on(self) -> None:
        """Add to what the run compared before it was resumed."""
        try:
            before = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return
        self._facts |= {name: before[name] for name in ("steps", "tokens", "tokens_of_older_weights")}

    def add(self, metrics: Metrics) -> None:
        """Count a step whose update has ended well."""
        self._facts["steps"] += 1
        self._facts["tokens"] += int(metrics[COMPARED_TOKENS].value())
        self._facts["tokens_of_older_weights"] += self._older
        self._write()

    @contextmanager
    def judging(self, loaded: LoadedConfig[Any], batch: DataProto, step: int) -> Iterator[None]:
        """Have the update in the block compare what was sampled with weights ``step``; turn its failure into one that
        says in which operation the computations part. Raises ``LogProbsDiffer``: of a token."""
        tensors = batch.batch
        # Asynchronous runs also train tokens of older weights, whose log-probs differ as they must.
        same = tensors["response_mask"] & (tensors["weight_versions"] == step)
        tensors[SAME_WEIGHTS] = same
        self._older = int((tensors["response_mask"] & ~same).sum())
        try:
            yield
        except RuntimeError as error:
            found = UNEQUAL.search(str(error))
            if found is None:
                raise
            sequence = [int(token) for token in found["sequence"].split(",")]
            position = int(found["position"])
            try:
                operation = locate(loaded, sequence, position)
            except (ConfigError, RuntimeError, ValueError, OSError) as failure:
                operation = f"not found: {failure}"
            self._facts |= {
                "equal": False,
                "first_difference": {
                    "step": step,
                    "position": position,
                    "trainer": float(found["trainer"]),
                    "engine": float(found["engine"]),
                    "operation": operation,
                    "sequence": sequence,
                },
            }
            self._write()
            raise LogProbsDiffer(
                f"strict_on_policy: in step {step} the log-prob of token {position} of a sample is {found['trainer']} "
                f"in the trainer and {found['engine']} in the engine; they part in {operation}; {self._path} has the "
                "sequence"
            ) from error

    def _write(self) -> None:
        with atomic_file(self._path) as written:
            written.write_text(json.dumps(self._facts, indent=1) + "\n")


@dataclass(frozen=True)
class Sample:
    """A sampled response, and its log-probs by both."""

    prompt: list[int]
    response: list[int]
    engine: list[float]
    trainer: list[float]

    @property
    def first_difference(self) -> int | None:
        """The first token of the response whose log-probs differ."""
        pairs = enumerate(zip(self.engine, self.trainer, strict=True))
        return next((index for index, (one, other) in pairs if one != other), None)


@dataclass(frozen=True)
class Parting:
    """The first operation whose results differ."""

    operation: str  # name of the module, with `in` or `out`
    position: int  # first token of the sequence for which it differs
    difference: float  # largest absolute one
    before: str | None  # the operation before it, whose results are equal; None: it is the first

    def __str__(self) -> str:
        name, _, side = self.operation.rpartition(" ")
        layer = _LAYER.search(name)
        where = f"layer {layer.group(1)}, {name}" if layer else name
        if side == "in":
            reason = next((text for end, text in _REASONS.items() if self.operation.endswith(end)), "what is before it")
            where += f" (its input: {reason}, after {self.before})"
        return f"{where}: first at token {self.position}, by up to {self.difference:.3g}"


def parting(trainer: Trace, engine: Trace) -> Parting | None:
    """The first operation, in the trainer's order, that gives some token other bits; None: all that both have agree."""
    before = None
    for name, rows in trainer.items():
        others = engine.get(name, {})
        common = sorted(rows.keys() & others.keys())
        different = [position for position in common if not bool((rows[position] == others[position]).all())]
        if different:
            largest = max(float((rows[one].float() - others[one].float()).abs().max()) for one in different)
            return Parting(name, different[0], largest, before)
        before = name if common else before
    return None


def parting_in_words(trainer: Trace, engine: Trace) -> str:
    """:func:`parting`, also where all operations agree and the log-probs do not."""
    return str(parting(trainer, engine) or "the output matrix or the log-softmax: all operations before them agree")


def by_layer(trainer: Trace, engine: Trace) -> dict[str, tuple[int, int, float]]:
    """By layer: rows compared, rows that differ, and the largest absolute difference."""
    found: dict[str, tuple[int, int, float]] = {}
    for name, rows in trainer.items():
        layer = _LAYER.search(name)
        key = f"layer {layer.group(1)}" if layer else name.rpartition(" ")[0]
        compared, different, largest = found.get(key, (0, 0, 0.0))
        for position in rows.keys() & engine.get(name, {}).keys():
            off = float((rows[position].float() - engine[name][position].float()).abs().max())
            compared, different, largest = compared + 1, different + (off != 0.0), max(largest, off)
        if compared:
            found[key] = compared, different, largest
    return found


class Pair:
    """The engine and the trainer of a configuration on one rank, with equal weights; ConfigError: a role that one rank
    cannot compute."""

    def __init__(self, loaded: LoadedConfig[Any]) -> None:
        self.loaded = loaded
        sections = (loaded.plan.roles[name].section for name in (TRAINER, ENGINE))
        trained, engine = (
            replace(role, device_mapping=(role.device_mapping or [0])[:1], world_size=1) for role in sections
        )
        threads = worker_threads(loaded.plan.num_devices_per_node)
        # As many threads as a worker has: their number decides the order of sums, and so the last bits.
        variables = {"OMP_NUM_THREADS": threads} | dict(loaded.config.system_envs) | trained.system_envs
        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
        try:
            self.trainer: ModelStrategy = create_strategy(trained, seed=loaded.config.seed)
            self.trainer.initialize()
            self.engine: GenerationStrategy = create_generation_strategy(engine, loaded.config.seed)
            self.engine.initialize()
        except ValueError as error:
            raise ConfigError([Problem("bisect-logprobs", None, f"one rank cannot compute this: {error}")]) from error
        self.engine.start_weight_update(0)
        for bucket in self.trainer.named_full_weights(2**28, ALL_WEIGHTS):
            self.engine.update_weights(dict(bucket))
        self.engine.finish_weight_update()

    def params(self, max_new_tokens: int) -> SamplingParams:
        return sampling_params(self.loaded.plan.roles[ENGINE].section.generating_args, max_new_tokens)

    def sample(self, prompts: Sequence[list[int]], count: int, max_new_tokens: int) -> list[GenerationOutput]:
        """Answers to all prompts, the same in each call."""
        params = self.params(max_new_tokens)
        self.engine.add_requests(
            [GenerationRequest(str(i), list(one), replace(params, seed=i), count) for i, one in enumerate(prompts)]
        )
        outputs: list[GenerationOutput] = []
        while self.engine.num_unfinished:
            outputs += self.engine.step()
        return sorted(outputs, key=lambda one: (int(one.request_id), one.sample_index))

    def compute(self, rows: Sequence[tuple[list[int], list[int]]], temperature: float) -> list[list[float]]:
        """The trainer's log-probs of each response."""
        width = max(len(prompt) + len(response) for prompt, response in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        masks = torch.zeros(2, len(rows), width, dtype=torch.bool)
        for row, (prompt, response) in enumerate(rows):
            end = len(prompt) + len(response)
            ids[row, :end] = torch.tensor([*prompt, *response])
            masks[0, row, :end], masks[1, row, len(prompt) : end] = True, True
        batch = {"input_ids": ids, "attention_mask": masks[0], "response_mask": masks[1]}
        found = self.trainer.forward(batch, [Output.LOG_PROBS], temperature)[Output.LOG_PROBS]
        return [found[row, len(p) : len(p) + len(r)].tolist() for row, (p, r) in enumerate(rows)]

    def samples(self, prompts: Sequence[list[int]], count: int, max_new_tokens: int) -> list[Sample]:
        outputs = self.sample(prompts, count, max_new_tokens)
        rows = [(list(prompts[int(one.request_id)]), list(one.token_ids)) for one in outputs]
        computed = self.compute(rows, self.params(1).temperature or 1.0)
        return [
            Sample(prompt, response, list(one.log_probs), own)
            for (prompt, response), one, own in zip(rows, outputs, computed, strict=True)
        ]

    @property
    def has_operations(self) -> bool:
        """True if the results of single operations can be compared."""
        from roll.strategies.hf_infer import HfInferStrategy
        from roll.strategies.training.data_parallel import DataParallelStrategy

        return isinstance(self.engine, HfInferStrategy) and isinstance(self.trainer, DataParallelStrategy)

    def traces(
        self, samples: Sequence[Sample], chosen: Sample, prompts: Sequence[list[int]], count: int, max_new_tokens: int
    ) -> tuple[Trace, Trace]:
        """Operations of trainer and engine for one of the samples, computed with the others as before."""
        from roll.strategies.hf_infer import tracing

        engine, trainer = (tracing.Recorder([*chosen.prompt, *chosen.response]) for _ in range(2))
        running: Any = self.engine
        with tracing.watching_engine(running, engine):
            self.sample(prompts, count, max_new_tokens)
        strategy: Any = self.trainer
        with tracing.watching_trainer(strategy, trainer):
            self.compute([(one.prompt, one.response) for one in samples], self.params(1).temperature or 1.0)
        return trainer.trace, engine.trace


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone, on the first device, as backends need one."""
    if dist.is_initialized():
        yield
        return
    platform = current_platform()
    if platform.device_type != "cpu":
        platform.set_device(0)
    own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with tempfile.TemporaryDirectory() as folder, environment(own):
        store = f"file://{folder}/store"
        dist.init_process_group(platform.process_group_backend, init_method=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def locate(loaded: LoadedConfig[Any], sequence: Sequence[int], position: int) -> str:
    """Say in which operation engine and trainer part for a sequence of a run, with the weights that the run began
    with: its tokens before ``position`` as a prompt, and half of them with sampled tokens after them."""
    count, longest = 2, max(2, min(32, len(sequence) - position))
    prompts = [list(sequence[:position]), list(sequence[: max(1, position // 2)])]
    with one_rank():
        pair = Pair(loaded)
        samples = pair.samples(prompts, count, longest)
        chosen = next((one for one in samples if one.first_difference is not None), None)
        if chosen is None:
            return "no operation that shows with the weights that the run began with: both agree on this sequence then"
        return parting_in_words(*pair.traces(samples, chosen, prompts, count, longest))
