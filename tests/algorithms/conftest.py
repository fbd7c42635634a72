import pytest

from roll.algorithms.advantages import advantage_estimators
from roll.algorithms.policy_losses import policy_losses
from roll.config.choices import ADV_ESTIMATORS, POLICY_LOSSES


@pytest.fixture
def own_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations of the test are forgotten afterwards."""
    for registry in (advantage_estimators, policy_losses):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
        monkeypatch.setattr(registry, "_names", list(registry._names))
    for table in (ADV_ESTIMATORS, POLICY_LOSSES):
        monkeypatch.setattr(table, "data", dict(table))
