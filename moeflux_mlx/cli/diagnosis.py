"""What several commands say of this machine: what it is, whether its values are right, and how fast its disk is.

Reads and writes one temporary file to measure the disk; loads no model.
"""

import os
import platform
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

import mlx.core as mx

from ..errors import ModelFileError
from ..formats.packed import PackedExperts
from ..formats.record import ExpertLayout, Record
from ..ops import backend
from ..ops.chips import M5_GENERATION, generation_of
from ..ops.launch import MOST_THREADS
from ..planning.machine import Figures, in_gb
from ..planning.settings import chip, physical_ram_bytes
from ..tools.checkup import ASKED, check_operations, runs_on, thread_limits
from .planning import measure_disk

PACKAGES = ("moeflux-mlx", "mlx", "numpy", "huggingface_hub", "mlx-lm")
MEASURED_FILE = 512 << 20
EXPERT = Record.make(2048, 512)  # reads of Qwen3.6-35B-A3B's size
RESIDENT_MACOS = 15
M5_MACOS, NAX = (26, 2), b"gather_qmm_rhs_nax"


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
        return measure_disk(PackedExperts(layout, {0: path}))


def hub_folder() -> Path:
    """The Hugging Face cache, or the first folder above it that exists."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    return next(place for place in (folder, *folder.parents) if place.is_dir())


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
