"""The pictures of the docs: plots match the stored figures, and a recording keeps a terminal's text and times."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import plots
import pytest
import record_demo

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"


def test_the_published_plots_are_drawn_from_the_kept_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plots.py", str(tmp_path)])
    plots.main()
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


def test_the_published_recording_is_small_and_needs_nothing_else():
    text = (PICTURES / "demo.svg").read_text()
    assert len(text) < 60_000 and "http" not in text.replace("http://www.w3.org/2000/svg", "")
