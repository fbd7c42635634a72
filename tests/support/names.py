"""Names of losses and estimators that the package itself has, without those of other tests' own functions."""

from __future__ import annotations

from roll.config.choices import ADV_ESTIMATORS, POLICY_LOSSES

POLICY_LOSS_NAMES = tuple(row.name for row in POLICY_LOSSES.rows if not POLICY_LOSSES.is_own(row.name))
ADVANTAGE_NAMES = tuple(row.name for row in ADV_ESTIMATORS.rows if not ADV_ESTIMATORS.is_own(row.name))
