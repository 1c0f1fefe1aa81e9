"""A prompt: the ids for comparing texts, the ids that the model gets, and the images."""

import hashlib
from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import numpy as np

from ..errors import RequestError
from ..model.decoder import Model
from ..model.images import NO_IMAGES, Image, Images, ImageSource
from ..model.tokens import token_ids
from ..vision.vision import ReadImage

OneOrMore = ImageSource | Image | Sequence[ImageSource | Image]
FIRST_KEY = 1 << 31  # larger than any token id


class Prompt(list[int]):
    """A list of token ids for comparing texts, in which each row of an image has a key instead of an id.

    The keys are derived from the image's digest, so different images have different keys.

    Args:
        tokens: [N] uint32, with the image token for each row of an image.
        images: the images with their places in the prompt.
    """

    def __init__(self, tokens: mx.array, images: Images = NO_IMAGES):
        keys = np.array(tokens)
        for place, image in images.placed:
            keys[place : place + image.length] = _keys(image)
        super().__init__(keys.tolist())
        self.tokens, self.images = tokens, images


def prompt_with_images(tokens: Sequence[int] | mx.array, images: OneOrMore, model: Model) -> Prompt:
    """Makes a prompt in which the images (one or a list) replace the model's image tokens, in order.

    Raises:
        RequestError: as `read_images`, or the number of images differs from the number of places.
    """
    read = read_images(images, model)
    assert model.vision is not None
    return with_images(np.array(tokens).tolist(), read, model.vision.token)


def read_images(images: OneOrMore, model: Model) -> list[Image]:
    """Reads images (one or a list) for a model.

    Raises:
        RequestError: the model reads no images, or one cannot be read.
    """
    if model.vision is None:
        raise RequestError(f"this {model.model_type} model was loaded without an image encoder; use load()")
    sources = images if isinstance(images, (list, tuple)) else [cast(ImageSource, images)]
    return [one if isinstance(one, ReadImage) else model.vision.image(one) for one in sources]


def with_images(tokens: Sequence[int], images: Sequence[Image], token: int) -> Prompt:
    """Makes a prompt in which the images replace each `token`, in order.

    Raises:
        RequestError: the number of images differs from the number of places.
    """
    places = [i for i, one in enumerate(tokens) if one == token]
    if len(places) != len(images):
        raise RequestError(
            f"the prompt has {len(places)} places for images, but {len(images)} images were given; "
            "give one image per place"
        )
    whole: list[int] = []
    placed, done = [], 0
    for place, image in zip(places, images, strict=True):
        whole += tokens[done:place]
        placed.append((len(whole), image))
        whole += [token] * image.length
        done = place + 1
    whole += tokens[done:]
    return Prompt(mx.array(whole, mx.uint32), Images(placed))


def places_of(text: Sequence[int]) -> list[int]:
    """The place of each token, with one place per image, followed by the length of the text.

    Two images must be separated by a token, as they are in every chat template.
    """
    begins = (i for i, one in enumerate(text) if one < FIRST_KEY or not i or text[i - 1] < FIRST_KEY)
    return [*begins, len(text)]


def collapsed(text: Sequence[int], token: int) -> list[int]:
    """The text with `token` once for each image."""
    return [token if text[place] >= FIRST_KEY else text[place] for place in places_of(text)[:-1]]


def checked_prompt(prompt: Sequence[int] | np.ndarray | mx.array, model: Model) -> Prompt:
    """Checks token ids and returns them as a `Prompt`; a `Prompt` is returned unchanged.

    Raises:
        RequestError: the list is empty, or an id is not an integer or outside the vocabulary. ExpertIOError: this
            process was forked after `model` was loaded.
    """
    model.check_process()  # in a forked child a GPU's arrays cannot even be made
    if isinstance(prompt, Prompt):
        token_ids(prompt.tokens, model.args.vocab_size, "the prompt")
        return prompt
    return Prompt(token_ids(prompt, model.args.vocab_size, "the prompt"))


def _keys(image: Image) -> np.ndarray:
    """uint32 [length]."""
    drawn = hashlib.shake_256(image.digest).digest(4 * image.length)
    return np.frombuffer(drawn, "<u4") | np.uint32(FIRST_KEY)
