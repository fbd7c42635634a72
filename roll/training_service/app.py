"""The HTTP interface of the ``tinker`` SDK, version 0.38: routes, fields of their bodies, and what is refused."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from roll.serving.http import BadRequest, Refusal, answered, check_key, is_same, read_bytes, read_json, wrong_key
from roll.training_service.adapters import LoraOptions
from roll.training_service.checkpoints import SCHEME, expiry
from roll.training_service.queue import Failure, Session
from roll.training_service.sampling import MAX_SAMPLES, SampleRequest
from roll.training_service.service import Service
from roll.training_service.wire import (
    MAX_DATA,
    PROTOBUF,
    SERVED_NOWHERE,
    Fields,
    check_optimizer,
    decompressed,
    read_params,
    read_pass,
    read_prompt,
)

T = TypeVar("T")
# Flags of the client: what it must not rely on is off. A queue of samples on a CPU may take long: none is stuck.
CONFIG = {
    "proto_compress_fwdbwd": True,
    "fwdbwd_max_chunk_len": MAX_DATA // 4,
    "sample_enable_stuck_detection": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
    "pjwt_auth_enabled": False,
}
URL_SECONDS = 3600
MAX_TOP = 128  # most probable tokens at a position, at most


# Of a handler: a response, a JSON body, the id of a queued request, or nothing to say (status 204).
Answer = Response | Mapping[str, Any] | str | None


@dataclass(frozen=True, eq=False)
class Endpoint:
    """Routes to a service."""

    service: Service
    api_key: str  # that clients must send; empty: none
    secret: bytes  # signs the addresses of files
    tokenizer: str  # folder or hub name, as clients find it

    def app(self) -> Starlette:
        service, store = self.service, self.service.store
        run, one = "/training_runs/{run}", "/training_runs/{run}/checkpoints/{kind}/{name}"
        model = {"model_name": service.name, "max_context_length": service.base.max_length}
        served = {"supported_models": [{**model, "trainable": True, "sampleable": True}]}
        dynamic = {"refresh_interval_sec": 3600, "sample_cancel_enabled": False}
        by_request: list[tuple[str, str, Callable[[Request], Answer | Awaitable[Answer]]]] = [
            ("GET", "/healthz", lambda _: {"status": "ok"}),
            ("GET", "/get_server_capabilities", lambda _: served),
            ("POST", "/client/config", lambda _: CONFIG),
            ("POST", "/client/dynamic_config", lambda _: dynamic),
            ("GET", "/sessions", lambda request: _page("sessions", request, list(service.sessions))),
            ("GET", "/sessions/{session}", self.session),
            ("POST", "/sessions/{session}/finish", self.finish_session),
            ("POST", "/forward_backward", self.forward_backward),
            ("GET", "/samplers/{sampler}", self.sampler),
            ("GET", "/training_runs", lambda request: _page("training_runs", request, store.runs())),
            ("GET", run, lambda request: store.run(request.path_params["run"])),
            ("GET", run + "/checkpoints", lambda request: {"checkpoints": store.listed(request.path_params["run"])}),
            ("GET", "/checkpoints", lambda request: _page("checkpoints", request, store.listed())),
            ("DELETE", one, lambda request: shutil.rmtree(store.find(_path(request))[0])),
            ("POST", one + "/publish", lambda request: store.change(_path(request), public=True)),
            ("DELETE", one + "/publish", lambda request: store.change(_path(request), public=False)),
            ("PUT", one + "/ttl", self.set_ttl),
            ("GET", one + "/external_weights_urls", self.weights_urls),
        ]
        by_body: dict[str, Callable[[Fields], Answer | Awaitable[Answer]]] = {
            "/telemetry": lambda _: {"status": "accepted"},
            "/create_session": self.create_session,
            "/session_heartbeat": self.heartbeat,
            "/create_model": self.create_model,
            "/get_info": self.get_info,
            "/unload_model": self.unload_model,
            "/optim_step": self._in_order(self.optim_step),
            "/save_weights": self._in_order(partial(self._save, "weights")),
            "/save_weights_for_sampler": self._in_order(partial(self._save, "sampler_weights")),
            "/save_weights_external": self._in_order(partial(self._save, "external_weights")),
            "/load_weights": self.load_weights,
            "/weights_info": self.weights_info,
            "/create_sampling_session": self.create_sampling_session,
            "/asample": self.sample,
            "/retrieve_future": self.retrieve_future,
        }

        def route(method: str, path: str, handler: Callable[[Any], Any], of_body: bool = False) -> Route:
            async def handle(request: Request, _: None) -> Response:
                answer = handler(Fields(await read_json(request)) if of_body else request)
                answer = await answer if inspect.isawaitable(answer) else answer
                if answer is None:
                    return Response(status_code=204)
                if isinstance(answer, Response):
                    return answer
                return JSONResponse({"request_id": answer} if isinstance(answer, str) else answer)

            return Route(path, answered(handle, partial(check_key, expected=self.api_key)), methods=method.split())

        made = [route(method, f"/api/v1{path}", handler) for method, path, handler in by_request]
        made += [route("POST", f"/api/v1{path}", handler, of_body=True) for path, handler in by_body.items()]
        # The signature of the address stands in for the key, as for any client of the SDK.
        address = "/api/v1/files/{run}/{name}/{file}/{until:int}/{signature}"
        made.append(Route(address, answered(self._file, lambda _: None), name="file"))
        return Starlette(routes=[*made, route("GET POST PUT DELETE PATCH", "/{path:path}", _unknown)])

    # The service and its clients

    def create_session(self, fields: Fields) -> Answer:
        fields.get("tags", list)
        fields.get("sdk_version", str)
        fields.off("project_id")
        metadata, name = fields.get("user_metadata", dict), fields.get("display_name", str)
        fields.end()
        session_id = str(uuid.uuid4())
        self.service.sessions[session_id] = Session(metadata, name)
        return {"type": "create_session", "session_id": session_id}

    def heartbeat(self, fields: Fields) -> Answer:
        self.service.session(fields.need("session_id", str))
        return {"type": "session_heartbeat"}

    def session(self, request: Request) -> Answer:
        found = self.service.session(request.path_params["session"])
        about = {"user_metadata": found.user_metadata, "display_name": found.display_name}
        return {"training_run_ids": found.models, "sampler_ids": found.samplers, **about}

    def finish_session(self, request: Request) -> Answer:
        self.service.finish_session(request.path_params["session"])
        return {}

    # Models

    def create_model(self, fields: Fields) -> Answer:
        check_optimizer(fields)
        config = fields.get("lora_config", dict)
        if config is None:
            raise BadRequest("lora_config is missing: whole models are not trained here, adapters are", "lora_config")
        own = Fields(config, "lora_config")
        flags = {key: own.get(key, bool, True) for key in ("train_unembed", "train_mlp", "train_attn")}
        lora = LoraOptions(own.need("rank", int), own.get("seed", int) or 0, **flags)  # type: ignore[arg-type]
        own.end()
        made = (fields.need("session_id", str), fields.need("model_seq_id", int), fields.need("base_model", str))
        metadata = fields.get("user_metadata", dict)
        fields.end()
        return self.service.create_model(*made, metadata, lora)

    def get_info(self, fields: Fields) -> Answer:
        model_id, name = fields.need("model_id", str), self.service.name
        rank = self.service.model(model_id).lora.rank
        data = {"model_name": name, "tokenizer_id": self.tokenizer, "arch": self.service.base.model.config.model_type}
        info = {"is_lora": True, "lora_rank": rank, "model_name": name}
        return {"type": "get_info", "model_id": model_id, "model_data": data, **info}

    def unload_model(self, fields: Fields) -> Answer:
        model_id = fields.need("model_id", str)
        self.service.unload(model_id)
        return {"type": "unload_model", "model_id": model_id, "request_id": f"{model_id}:0"}

    async def forward_backward(self, request: Request) -> Answer:
        body, coding = await read_bytes(request), request.headers.get("content-encoding", "identity")
        if request.headers.get("content-type") != PROTOBUF or coding not in ("identity", "zstd"):
            raise BadRequest(f"the body must be {PROTOBUF}, as it is or in the coding zstd", status=415)
        parsed = await asyncio.to_thread(lambda: read_pass(decompressed(body) if coding == "zstd" else body))
        return self.service.forward_backward(parsed)

    def _in_order(self, queue: Callable[[Fields, str, int], str]) -> Callable[[Fields], str]:
        """Have ``queue`` accept requests of a model; one that is refused counts, so that later ones can go on."""

        def handle(fields: Fields) -> str:
            model_id, seq_id = fields.need("model_id", str), fields.need("seq_id", int)
            try:
                return queue(fields, model_id, seq_id)
            except Exception:
                self.service.queue.skip(model_id, seq_id)
                raise

        return handle

    def optim_step(self, fields: Fields, model_id: str, seq_id: int) -> str:
        own = fields.get("adam_params", dict)
        if own is None:
            raise BadRequest("adam_params is missing: AdamW is the only optimizer here", "adam_params")
        adam = Fields(own, "adam_params")
        keys = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
        values = {key: adam.get(key, float) for key in keys}
        adam.end()
        fields.end()
        given = {key: value for key, value in values.items() if value is not None}
        return self.service.optim_step(model_id, seq_id, given)

    # Checkpoints

    def _save(self, kind: str, fields: Fields, model_id: str, seq_id: int) -> str:
        fields.off("age_encryption_recipients")
        fields.off("kind", "snapshot")
        name, ttl = fields.get("path", str), fields.get("ttl_seconds", int)
        metadata, overwrite = fields.get("user_metadata", dict), fields.get("overwrite", bool) or False
        sampling_seq_id = fields.get("sampling_session_seq_id", int)
        fields.end()
        if name is None and kind == "sampler_weights" and sampling_seq_id is not None:
            return self.service.snapshot(model_id, seq_id, sampling_seq_id)
        if name is None:
            raise BadRequest("path is missing: the name of the checkpoint", "path")
        return self.service.save(kind, model_id, seq_id, name, ttl, metadata, overwrite)

    def load_weights(self, fields: Fields) -> Answer:
        fields.off("weights_access_token")
        check_optimizer(fields)
        path, optimizer = fields.need("path", str), fields.need("optimizer", bool)
        session_id = fields.get("session_id", str)
        if session_id is not None:
            made = (fields.need("model_seq_id", int), fields.get("base_model", str), fields.get("user_metadata", dict))
            fields.end()
            return self.service.create_model(session_id, *made, None, path, optimizer)
        model_id, seq_id = fields.need("model_id", str), fields.need("seq_id", int)
        fields.end()
        return self.service.load(model_id, seq_id, path, optimizer)

    def weights_info(self, fields: Fields) -> Answer:
        meta = self.service.store.find(fields.need("tinker_path", str))[1]
        lora = meta["lora"]
        flags = {key: lora[key] for key in ("train_unembed", "train_mlp", "train_attn")}
        return {"base_model": meta["base_model"], "is_lora": True, "lora_rank": lora["rank"], **flags}

    async def set_ttl(self, request: Request) -> Answer:
        seconds = Fields(await read_json(request)).get("ttl_seconds", int)
        self.service.store.change(_path(request), expires_at=expiry(seconds))
        return None

    def weights_urls(self, request: Request) -> Answer:
        folder, until = self.service.store.find(_path(request))[0], int(time.time()) + URL_SECONDS
        run, name = request.path_params["run"], request.path_params["name"]
        if folder.parent.name != "external_weights":
            raise BadRequest("only weights of save_weights_external are downloaded")
        urls = {}
        for file in sorted(folder.glob("adapter_*")):
            parts = {"run": run, "name": name, "file": file.name, "until": until}
            urls[file.name] = str(request.url_for("file", **parts, signature=self._signature(parts)))
        return {"urls": urls, "expires": datetime.fromtimestamp(until, UTC).isoformat()}

    def _signature(self, parts: Mapping[str, Any]) -> str:
        signed = "/".join(str(parts[key]) for key in ("run", "name", "file", "until"))
        return hmac.new(self.secret, signed.encode(), "sha256").hexdigest()

    async def _file(self, request: Request, _: None) -> Response:
        given = request.path_params
        if not is_same(given["signature"], self._signature(given)) or given["until"] < time.time():
            raise wrong_key("the signature of the address")
        folder, _meta = self.service.store.find(f"{SCHEME}{given['run']}/external_weights/{given['name']}")
        return FileResponse(folder / Path(given["file"]).name)

    # Samples and results

    def create_sampling_session(self, fields: Fields) -> Answer:
        session_id, seq_id = fields.need("session_id", str), fields.need("sampling_session_seq_id", int)
        base_model, path = fields.get("base_model", str), fields.get("model_path", str)
        fields.end()
        if base_model is None and path is None:
            raise BadRequest("base_model or model_path must be given")
        made = self.service.create_sampler(session_id, seq_id, base_model, path)
        return {"type": "create_sampling_session", "sampling_session_id": made}

    def sampler(self, request: Request) -> Answer:
        name = request.path_params["sampler"]
        path = self.service.sampler(name).path
        return {"sampler_id": name, "base_model": self.service.name, "model_path": path}

    def sample(self, fields: Fields) -> Answer:
        sampler_id, seq_id = fields.need("sampling_session_id", str), fields.need("seq_id", int)
        fields.off("record_stability_info", False)
        fields.off("target_prompt_logprobs")
        fields.off("prompt_alt_tokens_k", 0)
        count = fields.get("num_samples", int, 1) or 0
        if not 1 <= count <= MAX_SAMPLES:
            raise BadRequest(f"num_samples: {count} must be in [1, {MAX_SAMPLES}]", "num_samples")
        prompt = read_prompt(fields.need("prompt", dict))
        tops = [fields.get(key, int, 0) or 0 for key in ("topk_sample_logprobs", "topk_prompt_logprobs")]
        if not all(0 <= top <= MAX_TOP for top in tops):
            raise BadRequest(f"topk_sample_logprobs, topk_prompt_logprobs: {tops} must be in [0, {MAX_TOP}]")
        longest = self.service.base.max_length
        params = read_params(fields.need("sampling_params", dict), longest - len(prompt), tops[0])
        last_n = fields.get("prompt_logprobs_last_n", int)
        if last_n is not None and not 1 <= last_n < len(prompt):
            rule = f"{last_n} must be in [1, {len(prompt) - 1}]"
            raise BadRequest(f"prompt_logprobs_last_n: {rule}", "prompt_logprobs_last_n")
        wants = fields.get("prompt_logprobs", bool) or False
        fields.end()
        if not 1 <= len(prompt) < longest or not all(0 <= token < self.service.base.vocabulary for token in prompt):
            rule = f"must have 1 to {longest - 1} token ids in [0, {self.service.base.vocabulary})"
            raise BadRequest(f"prompt: {len(prompt)} token ids; it {rule}", "prompt")
        request_id = f"{sampler_id}:{seq_id}"
        queued = SampleRequest(request_id, prompt, params, count, wants, tops[1], last_n)
        self.service.sample(sampler_id, queued)
        ids = [f"{request_id}:{index}" for index in range(count)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    async def retrieve_future(self, fields: Fields) -> Answer:
        request_id = fields.need("request_id", str)
        result = await self.service.queue.result(request_id)
        if result is None:
            return {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        if isinstance(result, Failure):  # ``RequestFailedResponse`` of the SDK
            return {"error": result.message, "category": "user" if result.user else "server"}
        return Response(result, media_type=PROTOBUF) if isinstance(result, bytes) else result


async def _unknown(request: Request) -> Response:
    raise Refusal(404, f"{request.method} {request.url.path[:200]} {SERVED_NOWHERE}", "not_found_error")


def _path(request: Request) -> str:
    return SCHEME + "/".join(request.path_params[key] for key in ("run", "kind", "name"))


def _page(name: str, request: Request, items: list[T]) -> dict[str, Any]:
    try:
        offset, limit = (int(request.query_params.get(key, value)) for key, value in (("offset", 0), ("limit", 20)))
    except ValueError as error:
        raise BadRequest("offset and limit must be integers") from error
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return {name: items[max(offset, 0) : max(offset, 0) + max(limit, 0)], "cursor": cursor}
