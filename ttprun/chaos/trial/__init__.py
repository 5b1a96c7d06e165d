"""One trial: a script runs undisturbed and broken, and both runs are compared. `check`, `drill`, `doctor`: trials.

Files, lowest floor first: `twins` (a run: how it is launched, and where), `compare` (what differs between two),
`kills` (which fault came to what), `drill` (a scenario with its faults), `check` (the user's own script, with a rank
killed at several moments). What ranks note in a check: `chaos/strikes.py` and `chaos/plain_observer`.
"""
