"""The pictures of the docs: plots match the stored figures, and a recording keeps a terminal's text and times, and
its memory."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import plots
import pytest
import record_demo
import record_memory

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"


def test_the_published_plots_are_drawn_from_the_kept_figures(tmp_path):
    plots.main([str(tmp_path)])
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert drawn and drawn == {file.name: file.read_text() for file in PICTURES.glob("plot-*.svg")}


@pytest.mark.parametrize("value, top", [(0.9, 1), (7.02, 7.5), (278.6, 300), (100, 100)])
def test_an_axis_ends_at_a_round_number(value, top):
    assert plots.round_up(value) == top


def test_bars_are_as_high_as_their_values():
    parts = plots.bars({"groups": ["a"], "bars": {"x": [1.0], "y": [2.0]}})
    low, high = (float(height) for height in re.findall(r'height="([\d.]+)"', "".join(parts)))
    assert high == pytest.approx(2 * low, abs=0.2)


def test_progress_that_is_wiped_is_not_recorded():
    pieces = [
        (0.1, "\r\x1b[Kloading"),
        (0.2, "\r\x1b[Knote\r\n\r\x1b[Kprompt 1/2"),
        (0.3, "\r\x1b[KOnce"),
        (0.4, " more"),
    ]
    kept = record_demo.lasting(pieces)
    assert "".join(letter for _, letter in kept) == "note\nOnce more"
    assert [at for at, letter in kept if letter in "O "] == [0.3, 0.4]


def test_a_recording_shows_every_word_in_order_and_at_its_time():
    letters = [(float(i), letter) for i, word in enumerate(["Tomas ", "<3 ", "geese " * 40]) for letter in word]
    drawing = record_demo.drawing("demo", letters)
    spans = ElementTree.fromstring(drawing).findall(".//{*}tspan")[1:]  # the first is the prompt's sign
    assert "".join(span.text for span in spans).split() == ["Tomas", "<3", *["geese"] * 40]
    delays = [float(re.search(r"[\d.]+", span.get("style"))[0]) for span in spans]
    assert delays == sorted(delays) and set(delays) == {0.0, 1.0, 2.0}


@pytest.mark.parametrize("name", ["demo", "memory"])
def test_a_published_recording_is_small_and_needs_nothing_else(name):
    text = (PICTURES / f"{name}.svg").read_text()
    assert len(text) < 60_000 and "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_a_command_is_watched_in_its_group(tmp_path):
    (tmp_path / "memory.stat").write_text("cache 7\nrss 1000\nshmem 24\n")
    wait = "import time; print('begun', flush=True); time.sleep(0.5); print('ended')"
    letters, samples = record_memory.watched(tmp_path, [sys.executable, "-c", wait])
    assert "".join(letter for _, letter in letters).split() == ["begun", "ended"]
    assert (tmp_path / "cgroup.procs").read_text().strip().isdigit()
    times = [at for at, _ in samples]
    assert len(samples) > 2 and times == sorted(times) and {held for _, held in samples} == {1024}


def test_memory_is_drawn_against_its_limit():
    samples = [(0.0, 0), (5.0, 1 << 30), (10.0, 2 << 30)]
    letters = [(4.0, letter) for letter in "half the way\n"]
    drawing = record_memory.drawing("run", "a model", letters, samples, 2 << 30, 10)
    root = ElementTree.fromstring(drawing)
    points = [tuple(map(float, point.split(","))) for point in root.find("{*}polyline").get("points").split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 - y2 == record_memory.RISE and "animation:c 1.0s" in drawing and "animation-delay:0.40s" in drawing
    places = [float(text.get("y")) for text in root.findall("{*}text")]
    assert max(places) < float(root.get("viewBox").split()[3])
    said = " ".join("".join(text.itertext()) for text in root.findall("{*}text"))
    assert "limit 2.15 GB" in said and "at most 2.15 GB, drawn 10 times as fast" in said and "10 s" in said


def test_many_samples_keep_their_peaks():
    samples = [(float(i), 5 if i == 777 else 1) for i in range(1000)]
    kept = record_memory.thinned(samples, 100)
    assert len(kept) == 100 and (777.0, 5) in kept


def test_no_group_no_recording(tmp_path):
    (tmp_path / "cgroup").write_text("0::/\n")
    with pytest.raises(SystemExit, match="no version 1 control groups"):
        record_memory.limited(1, tmp_path / "cgroup").__enter__()
