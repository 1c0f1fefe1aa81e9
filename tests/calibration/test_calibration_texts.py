"""The texts of a calibration run."""

import json

import numpy as np
import pytest
from tiny_models import tiny_directory

from moeflux_mlx.calibration.calibrated import CHAT, FOLDER, PLAIN, default_texts, windows
from moeflux_mlx.errors import RequestError
from moeflux_mlx.text.tokenizer import load_tokenizer


def test_the_text_that_ships_is_small_and_names_its_sources():
    files = {file.name: file for file in FOLDER.iterdir()}
    assert sum(file.stat().st_size for file in files.values()) < 300_000
    sources = files["SOURCES.md"].read_text()
    for name in (*PLAIN, CHAT):
        assert f"`{name}`" in sources and files[name].stat().st_size > 10_000
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in files["LICENSE-PYTHON.txt"].read_text()


def test_windows_hold_every_token_once():
    tokenizer = load_tokenizer(tiny_directory("qwen3_moe"))
    texts = default_texts(tokenizer, 1000)
    assert {len(text) for text in texts[:-1]} <= set(range(1, 1001)) and sum(len(text) == 1000 for text in texts) > 200
    prose = tokenizer.encode((FOLDER / PLAIN[0]).read_text())
    assert np.concatenate(texts)[: len(prose)].tolist() == prose
    chat = tokenizer.decode(np.concatenate(texts)[-2000:].tolist())
    assert "<|im_start|>" in chat and "the 93rd" in chat


REFUSES = "{{ raise_exception('no') }}"
NO_SYSTEM = (
    f"{{% for m in messages %}}{{% if m.role == 'system' %}}{REFUSES}{{% endif %}}[{{{{ m.content }}}}]{{% endfor %}}"
)


@pytest.mark.parametrize("template", [None, REFUSES, NO_SYSTEM])
def test_a_chat_is_read_by_models_of_any_template(tmp_path, template):
    for file in tiny_directory("qwen3_moe").glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(tmp_path)
    text = tokenizer.decode(np.concatenate(default_texts(tokenizer)).tolist())
    last = json.loads((FOLDER / CHAT).read_text())[-1][0]["content"]
    assert (f"[{last}]" if template and "for" in template else f"user: {last}") in text


def test_a_window_of_nothing():
    with pytest.raises(RequestError, match="window 0"):
        windows([[1]], 0)
