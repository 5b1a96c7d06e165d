"""transformers.Trainer."""

from __future__ import annotations

FOLLOW = "transformers.trainer"
LEFT_OUT = {
    # The newest evaluation's, for callbacks: None until the next one, as before the first.
    "transformers.trainer_callback:CallbackHandler": "eval_dataloader",
    # Of the hooks below: whether they are there, and how they are taken away.
    "transformers.modeling_utils:PreTrainedModel": """
        _output_capturing_hooks_installed _require_grads_hooks _require_grads_hook""",
}
# They collect hidden states for whoever asks for them.
HOOKS_WHEN_NEEDED = "transformers.utils.output_capturing:install_output_capuring_hook.<locals>.output_capturing_hook"
# trl adds one in each step.
HOOKS_THAT_REPEAT = (
    "transformers.modeling_utils:PreTrainedModel.enable_input_require_grads.<locals>.make_inputs_require_grads"
)
