"""/metrics: numbers as Prometheus reads them."""

from collections.abc import Mapping

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


def text(values: Mapping[str, float | Labelled]) -> str:
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
