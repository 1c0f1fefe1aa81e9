"""What a terminal shows of an answer, and while a prompt is computed."""

import io
import mmap
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moeflux_mlx.cli import terminal


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(terminal.time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.skipif(not terminal.Path("/proc/self/status").exists(), reason="only Linux tells")
def test_pages_of_mapped_files_are_counted(tmp_path):
    nbytes = 64 << 20
    (tmp_path / "file").write_bytes(bytes(nbytes))
    before = terminal.mapped_memory_gb()
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert sum(pages[::4096]) == 0
        assert terminal.mapped_memory_gb() - before > 0.9 * nbytes / 1e9
    assert abs(terminal.mapped_memory_gb() - before) < 0.1 * nbytes / 1e9
    assert terminal.peak_memory_gb() >= before


def test_a_system_without_figures_gives_no_mapped_memory(tmp_path):
    assert terminal.mapped_memory_gb(tmp_path / "none") is None
    (tmp_path / "old").write_text("VmRSS:\t 1 kB\n")
    assert terminal.mapped_memory_gb(tmp_path / "old") is None


def test_a_long_prompt_says_how_long_it_will_take(clock, monkeypatch):
    out = Terminal()
    monkeypatch.setattr(terminal.sys, "stderr", out)
    progress = terminal.ProgressLine("prompt")
    shown = []
    for seconds, done in ((0, 1000), (1, 1100), (10, 2000), (40, 5000)):
        clock[0] = 100.0 + seconds
        progress.update(done, 9000)
        shown.append(out.getvalue().rsplit("\r\033[K", 1)[-1])
    assert shown == [
        "prompt 1000/9000 tokens",
        "prompt 1100/9000 tokens",  # too little progress for an estimate
        "prompt 2000/9000 tokens, 1 min 10 s left",
        "prompt 5000/9000 tokens, 40 s left",
    ]
    progress.close()
    assert out.getvalue().endswith("\r\033[K")


def test_without_a_terminal_nothing_is_shown(clock, capsys):
    progress = terminal.ProgressLine("prompt")
    progress.update(1, 2)
    progress.close()
    assert capsys.readouterr().err == ""


def test_without_a_terminal_long_work_writes_a_line_now_and_then(clock, capsys):
    with terminal.ProgressLine("reading", lines=True) as progress:
        for seconds in range(0, 61, 5):
            clock[0] = 100.0 + seconds
            progress.update(seconds, 80)
    assert capsys.readouterr().err.splitlines() == [
        "reading ...",
        "reading 30/80 tokens, 50 s left",
        "reading 60/80 tokens, 20 s left",
    ]


@pytest.mark.parametrize("seconds, text", [(0.2, "0 s"), (59.4, "59 s"), (60, "1 min 00 s"), (3671, "61 min 11 s")])
def test_durations(seconds, text):
    assert terminal.duration(seconds) == text


def shown(written, edge):
    """Returns the lines of a terminal with this number of columns, with its own line breaks."""
    lines = [""]
    for move, letter in re.findall(r"\033\[(\d+)G\033\[K|(.)", written, re.DOTALL):
        if move:
            lines[-1] = lines[-1][: int(move) - 1]
        elif letter == "\n":
            lines.append("")
        elif terminal.columns(lines[-1] + letter) > edge:
            lines.append(letter)
        else:
            lines[-1] += letter
    return lines


@given(st.lists(st.sampled_from(["a", "bcd", "efghijkl", " ", "\n"]), max_size=40), st.lists(st.integers(1, 9)))
@example(["bcd", " ", "bcd", " ", "bcd"], [1] * 11)
def test_words_are_whole_however_the_text_is_cut(parts, cuts):
    text, pieces, edge = "".join(parts), [], 10
    for cut in cuts:
        pieces, text = [*pieces, text[:cut]], text[cut:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(edge))
        wrap = terminal.WordWrap()
        lines = shown("".join(map(wrap.feed, [*pieces, text])), edge)
    words = "".join(parts).split()
    if all(len(word) <= edge for word in words):
        assert [word for line in lines for word in line.split()] == words
    assert "".join("".join(lines).split()) == "".join(words)


def test_lines_are_broken_between_words_and_between_wide_letters(monkeypatch):
    monkeypatch.setenv("COLUMNS", "10")
    assert shown(terminal.WordWrap().feed("Once upon a time there"), 10) == ["Once upon ", "a time ", "there"]
    water = "水"  # two columns
    assert shown(terminal.WordWrap().feed("one " + 5 * water), 10) == ["one " + 3 * water, 2 * water]
    code = "```\nlong = 1 + 2 + 3\n```\n"
    assert terminal.WordWrap().feed(code) == code
    assert terminal.WordWrap().feed(code + "Once upon a time").endswith("Once upon \na time")
