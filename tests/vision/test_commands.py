"""Images in `generate`, `chat` and the library, and what a machine without the encoder says."""

import io
import itertools

import image_goldens
import mlx.core as mx
import numpy as np
import pytest
from image_models import image_directory, needs_encoder
from tiny_models import tiny_directory

from moeflux_mlx import generate, load, stream_generate
from moeflux_mlx.chat import Chat
from moeflux_mlx.driving.conversation import Conversation
from moeflux_mlx.errors import RequestError
from moeflux_mlx.generate.__main__ import main
from moeflux_mlx.opening.engine import load_model, open_engine
from moeflux_mlx.plan import main as planned
from moeflux_mlx.planning.machine import in_gb
from moeflux_mlx.vision import vision
from moeflux_mlx.vision.pixels import Processor, Size

FAMILY = "qwen3_vl_moe"
ASKED = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}]


@pytest.fixture(scope="module")
def engine():
    return open_engine(image_directory(FAMILY), dtype=mx.float32)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for i in range(2):
        (folder / f"{i}.png").write_bytes(image_goldens.png(FAMILY, i))
    return [str(folder / f"{i}.png") for i in range(2)]


@needs_encoder
def test_the_library_takes_images_as_mlx_vlm_does(engine, files):
    from PIL import Image

    prompt = engine.tokenizer.apply_chat_template(ASKED)
    said = {}
    for kind, image in {
        "path": files[0],
        "list": [files[0]],
        "URL": f"file://{files[0]}",
        "bytes": image_goldens.png(FAMILY, 0),
        "picture": Image.open(io.BytesIO(image_goldens.png(FAMILY, 0))),
        "other": files[1],
    }.items():
        (one,) = stream_generate(engine.model, engine.tokenizer, prompt, image=image, max_tokens=1)
        said[kind] = np.array(one.logprobs)
    other = said.pop("other")
    assert all(np.array_equal(one, said["path"]) for one in said.values())
    assert np.abs(other - said["path"]).max() > 1e-2
    assert isinstance(generate(engine.model, engine.tokenizer, prompt, image=files[0], max_tokens=3), str)
    with pytest.raises(RequestError, match="1 places for images, but 2 images were given"):
        next(stream_generate(engine.model, engine.tokenizer, prompt, image=files))
    with pytest.raises(RequestError, match="No such file"):
        next(stream_generate(engine.model, engine.tokenizer, prompt, image="nowhere.png"))


@needs_encoder
def test_generate_takes_several_files(capsys, engine, files):
    arguments = ["--model", str(image_directory(FAMILY)), "--max-tokens", "3", "--prompt", "what is it?"]
    assert main([*arguments, "--image", *files]) == 0
    length = int(capsys.readouterr().err.partition("prompt: ")[2].split()[0])
    text = engine.tokenizer.apply_chat_template([{"role": "user", "content": "what is it?"}])
    assert length == len(text) + 17 + 8


@needs_encoder
def test_a_chat_keeps_its_images_and_takes_them_along(tmp_path, capsys, engine, files):
    talk = Conversation(engine.session(), engine.tokenizer, {})
    chat = Chat(talk, engine, {"max_tokens": 4})
    chat.take(f"/image {files[0]}")
    assert "The next message has 1 image." in capsys.readouterr().err
    chat.take("what is it?")
    first = len(talk.session.tokens)
    chat.take("and now?")
    assert talk.session.reuse.memory >= first - 5 and len(talk.turns) == 4
    chat.take(f"/save {tmp_path / 'talk'}")
    tokens = list(talk.session.tokens)
    other = Conversation(engine.session(), engine.tokenizer, {})
    again = Chat(other, engine, {"max_tokens": 4})
    again.take(f"/load {tmp_path / 'talk'}")
    assert other.turns == talk.turns and other.session.tokens == tokens
    for one in (chat, again):
        one.take("once more?")
    assert other.session.reuse.computed < 40 and other.turns == talk.turns
    chat.take(f"/image {tmp_path / 'talk'}")
    assert "the image cannot be read" in capsys.readouterr().err


@needs_encoder
def test_the_encoder_is_in_the_plan_unless_it_is_left_out(engine, capsys):
    without = open_engine(image_directory(FAMILY), dtype=mx.float32, vision=False)
    files = vision.find_vision(engine.weights.located, engine.model.args)
    demands = [one.plan.demand for one in (engine, without)]
    said = []
    for more in ([], ["--no-vision"]):
        assert planned(["--model", str(image_directory(FAMILY)), "--dtype", "float32", *more]) == 0
        said.append(capsys.readouterr().out)
    assert all(in_gb(one.resident, 3) in lines for one, lines in zip(demands, said, strict=True)), said
    assert demands[0].resident - demands[1].resident == files.nbytes(mx.float32) > 0
    assert demands[0].encoding > demands[1].encoding == 0
    with pytest.raises(RequestError, match=r"images are off \(--no-vision\)"):
        without.model.vision.image(b"")
    with pytest.raises(RequestError, match="image_tokens is 0"):
        load(image_directory(FAMILY), image_tokens=0)
    small = open_engine(image_directory(FAMILY), dtype=mx.float32, image_tokens=4)
    assert small.model.vision.image(image_goldens.png(FAMILY, 0)).length <= 4


def test_without_the_extra_one_line_names_it(monkeypatch):
    monkeypatch.setattr(vision, "is_installed", lambda: False)
    model, _ = load(image_directory(FAMILY), dtype=mx.float32)
    packages = r"mlx-vlm==[0-9.]+ 'pillow>=[0-9.]+'|-e .*\[vision\]'?"  # the latter where we are not installed
    with pytest.raises(RequestError, match=f"^images need the extra vision: pip install ({packages})$"):
        model.vision.image(b"")


SIZES = [(1, 1), (7, 900), (4000, 33), (1920, 1080), (300, 299), (13, 14)]


@pytest.mark.parametrize("kind", ["area", "area of two", "padded"])
def test_no_image_has_more_rows_than_are_allowed(kind):
    made = Processor(kind, 14, 2, 2, 28 * 28, 1 << 24, (0.5,) * 3, (0.5,) * 3)
    for size, rows in itertools.product(SIZES, (1, 5, 64)):
        resized, padded = made.resized(Size(*size), rows)
        assert padded.width % 28 == padded.height % 28 == 0 and min(resized) >= 1, (size, rows)
        most = max(rows, 1 if kind == "padded" else 0) * 28 * 28
        assert padded.width * padded.height <= most or min(padded) == 28, (size, rows)


@needs_encoder
def test_text_runs_where_the_encoder_is_not_whole():
    model = load_model(tiny_directory("qwen3_vl_moe", "hub"), dtype=mx.float32)
    assert model(mx.array([[1, 2]])).shape[1] == 2
    with pytest.raises(RequestError, match="the image encoder's .* is missing"):
        model.vision.image("picture.png")
