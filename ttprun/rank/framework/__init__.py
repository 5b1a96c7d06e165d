"""Recovery of a framework that owns its train function, by its own callbacks (MindIO's interface, `--mindio`).

The phases and the agent's orders are the same as without it, but nothing of the script is recorded or replayed. A
survivor's main thread leaves its collective by an error, which the decorator of the train function catches; a
replacement runs the script up to that function. Each phase then calls a handler: the framework's own, or our default.

Files: `handlers` (the interface's values, callbacks and their defaults), `framework` (the main thread's
side), `callback_recovery` (the recovery thread's side). Read `callback_recovery.CallbackRecovery` first.
"""
