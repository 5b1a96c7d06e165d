"""Recovery of a framework that owns its train function, by callbacks of its own (MindIO's interface, `--mindio`).

It is the same recovery as without it, and takes the same orders of the agent; only here nothing of the script is
recorded or run again in replay. A survivor's main thread is brought out of its collective by an error, which the
decorator of the train function catches; a replacement runs the script up to that function. What then is done in each
phase is a handler: the framework's own, or ours if it has none.

Files: `codes` (the interface's numbers), `errors` (which error means what), `handlers` (callbacks and their defaults),
`bracket` (the optimizer's update), `framework` (the main thread's side), `recovery` (the recovery thread's side),
`hooks` (what is installed). Read `recovery.CallbackRecovery` first.
"""
