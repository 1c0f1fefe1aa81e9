"""Choices of tiles for tests. Each has its own plans: it neither uses earlier ones nor leaves any behind."""

from moeflux_mlx.ops.tiles import TILES, Tile, Tiles


class Chosen(Tiles):
    """These tiles by kernel on whatever shape and GPU, and the code's for the other kernels."""

    def __init__(self, by_kernel: dict[str, Tile] | None = None):
        super().__init__()
        self.by_kernel = by_kernel or {}

    def tile(self, target: str, kernel: str, shape: str) -> Tile:
        return self.by_kernel.get(kernel) or super().tile(target, kernel, shape)


OF_CUDA = TILES["cuda"]
