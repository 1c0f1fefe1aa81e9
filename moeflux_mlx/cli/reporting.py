"""Prints the facts about this machine, on the screen or into a file that its owner can send.

The file has no names, paths or keys (`without_names`). A part that fails is a line, and the others follow.
"""

import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import mlx.core as mx

from ..files import directory, replace_file
from ..ops.chips import CHIPS
from ..version import full_version
from .diagnosis import Facts, Finding, first_lines
from .options import file_to_write
from .terminal import note

FILE = "moeflux-report.txt"
QUOTED = re.compile(r"""(?<!\w)(["'`])(?:(?!\1).)*/(?:(?!\1).)*\1(?!\w)""")  # with a slash
PIECE = r"[^\s'\":,;()"
MORE = rf"(?: {PIECE}/]+){{1,3}}/{PIECE}]*"  # of a name with spaces
ABSOLUTE = re.compile(rf"(?<![\w.])(?:~[\w.-]*)?/{PIECE}]+(?:{MORE})*")
SECRET = re.compile("TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
LEAST_NAME, LEAST_SECRET = 2, 8  # characters: shorter words and values are not looked for
WORDS = (
    "apple cpu cuda demo dev disk doctor gpu kernel kernels linux mac macbook machine macos memory metal mini model "
    "models moeflux nvidia python report studio test tests threads values"
)


def print_screen(facts: Facts, with_disk: bool) -> int:
    """Prints the facts that take seconds; returns 1 if something is wrong or failed."""
    is_right = True
    for title, part in facts.table(with_disk, whole=False).items():
        lines, is_fine = outcome(part)
        print("\n".join(["", *lines] if title == "known models" else lines), end="\n" if lines else "", flush=True)
        is_right &= is_fine
    return 0 if is_right else 1


def write_report(facts: Facts, with_disk: bool, name: str, more: Mapping[str, Callable[[], Finding]]) -> int:
    """Prints all facts, `more` parts last, and keeps what there is in the file `name`, so that a crash loses only its
    own part. Returns 1 if something is wrong or failed.
    """
    path, kept, faults = file_to_write("--report", name), list[str](), list[str]()

    def add(*lines: str) -> None:
        text = without_names("\n".join(lines), [path.absolute(), path.absolute().parent, facts.folder])
        print(text, flush=True)
        kept.append(text)

    add(f"moeflux {full_version()}", f"made by moeflux doctor --report, {time.strftime('%Y-%m-%d')}")
    for title, part in {**facts.table(with_disk, whole=True), **more}.items():
        note(f"{title} ...")
        save(path, [*kept, f"\n{title}: began, and the program ended before it did"])
        lines, is_right = outcome(part)
        add("", f"{title}:", *(f"  {line}" for line in lines or ["of a Mac alone"]))
        faults += [] if is_right else [title]
    left = facts.left_out
    right = f"what ran is right; {left} kernels were left out" if left else "everything is right"
    add("", f"WRONG OR FAILED: {', '.join(faults)}" if faults else right)
    save(path, kept)
    note(f"saved in {path}; it holds no names, paths or keys")
    return 1 if faults else 0


def save(path: Path, lines: Sequence[str]) -> None:
    """Replaces the file."""
    replace_file(path, ["\n".join([*lines, ""]).encode()])


def outcome(part: Callable[[], Finding]) -> Finding:
    """What a part gives, or that it failed: on a machine of an unknown kind any part may fail in any way, and that is
    what the report is for.
    """
    try:
        return part()
    except Exception as error:
        return [f"failed: {type(error).__name__}: {first_lines(str(error))}"], False


def without_names(text: str, places: Sequence[Path] = ()) -> str:
    """`text` without paths, without the names of the user and the machine, and without the values of variables of the
    environment that are secret by their names. A path that is neither quoted nor in one of the `places` or the usual
    ones ends with the last word that has a slash, because any words may follow it.

    "no /Users/ann/models on anns-mac" -> "no PATH on NAME"
    """
    from huggingface_hub import constants

    usual = [Path.home(), Path.cwd(), Path(tempfile.gettempdir()), Path(sys.prefix), Path(mx.__file__).parent]
    known = [*places, *usual, Path(constants.HF_HUB_CACHE)]
    secrets = [value for name, value in os.environ.items() if SECRET.search(name)]
    host = platform.node()
    names = [Path.home().name, *(os.environ.get(name, "") for name in ("USER", "LOGNAME")), host, host.split(".")[0]]
    text = _replaced(text, (one for one in secrets if len(one) >= LEAST_SECRET), "SECRET", r"\w")
    text = QUOTED.sub(r"\1PATH\1", text)
    text = _replaced(text, (str(place) for place in known if place != place.parent), "/PATH")
    text = ABSOLUTE.sub("PATH", text)
    kept = own_words()
    return _replaced(
        text, (name for name in names if len(name) >= LEAST_NAME and name.lower() not in kept), "NAME", r"\w"
    )


def own_words() -> set[str]:
    """Words of the report that stay even if an account or a machine has such a name."""
    chips = (word for name in CHIPS for word in name.lower().split())
    return {*WORDS.split(), *chips, *(file.name.partition(".")[0] for file in directory("metal").iterdir())}


def _replaced(text: str, words: Iterable[str], by: str, inside: str = "(?!)") -> str:
    """`text` with `by` for each of the words, the longest first, where no character `inside` stands beside it."""
    for word in sorted(set(words), key=len, reverse=True):
        text = re.sub(f"(?<!{inside}){re.escape(word)}(?!{inside})", by, text)
    return text
