"""Choices of tiles for tests. Each has its own plans: it neither uses earlier plans nor leaves any behind."""

from moeflux_mlx.ops.tiles import TILES, Tile, Tiles


class Chosen(Tiles):
    """Gives these tiles to their kernels for any GPU; other kernels keep the tiles of the code."""

    def __init__(self, by_kernel: dict[str, Tile] | None = None):
        super().__init__()
        self.by_kernel = by_kernel or {}

    def tile(self, target: str, kernel: str) -> Tile:
        return self.by_kernel.get(kernel) or super().tile(target, kernel)


OF_CUDA = TILES["cuda"]
