"""The screen that describes a machine and what it can run."""

import re
from itertools import takewhile

import pytest
from tiny_models import tiny_directory

from moeflux_mlx import doctor
from moeflux_mlx.cli import diagnosis
from moeflux_mlx.kept.measured import Rates, keep_rates, kept_rates
from moeflux_mlx.ops import native
from moeflux_mlx.ops.tiles import MAX_TOKENS
from moeflux_mlx.spec import variants


@pytest.fixture(autouse=True)
def small_file(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("kept")))
    monkeypatch.setattr(diagnosis, "MEASURED_FILE", 8 << 20)


def test_the_screen_names_machine_values_disk_and_models(tmp_path, capsys):
    assert doctor.main(["--directory", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert all(out.count(f"\n{word}") == 1 for word in ("versions ", "runs on ", "memory ", "values ", "disk "))
    assert "GB/s reading whole experts" in out and all(f"\n{name} " in out for name in variants())
    assert list(tmp_path.iterdir()) == [], "the measured file is gone"


@pytest.mark.parametrize("other", ["--no-disk", "--launches"])
def test_a_directory_that_is_not_measured_is_refused(other, capsys):
    with pytest.raises(SystemExit, match="2"):
        doctor.main([other, "--directory", "."])
    assert f"--directory: not allowed with argument {other}" in capsys.readouterr().err


def test_a_wrong_value_is_reported_and_ends_in_an_error(monkeypatch, capsys):
    right = diagnosis.check_operations
    wrong = diagnosis.check_operations.__globals__["Check"]("experts", 0.7, 1e-4, 0.1)
    monkeypatch.setattr(diagnosis, "check_operations", lambda dtype: [*right(dtype), wrong])
    assert doctor.main(["--no-disk"]) == 1
    out = capsys.readouterr().out
    assert "WRONG: error 7.0e-01" in out and "please report" in out and "\ndisk" not in out


def test_a_disk_without_space_is_not_measured(free_disk, tmp_path, capsys):
    free_disk(1000)
    assert doctor.main(["--directory", str(tmp_path)]) == 0
    assert "disk      not measured:" in capsys.readouterr().out


def test_a_disk_that_is_not_measured_keeps_its_rate_and_a_missing_extra_comes_with_its_command(monkeypatch, capsys):
    monkeypatch.setattr(diagnosis, "EXTRAS", {"server": ("no_such_package",)})
    measured = Rates(1e9, 2e9, 1e-4, 2e-4)
    keep_rates(measured)
    assert doctor.main(["--no-disk"]) == 0
    kept = kept_rates()
    assert kept.disk == 2e9 and kept != measured
    assert re.search(r"no_such_package: pip install ('starlette>=|-e .*\[server\])", capsys.readouterr().out)


def test_metals_limit_on_threads_is_reported(monkeypatch, backend_is):
    assert diagnosis.thread_lines() == []
    backend_is("metal")
    monkeypatch.setattr(diagnosis, "thread_limits", lambda: (384, 1024))
    (line,) = diagnosis.thread_lines()
    assert "at most 256" in line and "384 of 1024, 1024 if" in line


@pytest.mark.parametrize(
    "architecture, macos, library, said",
    [
        ("applegpu_g16s", "26.4", b"", "GPUs from M5 on"),
        ("applegpu_g17s", "26.1.1", diagnosis.NAX, "need macOS 26.2"),
        ("applegpu_g17g", "26.2", b"steel_gemm", "this build of MLX"),
        ("applegpu_g17c", "27.0", b"..." + diagnosis.NAX, "moeflux tune"),
    ],
)
def test_whether_matrix_units_are_used_is_said(architecture, macos, library, said):
    assert said in diagnosis.matrix_units(architecture, macos, library)
    assert diagnosis.matrix_lines() == []


def launches(capsys, *options):
    assert doctor.main(["--launches", *options]) == 0
    return capsys.readouterr().out.splitlines()


def below(lines, part, tokens):
    """Returns the line of a part and a number of tokens, and the reasons after it."""
    at = next(i for i, line in enumerate(lines) if line.startswith(part))
    at = next(i for i, line in enumerate(lines) if i > at and line.startswith(f"{tokens:>5} token"))
    return lines[at], "\n".join(takewhile(lambda line: line.startswith(" " * 14), lines[at + 1 :]))


@pytest.mark.parametrize(("backend", "dtype"), [("metal", "bfloat16"), ("cuda", "bfloat16"), ("cpu", "float32")])
def test_what_a_model_runs_is_shown_for_any_backend(capsys, cpu_device, backend, dtype):
    lines = launches(capsys, "--model", str(tiny_directory("qwen3_moe")), "--backend", backend)
    assert lines[0].startswith(f"qwen3_moe on {backend}") and lines[0].endswith(f", in {dtype}")
    parts = [line.partition(":")[0] for line in lines[1:] if not line.startswith(" ")]
    assert parts == [
        "attention",
        *(["attention, short turn", "attention, short turn behind a long text"] if backend == "cuda" else []),
        *(["experts"] if backend == "cpu" else ["experts, resident", "experts, streamed"]),
        *(["experts, queued ahead"] if backend != "cpu" else []),
        "lm_head",
    ]
    single = sum("turn" in part or "ahead" in part for part in parts)
    assert sum(line.lstrip()[:1].isdigit() for line in lines) == 3 * len(parts) - 2 * single


def test_reasons_are_listed_below_what_runs(capsys, cpu_device):
    lines = launches(capsys, "--variant", "qwen3-30b-a3b", "--backend", "cuda")
    runs, reasons = below(lines, "attention", 1)
    assert "qmv[affine4] x2, attend_matrix, attend_combine" in runs and not reasons
    runs, reasons = below(lines, "attention", 512)
    assert runs.split("tokens")[1].split() == ["attend_span"]
    assert "no kernel for attend: there are several tokens" in reasons
    assert f"no kernel for linear: there are more than {MAX_TOKENS} rows" in reasons
    assert "expert_choice[affine4], expert_down_combine[affine4]" in below(lines, "experts, resident", 1)[0]
    assert "topk_host_copy, expert_gate_up[affine4]" in below(lines, "experts, streamed", 1)[0]


@pytest.mark.skipif(not native.available(), reason="the extension is not built")
def test_a_cpu_names_its_instructions_and_the_native_forms(capsys, cpu_device):
    lines = launches(capsys, "--variant", "cogito-v2-671b", "--backend", "cpu")
    assert lines[0] == f"deepseek_v3 on cpu ({native.instruction_paths()[0]}), in float32"
    runs, reasons = below(lines, "experts", 1)
    assert (
        "native expert_gate_up" in runs and reasons == " " * 14 + "route: the native choice knows softmax, not sigmoid"
    )


def test_a_small_matrix_is_left_to_mlx(capsys, cpu_device):
    lines = launches(capsys, "--model", str(tiny_directory("qwen3_moe")), "--backend", "metal")
    assert "weights are fewer than 4,000,000, from which it pays" in below(lines, "lm_head", 1)[1]


@pytest.mark.parametrize("option", [["--model", "X"], ["--variant", "demo"], ["--backend", "metal"]])
def test_options_of_launches_need_launches(capsys, option):
    option = [variants()[0] if word == "demo" else word for word in option]
    assert doctor.main(["--no-disk", *option]) != 0
    assert f"{option[0]} is for --launches; give both" in capsys.readouterr().err
