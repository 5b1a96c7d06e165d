"""Rehearsal of faults: a script under a schedule of faults, beside its undisturbed twin. Begin with `scenario`.

Files, lowest floor first: `scenario` (what is asked for), `twins` (runs it twice), `compare` (what differs), `pairing`
(which fault came to what), `rehearsal` (all of it together).
"""
