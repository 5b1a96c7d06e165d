"""Known frameworks with a training loop in them: hardly more than data.

FOLLOW names the modules that count as the user's own: files, not whole packages, where that will do, since
each followed module is compiled anew once, and what it holds is looked at in each step. A name that is not installed
costs nothing. LEFT_OUT names attributes that are left to the replay, by the full name of their class; the reason stands
beside each. MADE names classes of which the framework makes an object when it first needs one; a replay may pass over
that moment, and makes it itself: by a function that gets the class and those attributes that are plain values, or
without one as pickle would, without its constructor. Either way it is given all that the lost rank's held. Of
the hooks on a model's parts, HOOKS_WHEN_NEEDED names those that are put there when they are first needed and do nothing
otherwise, HOOKS_THAT_REPEAT those of which a second one changes nothing. WRITING names packages that write checkpoints
for a loop of the script's own: in a replay, that goes nowhere. SHARED names dictionaries of classes that outlive a run
of the script, and are emptied before it is run again in the same process.

For a standby, which imports what the ranks have imported: RUN_AGAIN names modules of which one statement runs again in
each rank that is made of it, DRAWING those in which that statement draws from Python's global generator.
KEEPS_OF_THE_ENVIRONMENT names modules that read all variables and keep only those whose names begin so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

# Lightning's package has two names. Two loops stand around each step, and all else is reached from them: where the data
# stands, what callbacks have seen. A loop of the script's own with Fabric is the user's.
_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
FOLLOW = frozenset(
    {
        "accelerate.data_loader",
        # The whole package: `create_supervised_trainer` keeps the loss of a step in a function of its `__init__.py`.
        "ignite.engine",
        *(f"{name}.loops.{loop}" for name in _LIGHTNING for loop in ("fit_loop", "training_epoch_loop")),
        "transformers.trainer",
    }
)
LEFT_OUT = {
    # What `prepare` was given, for free_memory() and save_state(). Each evaluation of transformers.Trainer adds a
    # loader, which a replay does not make again; those that train stand in the script's variables, too.
    "accelerate.accelerator:Accelerator": "_dataloaders",
    # Of an evaluator: what its newest run was given, until the next one. A replay may pass over all of its runs.
    "ignite.engine.events:State": "dataloader",
    # By the ids of its torchmetrics, found when one of them is first logged.
    **{f"{name}.core.module:LightningModule": "_metric_attributes" for name in _LIGHTNING},
    # The newest evaluation's, for callbacks: None until the next one, as before the first.
    "transformers.trainer_callback:CallbackHandler": "eval_dataloader",
    # Of the hooks below: whether they are there, and how they are taken away.
    "transformers.modeling_utils:PreTrainedModel": """
        _output_capturing_hooks_installed _require_grads_hooks _require_grads_hook""",
}


def _result_metric(kind: Any, attributes: dict[str, Any]) -> Any:
    """What Lightning's `log` keeps of one name in one hook; its description is restored with its other attributes."""
    of_nothing = sys.modules[kind.__module__]._Metadata("", "")
    of_nothing._sync = sys.modules[kind.__module__]._Sync()
    return kind(of_nothing, is_tensor=attributes["is_tensor"])


MADE: dict[str, Callable[[Any, dict[str, Any]], Any] | None] = {
    # Made with the first checkpoint, which a replay passes over.
    "lightning.fabric.plugins.io.torch_io:TorchCheckpointIO": None,
    "lightning_fabric.plugins.io.torch_io:TorchCheckpointIO": None,
    # Made when something is first logged under a name, maybe at the end of an epoch.
    **{f"{name}.trainer.connectors.logger_connector.result:_ResultMetric": _result_metric for name in _LIGHTNING},
}
# They collect hidden states for whoever asks for them.
HOOKS_WHEN_NEEDED = frozenset(
    {"transformers.utils.output_capturing:install_output_capuring_hook.<locals>.output_capturing_hook"}
)
# trl adds one in each step.
HOOKS_THAT_REPEAT = frozenset(
    {"transformers.modeling_utils:PreTrainedModel.enable_input_require_grads.<locals>.make_inputs_require_grads"}
)
WRITING = frozenset({"transformers", "accelerate", "peft", "trl", "diffusers"})
SHARED = tuple(
    f"accelerate.state:{kind}._shared_state" for kind in ("PartialState", "AcceleratorState", "GradientState")
)
_RANK_OF_FABRIC = 'rank_zero_only.rank = getattr(rank_zero_only, "rank", _get_rank() or 0)'
RUN_AGAIN = {
    "lightning.fabric.utilities.rank_zero": _RANK_OF_FABRIC,
    "lightning_fabric.utilities.rank_zero": _RANK_OF_FABRIC,
    "torchmetrics.utilities.prints": (
        'rank_zero_only.rank = getattr(rank_zero_only, "rank", int(os.environ.get("LOCAL_RANK", 0)))'
    ),
    "rich.style": "_id_generator = count(getrandbits(24))",
}
DRAWING = frozenset({"rich.style"})
KEEPS_OF_THE_ENVIRONMENT = {"fsspec.config": "FSSPEC"}
