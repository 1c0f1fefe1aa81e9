"""The feed-forward part after the mixer in a layer: routed experts or a dense MLP."""

from dataclasses import dataclass, replace
from typing import Literal, get_args


@dataclass(frozen=True)
class Router:
    """Which `top_k` of `experts` a token uses, and how they are weighed.

    `score` is "softmax", "sigmoid" or "sqrtsoftplus" (the root of log(1 + exp)) of the logits. A `correction_bias` is
    used only for the choice: it is added to the scores, or, if `biases_logits`, to the logits, by which experts are
    then chosen, also without a bias. Only experts of the best `kept_groups` of `groups` groups are considered. If
    `normalise`, weights are divided by their sum, to which `eps` is added unless they are a softmax; then they are
    multiplied by `scale`. `logit_bias`: the router adds a bias to its logits. `softcap`: each logit becomes softcap *
    tanh(logit / softcap). `table`: a table of this many token ids gives a token's experts; the logits give only the
    weights. `own_norm`: the logits come from the stream in the router's own norm, whose weight is multiplied by
    hidden_size ** -0.5. `expert_scales`: the weight of each expert is multiplied by its own learned number instead of
    `scale`. `identities`: the logits behind those of the experts are of so many further ones, whose output is their
    input. `shared`: the logits behind those of the experts are of so many experts that every token uses; their scores
    are part of the sum by which weights are divided, and they are weighed like the others. `learned_scale`: a learned
    number multiplies all weights too. `logit_scale`: logits are multiplied by it.
    """

    experts: int
    top_k: int
    score: str = "softmax"
    correction_bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    normalise: bool = True
    scale: float = 1.0
    logit_bias: bool = False
    softcap: float | None = None
    table: int | None = None
    own_norm: bool = False
    expert_scales: bool = False
    biases_logits: bool = False
    eps: float = 1e-20
    identities: int = 0
    shared: int = 0
    learned_scale: bool = False
    logit_scale: float = 1.0

    @property
    def of_choices(self) -> "Router":
        """The same rule, whose experts are all that a token chooses among. With shared experts the weights are scores,
        because what divides them is not known yet.
        """
        made = replace(self, experts=self.experts + self.identities, identities=0)
        return replace(made, normalise=False, scale=1.0) if self.shared else made


@dataclass(frozen=True)
class MatrixExperts:
    """Experts of one matrix [rows, hidden size] each, which `router` chooses: a token's part is the weighed sum of
    silu(W x) over them.
    """

    router: Router
    rows: int


ActivationForm = Literal["silu", "gelu", "clip then silu", "silu then clip", "clip then swish", "relu", "situ"]
FORMS: tuple[ActivationForm, ...] = get_args(ActivationForm)  # in the order in which kernels number them


@dataclass(frozen=True)
class Activation:
    """How a gated MLP joins its two products, gate g and up u; L is `limit`, which the three forms that clip need, and
    B `gate_limit`, which "situ" needs.

    An MLP without a gate uses u for g too, so "relu" gives relu(u)^2 (arXiv:2109.08668, section 3).

    Attributes:
        form: one of
            "silu": silu(g) * u (SwiGLU, arXiv:2002.05202)
            "gelu": gelu(g) * u, gelu by tanh (arXiv:1606.08415)
            "clip then silu": silu(min(g, L)) * clip(u, -L, L)
            "silu then clip": min(silu(g), L) * clip(u, -L, L)
            "clip then swish": g' * sigmoid(1.702 g') * (u' + 1), where g' = min(g, L) and u' = clip(u, -L, L)
            "relu": relu(g) * u
            "situ": B * tanh(g / B) * sigmoid(g) * L * tanh(u / L), or without a limit ... * u (Kimi K3, as mlx-lm's
                `kimi_k3.py` has it)
    """

    form: ActivationForm = "silu"
    limit: float | None = None
    gate_limit: float | None = None

    def __post_init__(self) -> None:
        if self.form != "situ":
            assert (self.limit is None) == ("clip" not in self.form), f"{self.form!r} with limit {self.limit}"
        assert (self.gate_limit is None) == (self.form != "situ"), f"{self.form!r} with gate limit {self.gate_limit}"


SILU = Activation()


@dataclass(frozen=True)
class Dense:
    """One gated MLP of `width` for every token: down(activation(gate x, up x)), if it is `scaled` times a learned
    number.
    """

    width: int
    activation: Activation = SILU
    scaled: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the rows that every token makes."""
        return (self.width,)


@dataclass(frozen=True)
class SharedExpert:
    """An MLP next to the routed experts that every token uses. `gated`: its output is multiplied by the sigmoid of a
    gate. `averaged`: it is multiplied by 1/2, as the routed experts' is by the router's `scale`. `normed`: its input
    has its own norm, and its output and that of the routed experts are each normed before they are added. `matrices`:
    three with a gate, two without. Its rows are those of the `Router.shared` experts, one after another.
    """

    width: int
    gated: bool = False
    activation: Activation = SILU
    normed: bool = False
    matrices: int = 3
    averaged: bool = False


@dataclass(frozen=True)
class Experts:
    """Routed experts, each a gated MLP of `width` chosen by `router`, and perhaps a shared one.

    `biases`: whether each of an expert's matrices has a bias. `matrices`: three with a gate, two without. `latent`:
    width of their input and output; one projection makes the input from the hidden state, before a norm if
    `latent_input_norm`, and another converts the sum of a token's experts back, behind a norm if `latent_norm`; None:
    they take the hidden state itself. `output_eps`: the output of each expert is multiplied by a learned vector, the
    same for all, and normed with this epsilon before it is weighed; None: it is weighed as it is. `scales_input`:
    the weight of a token's only expert multiplies its input, not its output.
    """

    router: Router
    width: int
    shared: SharedExpert | None = None
    activation: Activation = SILU
    biases: bool = False
    matrices: int = 3
    latent: int | None = None
    latent_norm: bool = False
    latent_input_norm: bool = False
    output_eps: float | None = None
    scales_input: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the rows that every token makes."""
        shared = (self.shared.width,) if self.shared else ()
        return shared if self.latent is None else (*shared, self.latent)
