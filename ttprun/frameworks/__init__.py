"""Known frameworks with a training loop in them: one file each, hardly more than data.

A file's FOLLOW names the modules that count as the user's own: files, not whole packages, where that will do, since
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

from ttprun.frameworks import accelerate, ignite, lightning, transformers

_KNOWN = (accelerate, ignite, lightning, transformers)
FOLLOW = frozenset(name for framework in _KNOWN for name in framework.FOLLOW.split())
LEFT_OUT: dict[str, str] = {name: attributes for framework in _KNOWN for name, attributes in framework.LEFT_OUT.items()}
MADE = lightning.MADE
HOOKS_WHEN_NEEDED = frozenset(transformers.HOOKS_WHEN_NEEDED.split())
HOOKS_THAT_REPEAT = frozenset(transformers.HOOKS_THAT_REPEAT.split())
WRITING = frozenset({"transformers", "accelerate", "peft", "trl", "diffusers"})
SHARED = tuple(accelerate.SHARED.split())
RUN_AGAIN = lightning.RUN_AGAIN
DRAWING = frozenset(lightning.DRAWING.split())
KEEPS_OF_THE_ENVIRONMENT = {"fsspec.config": "FSSPEC"}
