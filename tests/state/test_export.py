"""A model that was exported is the model that was trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.state.making import flip_byte
from tests.state.making_models import Net, net, save
from ttprun.errors import ConfigError
from ttprun.state.checkpoint import inspect
from ttprun.state.files import InvalidCheckpointError
from ttprun.state.tensor_file import Format, choose_model, load_model, names_without_wrappers, write_model


class Wrapped(nn.Module):
    """Holds a module under another name, as a wrapper does."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    """A group of this process alone, for DistributedDataParallel."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ddp(inner: nn.Module) -> nn.Module:
    return DistributedDataParallel(inner)


def compiled(inner: nn.Module) -> nn.Module:
    return torch.compile(inner, backend="eager")


def fsdp(inner: nn.Module) -> nn.Module:
    return Wrapped("_fsdp_wrapped_module", inner)


def read(path: Path, form: Format) -> dict[str, torch.Tensor]:
    if form == "safetensors":
        return load_file(path)
    loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return loaded


@pytest.mark.parametrize("form", ["torch", "safetensors"])
@pytest.mark.parametrize(
    "wrap",
    [lambda inner: inner, ddp, compiled, lambda inner: ddp(compiled(inner)), lambda inner: compiled(ddp(fsdp(inner)))],
    ids=["bare", "ddp", "compiled", "ddp of compiled", "compiled ddp of fsdp"],
)
def test_what_was_trained_is_loaded_strictly_into_a_bare_model(
    tmp_path: Path, wrap: Callable[[nn.Module], nn.Module], form: Format
) -> None:
    trained = net(seed=1)
    taken = save(tmp_path / "save", {"self.model": wrap(trained)})
    fresh = net(seed=2)

    write_model(load_model(taken, choose_model(taken)), tmp_path / "model", form)
    fresh.load_state_dict(read(tmp_path / "model", form), strict=True)

    wanted = trained.state_dict()
    assert fresh.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in fresh.state_dict().items())
    assert fresh.norm.num_batches_tracked.item() == 1


def test_tied_weights_are_one_tensor_in_a_file_of_torch(tmp_path: Path) -> None:
    taken = save(tmp_path / "save", {"model": net(1)})

    write_model(load_model(taken, choose_model(taken)), tmp_path / "model.pt", "torch")

    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert loaded["head.weight"].data_ptr() == loaded["embedding.weight"].data_ptr()


def test_of_several_models_one_must_be_named(tmp_path: Path) -> None:
    generator, critic = net(1), net(2)
    taken = save(tmp_path / "save", {"generator": generator, "critic": ddp(critic)})

    with pytest.raises(ConfigError, match=r"holds several models; choose by --model: 'critic', 'generator'$"):
        choose_model(taken)
    with pytest.raises(ConfigError, match=r"^--model: there is no 'critik'; did you mean 'critic'\?$"):
        choose_model(taken, "critik")

    chosen = load_model(taken, choose_model(taken, "critic"))
    assert torch.equal(chosen["module.weight"], critic.module.weight)


def test_a_checkpoint_without_a_model_says_so(tmp_path: Path) -> None:
    taken = save(tmp_path / "save", {})

    with pytest.raises(ConfigError, match="names no model"):
        choose_model(taken)


def test_nothing_is_taken_out_of_a_damaged_checkpoint(tmp_path: Path) -> None:
    taken = save(tmp_path / "save", {"model": net(1)})
    taken.file("tensors-00001.safetensors").write_bytes(b"short")
    damaged = inspect(taken.path)

    with pytest.raises(InvalidCheckpointError, match="has 5 bytes"):
        load_model(damaged, {})


def test_a_file_that_is_no_safetensors_or_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    taken = save(tmp_path / "save", {"model": net(1)})
    name = "tensors-00000.safetensors"

    with pytest.raises(ConfigError, match=f"{name}' cannot be read .*; choose another checkpoint"):
        load_model(taken, {"w": (name, "model/99")})

    flip_byte(taken.file(name), 9)
    with pytest.raises(ConfigError, match=f"{name}' cannot be read .*; choose another checkpoint"):
        load_model(taken, {"w": (name, "model/0")})


@pytest.mark.parametrize(
    ("names", "plain"),
    [
        (["module.a", "module.b.c"], ["a", "b.c"]),
        (["module.a", "n_averaged"], ["module.a", "n_averaged"]),
        (["module._orig_mod.module.a"], ["a"]),
        (["layers.0._orig_mod.a", "layers.1._fsdp_wrapped_module._orig_mod.a"], ["layers.0.a", "layers.1.a"]),
        (["encoder.module.a", "b"], ["encoder.module.a", "b"]),
        (["_orig_mod.a", "a"], ["_orig_mod.a", "a"]),
        (["module.module.a", "module.b"], ["module.a", "b"]),
        ([], []),
    ],
)
def test_only_what_wrappers_put_first_is_taken_off(names: list[str], plain: list[str]) -> None:
    assert list(names_without_wrappers(names).values()) == plain


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, form: Format) -> None:
    (tmp_path / "there").write_text("mine")

    with pytest.raises(ConfigError, match=r"there is a file .*there'; name a new one"):
        write_model(Net().state_dict(), tmp_path / "there", form)
    with pytest.raises(ConfigError, match=r"^--out: '.*/none/model' cannot be written \(.*\); name another file$"):
        write_model(Net().state_dict(), tmp_path / "none" / "model", form)

    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").read_text() == "mine"
