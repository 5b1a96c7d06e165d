"""`litgpt pretrain` for a tiny model: `litgpt.pretrain.setup`, with tokens drawn at random.

litgpt takes FSDP for several devices, and Lightning's FSDP wants GPUs; DDP stands in for it. It writes the settings of
a checkpoint from the command line of `litgpt`, which is not used here; they are not written.
"""

import litgpt.pretrain
import torch
from lightning.fabric.strategies import DDPStrategy
from litgpt import Config
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from torch.utils.data import DataLoader, TensorDataset


class Parallel:
    def __new__(cls, **_):
        return DDPStrategy()


litgpt.pretrain.FSDPStrategy = Parallel
litgpt.pretrain.save_hyperparameters = lambda *_, **__: None


class Tokens(DataModule):
    """Rows of random tokens."""

    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None, **kwargs):
        self.batch_size, self.length = batch_size, max_seq_length

    def _loader(self, rows, shuffle):
        tokens = torch.randint(0, 96, (rows, self.length + 1), generator=torch.Generator().manual_seed(rows))
        return DataLoader(Rows(tokens), batch_size=self.batch_size, shuffle=shuffle)

    def train_dataloader(self):
        return self._loader(24, True)

    def val_dataloader(self):
        return self._loader(8, False)


class Rows(TensorDataset):
    def __getitem__(self, index):
        return super().__getitem__(index)[0]


if __name__ == "__main__":
    config = Config(
        name="tiny", block_size=16, vocab_size=96, padded_vocab_size=96, n_layer=2, n_head=2, n_embd=16,
        intermediate_size=32,
    )  # fmt: skip
    litgpt.pretrain.setup(
        "tiny",
        model_config=config,
        out_dir="out",
        precision="32-true",
        data=Tokens(),
        devices=2,
        train=TrainArgs(
            save_interval=6, log_interval=1, global_batch_size=8, micro_batch_size=2, max_tokens=16 * 2 * 2 * 32,
            max_norm=1.0, min_lr=4e-5, lr_warmup_steps=2, tie_embeddings=False,
        ),
        eval=EvalArgs(interval=5, max_iters=2, final_validation=True),
        logger_name="csv",
    )  # fmt: skip
