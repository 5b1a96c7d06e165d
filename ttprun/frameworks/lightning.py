"""Lightning's Trainer, under both names of its package; a loop of the script's own with Fabric is the user's.

Two loops stand around each step, and all else is reached from them: where the data stands, what callbacks have seen.
"""

from __future__ import annotations

_LOOPS = "loops.fit_loop loops.training_epoch_loop"
FOLLOW = " ".join(f"{name}.{loop}" for name in ("lightning.pytorch", "pytorch_lightning") for loop in _LOOPS.split())
LEFT_OUT: dict[str, str] = {}
# Made with the first checkpoint, which a replay passes over.
MADE = "lightning.fabric.plugins.io.torch_io:TorchCheckpointIO lightning_fabric.plugins.io.torch_io:TorchCheckpointIO"
