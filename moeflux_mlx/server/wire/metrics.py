"""/metrics: numbers as Prometheus reads them."""

import math
from collections.abc import Mapping

Labelled = Mapping[tuple[tuple[str, str], ...], float]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "moeflux_"


def text(values: Mapping[str, float | Labelled], help: Mapping[str, str] | None = None) -> str:
    """All metrics, in their order.

    Args:
        values: name -> number, or labels -> number: {(("api", "chat"), ("status", "200")): 3}. A name that ends
            in `_total` counts up; any other goes up and down.
        help: name -> what it counts, in one line.
    """
    lines: list[str] = []
    for name, value in values.items():
        full = PREFIX + name
        if help and name in help:
            lines.append(f"# HELP {full} {_escaped(help[name])}")
        lines.append(f"# TYPE {full} {'counter' if name.endswith('_total') else 'gauge'}")
        series = value if isinstance(value, Mapping) else {(): value}
        lines += [f"{full}{_labels(labels)} {_number(number)}" for labels, number in series.items()]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    inside = ",".join(f'{name}="{_escaped(value, quote=True)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str, quote: bool = False) -> str:
    value = value.replace("\\", "\\\\").replace("\n", "\\n")
    return value.replace('"', '\\"') if quote else value


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)
