"""The routes that tell about the models and the server, and compute nothing: /v1/models has the keys of both OpenAI and
Anthropic, /metrics numbers as Prometheus reads them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ..files import JsonDict, JsonObject
from ..planning.machine import used_memory
from .embedder import Embedder
from .reply import Served
from .wire import ollama
from .wire.replies import error_headers, health
from .wire.settings import parse


def description(served: Served, name: str) -> JsonDict:
    switch = served.models
    described, context = switch.descriptions.get(name), switch.choices[name].context
    features = asdict(described.features) if described else None
    context = described.preparer.context if described else context
    return model_entry(name, served.started, context, switch.status(name), features)


def descriptions(served: Served) -> list[JsonDict]:
    """All models, the embedding model last."""
    embedder = served.embedder
    made = [description(served, name) for name in served.models.choices]
    return made if embedder is None else [*made, embedding_entry(served, embedder)]


def embedding_entry(served: Served, embedder: Embedder) -> JsonDict:
    return model_entry(embedder.name, served.started, embedder.limit, {"value": embedder.state}, embedding=True)


async def list_models(served: Served, http: HttpRequest) -> Response:
    return JSONResponse(listing(descriptions(served)))


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
    running = loaded.worker.running if loaded else []
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
    return PlainTextResponse(metrics_text(values), media_type=CONTENT_TYPE)


def model_entry(
    name: str,
    created: float,
    context: int | None,
    status: JsonObject,
    features: JsonObject | None = None,
    embedding: bool = False,
) -> JsonDict:
    """One model.

    Args:
        name: its id.
        created: when serving began, in seconds since 1970.
        context: how many tokens a prompt and its answer may have; None while that is not known, and then not said.
        status: whether it is loaded, as in llama.cpp's router, and the running requests.
        features: the fields of `Features`; None while they are not known.
        embedding: whether it makes vectors of texts, and answers nothing.
    """
    lengths = {} if context is None else dict.fromkeys(("max_model_len", "max_input_tokens", "max_tokens"), context)
    return {
        "id": name,
        "object": "model",
        "created": int(created),
        "owned_by": "moeflux",
        "status": dict(status),
        "features": features,
        "type": "model",
        "display_name": name,
        "created_at": ollama.moment(created),
        "lifecycle": "active",
        **({"embedding": True} if embedding else {}),
        **lengths,
    }


def listing(models: Sequence[JsonDict]) -> JsonDict:
    ids = [model["id"] for model in models]
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return {"object": "list", "data": list(models), "has_more": False, **ends}


Labelled = Mapping[tuple[tuple[str, str], ...], float]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "moeflux_"
HELP = {
    "requests_total": "Answers begun, by path and HTTP status.",
    "requests_running": "Requests that the model works on.",
    "requests_in_prompt": "Of those, requests whose prompt is not computed yet.",
    "requests_waiting": "Requests in the queue.",
    "requests_cancelled_total": "Requests whose client disconnected, or that ended with the server.",
    "requests_failed_total": "Requests that ended with an error.",
    "prompt_tokens_total": "Tokens of all prompts, including cached ones.",
    "prompt_tokens_cached_total": "Tokens of prompts that were cached.",
    "prompt_seconds_total": "Time spent on prompts.",
    "tokens_generated_total": "Tokens of all answers.",
    "generation_seconds_total": "Time spent on answers, except on their first tokens.",
    "steps_total": "Steps of the model, each of which gives every answer a token.",
    "model_loaded": "Whether the model is in memory.",
    "draft_steps_total": "Steps of single conversations, by how many drafted tokens they checked.",
    "drafts_checked_total": "Drafted tokens that were checked.",
    "drafts_taken_total": "Drafted tokens that became part of an answer.",
    "memory_used_bytes": "Memory that the process holds.",
    "memory_planned_bytes": "Memory that the plan gives the process.",
    "expert_pool_bytes": "Memory for experts that are streamed.",
    "expert_bytes_given_back_total": "Memory for experts that was given back because the machine was short of it.",
    "expert_host_bytes": "Memory of the computer for experts that are streamed to a GPU with memory of its own.",
    "expert_hits_total": "Experts that were in memory when asked for.",
    "expert_host_hits_total": "Of those, experts that the GPU read or copied from the computer's memory.",
    "expert_bytes_copied_total": "Bytes of experts that the GPU read or copied from the computer's memory.",
    "expert_misses_total": "Experts that were not in memory when asked for.",
    "expert_bytes_read_total": "Bytes of experts that were read.",
    "experts_warmed_total": "Experts read into free memory because earlier sessions used them most.",
    "experts_warmed_used_total": "Of those, experts that were used.",
    "expert_wait_seconds_total": "Time in which the model waited for experts.",
}


def metrics_text(values: Mapping[str, float | Labelled]) -> str:
    """All metrics, in their order, each with its line of `HELP`.

    Args:
        values: name -> finite number, or labels -> number: {(("api", "chat"), ("status", "200")): 3}. A name that ends
            in `_total` counts up; any other goes up and down.
    """
    lines: list[str] = []
    for name, value in values.items():
        full, kind = PREFIX + name, "counter" if name.endswith("_total") else "gauge"
        series = value if isinstance(value, Mapping) else {(): value}
        lines += [f"# HELP {full} {HELP[name]}", f"# TYPE {full} {kind}"]
        lines += [f"{full}{_labels(labels)} {number!r}" for labels, number in series.items()]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str) -> str:
    """A label's value, such as the name of a model, which may be that of any directory."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
