"""Lightning's Trainer, under both names of its package; a loop of the script's own with Fabric is the user's.

Two loops stand around each step, and all else is reached from them: where the data stands, what callbacks have seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_LOOPS = "loops.fit_loop loops.training_epoch_loop"
FOLLOW = " ".join(f"{name}.{loop}" for name in ("lightning.pytorch", "pytorch_lightning") for loop in _LOOPS.split())
LEFT_OUT = {
    # By the ids of its torchmetrics, found when one of them is first logged.
    f"{name}.core.module:LightningModule": "_metric_attributes"
    for name in ("lightning.pytorch", "pytorch_lightning")
}


def _result_metric(kind: Any, attributes: dict[str, Any]) -> Any:
    """What `log` keeps of one name in one hook; its description is restored with its other attributes."""
    of_nothing = sys.modules[kind.__module__]._Metadata("", "")
    of_nothing._sync = sys.modules[kind.__module__]._Sync()
    return kind(of_nothing, is_tensor=attributes["is_tensor"])


_RESULT_METRIC = "trainer.connectors.logger_connector.result:_ResultMetric"
MADE: dict[str, Callable[[Any, dict[str, Any]], Any] | None] = {
    # Made with the first checkpoint, which a replay passes over.
    "lightning.fabric.plugins.io.torch_io:TorchCheckpointIO": None,
    "lightning_fabric.plugins.io.torch_io:TorchCheckpointIO": None,
    # Made when something is first logged under a name, maybe at the end of an epoch.
    f"lightning.pytorch.{_RESULT_METRIC}": _result_metric,
    f"pytorch_lightning.{_RESULT_METRIC}": _result_metric,
}
# Of the modules that it imports: see `ttprun.frameworks`.
_RANK_OF_FABRIC = 'rank_zero_only.rank = getattr(rank_zero_only, "rank", _get_rank() or 0)'
RUN_AGAIN = {
    "lightning.fabric.utilities.rank_zero": _RANK_OF_FABRIC,
    "lightning_fabric.utilities.rank_zero": _RANK_OF_FABRIC,
    "torchmetrics.utilities.prints": (
        'rank_zero_only.rank = getattr(rank_zero_only, "rank", int(os.environ.get("LOCAL_RANK", 0)))'
    ),
    "rich.style": "_id_generator = count(getrandbits(24))",
}
DRAWING = "rich.style"
