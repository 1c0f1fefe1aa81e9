"""The routes that tell about the models and the server, and compute nothing."""

from dataclasses import asdict

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ..files import JsonDict
from ..planning.machine import used_memory
from .embedder import Embedder
from .served import Served
from .wire import metrics, models, ollama
from .wire.fields import parse
from .wire.replies import error_headers, health


def description(served: Served, name: str) -> JsonDict:
    switch = served.models
    described, context = switch.descriptions.get(name), switch.choices[name].context
    features = asdict(described.features) if described else None
    context = described.preparer.context if described else context
    return models.model(name, served.started, context, switch.status(name), features)


def descriptions(served: Served) -> list[JsonDict]:
    """All models, the embedding model last."""
    embedder = served.embedder
    made = [description(served, name) for name in served.models.choices]
    return made if embedder is None else [*made, embedding_entry(served, embedder)]


def embedding_entry(served: Served, embedder: Embedder) -> JsonDict:
    return models.model(embedder.name, served.started, embedder.limit, {"value": embedder.state}, embedding=True)


async def list_models(served: Served, http: HttpRequest) -> Response:
    return JSONResponse(models.listing(descriptions(served)))


async def show_model(served: Served, http: HttpRequest) -> Response:
    asked = http.path_params["name"]
    if not asked:
        return await list_models(served, http)
    if served.embedder is not None and asked == served.embedder.name:
        return JSONResponse(embedding_entry(served, served.embedder))
    return JSONResponse({**description(served, served.models.find(asked).name), "id": asked})


async def list_tags(served: Served, http: HttpRequest) -> Response:
    return JSONResponse(ollama.tags(descriptions(served)))


async def show_tag(served: Served, http: HttpRequest) -> Response:
    asked = await served.read(http, lambda data: ollama.asked_model(parse(data)))
    if served.embedder is not None and asked == served.embedder.name:
        return JSONResponse(ollama.show(embedding_entry(served, served.embedder), tools=False))
    name = served.models.find(asked).name
    preparer = await served.models.preparer(name)
    return JSONResponse(ollama.show(description(served, name), preparer is not None and preparer.dialect is not None))


async def tell_version(served: Served, http: HttpRequest) -> Response:
    return JSONResponse({"version": ollama.API})


async def tell_health(served: Served, http: HttpRequest) -> Response:
    status, body = health(served.models.ready)
    return JSONResponse(body, status, error_headers(status))


async def tell_metrics(served: Served, http: HttpRequest) -> Response:
    switch, totals = served.models, served.models.totals
    loaded = switch.loaded
    running = loaded.worker.state.running if loaded else []
    values: JsonDict = {
        "requests_total": {
            (("path", path), ("status", str(status))): n for (path, status), n in served.requests.items()
        },
        "requests_running": len(running),
        "requests_in_prompt": sum(one.in_prompt for one in running),
        "requests_waiting": switch.queue,
        "requests_cancelled_total": totals.cancelled,
        "requests_failed_total": totals.failed,
        "prompt_tokens_total": totals.prompt_tokens,
        "prompt_tokens_cached_total": totals.cached_tokens,
        "prompt_seconds_total": totals.prompt_seconds,
        "tokens_generated_total": totals.generated_tokens,
        "generation_seconds_total": totals.answer_seconds,
        "steps_total": totals.steps,
        "model_loaded": {(("model", name),): int(switch.status(name)["value"] == "loaded") for name in switch.choices},
        "memory_used_bytes": used_memory(),
    }
    if loaded is not None:
        stats, plan, experts = loaded.engine.experts.stats, loaded.engine.plan, loaded.engine.experts
        drafting = loaded.engine.model.drafting
        values |= {
            "draft_steps_total": {(("drafts", str(i)),): n for i, n in enumerate(drafting.steps)},
            "drafts_checked_total": drafting.checked,
            "drafts_taken_total": drafting.taken,
            "memory_planned_bytes": plan.total,
            "expert_pool_bytes": experts.pool_bytes,
            "expert_bytes_given_back_total": stats.given_back,
            "expert_host_bytes": experts.host_bytes,
            "expert_hits_total": stats.hits,
            "expert_host_hits_total": stats.host_hits,
            "expert_bytes_copied_total": stats.host_bytes,
            "expert_misses_total": stats.misses,
            "expert_bytes_read_total": stats.bytes_read,
            "experts_warmed_total": stats.warmed,
            "experts_warmed_used_total": stats.warm_hits,
            "expert_wait_seconds_total": stats.wait_seconds,
        }
    return PlainTextResponse(metrics.text(values), media_type=metrics.CONTENT_TYPE)
