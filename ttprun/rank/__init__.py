"""What runs inside a rank: the hooks around the user's script, and its part in a recovery.

Rooms, lowest first; each imports only from those before it (`tests/test_floors.py`):

process      this process: signals, memory, heartbeat, random states
position     where the script is: frames and loops, and jumping to a place in them
weights      what is trained, who holds the same, how it is sent and stored
values       the script's variables: recorded, and restored
records      the record of a boundary, in shared memory that outlives the process
comm         process groups over a backend that can be replaced, and the journal
checks       comparisons with the lost rank and with the other ranks
effects      files, output, time and entropy
data         DataLoaders and their workers
step         what happens at each optimizer step
replay       how a replacement gets to the lost rank's place, and what the others do meanwhile
framework    recovery by a framework's own callbacks (--mindio)
bootstrap    how the hooks get into a process, and how a run begins and ends

Read `session.py` first (what a rank knows), then `step/step_hooks.py`, `comm/process_group.py` (what happens at each
collective), `replay/recovery.py` (what happens when another rank is lost) and `replay/replay.py`.
"""
