"""transformers.Trainer."""

from __future__ import annotations

FOLLOW = "transformers.trainer"
LEFT_OUT = {
    # The newest evaluation's, for callbacks: None until the next one, as before the first.
    "transformers.trainer_callback:CallbackHandler": "eval_dataloader",
}
