"""Why a rank is not replaced, or not proved to be as it was: one table of the kinds of reasons.

A `Reason` (reason.py) names its kind. `ttprun explain KIND` prints a row. Standard library only: every part asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

NOT_PROTECTED, NOT_PROVED, REFUSED = "not protected", "not proved", "refused"
# The three words -> what ttprun does then.
WORDS = {
    NOT_PROTECTED: "A lost rank is not replaced as long as this holds, and the job goes on. If a rank is lost, all "
    "ranks go back to a snapshot or a saved state, or start again (--max-restarts), or the job ends: the message "
    "says which.",
    NOT_PROVED: "Training goes on, also after a recovery. What is named may differ between a replacement and the lost "
    "rank. It stands in `ttprun status` and with each incident. --proof strict refuses differences instead.",
    REFUSED: "This replacement is ended before it has given anything to the other ranks. A weaker recovery follows: "
    "another replacement, a snapshot, a saved state, or a restart of all ranks; `ttprun status` says which.",
}
# Headings of the guide, and a cure, of several reasons.
_LIMITS = "limits#Not covered: a fault restarts the whole group"
_SNAPSHOTS = "limits#Covered by a snapshot only"
_LADDER = "how-it-works#The ladder"
_BUG = "report it, with `events.jsonl` of the run directory: it is a bug of ttprun"
_TROUBLES = 'troubleshoot#"Not protected"'
_NAMED = "limits#What no record can hold is named"
_PROVED = "how-it-works#Proved or refused"
_REPLICAS = "how-it-works#Who is a replica of whom is compared, not assumed"
_SAME_SET_UP = (
    "let the set-up do the same each time the script begins, whatever an earlier run has left (files, time, names)"
)


@dataclass(frozen=True)
class ReasonKind:
    """One kind of reason.

    word    NOT_PROTECTED, NOT_PROVED or REFUSED
    kind    its stable name, for programs and for `ttprun explain`
    means   a sentence
    cure    what to do about it, in one line
    where   the guide's topic and heading that explain it: "limits#Covered"
    then    what ttprun does then, if that is not what WORDS says of `word`
    """

    word: str
    kind: str
    means: str
    cure: str
    where: str
    then: str = ""


_not_protected = partial(ReasonKind, NOT_PROTECTED)
_not_proved = partial(ReasonKind, NOT_PROVED)
_refused = partial(ReasonKind, REFUSED)
REASONS = (
    # What is being waited for.
    _not_protected(
        "no-step-yet",
        "A rank counts as protected once it has passed an optimizer step under ttprun's hooks.",
        "wait for the first step; if there was one, the training uses an optimizer that is not torch's (let "
        "torch.optim.SGD, or a torch.optim.Optimizer of your own, change the weights), or a process without hooks",
        "limits#Protected means seen",
        "A rank that is killed before its first step gets a new process, which runs the script from the top while the "
        "other ranks wait; no step is lost. An error of the script before its first step ends the job. If a rank "
        "trains in a way that ttprun does not see, its loss is as under torchrun: all ranks start again "
        "(--max-restarts), or the job ends.",
    ),
    _not_protected(
        "being-checked",
        "What the ranks have recorded in their first steps is read back before they count as protected.",
        "wait for the next steps",
        "limits#Protected means seen",
    ),
    _not_protected(
        "switched-off",
        "The configuration leaves this way of recovery out.",
        "name it in --rungs, or leave --rungs out",
        _LADDER,
    ),
    # What is wrong with the process.
    _not_protected(
        "ttprun-error",
        "A bug of ttprun: it has switched itself off, and the job runs as under torchrun.",
        _BUG,
        "how-it-works#It fails open",
    ),
    _not_protected(
        "hooks-missing",
        "The process that trains has no hooks of ttprun: its steps are not seen.",
        "train in the Python process that ttprun starts, without -E, -I and -S; `ttprun doctor` says more",
        _TROUBLES,
    ),
    _not_protected(
        "device-fault-spread",
        "The device has reported an error after which the state of the other ranks cannot be trusted either.",
        "--snapshot-every 10steps or --save-dir, to have a state from before the error",
        "devices#Errors are recognised by their texts",
    ),
    # What the script does.
    _not_protected(
        "gradients-carried",
        "Gradients that are kept across an optimizer step are needed by the next one, and a replacement lacks them.",
        "zero the gradients before or after each step",
        _LIMITS,
    ),
    _not_protected(
        "closure-called-twice",
        "The optimizer changes the weights between calls of its closure, in the middle of a step.",
        "torch.optim.LBFGS(max_iter=1) in a loop of your own",
        _LIMITS,
    ),
    _not_protected(
        "closure-not-called",
        "The step is seen at the call of its closure, and there was none.",
        "call step() without a closure",
        _LIMITS,
    ),
    _not_protected(
        "unequal-steps",
        "The ranks do not take the same number of steps together, so they have no common moment to go on from.",
        "give each rank as many batches (a DistributedSampler, drop_last=True)",
        _LIMITS,
    ),
    _not_protected(
        "step-in-backward",
        "A step inside a backward pass leaves the rest of that pass, which a replacement cannot compute.",
        "call step() after backward()",
        _SNAPSHOTS,
    ),
    _not_protected(
        "device-graph",
        "What a graph of the device holds runs without Python, and a replacement has only graphs of the set-up.",
        "capture before the training, without collectives and step() in it; no torch.compile with reduce-overhead",
        _LIMITS,
    ),
    _not_protected(
        "symmetric-memory",
        "Kernels read other ranks' memory without a collective, so nothing of it can be repeated.",
        "use collectives",
        _LIMITS,
    ),
    _not_protected(
        "mps",
        "Under CUDA's MPS the end of one process with running kernels ends the kernels of the others on its GPU.",
        "end it (echo quit | nvidia-cuda-mps-control), or set CUDA_MPS_PIPE_DIRECTORY to an empty folder",
        "devices#GPUs",
    ),
    _not_protected(
        "messages-not-repaired",
        "Communication that cannot be issued again in the same form after a fault.",
        "use all_reduce and the like, or messages on the CPU that are received in the step in which they are sent",
        _LIMITS,
    ),
    _not_protected(
        "backend",
        "Only gloo, nccl and hccl are rebuilt after a fault, each with the tensors that it is for.",
        "name a backend in init_process_group: gloo for the CPU, nccl for GPUs, hccl for NPUs",
        _LIMITS,
    ),
    _not_protected(
        "device",
        "A repair copies from the device and waits for it, by streams and events: its module in torch lacks a part.",
        "train on a device whose module in torch has streams and events, or without ttprun's protection",
        _LIMITS,
    ),
    _not_protected(
        "other-communication",
        "The ranks exchange data in a way that ttprun does not see.",
        "call torch.distributed.init_process_group by that name, and use its collectives",
        _LIMITS,
    ),
    _not_protected(
        "output-redirected",
        "Another file was put in the place of a descriptor: what was printed there cannot be counted.",
        "redirect the output in the shell, or use contextlib.redirect_stdout",
        _LIMITS,
    ),
    _not_protected(
        "random-draws",
        "Random numbers of the operating system are other ones each time.",
        "seed a generator, and draw from it",
        _LIMITS,
    ),
    _not_protected(
        "loop-not-followed",
        "The training loop, or the generator that hands out batches, is in a package that ttprun does not follow yet.",
        "start the job once more, or name the module: --follow mytrainer.loop (user_paths for all of a package)",
        "frameworks#What is followed",
    ),
    _not_protected(
        "made-inside-the-loop",
        "A replay skips the iteration in which the script has made this, so a replacement would not have it.",
        "make process groups, optimizers and their parameters before the training loop",
        _LIMITS,
    ),
    _not_protected(
        "journal-full",
        "The inputs of one step's collectives take more memory than they may.",
        "raise journal_limit_mib",
        "configuration#Configuration",
    ),
    _not_protected(
        "record-full",
        "What one rank records at a step takes more shared memory than it may.",
        "raise record_limit_mib",
        "configuration#Configuration",
    ),
    _not_protected(
        "state-unreadable",
        "Reading the state of this rank has failed, so no record of it is complete.",
        "see the error in the message: mostly a state_dict of your own that raises",
        _TROUBLES,
    ),
    _not_protected(
        "sharding-unknown",
        "It is not known which part of the weights this rank holds, or that part cannot be loaded elsewhere.",
        "shard with fully_shard (FSDP2) or DTensor, and keep reshard_after_forward",
        _SNAPSHOTS,
    ),
    _not_protected(
        "state-of-one-rank",
        "Only the lost rank had this part of the weights or of the optimizer state, and there is no copy of it.",
        "--buddy on or a larger --buddy-memory, to mirror each rank's own part (on the CPU), or --snapshot-every "
        "10steps: see 'Covered by a snapshot only' in 'ttprun guide limits'",
        _SNAPSHOTS,
    ),
    _not_protected(
        "optimizer-state-unknown",
        "What the optimizer keeps cannot be copied from one rank to another.",
        "keep an optimizer's state in tensors, one entry of `state` a parameter; torch's own optimizers do",
        _LIMITS,
    ),
    _not_protected(
        "memory-full",
        "There is no room in shared memory for a copy of this state.",
        "free memory, raise the limit of the container (docker: --shm-size), or --buddy-memory",
        _SNAPSHOTS,
    ),
    _not_protected(
        "command-line",
        "With these options the ranks run as under torchrun.",
        "--nnodes 2 or 2:3 in place of 1:N (or --elastic), and a Python script or module in place of another command",
        _LIMITS,
    ),
    # What a value is.
    _refused(
        "activation-used-later",
        "The script uses, after a step, a tensor that was computed with gradients before it.",
        "compute it again after the step, or --snapshot-every 10steps: see 'Covered by a snapshot only' in 'ttprun "
        "guide limits'",
        _SNAPSHOTS,
    ),
    _refused(
        "iteration-order",
        "The order of a set depends on its history, which no record has.",
        "keep the items in a dict or a list",
        "limits#Covered",
    ),
    _not_proved(
        "iterator-read-by-next",
        "An iterator is read in a way that does not show how far it has come.",
        "read it by a `for` loop",
        _NAMED,
    ),
    _not_proved(
        "loop-of-a-library",
        "A generator of a library, whose loop is met for the first time: its file is followed from the next run on.",
        "start the job once more, or name the library under `follow` in the configuration",
        _NAMED,
    ),
    _not_proved(
        "iterator-position",
        "A generator, an iterator or a coroutine does not show how far it has come.",
        "run over it by a `for` loop of your own, or count its items and take them by index",
        _NAMED,
    ),
    _not_proved(
        "work-of-another-thread",
        "A result of another thread or process, of which nobody knows how far it has come.",
        "have it done before the optimizer steps, and keep the result",
        _LIMITS,
    ),
    _not_proved(
        "container-too-long",
        "A container of more than 100,000 items is compared, and not recorded.",
        "keep it in an array or a tensor",
        "limits#Much data in memory",
    ),
    _not_proved(
        "set-of-objects",
        "The order of a set of objects depends on where they lie in memory.",
        "keep them in a list or a dictionary",
        "limits#Covered",
    ),
    _not_proved(
        "value-not-recorded",
        "A value can change, and its state cannot be read.",
        "set it in each step before it is read, or keep what the steps read of it in numbers, lists or arrays",
        _NAMED,
    ),
    # What a replay has done otherwise.
    _refused(
        "other-batch",
        "A DataLoader has given the replacement other data than the lost rank.",
        "let dataset and sampler give the same each time the script begins",
        _PROVED,
    ),
    _refused(
        "other-random-states",
        "The replay has drawn other random numbers than the lost rank.",
        "draw from a generator that the script seeds, or keeps in a variable",
        _PROVED,
    ),
    _refused(
        "other-loss",
        "The same step has come to another loss or gradient than in the lost rank.",
        "keep what the step depends on in variables or in objects with state_dict",
        _PROVED,
    ),
    _refused(
        "other-weights",
        "Ranks that should hold the same weights do not.",
        "seed the weights alike in all ranks, or broadcast them before the first step",
        _REPLICAS,
    ),
    _refused(
        "input-lost",
        "A collective of the interrupted step cannot be issued again, as what was put into it is gone.",
        "leave gradients alone between their all-reduce and the optimizer step",
        "how-it-works#When a rank dies",
    ),
    _refused(
        "other-collective",
        "A rank runs another collective than the others: another branch, shape or order.",
        _SAME_SET_UP,
        _PROVED,
    ),
    _refused(
        "other-place",
        "The replay has come to another line, loop or optimizer than the lost rank.",
        _SAME_SET_UP,
        _PROVED,
    ),
    _refused(
        "import-fails",
        "A module that the lost rank had imported cannot be imported by its replacement.",
        "see the error in the message: import it before the training loop",
        _PROVED,
    ),
    _not_proved(
        "made-without-constructor",
        "The replay has passed over what made this object (an evaluation, a checkpoint).",
        "make it before the training loop, if its content influences the training",
        _NAMED,
    ),
    _refused(
        "other-variable",
        "A variable is not in the replacement as it was in the lost rank, and cannot be written into it.",
        "let the set-up make it before the training loop, the same each time the script begins",
        _PROVED,
    ),
    _refused(
        "resume-with-another-model",
        "A parameter of the script's model has another shape than in the checkpoint.",
        "start with the model of the checkpoint, or with --resume off or another --save-dir to train the new one",
        "checkpoints#Another number of ranks, or other arguments",
    ),
    _refused(
        "resume-with-other-ranks",
        "A saved state cannot be divided among another number of ranks.",
        "start with as many ranks as before, or let the script load a checkpoint of its own",
        "checkpoints#Another number of ranks, or other arguments",
    ),
    _refused(
        "stored-state-unusable",
        "What was stored for this rank cannot be read, or is not of it.",
        "`ttprun checkpoints verify`; the next older one is tried",
        "checkpoints#Format",
    ),
    _refused(
        "gradients-late",
        "The rank whose gradients count has not sent them in time.",
        "none is known: the next recovery is tried",
        "how-it-works#Rounding",
    ),
    _refused(
        "not-replayable",
        "A replay of the script does not come to what the run has come to.",
        "keep what the step depends on in variables or in objects with state_dict",
        _PROVED,
    ),
    _refused(
        "handler-missing",
        "The framework recovers and saves through handlers of its own, and has registered none for this. Without one "
        "that saves, a job that ends has no newer state than its last checkpoint.",
        "register one (MindIO's `tft_register_*_handler`), as `ttprun guide mindio` says",
        "mindio#The mindio interface",
    ),
    _refused(
        "recovery-failed",
        "An error in the recovery itself.",
        "see the error in the message; if it is not of your script, " + _BUG,
        "how-it-works#It fails open",
    ),
    # What is named, and no more.
    _not_proved(
        "file-changed",
        "The set-up has looked at a file which has another content now.",
        "read such files before the first step, or keep their content in a variable",
        "limits#Covered",
    ),
    _not_proved(
        "save-given-up",
        "A checkpoint that the script was writing in the background is not complete.",
        "let the script save again; an older checkpoint of its own stays",
        _LIMITS,
    ),
    _not_proved(
        "equal-to-rounding",
        "Numbers differ from the lost rank's by rounding alone, as kernels need not be reproducible.",
        "--proof strict refuses it; torch.use_deterministic_algorithms(True) makes more kernels reproducible",
        "how-it-works#Rounding",
    ),
    _not_proved(
        "not-compared",
        "There was nothing to compare the replacement with.",
        "nothing need be done: the ranks' weights are compared once more before the next two steps",
        _PROVED,
    ),
    _not_proved(
        "written-again",
        "Compiled code writes to this file, which a replay cannot drop: after a replacement, rows come twice.",
        "rows with a key of their own (INSERT OR REPLACE by run and step), or a logger that appends to a plain file",
        _NAMED,
    ),
    _not_proved(
        "dear-to-record",
        "The record of each step walks over the script's variables. These made it take more than 15 % of the step, "
        "so they are left alone: a replacement has them as the script's set-up makes them.",
        "fewer objects that change at each step: arrays and tensors in place of objects; or record them at any cost: "
        "--overhead-budget unlimited",
        "limits#What a step costs",
    ),
    _not_proved(
        "hidden-state",
        "An object can change and is in no record: a replacement has it as the script's set-up makes it.",
        "if its content influences the training: plain variables, or a class with state_dict and load_state_dict",
        _NAMED,
    ),
    # What ends the job, once the ways above are closed.
    _refused(
        "survivors-disagree",
        "The surviving ranks are at different steps, so no rank can supply the state of another.",
        "--snapshot-every 10steps or --save-dir, to have a state that all can go back to",
        _LADDER,
    ),
    _not_protected(
        "not-compared-yet",
        "Which ranks hold the same is compared in the first steps, and the rank was lost before.",
        "nothing: it holds for the first two steps",
        _REPLICAS,
    ),
    _not_protected(
        "no-survivor",
        "No rank is left that holds the state.",
        "--snapshot-every 10steps or --save-dir, to have a state that all can go back to",
        _LADDER,
    ),
    _not_protected(
        "ranks-have-finished",
        "Some ranks have come to the end of the script and cannot take part in new connections.",
        "end the script with a barrier, so that all ranks leave together",
        "limits#Covered",
    ),
    _refused(
        "same-fault-again",
        "The same fault has come back too often, or is sure to: another attempt would not help.",
        "see the first of the incidents in `ttprun status`; --max-incidents-per-hour is the limit of all",
        "operating#Exit codes",
    ),
    _not_protected(
        "no-restart-left",
        "All ranks may not start again as often as that.",
        "--max-restarts N",
        _LADDER,
    ),
)
KINDS = {row.kind: row for row in REASONS}
