"""Sessions, models and sampling sessions of the service, on its event loop, and the work that it queues."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from roll.serving.http import BadRequest
from roll.training_service.adapters import AdamOptions, AdapterWeights, Base, LoraOptions, Tenant
from roll.training_service.checkpoints import Store, check_name, expiry, missing
from roll.training_service.queue import Failure, Job, Queue, Result, Session, Slices
from roll.training_service.sampling import Sampler, SampleRequest, read_adapter
from roll.training_service.wire import PassRequest, pass_output

# A session without a sign of life for so long may lose its models, when another needs the room.
SESSION_SECONDS = 1800.0
KEPT_SAMPLERS = 8  # unnamed sampler weights that are kept of each model


@dataclass
class Model:
    """A model under training; ``tenant`` is there once the first request of its line is done."""

    session_id: str
    lora: LoraOptions
    tenant: Tenant | None = None
    # Sampling sessions with weights that have no name, the oldest first.
    unnamed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Source:
    """The weights of a sampling session."""

    key: str | None  # sessions with the same key have the same weights; None: the base model
    read: Callable[[], AdapterWeights] | None
    path: str | None = None


class Service:
    """Answers to requests whose fields have been read. Made on the event loop that it is used on. ``name``: of the base
    model, as clients give it; ``max_models``: models under training at a time; ``max_open``: requests of one model that
    wait."""

    def __init__(self, base: Base, sampler: Sampler, store: Store, name: str, max_models: int, max_open: int) -> None:
        self.base, self.store, self.name = base, store, name
        self._sampler, self._max_models = sampler, max_models
        self.queue = Queue(max_open)
        self.sessions: dict[str, Session] = {}
        self._models: dict[str, Model] = {}
        self._sources: dict[str, Source] = {}

    # Sessions

    def session(self, session_id: str) -> Session:
        """The session of an id; ``Refusal`` where there is none."""
        found = self.sessions.get(session_id)
        if found is None:
            raise missing(f"session {session_id[:100]}: the service was started again, or the session has ended")
        found.seen = time.monotonic()
        return found

    def finish_session(self, session_id: str) -> None:
        """Unload all that a session has in memory."""
        session = self.session(session_id)
        for model_id in list(session.models):
            self.unload(model_id)
        for sampler_id in session.samplers:
            self._sources.pop(sampler_id, None)
            self.queue.close_line(sampler_id)
        del self.sessions[session_id]

    # Models

    def create_model(
        self,
        session_id: str,
        model_seq_id: int,
        base_model: str | None,
        user_metadata: dict[str, Any] | None,
        lora: LoraOptions | None,
        path: str | None = None,
        optimizer: bool = False,
    ) -> str:
        """Queue a new model, or with ``path`` one that begins at a checkpoint; the id of the request."""
        session = self.session(session_id)
        model_id = f"{session_id}:train:{model_seq_id}"
        request_id = f"{model_id}:0"
        if request_id in self.queue.jobs:
            return request_id
        if base_model is not None:
            self.check_base(base_model)
        if path is not None:
            lora = LoraOptions(**self.store.find(path)[1]["lora"])
        assert lora is not None
        now = time.monotonic()
        for other, idle in list(self.sessions.items()):
            if len(self._models) >= self._max_models and other != session_id and now - idle.seen > SESSION_SECONDS:
                self.finish_session(other)
        if len(self._models) >= self._max_models:
            rule = f"{self._max_models} models are loaded, which is the most (--max-models)"
            raise BadRequest(f"create_model: {rule}; unload one, or end its session")
        model = Model(session_id, lora)
        self.queue.open_line(model_id, session, 1)

        def created() -> Result:
            try:
                tenant = Tenant(self.base, lora)
                if path is not None:
                    tenant.load(self.store.find(path)[0], optimizer)
                self.store.begin_run(
                    model_id, base_model=self.name, lora_rank=lora.rank, user_metadata=user_metadata or None
                )
                model.tenant = tenant
            except ValueError as error:
                return Failure(str(error))
            kind = "create_model" if path is None else "load_weights"
            return {"type": kind, "model_id": model_id, **({} if path is None else {"path": path})}

        self._models[model_id] = model
        session.models.append(model_id)
        self.queue.add(model_id, None, Job(request_id, created))
        return request_id

    def check_base(self, name: str) -> None:
        """Raise ``BadRequest`` for another base model than the one here."""
        if name != self.name:
            raise BadRequest(f"base_model: {name[:200]!r} is not served; {self.name!r} is", "base_model")

    def model(self, model_id: str) -> Model:
        """The model of an id; ``Refusal`` where there is none."""
        found = self._models.get(model_id)
        if found is None:
            raise missing(f"model {model_id[:100]}: it was unloaded, or the service was started again")
        if found.session_id in self.sessions:
            self.sessions[found.session_id].seen = time.monotonic()
        return found

    def unload(self, model_id: str) -> None:
        """Free a model's adapter and optimizer; its checkpoints stay."""
        model = self.model(model_id)
        self.queue.close_line(model_id)
        del self._models[model_id]
        self.sessions[model.session_id].models.remove(model_id)

    # Requests of a model, in the order of seq_id

    def _queue(self, model_id: str, seq_id: int, compute: Callable[[Tenant], Result | Slices]) -> str:
        request_id = f"{model_id}:{seq_id}"
        if request_id not in self.queue.jobs:
            model = self.model(model_id)

            def computed() -> Result | Slices:
                if model.tenant is None:
                    raise ValueError(f"{model_id}: the model could not be made")
                return compute(model.tenant)

            self.queue.add(model_id, seq_id, Job(request_id, computed))
        return request_id

    def forward_backward(self, request: PassRequest) -> str:
        backward = not request.forward_only

        def computed(tenant: Tenant) -> Slices:
            try:
                if request.problem is not None:
                    raise ValueError(request.problem)
                found = yield from tenant.forward_backward(request.data, request.loss, request.options, backward)
                return pass_output(*found)
            except Exception:
                # The next step, which may be on its way already, would lack this gradient.
                tenant.lacks_a_pass |= backward
                raise

        return self._queue(request.model_id, request.seq_id, computed)

    def optim_step(self, model_id: str, seq_id: int, options: Mapping[str, float]) -> str:
        """Queue a step of AdamW."""
        return self._queue(model_id, seq_id, lambda tenant: {"metrics": tenant.optim_step(AdamOptions(**options))})

    def save(
        self, kind: str, model_id: str, seq_id: int, name: str, ttl: int | None, metadata: object, overwrite: bool
    ) -> str:
        """Queue a checkpoint: ``weights`` with the optimizer, ``sampler_weights`` and ``external_weights`` without."""
        model = self.model(model_id)
        check_name(name, "path")
        lora = asdict(model.lora)
        meta = {"base_model": self.name, "lora": lora, "user_metadata": metadata, "expires_at": expiry(ttl)}

        def saved(tenant: Tenant) -> Result:
            write = partial(tenant.save, base=str(self.base.args.model_name_or_path), optimizer=kind == "weights")
            path = self.store.save(model_id, kind, name, write, meta, overwrite)
            call = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}
            return {"path": path, "type": call.get(kind, "save_weights_external")}

        return self._queue(model_id, seq_id, saved)

    def load(self, model_id: str, seq_id: int, path: str, optimizer: bool) -> str:
        def loaded(tenant: Tenant) -> Result:
            tenant.load(self.store.find(path)[0], optimizer)
            return {"type": "load_weights", "path": path, "model_id": model_id}

        return self._queue(model_id, seq_id, loaded)

    def snapshot(self, model_id: str, seq_id: int, sampling_seq_id: int) -> str:
        """Queue a sampling session of the weights as they are then."""
        model = self.model(model_id)
        sampler_id = f"{model.session_id}:sample:{sampling_seq_id}"
        held: list[AdapterWeights] = []

        def taken(tenant: Tenant) -> Result:
            held.append(tenant.weights())
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        request_id = f"{model_id}:{seq_id}"
        if request_id not in self.queue.jobs:
            self._queue(model_id, seq_id, taken)
            self._open_sampler(model.session_id, sampler_id, Source(sampler_id, lambda: held[0]))
            model.unnamed.append(sampler_id)
            for oldest in model.unnamed[:-KEPT_SAMPLERS]:
                self._sources.pop(oldest, None)
                self.queue.close_line(oldest)
            del model.unnamed[:-KEPT_SAMPLERS]
        return request_id

    # Sampling sessions

    def create_sampler(self, session_id: str, seq_id: int, base_model: str | None, path: str | None) -> str:
        sampler_id = f"{session_id}:sample:{seq_id}"
        if sampler_id in self._sources:
            return sampler_id
        if base_model is not None:
            self.check_base(base_model)
        source = Source(None, None)
        if path is not None:
            folder, meta = self.store.find(path)
            source = Source(f"{path}@{meta['time']}", partial(read_adapter, folder), path)
        self._open_sampler(session_id, sampler_id, source)
        return sampler_id

    def _open_sampler(self, session_id: str, sampler_id: str, source: Source) -> None:
        session = self.session(session_id)
        session.samplers.append(sampler_id)
        self._sources[sampler_id] = source
        self.queue.open_line(sampler_id, session, None)

    def sampler(self, sampler_id: str) -> Source:
        """The weights of a sampling session; ``Refusal`` where there is none."""
        found = self._sources.get(sampler_id)
        if found is None:
            rule = f"of each model the last {KEPT_SAMPLERS} without a name are kept"
            raise missing(f"sampling session {sampler_id[:100]}; {rule}, until the service ends")
        return found

    def sample(self, sampler_id: str, request: SampleRequest) -> str:
        if request.request_id not in self.queue.jobs:
            source = self.sampler(sampler_id)
            job = Job(request.request_id, None, (partial(self._sampled, source), request))
            self.queue.add(sampler_id, None, job)
        return request.request_id

    def _sampled(self, source: Source, requests: Sequence[SampleRequest]) -> dict[str, Result]:
        self._sampler.use(source.key, source.read)
        answers = self._sampler.sample(requests)
        return {name: Failure(own) if isinstance(own, str) else own for name, own in answers.items()}
