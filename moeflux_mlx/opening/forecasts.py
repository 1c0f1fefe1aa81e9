"""The forecast of a loaded model's speed on this machine."""

from ..kept.rates import kept_rates
from ..model.tensors import token_bytes
from ..planning.forecast import Forecast, TokenWork, expected
from .engine import Engine


def forecast_of(engine: Engine, positions: int, hits: float | None = None) -> Forecast | None:
    """Of the tokens of a text after `positions` others; None: moeflux doctor has not measured this machine.

    Args:
        hits: of a token's experts, those that are in memory; None: as many as in texts.
    """
    rates = kept_rates()
    if rates is None:
        return None
    args, dtype = engine.model.args, engine.model.activation_dtype
    dense, routed = token_bytes(args, engine.weights.shapes, dtype), engine.experts.layout.token_bytes(args)
    work = TokenWork.of(args, dense, routed, positions, dtype.size)
    return expected(engine.plan, work, rates, hits)
