"""Keys of older ROLL files that change nothing: they load, and one line says what decides instead."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from roll.config.reading.fields import rules, setting

TOPR = "pg_variant: topr with topr_positive_weight and topr_negative_weight is the working form"


@dataclass(frozen=True)
class OlderRLVRKeys:
    """Keys at the top of RLVR files."""

    save_logging_board_dir: str | None = setting(None, inert="the tracker's own options decide")
    """Accepted for older files."""
    reward_norm: str | None = setting(None, inert="norm_mean_type and norm_std_type decide")
    """Accepted for older files."""
    reward_shift: bool = setting(False, inert="norm_mean_type decides")
    """Accepted for older files."""
    reward_scale: bool = setting(False, inert="norm_std_type decides")
    """Accepted for older files."""
    positive_loss_coef: float | str | None = setting(
        None, aliases=("postive_loss_coef",), inert="pg_variant: topr with topr_positive_weight is the working form"
    )
    """Accepted for older files."""
    use_topr_neg_loss_coef: float | str | None = setting(None, inert=TOPR)
    """Accepted for older files."""
    use_topr_loss: bool | None = setting(None, inert=TOPR)
    """Accepted for older files."""
    use_policy_loss_type: str | None = setting(None, inert="pg_variant decides")
    """Accepted for older files."""
    l2: float | None = setting(None, inert="training_args.weight_decay decides")
    """Accepted for older files."""
    use_reward_scaling: bool | None = setting(None, inert="norm_std_type decides")
    """Accepted for older files."""
    use_reward_norm: bool | None = setting(None, inert="norm_mean_type decides")
    """Accepted for older files."""
    add_len_reward: bool | None = setting(None, inert="")
    """Accepted for older files."""
    dataset_filter: str | list[Any] | dict[str, Any] | None = field(
        default=None, metadata=rules(inert="actor_train.data_args.dataset_filter decides")
    )
    """Accepted for older files."""
    val_greedy: bool | None = setting(None, inert="validation.greedy decides")
    """Accepted for older files."""
    val_n_sample: int | None = setting(None, inert="validation.generating_args.num_return_sequences decides")
    """Accepted for older files."""
    mask_type: str | None = setting(None, inert="")
    """Accepted for older files."""
    balance_length: bool | None = setting(None, inert="")
    """Accepted for older files."""
    minibatch_data_iter_num: int | None = setting(None, inert="ppo_epochs decides")
    """Accepted for older files."""
    report_length_and_rewards: bool | None = setting(None, inert="lengths and rewards are always in the metrics")
    """Accepted for older files."""
    length_profiler_dir: str | None = setting(None, inert="")
    """Accepted for older files."""
    data_seed: int | None = setting(None, inert="seed decides")
    """Accepted for older files."""
    generate_opt_level: int = setting(1, ge=0, le=1, inert="requests are always scheduled one by one")
    """Accepted for older files."""
    reward_system_config: dict[str, Any] = field(default_factory=dict, metadata=rules(inert=""))
    """Accepted for older files."""
