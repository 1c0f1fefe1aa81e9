"""The facts about this machine, in one table: what it is, whether its values are right, how fast its disk is, which
models suit it, whether their kernels compile, and how the demo model runs. Others print them.

Reads and writes one temporary file to measure the disk; loads no model but the demo.
"""

import argparse
import importlib.util
import os
import platform
import re
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cached_property
from importlib import metadata
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..errors import ModelFileError, MoefluxError
from ..formats.packed import PackedExperts
from ..formats.record import ExpertLayout, Record
from ..installation import install_command, reinstall_command
from ..kept.measured import keep_rates, kept_rates
from ..opening.engine import Engine
from ..ops import backend, native
from ..ops.chips import M5_GENERATION, generation_of
from ..ops.launch import MOST_THREADS
from ..planning.machine import Figures, default_dtype, in_gb, machine_figures, used_memory
from ..planning.settings import chip, physical_ram_bytes
from ..tools.checkup import (
    ASKED,
    Built,
    check_operations,
    compiled_in_time,
    programs_of_variants,
    runs_on,
    thread_limits,
)
from ..tools.demo_check import BOUND, NATS, open_demo, story_rows
from ..tools.rates import measure_rates
from .benchmarking import OURS, measured, own_steps
from .benchmarking import table as table_of_speed
from .known_models import Fit, Machine, known_models, machine_of, measure_disk
from .known_models import table as table_of_models
from .terminal import note

PACKAGES = ("moeflux-mlx", "mlx", "numpy", "huggingface_hub", "mlx-lm")
EXTRAS = {"server": ("starlette", "uvicorn"), "structured": ("llguidance",)}
DEVICE = ("architecture", "memory_size", "max_recommended_working_set_size", "max_buffer_length", "resource_limit")
VIRTUAL = "Paravirtual"  # in the GPU's name on a virtual Mac
MEASURED_FILE = 512 << 20
EXPERT = Record.make(2048, 512)  # reads of Qwen3.6-35B-A3B's size
RESIDENT_MACOS = 15
M5_MACOS, NAX = (26, 2), b"gather_qmm_rhs_nax"
BUDGET, CI_BUDGET = 120.0, 300.0  # seconds for compiling kernels; macOS keeps them, so a second report takes less
POOL = 2 << 20  # bytes: half of the demo model's experts
PROMPT, ANSWER, ROUNDS = 512, 64, 3  # tokens of the demo model's prompt and answer; rounds of which the median counts
KERNEL = re.compile(r"moeflux_(\w+)_\d+_[0-9a-f]{16}")
WIDTH = 100  # columns
FAULT_LINES = 8  # of what a compiler says

Finding = tuple[list[str], bool]  # lines, and whether everything is right


class Facts:
    """What can be found about this machine. `folder`: where the disk is measured; None: the Hugging Face cache.

    Attributes:
        folder: as given, or found.
        left_out: kernels that were not compiled, for lack of time.
    """

    def __init__(self, folder: Path | None = None):
        self.folder, self.left_out = (folder or hub_folder()).absolute(), 0
        self._rate: float | None = None

    def table(self, with_disk: bool, whole: bool) -> dict[str, Callable[[], Finding]]:
        """What finds each fact, by title; with `whole` also those that take minutes."""
        return {
            "machine": self.machine,
            "threads and matrix units": lambda: ([*thread_lines(), *matrix_lines()], True),
            "values": lambda: value_lines(default_dtype()),
            **({"disk": self.disk} if with_disk else {}),
            "memory": self.memory,
            "layers": self.layers,
            "known models": lambda: (table_of_models(self.here, self.models), True),
            **({"kernels": self.kernels, "demo model": self.demo} if whole else {}),
        }

    @cached_property
    def here(self) -> Machine:
        """This machine, with the disk's rate if it was measured."""
        return machine_of(machine_figures(), self._rate)

    @cached_property
    def models(self) -> list[Fit]:
        """The known models, those that fit first."""
        return known_models(self.here)

    def machine(self) -> Finding:
        return [*machine_lines(machine_figures()), *device_lines(), *missing_lines()], True

    def memory(self) -> Finding:
        rate, used = in_gb(self.here.products, 1), in_gb(used_memory())
        return [f"products  {rate}/s of 4-bit weights with one row; {used} of memory in use here"], True

    def layers(self) -> Finding:
        """Measures and keeps what forecasts are made from."""
        kept = kept_rates()
        disk = self._rate or (kept.disk if kept else float(self.here.disk))
        rates = measure_rates(disk, self.here.products)
        keep_rates(rates)
        each, streamed, token = (f"{1e3 * one:.3f} ms" for one in (rates.layer, rates.streamed_layer, rates.token))
        return [
            f"layers    {each} each beside their bytes, {streamed} if streamed, and {token} a token, for forecasts"
        ], True

    def disk(self) -> Finding:
        """Measures the disk; no room for the file is no fault of the machine."""
        try:
            self._rate = disk_rate(self.folder)
        except (MoefluxError, OSError) as error:
            return [f"disk      not measured: {error}"], True
        return [
            f"disk      {self._rate / 1e9:.2f} GB/s reading whole experts past the page cache, at {self.folder}"
        ], True

    def kernels(self) -> Finding:
        """Compiles the kernels of the known models, those that fit first, until the time is over."""
        if not backend.has_kernels():
            return ["none to compile: no GPU computes here"], True
        budget = CI_BUDGET if os.environ.get("CI") else BUDGET
        programs = programs_of_variants([fit.name for fit in self.models], backend.name(), default_dtype())
        done = list[Built]()
        with closing(compiled_in_time(programs, backend.name(), budget)) as compiled:
            for one in compiled:
                done.append(one)
                if len(done) % 100 == 0:
                    note(f"{len(done)} of {len(programs)} kernels compiled")
        self.left_out = len(programs) - len(done)
        return kernel_lines(done, len(programs), len(self.models), budget), not any(one.fault for one in done)

    def demo(self) -> Finding:
        """Runs the demo model with all experts in memory and streamed: a known story, a prompt and an answer."""
        lines, is_right, rows = list[str](), True, list[np.ndarray]()
        for title, io, pool in (("in memory", "mmap", None), ("half of the experts streamed", "pread", POOL)):
            engine = open_demo(io, pool)
            with closing(engine.experts):
                made, nats = story_rows(engine)
                rows.append(made)
                is_near = abs(nats - NATS) <= BOUND
                is_right &= is_near
                verdict = "right" if is_near else "WRONG"
                lines.append(f"{title}: a known story has {nats:.3f} nats a token, {verdict} ({NATS} expected)")
                lines += speed_of(engine)
        is_same = np.array_equal(rows[0], rows[1])
        lines.append(f"streaming gives {'the same bits' if is_same else 'OTHER BITS'}")
        return lines, is_right and is_same


def machine_lines(figures: Figures) -> list[str]:
    """Lines that describe the machine and the versions."""
    installed = {name: _version(name) for name in PACKAGES}
    versions = ", ".join(f"{name} {version}" for name, version in installed.items() if version)
    limits = [f"{in_gb(figures.memory, 1)} of {figures.name} may be used"]
    if figures.working_set is not None:
        limits.append(
            f"Metal recommends {in_gb(figures.working_set, 1)}, a buffer at most {in_gb(figures.buffer or 0, 1)}"
        )
    ram = in_gb(physical_ram_bytes(), 1)
    return [
        f"machine   {_processor()}, {os.cpu_count()} CPUs, {ram} of RAM, {platform.platform()}",
        f"versions  Python {platform.python_version()}, {versions}",
        f"runs on   {runs_on()}",
        *system_lines(platform.mac_ver()[0]),
        *([f"GPU       {mx.device_info().get('device_name', 'unnamed')}"] if mx.default_device() == mx.gpu else []),
        f"memory    {'; '.join(limits)}",
    ]


def system_lines(macos: str) -> list[str]:
    """A line on a version of macOS on which MLX keeps nothing resident; "" is no Mac."""
    if not macos or int(macos.split(".")[0]) >= RESIDENT_MACOS:
        return []
    return [
        f"note      macOS {macos}: MLX keeps memory resident for the GPU from macOS {RESIDENT_MACOS} on; before it, "
        "streamed experts are slow"
    ]


def device_lines() -> list[str]:
    """Lines on the limits of the GPU, without what identifies the machine."""
    if not backend.has_kernels():
        return []
    known = mx.device_info()
    lines = ["device    " + ", ".join(f"{name} {known[name]}" for name in DEVICE if name in known)]
    if VIRTUAL in str(known["device_name"]):
        lines.append("note      this GPU is virtual: values count, and times say nothing of a Mac")
    return lines


def missing_lines() -> list[str]:
    """What is not installed, and the command that installs it."""
    lines = []
    if not native.available() and mx.default_device() == mx.cpu:
        lines.append(f"missing   native CPU kernels: install a C compiler, then {reinstall_command()}")
    for extra, packages in EXTRAS.items():
        absent = [name for name in packages if importlib.util.find_spec(name) is None]
        if absent:
            lines.append(f"missing   {' and '.join(absent)}: {install_command(extra)}")
    return lines


def thread_lines() -> list[str]:
    """Lines on the threads that Metal allows in a threadgroup, and those that the kernels use."""
    if backend.name() != "metal":
        return []
    alone, named = thread_limits()
    granted = f"Metal allows a kernel with many registers {alone} of {ASKED}, {named} if its source declares them"
    return [f"threads   the kernels ask for at most {MOST_THREADS['metal']} in a threadgroup; {granted}"]


def matrix_lines() -> list[str]:
    """A line on the matrix units of an M5, which MLX's own products use for many rows of 16-bit floats."""
    if backend.name() != "metal":
        return []
    library = Path(mx.__file__).parent / "lib" / "mlx.metallib"
    held = library.read_bytes() if library.exists() else b""
    return [f"matrices  {matrix_units(str(mx.device_info()['architecture']), platform.mac_ver()[0], held)}"]


def matrix_units(architecture: str, macos: str, library: bytes) -> str:
    """Whether prompts use matrix units, by the conditions of MLX 0.32 (`is_nax_available` in its
    backend/metal/device.cpp).

    Args:
        architecture: the GPU's, as MLX names it: "applegpu_g17s".
        macos: the version of macOS.
        library: MLX's compiled kernels.
    """
    if generation_of(architecture) < M5_GENERATION:
        return f"{architecture} has no matrix units; GPUs from M5 on have them"
    if tuple(map(int, macos.split(".")[:2])) < M5_MACOS:
        return f"matrix units are not used: they need macOS {'.'.join(map(str, M5_MACOS))} or later"
    if NAX not in library:
        return "matrix units are not used: this build of MLX has no kernels for them; the wheel from PyPI has"
    return "a prompt's products use the matrix units; moeflux tune finds from how many rows to dequantise experts"


def value_lines(dtype: mx.Dtype) -> tuple[list[str], bool]:
    """Whether values are right here, a line for each operation."""
    checks = check_operations(dtype)
    lines = []
    for i, check in enumerate(checks):
        start = f"{'' if i else 'values':10}{check.name:10}{'right' if check.is_right else 'WRONG'}"
        lines.append(f"{start}: error {check.error:.1e}, rounding {check.bound:.0e} at most ({check.seconds:.1f} s)")
    is_right = all(check.is_right for check in checks)
    if not is_right:
        lines.append("error: an operation is wrong on this machine; please report this output as a bug")
    return lines, is_right


def disk_rate(folder: Path) -> float:
    """Bytes per second of reading experts in random order from a file that is written here and removed again.

    Raises:
        ModelFileError: there is no room for the file. OSError: it cannot be written.
    """
    free = shutil.disk_usage(folder).free
    if free < 2 * MEASURED_FILE:
        raise ModelFileError(f"{folder} has {in_gb(free, 1)} free; measuring takes {in_gb(2 * MEASURED_FILE, 1)}")
    count = MEASURED_FILE // EXPERT.stride
    layout = ExpertLayout({0: EXPERT}, count, 1)
    with tempfile.TemporaryDirectory(prefix=".moeflux-doctor-", dir=folder) as made:
        path = Path(made) / layout.file_name(0)
        with path.open("wb") as file:
            for _ in range(count):
                file.write(os.urandom(EXPERT.stride))  # drives and file systems may make little of zeros
            os.fsync(file.fileno())
        return measure_disk(PackedExperts(layout, [path.parent]))


def hub_folder() -> Path:
    """The Hugging Face cache, or the first folder above it that exists."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def speed_of(engine: Engine) -> list[str]:
    """A table of the speed of a prompt of `PROMPT` tokens and an answer after it."""
    sizes = argparse.Namespace(prompt_tokens=[PROMPT], max_tokens=ANSWER, rounds=ROUNDS)
    return table_of_speed(measured(sizes, engine, {OURS: own_steps(engine)})[OURS], None)


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


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's name, as the system gives it."""
    if platform.system() == "Linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    return chip() or platform.processor() or platform.machine()
