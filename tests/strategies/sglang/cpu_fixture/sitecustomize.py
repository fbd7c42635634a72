"""Lets torchvision's build for GPUs be imported next to a torch for CPUs, in every process that the tests start.

SGLang imports torchvision, which at once describes two operators that its library for GPUs would have defined.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from typing import Any


class DefineOperators(importlib.abc.MetaPathFinder):
    """Finds nothing; defines the operators before torchvision is imported."""

    library: Any = None

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        # importlib.util.find_spec only asks whether there is a torchvision.
        asked_only = sys._getframe(1).f_code.co_name == "find_spec"
        if fullname == "torchvision" and fullname not in sys.modules and self.library is None and not asked_only:
            import torch

            type(self).library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, DefineOperators())
