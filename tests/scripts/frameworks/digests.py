"""What a script prints of all that it holds in the end: one line of each, which must not differ."""

import hashlib

import torch


def plain(value):
    """Tensors as bytes, containers with their items, all else as it is."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), list(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return [(key, plain(item)) for key, item in value.items()]
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def print_digests(rank, **held):
    """`rank 1 sha256 model ...`, and so on."""
    for name, value in held.items():
        print(f"rank {rank} sha256 {name} {hashlib.sha256(repr(plain(value)).encode()).hexdigest()}", flush=True)


def print_digests_of(trainer):
    """Of a transformers.Trainer: what it holds, and what it has logged, but for times."""
    history = [
        {name: value for name, value in entry.items() if "runtime" not in name and "per_second" not in name}
        for entry in trainer.state.log_history
    ]
    held = {"model": trainer.model, "optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
    states = {name: one.state_dict() for name, one in held.items()}
    print_digests(trainer.args.process_index, **states, history=history)
