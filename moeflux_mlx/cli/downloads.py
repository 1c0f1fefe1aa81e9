"""The models in the Hub's cache that can be run: listed, and deleted."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import MoefluxError, RequestError, did_you_mean
from ..formats.gguf_file import open_gguf
from ..formats.gguf_names import SUFFIX, models_in
from ..formats.hub import cache_folder
from ..opening.weights import open_weights
from ..packing.located import Located
from .terminal import agree, note

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo


def list_models(options: argparse.Namespace) -> int:
    """Prints a line for each: its name, its size, and whether something is missing."""
    models = downloaded()
    width = max(map(len, models), default=0)
    for name, repository in sorted(models.items()):
        rest = "" if any(_is_whole(one.snapshot_path) for one in repository.revisions) else "  not all of it is here"
        print(f"{name:{width}}  {repository.size_on_disk / 1e9:9.3f} GB{rest}")
    note(f"downloaded models: {len(models)}, in {cache_folder()}")
    return 0


def remove_model(options: argparse.Namespace) -> int:
    """Deletes one, if the user agrees."""
    import huggingface_hub as hub

    models = downloaded()
    if options.name not in models:
        meant = did_you_mean(options.name, models)
        raise RequestError(f"{options.name} is not among the downloaded models, which moeflux list shows{meant}")
    revisions = [one.commit_hash for one in models[options.name].revisions]
    deletion = hub.scan_cache_dir(cache_folder()).delete_revisions(*revisions)
    agree(f"{deletion.expected_freed_size / 1e9:.3f} GB of {options.name} will be deleted", options.yes)
    deletion.execute()
    note(f"{options.name} is deleted")
    return 0


def downloaded() -> "dict[str, CachedRepoInfo]":
    """The downloaded models as huggingface_hub lists them, by name."""
    import huggingface_hub as hub

    if not cache_folder().is_dir():
        return {}
    repos = hub.scan_cache_dir(cache_folder()).repos
    models = (repo for repo in repos if repo.repo_type == "model")
    return {repo.repo_id: repo for repo in models if any(_runs(one.snapshot_path) for one in repo.revisions)}


def _runs(folder: Path) -> bool:
    """Whether it is of a known family, and packed or as MLX quantises, or has GGUF models; weights may be missing."""
    if next(folder.rglob(f"*{SUFFIX}"), None):
        return True
    try:
        located = Located(folder)
        return located.states_mlx or located.is_packed
    except MoefluxError:
        return False


def _is_whole(folder: Path) -> bool:
    """Whether a model can be opened; of GGUF models all must have all of their files."""
    ggufs = models_in(str(file) for file in folder.rglob(f"*{SUFFIX}"))
    try:
        for files in ggufs.values():
            open_gguf(Path(files[0]))
        if not ggufs:
            open_weights(Located(folder), without_correction_bias=True)
    except MoefluxError:
        return False
    return True
