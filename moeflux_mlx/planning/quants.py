"""Of the GGUF models in one place, the quant of a model that suits the machine's memory best. Sizes and names of files
decide; headers are not read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..formats.gguf_names import FLOATS, SUFFIX, is_whole, models_in, stem_and_quant
from .machine import in_gb

SHARE = 0.8  # of memory for a file whose model lies in memory whole; caches and temporaries take the rest


@dataclass(frozen=True)
class Quants:
    """The files of one place.

    Attributes:
        sizes: bytes of each file, by name.
        chosen: the files of the model that is to run.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    chosen: Sequence[str] = ()

    @classmethod
    def beside(cls, files: Sequence[Path]) -> "Quants":
        """Those in the directory of the first of these files, which are the chosen model's; none without files."""
        here = files[0].parent.glob(f"*{SUFFIX}") if files else ()
        return cls({one.name: one.stat().st_size for one in (*here, *files)}, [file.name for file in files])

    def note(self, memory: int) -> str:
        """A line that names another quant of the chosen model: the largest that fits in `memory`. Empty: there is none,
        or it is the chosen one.
        """
        models = models_in(self.sizes)
        name = next((name for name, files in models.items() if set(files) & set(self.chosen)), "")
        alike = {
            one: sum(map(self.sizes.__getitem__, files))
            for one, files in models.items()
            if is_whole(files)
            and stem_and_quant(one)[0] == stem_and_quant(name)[0]
            and stem_and_quant(one)[1] not in ("", *FLOATS)
        }
        fitting = [one for one, size in alike.items() if size <= SHARE * memory]
        best = max(fitting, key=alike.__getitem__, default=name)
        if name not in alike or alike[best] == alike[name]:
            return ""
        own, other = (f"{one} ({in_gb(alike[one], 1)})" for one in (name, best))
        if alike[best] > alike[name]:
            return f"{other} is rounded less, and fits in memory too"
        return f"{other} fits in memory; {own} is streamed from disk"
