"""Checkpoints on disk: what a save directory holds, and how it stays valid whatever dies. Begin with `store`.

Files, lowest floor first: `errors`, `files` (one file, written and hashed), `manifest` (what `ttprun.json` says),
`checkpoint` (one directory, looked at), `lock` (one job a directory), `draft` (one being written), `store` (all of
them), `tensor_file` (tensors as safetensors), `export` (a model for `load_state_dict`). All but the last two do without
torch.

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
