"""A tiny GPT-2 trained by transformers.Trainer as its documentation has it, on text that is made on the spot.

torchrun --nproc-per-node 2 transformers_trainer.py --steps 110 --step-logs logs
"""

import time

STARTED_AT_S = time.time()

import torch  # noqa: E402
from measured import Steps, framework_arguments, sha256_of  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402
from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

IMPORTED_AT_S = time.time()
VOCABULARY, LENGTH, SAMPLES = 512, 64, 4096


class Sentences(Dataset):
    def __init__(self):
        self.tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Report(TrainerCallback):
    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.done(state.global_step - 1)


def main() -> None:
    args = framework_arguments(__doc__).parse_args()
    set_seed(1)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4, eos_token_id=2)
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir=args.checkpoint or "checkpoints",
        per_device_train_batch_size=4,
        max_steps=args.steps,
        learning_rate=1e-4,
        logging_steps=10,
        save_strategy="steps" if args.checkpoint else "no",
        save_steps=args.checkpoint_every,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    steps = Steps(args, STARTED_AT_S, IMPORTED_AT_S)
    trainer = Trainer(model=model, args=arguments, train_dataset=Sentences(), callbacks=[Report(steps)])
    last = get_last_checkpoint(args.checkpoint) if args.checkpoint and args.checkpoint.exists() else None
    trainer.train(resume_from_checkpoint=last)
    if trainer.is_world_process_zero():
        print(f"sha256 {sha256_of(model)}", flush=True)


if __name__ == "__main__":
    main()
