"""The limits of sizes, and the errors of sizes that are beyond them or do not fit each other."""

from ..errors import ConfigError
from .rotation import Rotation

LARGEST = 2**31 - 1  # MLX counts an array's axes in 32 bits
WIDEST_HEAD, WIDEST_WINDOW = 1 << 16, 1 << 20  # far beyond any model's


def check_width(name: str, value: int) -> None:
    """Checks the width of a projection's result: a product of fields that are each in range."""
    if not 0 < value <= LARGEST:
        raise ConfigError(f"{name} is {value}; expected a width from 1 to {LARGEST}")


def check_head(width: int, rotation: Rotation | None) -> None:
    """Checks the width of a head, and how many of its values are rotated."""
    if not 1 <= width <= WIDEST_HEAD:
        raise ConfigError(f"head_dim is {width}; expected an integer from 1 to {WIDEST_HEAD}")
    if rotation and not (0 < rotation.dims <= width and rotation.dims % 2 == 0):
        raise ConfigError(f"{rotation.dims} rotary dimensions do not fit a head of {width}")


def check_window(window: int) -> None:
    """Checks how many of the newest positions a query sees."""
    if not 1 <= window <= WIDEST_WINDOW:
        raise ConfigError(f"sliding_window is {window}; expected positions from 1 to {WIDEST_WINDOW}")


def check_index_head(width: int, rotated: int) -> None:
    """Checks the width of an indexer's head, of which as many values are rotated as of attention's."""
    if not rotated <= width <= WIDEST_HEAD:
        raise ConfigError(f"index_head_dim is {width}; expected an integer from {rotated} to {WIDEST_HEAD}")


def not_multiple(name: str, value: int, of: str, unit: int) -> ConfigError:
    return ConfigError(f"{name} {value} is not a multiple of {of} {unit}")
