"""Files and URLs of images: every form that a browser shows is read, and an error says what is wrong."""

import base64
import io
import time
from concurrent.futures import ThreadPoolExecutor

import image_goldens
import numpy as np
import pytest
from image_models import image_directory, needs_encoder
from tiny_models import tiny_directory

from moeflux_mlx.errors import RequestError
from moeflux_mlx.generate.__main__ import main
from moeflux_mlx.vision import vision
from moeflux_mlx.vision.pixels import Processor, read_levels
from moeflux_mlx.vision.sources import bytes_of, image_bytes
from moeflux_mlx.vision.vision import PictureReader

FAMILY = "qwen3_vl_moe"
AS_IT_IS = Processor("area", 4, 1, 1, 1, 1 << 20, (0.5,) * 3, (0.5,) * 3)


@pytest.fixture(scope="module")
def pillow():
    return pytest.importorskip("PIL.Image")


def levels_of(picture, **options):
    """Returns the red of a picture of 4 by 4 cells with 4 by 4 pixels each."""
    file = io.BytesIO()
    picture.save(file, "PNG", **options)
    levels = read_levels(file.getvalue(), AS_IT_IS, 1000)
    assert (levels == levels[..., :1]).all()
    return levels[::4, ::4, 0]


def test_greys_of_16_bits_keep_their_levels(pillow):
    """They are as those of 8 bits, also where one level is transparent."""
    cells = np.arange(0, 256, 17, dtype=np.uint16).reshape(4, 4)
    greys = np.kron(cells, np.ones((4, 4), np.uint16))
    np.testing.assert_array_equal(levels_of(pillow.fromarray(greys * 257)), cells)
    np.testing.assert_array_equal(levels_of(pillow.fromarray(greys.astype(np.uint8))), cells)
    clear = cells.copy()
    clear[1, 1] = 255
    level = int(cells[1, 1])
    np.testing.assert_array_equal(levels_of(pillow.fromarray(greys * 257), transparency=level * 257), clear)
    np.testing.assert_array_equal(levels_of(pillow.fromarray(greys.astype(np.uint8)), transparency=level), clear)


DATA = bytes(range(200, 256)) * 2
TEXT = base64.b64encode(DATA).decode()
assert {"+", "/", "="} <= set(TEXT)


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{TEXT}",
        f"DATA:image/png;base64,{TEXT}",
        f"Data:;BASE64,{TEXT}",
        f"data:image/png;charset=utf-8;base64,{TEXT}",
        f"data:image/png; base64 ,{TEXT}",
        f" data:image/png;base64,{TEXT}\n",
        f"data:image/png;base64,{TEXT.rstrip('=')}",
        "data:image/png;base64," + "\r\n".join(TEXT[i : i + 76] for i in range(0, len(TEXT), 76)),
        f"data:image/png;base64,\t {TEXT[:5]} \n{TEXT[5:]}",
        f"data:image/png;base64,{TEXT.replace('+', '%2B').replace('/', '%2f').replace('=', '%3D')}",
        f"data:image/png;base64,{TEXT}#part",
        "data:image/png," + "".join(f"%{byte:02x}" for byte in DATA),
        "data:;base64=no," + "".join(f"%{byte:02X}" for byte in DATA),
    ],
)
def test_data_urls_are_read_as_browsers_read_them(url):
    assert image_bytes(url) == DATA
    assert bytes_of(url.strip()) == DATA


@pytest.mark.parametrize(
    "url, said",
    [
        ("data:image/png;base64", "has no comma"),
        ("data:;base64,AAAAA", "base64 is damaged"),
        ("data:;base64,AA=A", "base64 is damaged"),
        ("data:;base64,AAA==", "base64 is damaged"),
        ("data:;base64,AA-_", "base64 is damaged"),
        ("data:;base64,AAAé", "base64 is damaged"),
    ],
)
def test_damaged_data_urls_are_refused(url, said):
    with pytest.raises(RequestError, match=said):
        image_bytes(url)


@pytest.mark.parametrize("data", [b"", b"hello", image_goldens.png(FAMILY, 0)[:10]])
def test_a_file_that_is_no_image_is_called_so(pillow, data):
    with pytest.raises(RequestError, match="^the image cannot be read: it is damaged or of another format; give") as no:
        read_levels(data, AS_IT_IS, 1000)
    assert "0x" not in str(no.value)


def test_a_picture_that_no_file_can_hold_is_refused(pillow):
    with pytest.raises(RequestError, match="^the picture cannot be read: .*mode F.*; convert it to RGB"):
        bytes_of(pillow.fromarray(np.zeros((4, 4), np.float32)))


@pytest.fixture
def decoded(monkeypatch):
    """Returns the files that were decoded."""
    files = []

    def read(data, *rest):
        files.append(data)
        time.sleep(0.02)
        return read_levels(data, *rest)

    monkeypatch.setattr(vision, "read_levels", read)
    monkeypatch.setattr(vision, "_KEPT", {})
    return files


@pytest.fixture
def keep_bytes(monkeypatch):
    """Returns a function that says how many bytes of images are kept."""
    return lambda nbytes: monkeypatch.setattr(vision, "KEPT_BYTES", nbytes)


def test_a_file_is_decoded_once_also_by_several_threads(pillow, decoded):
    read, (one, other) = PictureReader(AS_IT_IS, 0, True), (image_goldens.png(FAMILY, number) for number in range(2))
    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(read.image, [one] * 4)
    assert decoded == [one] and all(image.digest == first.digest for image in others)
    assert read.image(other).digest != first.digest and decoded == [one, other]


def test_the_files_used_last_are_kept(pillow, decoded, keep_bytes):
    read, files = PictureReader(AS_IT_IS, 0, True), [image_goldens.png(FAMILY, number) for number in range(2)]
    sizes = [read_levels(file, AS_IT_IS, 1024).nbytes for file in files]
    keep_bytes(sum(sizes) - 1)
    for number in (0, 0, 1, 1, 0):
        read.image(files[number])
    assert decoded == [files[0], files[1], files[0]]
    keep_bytes(sum(sizes))
    for number in (1, 0, 1, 0):
        read.image(files[number])
    assert len(decoded) == 4


def generate(path, capsys):
    code = main(["--model", str(path), "--dtype", "float32", "--prompt", "what is it?", "--image", "nope.png"])
    assert code == 1
    return capsys.readouterr().err


def test_generate_says_first_that_a_model_reads_no_images(capsys):
    """Neither the missing file nor the template, which has no place for an image, is named."""
    path = tiny_directory("qwen3_moe", template="qwen35_style")
    said = generate(path, capsys)
    assert "error: this qwen3_moe model has no image encoder that is known here; send text alone\n" in said


@needs_encoder
def test_generate_names_a_missing_file(capsys):
    assert "error: nope.png cannot be read: No such file" in generate(image_directory(FAMILY), capsys)
