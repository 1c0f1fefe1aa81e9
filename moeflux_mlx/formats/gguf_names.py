"""What names of GGUF files say: which files are one model, its quant, and which draft head is a model's own."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

SUFFIX = ".gguf"
SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
HEAD_ALONE = re.compile(r"mtp-")  # begins the name of a file that holds a draft head without its model
# In names of files that hold no model: an image encoder, statistics of inputs, or a model that drafts (llama.cpp's
# `gguf_filename_is_model`).
ASIDE = re.compile("(?i:mmproj)|imatrix|mtp-|eagle3-|dflash-|dspark-")
QUANT = re.compile(r"[-._](?:ud-)?((?:i?q\d|tq\d|mxfp4|nvfp4|bf16|f16|f32)\w*)$")  # ends a name
FLOATS = ("bf16", "f16", "f32")


def models_in(names: Iterable[str]) -> dict[str, list[str]]:
    """The models among these names of files, by name without suffixes, each with its files in order. Of models that
    differ only in the number of their files, those that are split have the name of their first file.
    """
    return _grouped(name for name in names if not ASIDE.search(_own(name)))


def is_whole(files: Sequence[str]) -> bool:
    """Whether these files of a model are all that it has."""
    match = SPLIT_NAME.fullmatch(files[0])
    return match is None or int(match[3]) == len(files)


def heads_of(files: Sequence[str], sizes: Mapping[str, int]) -> list[list[str]]:
    """The draft head alone (`mtp-*.gguf`) in a model's folder, as its files in order: of those with the model's name
    the one of its quant, or else the smallest; or else all, of which any may be meant.

    Args:
        files: of the model, the first one first.
        sizes: bytes of each file, by name.
    """
    folder, (model,) = files[0].removesuffix(_own(files[0])), _grouped(files)
    heads = _grouped(name for name in sizes if name == folder + _own(name) and HEAD_ALONE.match(_own(name)))
    stem, quant = stem_and_quant(model)
    of_head = {name: stem_and_quant(_own(name).removeprefix("mtp-")) for name in heads}
    total = {name: sum(map(sizes.__getitem__, heads[name])) for name in heads}
    alike = [name for name in heads if of_head[name][0] == stem]
    best = min(alike, key=lambda name: (of_head[name][1] != quant, total[name]), default=None)
    return list(heads.values()) if best is None else [heads[best]]


def stem_and_quant(name: str) -> tuple[str, str]:
    """The name of a model without its folder and its quant, and the quant, which is empty if it names none; both in
    lower case.
    """
    own = _own(name).lower()
    match = QUANT.search(own)
    return (own[: match.start()], match[1]) if match else (own, "")


def _own(name: str) -> str:
    return name.rpartition("/")[2]


def _grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """As `models_in`, of all that are GGUF files."""
    models: dict[tuple[str, str | None], list[str]] = {}
    for name in sorted(names):
        if name.endswith(SUFFIX):
            match = SPLIT_NAME.fullmatch(name)
            models.setdefault((match[1], match[3]) if match else (name.removesuffix(SUFFIX), None), []).append(name)
    alike = Counter(stem for stem, _ in models)
    return {files[0].removesuffix(SUFFIX) if alike[stem] > 1 else stem: files for (stem, _), files in models.items()}
