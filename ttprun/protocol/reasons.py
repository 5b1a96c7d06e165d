"""Why a rank is not replaced, or not proved to be as it was: one table, known by its kinds. Begin with REASONS.

A message is a sentence that whoever finds the reason writes; its row is found again by words of it, so that nothing
but the sentence crosses between processes. `ttprun explain KIND` prints a row. Standard library only: every part asks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

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
_MARK = "; what helps: "
_LIMITS = "limits#Not covered: a fault restarts the whole group"
_SNAPSHOTS = "limits#Covered by a snapshot only"
_NAMED = "limits#What no record can hold is named"
_PROVED = "how-it-works#Proved or refused"
_REPLICAS = "how-it-works#Who is a replica of whom is compared, not assumed"
_LADDER = "how-it-works#The ladder"
_TROUBLES = 'troubleshoot#"Not protected"'
_SAME_SET_UP = (
    "let the set-up do the same each time the script begins, whatever an earlier run has left (files, time, names)"
)
_BUG = "report it, with `events.jsonl` of the run directory: it is a bug of ttprun"
# What a message itself says to do.
_SAID = re.compile(
    r"cannot be recorded: |: use |: give each|: zero |: seed |: make |: call |: leave |: raise |: start |: install |"
    r": write|, or broadcast|user_paths|try this line|: step in |: add parameters"
)


@dataclass(frozen=True)
class Reason:
    """One reason.

    kind    its stable name, for programs and for `ttprun explain`
    word    NOT_PROTECTED, NOT_PROVED or REFUSED
    found   words of its messages, a regular expression
    means   a sentence
    cure    what to do about it, in one line
    where   the guide's topic and heading that explain it: "limits#Covered"
    """

    kind: str
    word: str
    found: str
    means: str
    cure: str
    where: str


# A message is of the first row that is found in it: what is special comes before what may hold it.
REASONS = (
    # What is being waited for.
    Reason(
        "no-step-yet",
        NOT_PROTECTED,
        "no optimizer step( of [^:]*)? so far|have not reported yet|not completed an optimizer step",
        "A rank counts as protected once it has passed an optimizer step under ttprun's hooks.",
        "wait for the first step; if there was one, the training uses an optimizer that is not torch's, or a process "
        "without hooks",
        "limits#Protected means seen",
    ),
    Reason(
        "being-checked",
        NOT_PROTECTED,
        "are being read back",
        "What the ranks have recorded in their first steps is read back before they count as protected.",
        "wait for the next steps",
        "limits#Protected means seen",
    ),
    Reason(
        "switched-off",
        NOT_PROTECTED,
        "is switched off|a lost rank (restarts the whole group|leaves with its)",
        "The configuration leaves this way of recovery out.",
        "name it in --rungs, or leave --rungs out",
        _LADDER,
    ),
    # What is wrong with the process.
    Reason(
        "ttprun-error",
        NOT_PROTECTED,
        "ttprun failed in|an error in ttprun itself|first message is not a welcome|ttprun's supervisor failed",
        "A bug of ttprun: it has switched itself off, and the job runs as under torchrun.",
        _BUG,
        "how-it-works#It fails open",
    ),
    Reason(
        "hooks-missing",
        NOT_PROTECTED,
        "hooks could not be installed|Python was started with|child process does|started the ranks itself"
        "|import hook placed|its Python is a child of|has not loaded ttprun's hooks|closed its connection to ttprun"
        "|may train where no fault",
        "The process that trains has no hooks of ttprun: its steps are not seen.",
        "train in the Python process that ttprun starts, without -E, -I and -S; `ttprun doctor` says more",
        _TROUBLES,
    ),
    Reason(
        "device-fault-spread",
        NOT_PROTECTED,
        "the other ranks' state may be wrong too",
        "The device has reported an error after which the state of the other ranks cannot be trusted either.",
        "--snapshot-every 10steps or --save-dir, to have a state from before the error",
        "devices#Errors are recognised by their texts",
    ),
    # What the script does.
    Reason(
        "gradients-carried",
        NOT_PROTECTED,
        "carr(y|ies) gradients across|unreduced gradients are kept",
        "Gradients that are kept across an optimizer step are needed by the next one, and a replacement lacks them.",
        "zero the gradients before or after each step",
        _LIMITS,
    ),
    Reason(
        "closure-called-twice",
        NOT_PROTECTED,
        "calls its closure several times",
        "The optimizer changes the weights between calls of its closure, in the middle of a step.",
        "torch.optim.LBFGS(max_iter=1) in a loop of your own",
        _LIMITS,
    ),
    Reason(
        "closure-not-called",
        NOT_PROTECTED,
        "without calling its closure|step is given a closure",
        "The step is seen at the call of its closure, and there was none.",
        "call step() without a closure",
        _LIMITS,
    ),
    Reason(
        "unequal-steps",
        NOT_PROTECTED,
        r"with join\(\)|ranks do not step together|world_size differs",
        "The ranks do not take the same number of steps together, so they have no common moment to go on from.",
        "give each rank as many batches (a DistributedSampler, drop_last=True)",
        _LIMITS,
    ),
    Reason(
        "step-in-backward",
        NOT_PROTECTED,
        "inside (the|a) backward pass",
        "A step inside a backward pass leaves the rest of that pass, which a replacement cannot compute.",
        "call step() after backward()",
        _SNAPSHOTS,
    ),
    Reason(
        "device-graph",
        NOT_PROTECTED,
        "in a graph of the device|in graphs of the device",
        "What a graph of the device holds runs without Python, so no step of it can be followed.",
        "leave the capture out (torch.cuda.graph, make_graphed_callables, torch.compile's reduce-overhead)",
        _LIMITS,
    ),
    Reason(
        "symmetric-memory",
        NOT_PROTECTED,
        "symmetric memory",
        "Kernels read other ranks' memory without a collective, so nothing of it can be repeated.",
        "use collectives",
        _LIMITS,
    ),
    Reason(
        "messages-not-repaired",
        NOT_PROTECTED,
        "recv without src|is still pending at optimizer step|starts operations on .* together|takes sparse tensors"
        "|the script uses .*, which is not repaired|(send|recv)\\w* of tensors on",
        "Communication that cannot be issued again in the same form after a fault.",
        "use all_reduce and the like, or messages on the CPU that are received in the step in which they are sent",
        _LIMITS,
    ),
    Reason(
        "backend",
        NOT_PROTECTED,
        "backend .* is (unknown|not repaired)|of .* is not repaired, only|build of torch has no NCCL"
        "|not repaired with the backend",
        "Only gloo, nccl and hccl are rebuilt after a fault, each with the tensors that it is for.",
        "name a backend in init_process_group: gloo for the CPU, nccl for GPUs, hccl for NPUs",
        _LIMITS,
    ),
    Reason(
        "other-communication",
        NOT_PROTECTED,
        "it communicates by|reference to torch's function",
        "The ranks exchange data in a way that ttprun does not see.",
        "call torch.distributed.init_process_group by that name, and use its collectives",
        _LIMITS,
    ),
    Reason(
        "output-redirected",
        NOT_PROTECTED,
        "has redirected",
        "Another file was put in the place of a descriptor: what was printed there cannot be counted.",
        "redirect the output in the shell, or use contextlib.redirect_stdout",
        _LIMITS,
    ),
    Reason(
        "random-draws",
        NOT_PROTECTED,
        "draws from os.urandom|another random generator than",
        "Random numbers of the operating system are other ones each time.",
        "seed a generator, and draw from it",
        _LIMITS,
    ),
    Reason(
        "loop-not-followed",
        NOT_PROTECTED,
        "(was|were|is|are) not followed|followed from the next run|training loop of|inside an iterator whose items"
        "|step is taken in a (loop|function) of|loop is met for the first time",
        "The training loop, or the generator that hands out batches, is in a package that ttprun does not follow yet.",
        "start the job once more, or name the module: --follow mytrainer.loop (user_paths for all of a package)",
        "frameworks#What is followed",
    ),
    Reason(
        "made-inside-the-loop",
        NOT_PROTECTED,
        "inside the training loop|in an iteration that a replay skips|has .* parameters in the lost rank and"
        "|optimizers in the replay",
        "A replay skips the iteration in which the script has made this, so a replacement would not have it.",
        "make process groups, optimizers and their parameters before the training loop",
        _LIMITS,
    ),
    Reason(
        "journal-full",
        NOT_PROTECTED,
        "journal_limit_mib",
        "The inputs of one step's collectives take more memory than they may.",
        "raise journal_limit_mib",
        "configuration#Configuration",
    ),
    Reason(
        "record-full",
        NOT_PROTECTED,
        "record_limit_mib",
        "What one rank records at a step takes more shared memory than it may.",
        "raise record_limit_mib",
        "configuration#Configuration",
    ),
    Reason(
        "state-unreadable",
        NOT_PROTECTED,
        r"state of boundary \S+ cannot be recorded|state of the DataLoader made at"
        r"|weights after step \S+ cannot be noted|another rank cannot load that",
        "Reading the state of this rank has failed, so no record of it is complete.",
        "see the error in the message: mostly a state_dict of your own that raises",
        _TROUBLES,
    ),
    Reason(
        "sharding-unknown",
        NOT_PROTECTED,
        "FSDP1's parameters|partial sums over the ranks|parts of its sharded parameters"
        "|sharded over the ranks in a way"
        "|DTensors, and others|sharded, and those|being gathered while|gathered parameters are kept"
        "|share of .* in the same way|not all ranks shard"
        "|hold different parameters|another form than in the lost rank|this rank's part is",
        "It is not known which part of the weights this rank holds, or that part cannot be loaded elsewhere.",
        "shard with fully_shard (FSDP2) or DTensor, and keep reshard_after_forward",
        _SNAPSHOTS,
    ),
    Reason(
        "state-of-one-rank",
        NOT_PROTECTED,
        "no other rank holds|no single rank holds|communicates inside step|are sharded over the ranks|its own part"
        "|is not mirrored"
        "|its mirror holds the same|the mirror of rank|no mirror is kept|not mirrored yet|no copy would remain",
        "Only the lost rank had this part of the weights or of the optimizer state, and there is no copy of it.",
        "--buddy on or a larger --buddy-memory, to mirror each rank's own part (on the CPU), or --snapshot-every "
        "10steps: see 'Covered by a snapshot only' in 'ttprun guide limits'",
        _SNAPSHOTS,
    ),
    Reason(
        "optimizer-state-unknown",
        NOT_PROTECTED,
        "optimizers have no parameters|keeps state in lists|has state '|unknown whether it is sharded|fused=True",
        "What the optimizer keeps cannot be copied from one rank to another.",
        "keep an optimizer's state in tensors, one entry of `state` a parameter; torch's own optimizers do",
        _LIMITS,
    ),
    Reason(
        "memory-full",
        NOT_PROTECTED,
        "MiB of shared memory, and only",
        "There is no room in shared memory for a copy of this state.",
        "free memory, raise the limit of the container (docker: --shm-size), or --buddy-memory",
        _SNAPSHOTS,
    ),
    Reason(
        "command-line",
        NOT_PROTECTED,
        "number is not fixed|ranks must run Python|--run-path",
        "With these options the ranks run as under torchrun.",
        "--nnodes 2 or 2:3 in place of 1:N (or --elastic), and a Python script or module in place of another command",
        _LIMITS,
    ),
    # What a value is.
    Reason(
        "activation-used-later",
        REFUSED,
        "too large to record|graph is not recorded",
        "The script uses, after a step, a tensor that was computed with gradients before it.",
        "compute it again after the step, or --snapshot-every 10steps: see 'Covered by a snapshot only' in 'ttprun "
        "guide limits'",
        _SNAPSHOTS,
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
        _LIMITS,
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
        "The framework recovers through handlers of its own, and has registered none for this.",
        "register one (MindIO's `tft_register_*_handler`), as `ttprun guide mindio` says",
        "mindio#The mindio interface",
    ),
    Reason(
        "recovery-failed",
        REFUSED,
        "while it (stopped|sent|loaded|took|wrote|issued|recovered)|attempts to replace"
        "|not come to (a collective within|optimizer step)",
        "An error in the recovery itself.",
        "see the error in the message; if it is not of your script, " + _BUG,
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
        _LIMITS,
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
        "The remaining ranks do not stand at one step, so none can be the source of another.",
        "--snapshot-every 10steps or --save-dir, to have a state that all can go back to",
        _LADDER,
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
        _LADDER,
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
        "the same fault|incidents of the kind|error of the script itself",
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
        _LADDER,
    ),
)
KINDS = {row.kind: row for row in REASONS}
_FOUND = [(re.compile(row.found), row) for row in REASONS]


@lru_cache(maxsize=1024)
def reason_of(text: str) -> Reason | None:
    """The row of a message; None if it has none."""
    return next((row for pattern, row in _FOUND if pattern.search(text)), None) if text else None


def kind_of(text: str) -> str:
    """The kind of a message; "" if no row is of it."""
    row = reason_of(text)
    return "" if row is None else row.kind


def pointer(text: str) -> str:
    """What a line that ends with this reason goes on with: where it is explained; "" if nowhere."""
    return f" (ttprun explain {kind})" if (kind := kind_of(text)) else ""


def cure_of(text: str) -> str:
    """What helps against it; "" if nothing is known to, or the message itself says so."""
    row = reason_of(text)
    return "" if row is None or says_cure(text) else row.cure


def says_cure(text: str) -> bool:
    """Whether a message itself says what helps."""
    return _SAID.search(text) is not None


def with_cure(text: str) -> str:
    """A message with what helps, for one line."""
    cure = cure_of(text)
    return f"{text}{_MARK}{cure}" if cure and _MARK not in text else text


def split_cure(text: str) -> tuple[str, str]:
    """(the message, what helps) of what `with_cure` has returned."""
    why, _, cure = text.partition(_MARK)
    return why, cure


def not_recorded(name: str, why: str) -> str:
    """One line: the path of a value that cannot be recorded, what it is, and what to do.

    why   continues "it"
    """
    said = f"{name} cannot be recorded: it {why}"
    row = reason_of(f"cannot be recorded: it {why}")
    return said if row is None or row.kind == "iterator-read-by-next" else f"{said}; {row.cure}"
