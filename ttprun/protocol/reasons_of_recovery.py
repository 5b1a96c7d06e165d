"""Why a replacement is refused, or not proved; and what closes the ways of recovery. Read with reasons.py."""

from __future__ import annotations

from ttprun.protocol.reason import BUG, LADDER, LIMITS, NOT_PROTECTED, NOT_PROVED, REFUSED, SNAPSHOTS, Reason

_NAMED = "limits#What no record can hold is named"
_PROVED = "how-it-works#Proved or refused"
_REPLICAS = "how-it-works#Who is a replica of whom is compared, not assumed"
_SAME_SET_UP = (
    "let the set-up do the same each time the script begins, whatever an earlier run has left (files, time, names)"
)
OF_RECOVERY = (
    # What a value is.
    Reason(
        "activation-used-later",
        REFUSED,
        "too large to record|graph is not recorded",
        "The script uses, after a step, a tensor that was computed with gradients before it.",
        "compute it again after the step, or --snapshot-every 10steps: see 'Covered by a snapshot only' in 'ttprun "
        "guide limits'",
        SNAPSHOTS,
    ),
    Reason(
        "iteration-order",
        REFUSED,
        "another iteration order than",
        "The order of a set depends on its history, which no record has.",
        "keep the items in a dict or a list",
        "limits#Covered",
    ),
    Reason(
        "iterator-read-by-next",
        NOT_PROVED,
        "cannot be recorded: it (.* read by next|.* cycle that gathers|.*followed)",
        "An iterator is read in a way that does not show how far it has come.",
        "read it by a `for` loop",
        _NAMED,
    ),
    Reason(
        "iterator-position",
        NOT_PROVED,
        "cannot be recorded: it .*position",
        "A generator, an iterator or a coroutine does not show how far it has come.",
        "run over it by a `for` loop of your own, or count its items and take them by index",
        _NAMED,
    ),
    Reason(
        "work-of-another-thread",
        NOT_PROVED,
        "cannot be recorded: it .*(another thread or process|shared with)",
        "A result of another thread or process, of which nobody knows how far it has come.",
        "have it done before the optimizer steps, and keep the result",
        LIMITS,
    ),
    Reason(
        "container-too-long",
        NOT_PROVED,
        "cannot be recorded: it is a (container|tuple) of|a long container",
        "A container of more than 100,000 items is compared, and not recorded.",
        "keep it in an array or a tensor",
        "limits#Much data in memory",
    ),
    Reason(
        "set-of-objects",
        NOT_PROVED,
        "cannot be recorded: it is a set of objects",
        "The order of a set of objects depends on where they lie in memory.",
        "keep them in a list or a dictionary",
        "limits#Covered",
    ),
    Reason(
        "value-not-recorded",
        NOT_PROVED,
        "cannot be recorded: it",
        "A value can change, and its state cannot be read.",
        "set it in each step before it is read, or keep what the steps read of it in numbers, lists or arrays",
        _NAMED,
    ),
    # What a replay has done otherwise.
    Reason(
        "other-batch",
        REFUSED,
        "another batch|other samples|batch of a DataLoader number|DataLoaders have yielded",
        "A DataLoader has given the replacement other data than the lost rank.",
        "let dataset and sampler give the same each time the script begins",
        _PROVED,
    ),
    Reason(
        "other-random-states",
        REFUSED,
        "other random states",
        "The replay has drawn other random numbers than the lost rank.",
        "draw from a generator that the script seeds, or keeps in a variable",
        _PROVED,
    ),
    Reason(
        "other-loss",
        REFUSED,
        "loss number|input of a collective|inputs of collectives|replay of this script has differed|left no loss",
        "The same step has come to another loss or gradient than in the lost rank.",
        "keep what the step depends on in variables or in objects with state_dict",
        _PROVED,
    ),
    Reason(
        "other-weights",
        REFUSED,
        "different weights|replicated states differ|sent state|froze with state|do not replicate each other"
        "|state that "
        "contradicts|hold different values|and the source|than the source|the source's parts|from another rank$"
        "|was overwritten while it was sent|has diverged",
        "Ranks that should hold the same weights do not.",
        "seed the weights alike in all ranks, or broadcast them before the first step",
        _REPLICAS,
    ),
    Reason(
        "input-lost",
        REFUSED,
        "input is therefore lost|after it was gathered|is dropped, as all ranks|no rank still has the input",
        "A collective of the interrupted step cannot be issued again, as what was put into it is gone.",
        "leave gradients alone between their all-reduce and the optimizer step",
        "how-it-works#When a rank dies",
    ),
    Reason(
        "other-collective",
        REFUSED,
        "the replacement issues|has issued '",
        "A rank runs another collective than the others: another branch, shape or order.",
        _SAME_SET_UP,
        _PROVED,
    ),
    Reason(
        "other-place",
        REFUSED,
        "the lost rank was at|its loops are at|in the lost rank it was optimizer|did not reach (what|its)"
        "|the script's end|not at the place of|does not reach the place|what the iterations before have made",
        "The replay has come to another line, loop or optimizer than the lost rank.",
        _SAME_SET_UP,
        _PROVED,
    ),
    Reason(
        "import-fails",
        REFUSED,
        "had imported the module",
        "A module that the lost rank had imported cannot be imported by its replacement.",
        "see the error in the message: import it before the training loop",
        _PROVED,
    ),
    Reason(
        "made-without-constructor",
        NOT_PROVED,
        "has not run what makes it|was made again from its attributes",
        "The replay has passed over what made this object (an evaluation, a checkpoint).",
        "make it before the training loop, if its content influences the training",
        _NAMED,
    ),
    Reason(
        "other-variable",
        REFUSED,
        "than in the lost rank|the replacement has |in the replacement|in the lost rank|the lost rank's, and cannot"
        "|is not here|cannot be restored|could not be restored|lies elsewhere|cannot be made again|is a view of"
        "|has another shape|has shape|in the old run|where the lost rank had|what the lost rank held",
        "A variable is not in the replacement as it was in the lost rank, and cannot be written into it.",
        "let the set-up make it before the training loop, the same each time the script begins",
        _PROVED,
    ),
    Reason(
        "resume-with-another-model",
        REFUSED,
        "in the script's model",
        "A parameter of the script's model has another shape than in the checkpoint.",
        "start with the model of the checkpoint, or with --resume off or another --save-dir to train the new one",
        "checkpoints#Another number of ranks, or other arguments",
    ),
    Reason(
        "resume-with-other-ranks",
        REFUSED,
        "cannot resume with other ranks|cannot be taken over|before the first step cannot be read|how the ranks divide"
        "|not known what has changed since|in the new run|holds an optimizer's state|prefetched",
        "A saved state cannot be divided among another number of ranks.",
        "start with as many ranks as before, or let the script load a checkpoint of its own",
        "checkpoints#Another number of ranks, or other arguments",
    ),
    Reason(
        "stored-state-unusable",
        REFUSED,
        "its stored state cannot be used|in none of the checkpoint's files|in the checkpoint$"
        "|cannot be taken again from",
        "What was stored for this rank cannot be read, or is not of it.",
        "`ttprun checkpoints verify`; the next older one is tried",
        "checkpoints#Format",
    ),
    Reason(
        "gradients-late",
        REFUSED,
        "whose results count, have not",
        "The rank whose gradients count has not sent them in time.",
        "none is known: the next recovery is tried",
        "how-it-works#Rounding",
    ),
    Reason(
        "not-replayable",
        REFUSED,
        "the script cannot be replayed",
        "A replay of the script does not come to what the run has come to.",
        "keep what the step depends on in variables or in objects with state_dict",
        _PROVED,
    ),
    Reason(
        "handler-missing",
        REFUSED,
        r"no \S+ handler is registered",
        "The framework recovers and saves through handlers of its own, and has registered none for this. Without one "
        "that saves, a job that ends has no newer state than its last checkpoint.",
        "register one (MindIO's `tft_register_*_handler`), as `ttprun guide mindio` says",
        "mindio#The mindio interface",
    ),
    Reason(
        "recovery-failed",
        REFUSED,
        "while it (stopped|sent|loaded|took|wrote|issued|recovered)|attempts to replace"
        "|not come to (a collective within|optimizer step)",
        "An error in the recovery itself.",
        "see the error in the message; if it is not of your script, " + BUG,
        "how-it-works#It fails open",
    ),
    # What is named, and no more.
    Reason(
        "file-changed",
        NOT_PROVED,
        "has changed since the set-up looked",
        "The set-up has looked at a file which has another content now.",
        "read such files before the first step, or keep their content in a variable",
        "limits#Covered",
    ),
    Reason(
        "save-given-up",
        NOT_PROVED,
        "dcp.async_save",
        "A checkpoint that the script was writing in the background is not complete.",
        "let the script save again; an older checkpoint of its own stays",
        LIMITS,
    ),
    Reason(
        "equal-to-rounding",
        NOT_PROVED,
        "by rounding|to rounding|not a gradient: perhaps|not be reproducible|is reproducible",
        "Numbers differ from the lost rank's by rounding alone, as kernels need not be reproducible.",
        "--proof strict refuses it; torch.use_deterministic_algorithms(True) makes more kernels reproducible",
        "how-it-works#Rounding",
    ),
    Reason(
        "not-compared",
        NOT_PROVED,
        "had left no|cannot be compared with|cannot be hashed|recovery is not proved|weights are not compared"
        "|has left no record",
        "There was nothing to compare the replacement with.",
        "nothing need be done: the ranks' weights are compared once more before the next two steps",
        _PROVED,
    ),
    Reason(
        "written-again",
        NOT_PROVED,
        "write to it is written again",
        "Compiled code writes to this file, which a replay cannot drop: after a replacement, rows come twice.",
        "rows with a key of their own (INSERT OR REPLACE by run and step), or a logger that appends to a plain file",
        _NAMED,
    ),
    Reason(
        "dear-to-record",
        NOT_PROVED,
        "a step to record; not recorded",
        "The record of each step walks over the script's variables. These made it take more than 15 % of the step, "
        "so they are left alone: a replacement has them as the script's set-up makes them.",
        "fewer objects that change at each step: arrays and tensors in place of objects; or record them at any cost: "
        "--overhead-budget unlimited",
        "limits#What a step costs",
    ),
    Reason(
        "hidden-state",
        NOT_PROVED,
        r"^not proved: |^[^;]{1,120} \([\w.<>]+\): ",
        "An object can change and is in no record: a replacement has it as the script's set-up makes it.",
        "if its content influences the training: plain variables, or a class with state_dict and load_state_dict",
        _NAMED,
    ),
    # What ends the job, once the ways above are closed.
    Reason(
        "survivors-disagree",
        REFUSED,
        "survivors are at different boundaries|members are at boundaries|taken it at different steps"
        "|trained without a process group"
        "|without a process group, (so|each)",
        "The surviving ranks are at different steps, so no rank can supply the state of another.",
        "--snapshot-every 10steps or --save-dir, to have a state that all can go back to",
        LADDER,
    ),
    Reason(
        "not-compared-yet",
        NOT_PROTECTED,
        "has not been compared yet|no copy yet|not mirrored so far",
        "Which ranks hold the same is compared in the first steps, and the rank was lost before.",
        "nothing: it holds for the first two steps",
        _REPLICAS,
    ),
    Reason(
        "no-survivor",
        NOT_PROTECTED,
        "all ranks of the group were lost|no rank would (be left|remain)|nothing of its state is left",
        "No rank is left that holds the state.",
        "--snapshot-every 10steps or --save-dir, to have a state that all can go back to",
        LADDER,
    ),
    Reason(
        "ranks-have-finished",
        NOT_PROTECTED,
        "finished before, so the group|no longer train",
        "Some ranks have come to the end of the script and cannot take part in new connections.",
        "end the script with a barrier, so that all ranks leave together",
        "limits#Covered",
    ),
    Reason(
        "same-fault-again",
        REFUSED,
        "the same fault|incidents of the kind|error of the script itself|no memory left for it"
        "|crashes in the same line",
        "The same fault has come back too often, or is sure to: another attempt would not help.",
        "see the first of the incidents in `ttprun status`; --max-incidents-per-hour is the limit of all",
        "operating#Exit codes",
    ),
    Reason(
        "no-restart-left",
        NOT_PROTECTED,
        r"no restart is left|restarting the group is",
        "All ranks may not start again as often as that.",
        "--max-restarts N",
        LADDER,
    ),
)
