"""Writes a file about this machine that its owner can send: what it is, whether as many kernels as some minutes allow
compile, whether values are right, and how fast the demo model runs.

The file has no names, paths or keys (`without_names`). A part that fails is a line of the file, and the others follow.
"""

import argparse
import os
import platform
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..errors import MoefluxError
from ..files import directory, replace_file
from ..kept.rates import keep_rates
from ..opening.engine import Engine, open_engine
from ..ops import backend
from ..ops.chips import CHIPS
from ..ops.kernel_files import Program
from ..planning.machine import default_dtype, in_gb, machine_figures, used_memory
from ..tools.checkup import product_rate
from ..tools.demo_check import BOUND, NATS, story_rows
from ..tools.kernels import Built, built, compiler_of, programs_of_variants
from ..tools.rates import measure_rates
from ..version import described
from .benchmarking import OURS, measured, own_steps, table
from .diagnosis import (
    disk_rate,
    hub_folder,
    machine_lines,
    matrix_lines,
    thread_lines,
    value_lines,
)
from .known_models import Fit, Machine, known_models
from .known_models import table as table_of_models
from .options import file_to_write
from .planning import ASSUMED_DISK
from .terminal import note

FILE = "moeflux-report.txt"
WIDTH = 100  # columns
BUDGET, CI_BUDGET = 120.0, 300.0  # seconds for compiling kernels; macOS keeps them, so a second report takes less
FAULT_LINES = 8  # of what a compiler says
DEVICE = ("architecture", "memory_size", "max_recommended_working_set_size", "max_buffer_length", "resource_limit")
VIRTUAL = "Paravirtual"  # in the GPU's name on a virtual Mac
POOL = 2 << 20  # bytes: half of the demo model's experts
PROMPT, ANSWER, ROUNDS = 512, 64, 3  # tokens of the demo model's prompt and answer; rounds of which the median counts
KERNEL = re.compile(r"moeflux_(\w+)_\d+_[0-9a-f]{16}")
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

Finding = tuple[list[str], bool]  # lines, and whether everything is right


def run(options: argparse.Namespace, more: Mapping[str, Callable[[], Finding]]) -> int:
    """Prints the report part by part, `more` parts last, and keeps what there is in the file, so that a crash loses
    only its own part. Returns 1 if something is wrong or failed.
    """
    path, lines, faults = file_to_write("--report", options.report), list[str](), list[str]()
    folder = options.directory and options.directory.absolute()
    places = [path.absolute(), path.absolute().parent, *([folder] if folder else [])]

    def add(*more: str) -> None:
        text = without_names("\n".join(more), places)
        print(text, flush=True)
        lines.append(text)

    add(f"moeflux {described()}", f"made by moeflux doctor --report, {time.strftime('%Y-%m-%d')}")
    report = MachineReport(folder)
    for title, part in {**report.parts(with_disk=not options.no_disk), **more}.items():
        note(f"{title} ...")
        save(path, [*lines, f"\n{title}: began, and the program ended before it did"])
        said, is_right = outcome(part)
        add("", f"{title}:", *(f"  {line}" for line in said))
        faults += [] if is_right else [title]
    left = report.left_out
    right = f"what ran is right; {left} kernels were left out" if left else "everything is right"
    add("", f"WRONG OR FAILED: {', '.join(faults)}" if faults else right)
    save(path, lines)
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


class MachineReport:
    """The parts of a report. `folder`: where the disk is measured; None: the Hugging Face cache.

    Attributes:
        left_out: kernels that were not compiled, for lack of time.
    """

    def __init__(self, folder: Path | None):
        self._folder, self.left_out = folder, 0
        self._disk: float | None = None

    def parts(self, with_disk: bool) -> dict[str, Callable[[], Finding]]:
        """The parts by title, in their order."""
        return {
            "machine": self.machine,
            "threads and matrix units": lambda: ([*thread_lines(), *matrix_lines()] or ["of a Mac alone"], True),
            "values": lambda: value_lines(default_dtype()),
            **({"disk": self.disk} if with_disk else {}),
            "memory": self.memory,
            "known models": lambda: (table_of_models(self.here, self.models), True),
            "kernels": self.kernels,
            "demo model": self.demo,
            "rates of forecasts, in bytes per second and seconds": self.rates,
        }

    @cached_property
    def here(self) -> Machine:
        """This machine, with the disk's rate if it was measured."""
        rate = product_rate(default_dtype())
        return Machine(machine_figures(), rate, self._disk or ASSUMED_DISK, self._disk is not None)

    @cached_property
    def models(self) -> list[Fit]:
        """The known models, those that fit first."""
        return known_models(self.here)

    def machine(self) -> Finding:
        lines = machine_lines(machine_figures())
        if backend.has_kernels():
            known = mx.device_info()
            lines.append("device    " + ", ".join(f"{name} {known[name]}" for name in DEVICE if name in known))
            if VIRTUAL in str(known["device_name"]):
                lines.append("note      this GPU is virtual: values count, and times say nothing of a Mac")
        return lines, True

    def memory(self) -> Finding:
        used = in_gb(used_memory())
        return [f"{in_gb(self.here.products, 1)}/s of 4-bit weights in products of one row; {used} in use here"], True

    def disk(self) -> Finding:
        """Measures the disk; no room for the file is no fault of the machine."""
        try:
            self._disk = rate = disk_rate(self._folder or hub_folder())
        except (MoefluxError, OSError) as error:
            return [f"not measured: {error}"], True
        return [f"{rate / 1e9:.2f} GB/s reading whole experts past the page cache"], True

    def kernels(self) -> Finding:
        """Compiles the kernels of the known models, those that fit first, until the time is over."""
        target = backend.name()
        if not backend.has_kernels():
            return ["none to compile: no GPU computes here"], True
        compiled, budget = compiler_of(target), CI_BUDGET if os.environ.get("CI") else BUDGET
        names = [fit.name for fit in self.models]
        with closing(programs_of_variants(names, target, default_dtype())) as listed:
            programs = list(listed)
        end = time.perf_counter() + budget

        def in_time(program: Program) -> Built | None:
            return built(program, compiled) if time.perf_counter() < end else None

        done: list[Built] = []
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            # MLX compiles for Metal in this thread alone; NVIDIA's compiler runs in several at the same time.
            for one in (pool.map if target == "cuda" else map)(in_time, programs):
                if one is None:
                    break
                done.append(one)
                if len(done) % 100 == 0:
                    note(f"{len(done)} of {len(programs)} kernels compiled")
        self.left_out = len(programs) - len(done)
        return kernel_lines(done, len(programs), len(self.models), budget), not any(one.fault for one in done)

    def demo(self) -> Finding:
        """Runs the demo model with all experts in memory and streamed: a known story, a prompt and an answer. No trial
        of launches that keep the GPU warm disturbs the times.
        """
        lines, is_right, rows = list[str](), True, list[np.ndarray]()
        for title, io, pool in (("in memory", "mmap", None), ("half of the experts streamed", "pread", POOL)):
            trial = {"keep_warm": "off"}
            engine = open_engine(None, expert_io=io, expert_cache_bytes=pool, warm_start="off", set=trial)
            try:
                made, nats = story_rows(engine)
                rows.append(made)
                is_near = abs(nats - NATS) <= BOUND
                is_right &= is_near
                verdict = "right" if is_near else "WRONG"
                lines.append(f"{title}: a known story has {nats:.3f} nats a token, {verdict} ({NATS} expected)")
                lines += speed_of(engine)
            finally:
                engine.experts.close()
        is_same = np.array_equal(rows[0], rows[1])
        lines.append(f"streaming gives {'the same bits' if is_same else 'OTHER BITS'}")
        return lines, is_right and is_same

    def rates(self) -> Finding:
        """What forecasts are made from, so that they can be compared with what benchmark measures."""
        rates = measure_rates(self.here.disk, self.here.products)
        keep_rates(rates)
        return [", ".join(f"{name} {value:.3g}" for name, value in asdict(rates).items())], True


def speed_of(engine: Engine) -> list[str]:
    """A table of the speed of a prompt of `PROMPT` tokens and an answer after it."""
    sizes = argparse.Namespace(prompt_tokens=[PROMPT], max_tokens=ANSWER, rounds=ROUNDS)
    return table(measured(sizes, engine, {OURS: own_steps(engine)})[OURS], None)


def kernel_lines(done: Sequence[Built], count: int, models: int, budget: float) -> list[str]:
    """Lines on compiled kernels: the sum, each text's time and threads by kernel, and the faults.

    Args:
        done: those that were compiled.
        count: of all texts of `models` models.
        budget: seconds after which the others were left out.
    """
    seconds = [one.seconds for one in done]
    faults = [one for one in done if one.fault]
    total = f"{len(done)} of {count} texts of {models} models, {sum(seconds):.1f} s of compiling"
    lines = [f"{total}, the slowest in {max(seconds, default=0):.2f} s; {len(faults)} failed"]
    if len(done) < count:
        lines.append(f"{count - len(done)} were left out, because {budget:.0f} s were over")
    lines.append("milliseconds of each text, and after a slash the threads that it allows in a threadgroup:")
    by_kernel: dict[str, list[str]] = {}
    for one in done:
        name = KERNEL.sub(r"\1", one.name)
        threads = "" if one.allowed is None else f"/{one.allowed}"
        by_kernel.setdefault(name, []).append("failed" if one.fault else f"{1e3 * one.seconds:.0f}{threads}")
    for name in sorted(by_kernel):
        text = f"{name}: {' '.join(by_kernel[name])}"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return lines + [f"FAILED {one.name}: {first_lines(one.fault)}" for one in faults]


def first_lines(text: str) -> str:
    """The first lines of a message, each but the first indented."""
    return "\n    ".join(line.strip() for line in text.strip().splitlines()[:FAULT_LINES])


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
