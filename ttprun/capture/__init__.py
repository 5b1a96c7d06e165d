"""Records the live state of a Python training loop, and restores it in another process.

    recording.py   gathers a boundary's record: position (loops, call sites), values (variables), data (DataLoaders)
    replay         how a script, run from its top, becomes what a record says; what another run takes of a record
    effects        what the script has written and was answered: files, output, time, entropy

May import: introspect, device, protocol. Begin with recording.py. Without a rank: tests/alone/capture.py.
"""
