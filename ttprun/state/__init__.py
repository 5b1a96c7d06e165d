"""Checkpoints on disk: what a save directory holds, and how it stays valid whatever dies. Begin with `store`.

Files, lowest floor first: `files` (one file, written and hashed), `checkpoint` (one directory, looked at), `store` (all
of them), `tensor_file` (tensors as safetensors, also read in other parts than they were written, or as a model for
`load_state_dict`); beside them `chunks` (parts of sharded tensors) and `cost_limits`. The first three and
these two do without torch.

    .ttprun.lock                          held by the job that writes here; names it
    latest                                name of the checkpoint that was completed last
    step-00000120/                        one checkpoint; with `-2` if that name was taken
        ttprun.json                       its manifest, written last
        rank-00000.msgpack ...            one rank's own records
        tensors-00000.safetensors ...     the tensors that one rank was chosen to write
    incomplete-step-00000120/             what there was of one that could not be complete; nothing resumes from it
    .writing-step-00000120-RUN/           being written; removed by the next job if its writer died
    .removing-step-00000090/              being removed
"""
