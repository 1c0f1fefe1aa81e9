"""Conditions between fields of a configuration; those of a mixer's own are in its `check`."""

from ..errors import ConfigError
from ..kinds import Experts
from ..kinds.limits import check_width

LEAST_GROUP = 32  # values of a group or block that most stored forms have; who quantises checks that a form fits


def check_experts(experts: Experts, hidden_size: int) -> None:
    """Checks the conditions between the fields of a router and its experts. Raises ConfigError with their names."""
    router = experts.router
    if router.top_k > router.experts:
        raise ConfigError(f"num_experts_per_tok {router.top_k} exceeds num_experts {router.experts}")
    for name, value in (("hidden_size", hidden_size), ("moe_intermediate_size", experts.width)):
        if value % LEAST_GROUP:
            raise ConfigError(f"{name} {value} is not a multiple of {LEAST_GROUP}, the smallest quantisation group")
    if not 1 <= router.kept_groups <= router.groups or router.experts % router.groups:
        groups = f"n_group {router.groups}, topk_group {router.kept_groups}"
        raise ConfigError(f"num_experts {router.experts}, {groups} do not divide")
    if router.top_k > router.kept_groups * (router.experts // router.groups):
        raise ConfigError(
            f"num_experts_per_tok {router.top_k} exceeds the experts of {router.kept_groups} of {router.groups} groups"
        )
    check_width("n_routed_experts + zero_expert_num", router.of_choices.experts)
    if experts.shared:
        check_width("shared_expert_intermediate_size", experts.shared.width)
