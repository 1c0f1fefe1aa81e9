"""Conversions by min-max rounding, for tests that compute the expected codes with `mx.quantize`."""

from functools import partial

from moeflux_mlx import convert as command

convert = partial(command.convert, rounding="minmax")
