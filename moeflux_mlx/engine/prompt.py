"""A prompt: the ids by which texts are compared, the ids that the model gets, and its images."""

import hashlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import RequestError
from ..model.decoder import Model
from ..model.images import NO_IMAGES, Image, Images
from ..model.tokens import token_ids
from ..vision.vision import EncodedImage

FIRST_KEY = 1 << 31  # beyond any vocabulary


class Prompt(list[int]):
    """A list of token ids in which each row of an image has a key instead, by which texts are compared.

    The keys of an image follow from its digest, so another image has others.

    Args:
        tokens: [N] uint32, an image's token in place of each of its rows.
        images: at places of the prompt.
    """

    def __init__(self, tokens: mx.array, images: Images = NO_IMAGES):
        keys = np.array(tokens)
        for place, image in images.placed:
            keys[place : place + image.length] = _keys(image)
        super().__init__(keys.tolist())
        self.tokens, self.images = tokens, images


def prompt_with_images(tokens: Sequence[int] | mx.array, images: Any, model: Model) -> Prompt:
    """The prompt in which images, or one, take the places of the model's token for them, one after another.

    Raises:
        RequestError: the model reads none, one cannot be read, or there are more images than places, or fewer.
    """
    if model.vision is None:
        raise RequestError(f"this {model.model_type} model was loaded without what reads images; use load()")
    sources = images if isinstance(images, (list, tuple)) else [images]
    read = [one if isinstance(one, EncodedImage) else model.vision.image(one) for one in sources]
    return with_images(np.array(tokens).tolist(), read, model.vision.token)


def with_images(tokens: Sequence[int], images: Sequence[Image], token: int) -> Prompt:
    """The prompt in which the images take the places of `token`, one after another.

    Raises:
        RequestError: there are more images than places, or fewer.
    """
    places = [i for i, one in enumerate(tokens) if one == token]
    if len(places) != len(images):
        raise RequestError(f"the prompt has {len(places)} places for images, and there are {len(images)}")
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
    """Where each token of a text lies, with one place for each image, and at last the length of the text.

    Between two images there must be a token, as every chat template has it.
    """
    begins = (i for i, one in enumerate(text) if one < FIRST_KEY or not i or text[i - 1] < FIRST_KEY)
    return [*begins, len(text)]


def collapsed(text: Sequence[int], token: int) -> list[int]:
    """The text with `token` once for each image."""
    return [token if text[place] >= FIRST_KEY else text[place] for place in places_of(text)[:-1]]


def checked_prompt(prompt: Sequence[int] | np.ndarray | mx.array, model: Model) -> Prompt:
    """Token ids as a prompt; one that is a prompt already, itself.

    Raises:
        RequestError: there are none, they are no integers, or one is outside the vocabulary. ExpertIOError: this
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
