"""accelerate: the loop is the script's own, or that of a framework which stands on it; its loaders are generators."""

from __future__ import annotations

FOLLOW = "accelerate.data_loader"
LEFT_OUT = {
    # What `prepare` was given, for free_memory() and save_state(). Each evaluation of transformers.Trainer adds a
    # loader, which a replay does not make again; those that train stand in the script's variables, too.
    "accelerate.accelerator:Accelerator": "_dataloaders",
}
# What each of its objects of these classes shares with all others.
SHARED = " ".join(
    f"accelerate.state:{kind}._shared_state" for kind in ("PartialState", "AcceleratorState", "GradientState")
)
