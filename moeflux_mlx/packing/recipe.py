"""Which stored form each part of a model gets: a recipe, which is a JSON file that people can read, edit and share.

    {
      "name": "mine",
      "default": 8,
      "gate_up": 3,
      "down": {"bits": 4, "group_size": 32},
      "router": "float",
      "layers": {"0-2": {"gate_up": 4}, "-1": {"down": 6}}
    }

A form is a number of bits (mode affine, groups of 64), the name of another mode ("mxfp4") or of a type of GGUF
("q3_k"), an object as in the `quantization` of config.json, or "float": as the checkpoint has it. `PARTS` names the
parts. A part that is not named takes `default`, which also stands for every matrix that belongs to no part; only a
router takes 8 bits. `layers` says what differs in some layers: a number from 0 on, from -1 on counted from the end, or
a range. A later entry wins. Recipes are shared, so a file has at most `MOST_BYTES`, and no number in it is believed.
"""

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files import JsonDict, JsonObject, read_json, user_path
from ..formats.checkpoint import RECIPE
from ..formats.record import VALUES, Quants, set_path
from ..model.tensors import EMBEDDING, ROUTER, ROUTERS, layer_of
from ..quant import DEFAULT, MLX_MODES, MODES, Quant, parse
from ..spec import ModelArgs

DEFAULT_PART, ROUTER_PART, EXPERT_PARTS, TABLES = "default", "router", ("gate_up", "down"), "tables"
PARTS = {
    EXPERT_PARTS[0]: "gate and up of the routed experts",
    EXPERT_PARTS[1]: "down of the routed experts",
    "shared": "shared experts",
    "attention": "mixers that attend to earlier positions",
    "recurrent": "mixers with a state of fixed size",
    ROUTER_PART: "the choice of experts",
    "embedding": "the embedding, which is the output head too if the two are tied",
    "head": "the output head",
    TABLES: "tables of n-grams, of which a token reads a few rows",
    DEFAULT_PART: "everything else",
}
OF_MODEL = ("embedding", "head", TABLES)  # parts that no layer has
MIXERS = ("self_attn", "linear_attn", "mamba", "conv")  # modules of a layer
FLOAT = "float"
_LAYERS = re.compile(r"([0-9]{1,4})-([0-9]{1,4})|(-?[0-9]{1,4})")
MOST_BYTES, LONGEST_NAME = 1 << 20, 255
MOST_ENTRIES = 4096  # of `layers`: four for each layer of the largest model

QuantChoice = Quant | None  # None: as the checkpoint has it
Forms = Mapping[str, QuantChoice]  # by part


@dataclass(frozen=True)
class Recipe:
    """Args:
    name: of the recipe, for people.
    parts: forms by part; `default` is among them.
    layers: what differs in some layers, in order: an entry as in a file, and forms by part.
    """

    name: str
    parts: Forms
    layers: tuple[tuple[str, Forms], ...] = ()

    def __str__(self) -> str:
        """A line such as "balanced: gate_up 4, down 4, tables 4, default 8"."""
        content = self.to_json()
        layers = ", ".join(content.get("layers", {}))
        stated = ", ".join(f"{part} {content[part]}" for part in PARTS if part in content)
        return f"{self.name}: {stated}" + (f"; others in layers {layers}" if layers else "")

    @classmethod
    def of(cls, given: "str | Path | Recipe") -> "Recipe":
        """The recipe with one of the names of `RECIPES`, or in a file.

        Raises:
            ConfigError: there is no such recipe, or it has unknown keys or values. ModelFileError: the file is no JSON.
        """
        if isinstance(given, Recipe):
            return given
        if given in RECIPES:
            return cls.from_json(RECIPES[str(given)], str(given), str(given))
        path = user_path(given)
        if not path.is_file():
            raise ConfigError(f"there is no recipe {given}; give {', '.join(RECIPES)}, or the path of a JSON file")
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes; a recipe has at most {MOST_BYTES}")
        return cls.from_json(read_json(path), path.stem, str(path))

    @classmethod
    def from_json(cls, content: JsonObject, name: str, where: str) -> "Recipe":
        """Args:
            content: what a file holds.
            name: where it has none.
            where: for messages.

        Raises:
            ConfigError: a key or a value is unknown.
        """
        named, layers = content.get("name", name), content.get("layers", {})
        if not isinstance(named, str) or not named.isprintable() or len(named) > LONGEST_NAME:
            raise ConfigError(
                f"{where}: name is {reprlib.repr(named)}; give a line of text of at most {LONGEST_NAME} characters"
            )
        if not isinstance(layers, Mapping) or not all(isinstance(one, Mapping) for one in layers.values()):
            raise ConfigError(
                f'{where}: layers is {reprlib.repr(layers)}; give an object such as {{"0-2": {{"down": 6}}}}'
            )
        if len(layers) > MOST_ENTRIES:
            raise ConfigError(f"{where}: layers has {len(layers)} entries; give at most {MOST_ENTRIES}, or ranges")
        parts = _forms({key: form for key, form in content.items() if key not in ("name", "layers")}, where)
        if DEFAULT_PART not in parts:
            raise ConfigError(f"{where}: {DEFAULT_PART} is missing; give the form of every part that is not named")
        if not {*EXPERT_PARTS} <= parts.keys() and parts[DEFAULT_PART] is None:
            raise ConfigError(f"{where}: routed experts cannot be {FLOAT}; give {' and '.join(EXPERT_PARTS)} a form")
        return cls(named, parts, tuple((_checked(key, where), _forms(one, where, key)) for key, one in layers.items()))

    def to_json(self) -> JsonDict:
        """The content of a file with this recipe."""
        layers = {key: {part: _stated(form) for part, form in forms.items()} for key, forms in self.layers}
        stated = {part: _stated(self.parts[part]) for part in PARTS if part in self.parts}
        return {"name": self.name, **stated, **({"layers": layers} if layers else {})}

    def file(self) -> bytes:
        """The bytes of a file with this recipe."""
        return (json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n").encode()

    @property
    def forms(self) -> set[Quant]:
        """Every form that it names."""
        return {form for own in (self.parts, *(own for _, own in self.layers)) for form in own.values() if form}

    def with_forms(self, forms: Forms) -> "Recipe":
        """The recipe with other forms of these parts, in all layers."""
        if not forms:
            return self
        kept = ((key, {part: one for part, one in own.items() if part not in forms}) for key, own in self.layers)
        return replace(self, parts={**self.parts, **forms}, layers=tuple((key, own) for key, own in kept if own))

    def check(self, num_layers: int) -> None:
        """Raises ConfigError: it names a layer that a model of so many layers has not."""
        for key, _ in self.layers:
            numbers = _numbers(key, num_layers)
            if numbers[0] < 0 or numbers[-1] >= num_layers:
                has = f"the model has {num_layers}, from 0 to {num_layers - 1}"
                raise ConfigError(f"recipe {self.name} names the layers {key!r}; {has}")

    def form(self, part: str, layer: int | None = None, num_layers: int = 0) -> QuantChoice:
        """The form of a part, in a layer of a model with `num_layers` or outside of its layers (None)."""
        parts = [self.parts]
        parts += [own for key, own in self.layers if layer is not None and layer in _numbers(key, num_layers)]
        default = next(one[DEFAULT_PART] for one in reversed(parts) if DEFAULT_PART in one)
        usual = ROUTER if part == ROUTER_PART else default
        return next((one[part] for one in reversed(parts) if part in one), usual)

    def of_matrix(self, args: ModelArgs, path: str) -> QuantChoice:
        """The form of a resident matrix, by its module path in a model."""
        return self.form(part_of(args, path), layer_of(path), args.num_hidden_layers)

    def of_experts(self, args: ModelArgs, layer: int) -> Quants:
        """The forms of the matrices of the experts of a record set, fitted to their columns.

        Raises:
            ConfigError: as `named_of_experts`.
        """
        forms, columns = self.named_of_experts(args, layer), [args.hidden_size]
        if layer < args.num_hidden_layers:
            columns = [*[args.expert_size] * (args.experts.matrices - 1), args.moe_intermediate_size]
        return tuple(form.fitted(count) for form, count in zip(forms, columns, strict=True))

    def named_of_experts(self, args: ModelArgs, layer: int) -> Quants:
        """The forms that the recipe names for the matrices of the experts of a record set; value experts have that of
        their mixer.

        Raises:
            ConfigError: they would be floats.
        """
        if layer >= args.num_hidden_layers:
            path = set_path(args, layer, VALUES)
            form = self.of_matrix(args, path)
            if form is None:
                raise ConfigError(f"recipe {self.name}: {path} cannot be {FLOAT}; give {part_of(args, path)} bits")
            return (form,)
        gate_up, down = (self.form(part, layer, args.num_hidden_layers) for part in EXPERT_PARTS)
        if gate_up is None or down is None:
            raise ConfigError(f"recipe {self.name}: routed experts of layer {layer} cannot be {FLOAT}; give them bits")
        return (gate_up, gate_up, down)[-args.experts.matrices :]


def part_of(args: ModelArgs, path: str) -> str:
    """The part of the model that a resident matrix belongs to.

    model.layers.3.self_attn.q_proj    attention
    model.layers.3.mlp.gate            router
    model.layers.0.mlp.up_proj         default
    """
    layer = layer_of(path)
    if layer is None:
        return "embedding" if path.endswith(EMBEDDING) else "head" if path == "lm_head" else DEFAULT_PART
    module = path.split(".")[3:]
    if path.endswith(ROUTERS):
        return ROUTER_PART
    if module[0] in MIXERS:
        return "recurrent" if args.mixers[layer].attention is None else "attention"
    return "shared" if module[:2] == ["mlp", "shared_expert"] else DEFAULT_PART


def read_recipe(folder: Path) -> Recipe | None:
    """The recipe of a packed model; None: its directory has none.

    Raises:
        ConfigError, ModelFileError: its file has been changed to something that is no recipe.
    """
    path = folder / RECIPE
    return Recipe.of(path) if path.is_file() else None


def _forms(content: JsonObject, where: str, layers: str = "") -> dict[str, QuantChoice]:
    allowed = [part for part in PARTS if not layers or part not in OF_MODEL]
    unknown = next((key for key in content if key not in allowed), None)
    if unknown is not None:
        inside = f" in layers {layers}" if layers else ", name and layers"
        raise ConfigError(f"{where}: {reprlib.repr(unknown)} is no part; parts are {', '.join(allowed)}{inside}")
    return {part: _form(part, value, where) for part, value in content.items()}


def _form(part: str, value: Any, where: str) -> QuantChoice:
    if value == FLOAT and part not in EXPERT_PARTS:
        return None
    if type(value) is int:
        value = {"bits": value}
    elif isinstance(value, str) and value.lower() in MODES:
        value = {"mode": value.lower()}
    if not (isinstance(value, Mapping) and {*value} <= {*DEFAULT.entry()}):
        floats = "" if part in EXPERT_PARTS else f', "{FLOAT}"'
        raise ConfigError(
            f"{where}: {part} is {reprlib.repr(value)}; give a number of bits, one of {', '.join(MLX_MODES)}{floats}, "
            'a type of GGUF such as "q3_k", or an object such as {"bits": 4, "group_size": 32}'
        )
    return parse(f"{part} in {where}", value)


def _stated(form: QuantChoice) -> Any:
    """The shortest value in a file."""
    if form is None:
        return FLOAT
    if (form.mode, form.group_size) == (DEFAULT.mode, DEFAULT.group_size):
        return form.bits
    return form.entry() if form.mode == DEFAULT.mode else form.mode


def _checked(layers: str, where: str) -> str:
    match = _LAYERS.fullmatch(layers)
    if match is None or (match[3] is None and int(match[2]) < int(match[1])):
        raise ConfigError(f'{where}: {reprlib.repr(layers)} names no layers; give "3", "-1" or "0-2"')
    return layers


def _numbers(layers: str, num_layers: int) -> range:
    """The layers that an entry names."""
    found = _LAYERS.fullmatch(layers)
    assert found is not None
    if found[3] is None:
        return range(int(found[1]), int(found[2]) + 1)
    number = int(found[3])
    number += num_layers if number < 0 else 0
    return range(number, number + 1)


RECIPES: Mapping[str, JsonObject] = {
    "uniform": {"default": 4},
    "balanced": {"gate_up": 4, "down": 4, "tables": 4, "default": 8},
    "small": {"gate_up": 2, "down": 3, "tables": 4, "default": 6},
}
UNIFORM_RECIPE = Recipe.of("uniform")
