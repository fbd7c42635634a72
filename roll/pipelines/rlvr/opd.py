"""On-policy distillation alone, as ROLL's ``start_onpolicy_distill_pipeline.py`` runs it: RLVR without learning from
the rewards. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from roll.config.pipelines import Headline, Panel
from roll.pipelines.rlvr.config import RLVRConfig
from roll.pipelines.rlvr.definition import RLVR


@dataclass(frozen=True)
class OPDConfig(RLVRConfig):
    """RLVR's keys with other defaults."""

    adv_estimator: str = "reinforce"
    is_pure_opd: bool = True
    """Always, in this pipeline."""


class OPD(RLVR):
    """Learning from teachers on the student's own samples."""

    name = "opd"
    config_class = OPDConfig
    headlines = (Headline("opd/kl", "kl", "{:.4f}"), *RLVR.headlines)
    panels = (Panel("Divergence from the teacher", ("opd/*/kl",), smooth=True), *RLVR.panels)
    reference = ()
    section_tables = ()
