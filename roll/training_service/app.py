"""The HTTP interface of the ``tinker`` SDK, version 0.38: routes, fields of their bodies, and what is refused."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from roll.serving.http import answered, is_same, key_of, read_bytes, read_json
from roll.serving.refusals import BadRequest, Refusal, wrong_key
from roll.training_service.adapters import LoraOptions
from roll.training_service.checkpoints import SCHEME, expiry
from roll.training_service.fields import SERVED_NOWHERE, Fields, check_optimizer, read_params, read_prompt
from roll.training_service.queue import encoded
from roll.training_service.sampling import MAX_SAMPLES, SampleRequest
from roll.training_service.service import Service
from roll.training_service.wire import MAX_DATA, PROTOBUF, decompressed, read_pass

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
CONFIG = {
    "proto_compress_fwdbwd": True,
    "fwdbwd_max_chunk_len": MAX_DATA // 4,
    "sample_enable_stuck_detection": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
    "pjwt_auth_enabled": False,
}
"""Flags of the client: what it must not rely on is off. A queue of samples on a CPU may take long: none is stuck."""
URL_SECONDS = 3600
MAX_TOP = 128
"""Most probable tokens at a position, at most."""


class Endpoint:
    """Routes to a service.

    Args:
        api_key: that clients must send; empty: none.
        secret: signs the addresses of files.
        tokenizer: folder or hub name, as clients find it.
    """

    def __init__(self, service: Service, api_key: str, secret: bytes, tokenizer: str) -> None:
        self._service, self._api_key, self._secret, self._tokenizer = service, api_key, secret, tokenizer

    def app(self) -> Starlette:
        runs, one = "/training_runs", "/training_runs/{run}/checkpoints/{kind}/{name}"
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "/healthz", self.health),
            ("GET", "/get_server_capabilities", self.capabilities),
            ("POST", "/client/config", self.client_config),
            ("POST", "/client/dynamic_config", self.dynamic_config),
            ("POST", "/telemetry", self.telemetry),
            ("POST", "/create_session", self.create_session),
            ("POST", "/session_heartbeat", self.heartbeat),
            ("GET", "/sessions", self.sessions),
            ("GET", "/sessions/{session}", self.session),
            ("POST", "/sessions/{session}/finish", self.finish_session),
            ("POST", "/create_model", self.create_model),
            ("POST", "/get_info", self.get_info),
            ("POST", "/unload_model", self.unload_model),
            ("POST", "/forward_backward", self.forward_backward),
            ("POST", "/optim_step", self.optim_step),
            ("POST", "/save_weights", self.save_weights),
            ("POST", "/save_weights_for_sampler", self.save_for_sampler),
            ("POST", "/save_weights_external", self.save_external),
            ("POST", "/load_weights", self.load_weights),
            ("POST", "/weights_info", self.weights_info),
            ("POST", "/create_sampling_session", self.create_sampling_session),
            ("GET", "/samplers/{sampler}", self.sampler),
            ("POST", "/asample", self.sample),
            ("POST", "/retrieve_future", self.retrieve_future),
            ("GET", runs, self.runs),
            ("GET", runs + "/{run}", self.run),
            ("GET", runs + "/{run}/checkpoints", self.run_checkpoints),
            ("GET", "/checkpoints", self.checkpoints),
            ("DELETE", one, self.delete_checkpoint),
            ("POST", one + "/publish", self.publish),
            ("DELETE", one + "/publish", self.publish),
            ("PUT", one + "/ttl", self.set_ttl),
            ("GET", one + "/external_weights_urls", self.weights_urls),
        ]
        made = [Route(f"/api/v1{path}", self._answered(handler), methods=[method]) for method, path, handler in routes]
        # The signature of the address stands in for the key, as for any client of the SDK.
        address = "/api/v1/files/{run}/{name}/{file}/{until:int}/{signature}"
        files = Route(address, answered(self._file, lambda _: None), name="file")
        methods = ["GET", "POST", "PUT", "DELETE", "PATCH"]
        return Starlette(routes=[*made, files, Route("/{path:path}", self._answered(self._unknown), methods=methods)])

    def _answered(self, handler: Handler) -> Handler:
        async def handle(request: Request, _: None) -> Response:
            return await handler(request)

        return answered(handle, self._admit)

    def _admit(self, request: Request) -> None:
        if self._api_key and not is_same(key_of(request), self._api_key):
            raise wrong_key()

    async def _unknown(self, request: Request) -> Response:
        raise Refusal(404, f"{request.method} {request.url.path[:200]} {SERVED_NOWHERE}", "not_found_error")

    # The service and its clients

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def capabilities(self, request: Request) -> Response:
        model = {
            "model_name": self._service.name,
            "max_context_length": self._service.base.max_length,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [model]})

    async def client_config(self, request: Request) -> Response:
        return JSONResponse(CONFIG)

    async def dynamic_config(self, request: Request) -> Response:
        return JSONResponse({"refresh_interval_sec": 3600, "sample_cancel_enabled": False})

    async def telemetry(self, request: Request) -> Response:
        await read_json(request)
        return JSONResponse({"status": "accepted"})

    async def create_session(self, request: Request) -> Response:
        fields = Fields(await read_json(request))
        fields.get("tags", list)
        fields.get("sdk_version", str)
        fields.off("project_id")
        session_id = self._service.create_session(fields.get("user_metadata", dict), fields.get("display_name", str))
        fields.end()
        return JSONResponse({"type": "create_session", "session_id": session_id})

    async def heartbeat(self, request: Request) -> Response:
        self._service.session(Fields(await read_json(request)).need("session_id", str))
        return JSONResponse({"type": "session_heartbeat"})

    async def sessions(self, request: Request) -> Response:
        return JSONResponse({"sessions": _page(request, self._service.sessions())[0]})

    async def session(self, request: Request) -> Response:
        found = self._service.session(request.path_params["session"])
        return JSONResponse(
            {
                "training_run_ids": found.models,
                "sampler_ids": found.samplers,
                "user_metadata": found.user_metadata,
                "display_name": found.display_name,
            }
        )

    async def finish_session(self, request: Request) -> Response:
        self._service.finish_session(request.path_params["session"])
        return JSONResponse({})

    # Models

    async def create_model(self, request: Request) -> Response:
        fields = Fields(await read_json(request))
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
        return _future(self._service.create_model(*made, metadata, lora))

    async def get_info(self, request: Request) -> Response:
        model_id = Fields(await read_json(request)).need("model_id", str)
        model, name = self._service.model(model_id), self._service.name
        data = {"model_name": name, "tokenizer_id": self._tokenizer, "arch": self._service.base.model.config.model_type}
        info = {"is_lora": True, "lora_rank": model.lora.rank, "model_name": name}
        return JSONResponse({"type": "get_info", "model_id": model_id, "model_data": data, **info})

    async def unload_model(self, request: Request) -> Response:
        model_id = Fields(await read_json(request)).need("model_id", str)
        self._service.unload(model_id)
        return JSONResponse({"type": "unload_model", "model_id": model_id, "request_id": f"{model_id}:0"})

    async def forward_backward(self, request: Request) -> Response:
        body, coding = await read_bytes(request), request.headers.get("content-encoding", "identity")
        if request.headers.get("content-type") != PROTOBUF or coding not in ("identity", "zstd"):
            raise BadRequest(f"the body must be {PROTOBUF}, as it is or in the coding zstd", status=415)
        parsed = await asyncio.to_thread(lambda: read_pass(decompressed(body) if coding == "zstd" else body))
        return _future(self._service.forward_backward(parsed))

    async def _in_order(self, request: Request, queue: Callable[[Fields, str, int], str]) -> Response:
        """Have ``queue`` accept a request of a model; one that is refused counts, so that later ones can go on."""
        fields = Fields(await read_json(request))
        model_id, seq_id = fields.need("model_id", str), fields.need("seq_id", int)
        try:
            return _future(queue(fields, model_id, seq_id))
        except Exception:
            self._service.queue.skip(model_id, seq_id)
            raise

    async def optim_step(self, request: Request) -> Response:
        def queue(fields: Fields, model_id: str, seq_id: int) -> str:
            own = fields.get("adam_params", dict)
            if own is None:
                raise BadRequest("adam_params is missing: AdamW is the only optimizer here", "adam_params")
            adam = Fields(own, "adam_params")
            keys = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
            values = {key: adam.get(key, float) for key in keys}
            adam.end()
            fields.end()
            given = {key: value for key, value in values.items() if value is not None}
            return self._service.optim_step(model_id, seq_id, given)

        return await self._in_order(request, queue)

    # Checkpoints

    async def save_weights(self, request: Request) -> Response:
        return await self._save(request, "weights")

    async def save_external(self, request: Request) -> Response:
        return await self._save(request, "external_weights")

    async def save_for_sampler(self, request: Request) -> Response:
        return await self._save(request, "sampler_weights")

    async def _save(self, request: Request, kind: str) -> Response:
        def queue(fields: Fields, model_id: str, seq_id: int) -> str:
            fields.off("age_encryption_recipients")
            fields.off("kind", "snapshot")
            name, ttl = fields.get("path", str), fields.get("ttl_seconds", int)
            metadata, overwrite = fields.get("user_metadata", dict), fields.get("overwrite", bool) or False
            sampling_seq_id = fields.get("sampling_session_seq_id", int)
            fields.end()
            if name is None and kind == "sampler_weights" and sampling_seq_id is not None:
                return self._service.snapshot(model_id, seq_id, sampling_seq_id)
            if name is None:
                raise BadRequest("path is missing: the name of the checkpoint", "path")
            return self._service.save(kind, model_id, seq_id, name, ttl, metadata, overwrite)

        return await self._in_order(request, queue)

    async def load_weights(self, request: Request) -> Response:
        fields = Fields(await read_json(request))
        fields.off("weights_access_token")
        check_optimizer(fields)
        path, optimizer = fields.need("path", str), fields.need("optimizer", bool)
        session_id = fields.get("session_id", str)
        if session_id is not None:
            made = (fields.need("model_seq_id", int), fields.get("base_model", str), fields.get("user_metadata", dict))
            fields.end()
            return _future(self._service.create_model(session_id, *made, None, path, optimizer))
        model_id, seq_id = fields.need("model_id", str), fields.need("seq_id", int)
        fields.end()
        return _future(self._service.load(model_id, seq_id, path, optimizer))

    async def weights_info(self, request: Request) -> Response:
        meta = self._service.store.meta(Fields(await read_json(request)).need("tinker_path", str))
        lora = meta["lora"]
        flags = {key: lora[key] for key in ("train_unembed", "train_mlp", "train_attn")}
        return JSONResponse({"base_model": meta["base_model"], "is_lora": True, "lora_rank": lora["rank"], **flags})

    async def runs(self, request: Request) -> Response:
        runs, cursor = _page(request, self._service.store.runs())
        return JSONResponse({"training_runs": runs, "cursor": cursor})

    async def run(self, request: Request) -> Response:
        return JSONResponse(self._service.store.run(request.path_params["run"]))

    async def run_checkpoints(self, request: Request) -> Response:
        return JSONResponse({"checkpoints": self._service.store.listed(request.path_params["run"])})

    async def checkpoints(self, request: Request) -> Response:
        found, cursor = _page(request, self._service.store.listed())
        return JSONResponse({"checkpoints": found, "cursor": cursor})

    async def delete_checkpoint(self, request: Request) -> Response:
        self._service.store.delete(_path(request))
        return Response(status_code=204)

    async def publish(self, request: Request) -> Response:
        self._service.store.change(_path(request), public=request.method == "POST")
        return Response(status_code=204)

    async def set_ttl(self, request: Request) -> Response:
        seconds = Fields(await read_json(request)).get("ttl_seconds", int)
        self._service.store.change(_path(request), expires_at=expiry(seconds))
        return Response(status_code=204)

    async def weights_urls(self, request: Request) -> Response:
        folder, until = self._service.store.folder(_path(request)), int(time.time()) + URL_SECONDS
        run, name = request.path_params["run"], request.path_params["name"]
        if folder.parent.name != "external_weights":
            raise BadRequest("only weights of save_weights_external are downloaded")
        urls = {}
        for file in sorted(folder.glob("adapter_*")):
            parts = {"run": run, "name": name, "file": file.name, "until": until}
            urls[file.name] = str(request.url_for("file", **parts, signature=self._signature(parts)))
        return JSONResponse({"urls": urls, "expires": datetime.fromtimestamp(until, UTC).isoformat()})

    def _signature(self, parts: Mapping[str, Any]) -> str:
        signed = "/".join(str(parts[key]) for key in ("run", "name", "file", "until"))
        return hmac.new(self._secret, signed.encode(), "sha256").hexdigest()

    async def _file(self, request: Request, _: None) -> Response:
        given = request.path_params
        if not is_same(given["signature"], self._signature(given)) or given["until"] < time.time():
            raise wrong_key("the signature of the address")
        folder = self._service.store.folder(f"{SCHEME}{given['run']}/external_weights/{given['name']}")
        return FileResponse(folder / Path(given["file"]).name)

    # Samples and results

    async def create_sampling_session(self, request: Request) -> Response:
        fields = Fields(await read_json(request))
        session_id, seq_id = fields.need("session_id", str), fields.need("sampling_session_seq_id", int)
        base_model, path = fields.get("base_model", str), fields.get("model_path", str)
        fields.end()
        if base_model is None and path is None:
            raise BadRequest("base_model or model_path must be given")
        made = self._service.create_sampler(session_id, seq_id, base_model, path)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": made})

    async def sampler(self, request: Request) -> Response:
        name = request.path_params["sampler"]
        path = self._service.sampler(name).path
        return JSONResponse({"sampler_id": name, "base_model": self._service.name, "model_path": path})

    async def sample(self, request: Request) -> Response:
        fields = Fields(await read_json(request))
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
        longest = self._service.base.max_length
        params = read_params(fields.need("sampling_params", dict), longest - len(prompt), tops[0])
        last_n = fields.get("prompt_logprobs_last_n", int)
        if last_n is not None and not 1 <= last_n < len(prompt):
            rule = f"{last_n} must be in [1, {len(prompt) - 1}]"
            raise BadRequest(f"prompt_logprobs_last_n: {rule}", "prompt_logprobs_last_n")
        wants = fields.get("prompt_logprobs", bool) or False
        fields.end()
        if not 1 <= len(prompt) < longest or not all(0 <= token < self._service.base.vocabulary for token in prompt):
            rule = f"must have 1 to {longest - 1} token ids in [0, {self._service.base.vocabulary})"
            raise BadRequest(f"prompt: {len(prompt)} token ids; it {rule}", "prompt")
        request_id = f"{sampler_id}:{seq_id}"
        queued = SampleRequest(request_id, prompt, params, count, wants, tops[1], last_n)
        self._service.sample(sampler_id, queued)
        ids = [f"{request_id}:{index}" for index in range(count)]
        return JSONResponse({"request_id": request_id, "sample_sequence_ids": ids})

    async def retrieve_future(self, request: Request) -> Response:
        request_id = Fields(await read_json(request)).need("request_id", str)
        result = await self._service.queue.result(request_id)
        if result is None:
            return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": "active"})
        body, is_protobuf = encoded(result)
        return Response(body, media_type=PROTOBUF if is_protobuf else "application/json")


def _future(request_id: str) -> Response:
    return JSONResponse({"request_id": request_id})


def _path(request: Request) -> str:
    return SCHEME + "/".join(request.path_params[key] for key in ("run", "kind", "name"))


def _page(request: Request, items: list[T]) -> tuple[list[T], Mapping[str, int]]:
    try:
        offset, limit = (int(request.query_params.get(key, value)) for key, value in (("offset", 0), ("limit", 20)))
    except ValueError as error:
        raise BadRequest("offset and limit must be integers") from error
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return items[max(offset, 0) : max(offset, 0) + max(limit, 0)], cursor
