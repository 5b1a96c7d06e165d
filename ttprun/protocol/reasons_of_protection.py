"""Why a lost rank would not be replaced: what is waited for, the process, the script. Read with reasons.py."""

from __future__ import annotations

from ttprun.protocol.reason import BUG, LADDER, LIMITS, NOT_PROTECTED, SNAPSHOTS, Reason

_TROUBLES = 'troubleshoot#"Not protected"'
OF_PROTECTION = (
    # What is being waited for.
    Reason(
        "no-step-yet",
        NOT_PROTECTED,
        "no optimizer step( of [^:]*)? so far|have not reported yet|not completed an optimizer step",
        "A rank counts as protected once it has passed an optimizer step under ttprun's hooks.",
        "wait for the first step; if there was one, the training uses an optimizer that is not torch's, or a process "
        "without hooks",
        "limits#Protected means seen",
        "A rank that is killed before its first step gets a new process, which runs the script from the top while the "
        "other ranks wait; no step is lost. An error of the script before its first step ends the job. If a rank "
        "trains in a way that ttprun does not see, its loss is as under torchrun: all ranks start again "
        "(--max-restarts), or the job ends.",
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
        LADDER,
    ),
    # What is wrong with the process.
    Reason(
        "ttprun-error",
        NOT_PROTECTED,
        "ttprun failed in|an error in ttprun itself|first message is not a welcome|ttprun's supervisor failed",
        "A bug of ttprun: it has switched itself off, and the job runs as under torchrun.",
        BUG,
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
        LIMITS,
    ),
    Reason(
        "closure-called-twice",
        NOT_PROTECTED,
        "calls its closure several times",
        "The optimizer changes the weights between calls of its closure, in the middle of a step.",
        "torch.optim.LBFGS(max_iter=1) in a loop of your own",
        LIMITS,
    ),
    Reason(
        "closure-not-called",
        NOT_PROTECTED,
        "without calling its closure|step is given a closure",
        "The step is seen at the call of its closure, and there was none.",
        "call step() without a closure",
        LIMITS,
    ),
    Reason(
        "unequal-steps",
        NOT_PROTECTED,
        r"with join\(\)|ranks do not step together|world_size differs",
        "The ranks do not take the same number of steps together, so they have no common moment to go on from.",
        "give each rank as many batches (a DistributedSampler, drop_last=True)",
        LIMITS,
    ),
    Reason(
        "step-in-backward",
        NOT_PROTECTED,
        "inside (the|a) backward pass",
        "A step inside a backward pass leaves the rest of that pass, which a replacement cannot compute.",
        "call step() after backward()",
        SNAPSHOTS,
    ),
    Reason(
        "device-graph",
        NOT_PROTECTED,
        "in a graph of the device|in graphs of the device",
        "What a graph of the device holds runs without Python, so no step of it can be followed.",
        "leave the capture out (torch.cuda.graph, make_graphed_callables, torch.compile's reduce-overhead)",
        LIMITS,
    ),
    Reason(
        "symmetric-memory",
        NOT_PROTECTED,
        "symmetric memory",
        "Kernels read other ranks' memory without a collective, so nothing of it can be repeated.",
        "use collectives",
        LIMITS,
    ),
    Reason(
        "messages-not-repaired",
        NOT_PROTECTED,
        "recv without src|is still pending at optimizer step|starts operations on .* together|takes sparse tensors"
        "|the script uses .*, which is not repaired|(send|recv)\\w* of tensors on",
        "Communication that cannot be issued again in the same form after a fault.",
        "use all_reduce and the like, or messages on the CPU that are received in the step in which they are sent",
        LIMITS,
    ),
    Reason(
        "backend",
        NOT_PROTECTED,
        "backend .* is (unknown|not repaired)|of .* is not repaired, only|build of torch has no NCCL"
        "|not repaired with the backend",
        "Only gloo, nccl and hccl are rebuilt after a fault, each with the tensors that it is for.",
        "name a backend in init_process_group: gloo for the CPU, nccl for GPUs, hccl for NPUs",
        LIMITS,
    ),
    Reason(
        "device",
        NOT_PROTECTED,
        "has no \\w+, without which nothing on such a device",
        "A repair copies from the device and waits for it, by streams and events: its module in torch lacks a part.",
        "train on a device whose module in torch has streams and events, or without ttprun's protection",
        LIMITS,
    ),
    Reason(
        "other-communication",
        NOT_PROTECTED,
        "it communicates by|reference to torch's function",
        "The ranks exchange data in a way that ttprun does not see.",
        "call torch.distributed.init_process_group by that name, and use its collectives",
        LIMITS,
    ),
    Reason(
        "output-redirected",
        NOT_PROTECTED,
        "has redirected",
        "Another file was put in the place of a descriptor: what was printed there cannot be counted.",
        "redirect the output in the shell, or use contextlib.redirect_stdout",
        LIMITS,
    ),
    Reason(
        "random-draws",
        NOT_PROTECTED,
        "draws from os.urandom|another random generator than",
        "Random numbers of the operating system are other ones each time.",
        "seed a generator, and draw from it",
        LIMITS,
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
        LIMITS,
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
        SNAPSHOTS,
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
        SNAPSHOTS,
    ),
    Reason(
        "optimizer-state-unknown",
        NOT_PROTECTED,
        "optimizers have no parameters|keeps state in lists|has state '|unknown whether it is sharded|fused=True",
        "What the optimizer keeps cannot be copied from one rank to another.",
        "keep an optimizer's state in tensors, one entry of `state` a parameter; torch's own optimizers do",
        LIMITS,
    ),
    Reason(
        "memory-full",
        NOT_PROTECTED,
        "MiB of shared memory, and only",
        "There is no room in shared memory for a copy of this state.",
        "free memory, raise the limit of the container (docker: --shm-size), or --buddy-memory",
        SNAPSHOTS,
    ),
    Reason(
        "command-line",
        NOT_PROTECTED,
        "number is not fixed|ranks must run Python|--run-path",
        "With these options the ranks run as under torchrun.",
        "--nnodes 2 or 2:3 in place of 1:N (or --elastic), and a Python script or module in place of another command",
        LIMITS,
    ),
)
