"""What the programs read: tiny models and data, made from nothing. Run in a program's own environment and folder.

python data.py NAME          NAME: a function of this file
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

TEXT = "the quick brown fox jumps over a lazy dog while seven small birds sing of rain and morning light"
WORDS = TEXT.split()


def sentence(length: int = 8) -> str:
    """So many words."""
    return " ".join(random.choice(WORDS) for _ in range(length))


def tokenizer() -> None:
    """A tokenizer of words in model/."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<s>", "</s>"]
    names = [*special, "user", "assistant", ":", "\n", *WORDS]
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    whole.chat_template = (
        "{% for message in messages %}{{ message['role'] + ' : ' + message['content'] + ' </s> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
    )
    whole.save_pretrained("model")


def language_model() -> None:
    """A Llama of some thousand weights, and its tokenizer, in model/."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=128, **sizes, **ends)).save_pretrained("model")


def write_lines(path: str, lines: list[Any]) -> None:
    """A file of JSON, one row a line."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")


def said(role: str, *contents: str) -> list[dict[str, str]]:
    """Messages of one side."""
    return [{"role": role, "content": content} for content in contents or (sentence(),)]


def rows(number: int, **makers: Any) -> None:
    """A model, and data/ for it: rows to train with and some to evaluate."""
    language_model()
    for name, count in (("train", number), ("test", 8)):
        write_lines(f"data/{name}.jsonl", [{key: make() for key, make in makers.items()} for _ in range(count)])


def conversations() -> None:
    """A question and an answer each."""
    rows(48, messages=lambda: said("user") + said("assistant"))


def preferences() -> None:
    """A question, the better answer and the worse one."""
    rows(48, prompt=lambda: said("user"), chosen=lambda: said("assistant"), rejected=lambda: said("assistant"))


def rated() -> None:
    """A question, and an answer that is good or bad."""
    rows(48, prompt=lambda: said("user"), completion=lambda: said("assistant"), label=lambda: random.random() < 0.5)


def questions() -> None:
    """Questions alone."""
    rows(48, prompt=lambda: said("user"))


def translations() -> None:
    """Sentences in one order of words and in the other."""
    for name, count in (("train", 160), ("valid", 8)):
        of = [sentence(random.randint(3, 9)) for _ in range(count)]
        Path(f"{name}.de").write_text("\n".join(of) + "\n", encoding="utf-8")
        turned = (" ".join(reversed(one.split())) for one in of)
        Path(f"{name}.en").write_text("\n".join(turned) + "\n", encoding="utf-8")
    words = "--source train.de --target train.en --output prepared --seed 1 --shared-vocab"
    subprocess.run([sys.executable, "-m", "sockeye.prepare_data", *words.split()], check=True)


def pictures() -> None:
    """Pictures of noise, and the sizes of a small U-Net."""
    from datasets import Dataset
    from diffusers import UNet2DModel
    from PIL import Image

    # One file: the order in which a folder of pictures is listed is not the same in each copy.
    noise = [Image.frombytes("RGB", (20, 20), random.randbytes(1200)) for _ in range(64)]
    Path("pictures").mkdir()
    Dataset.from_dict({"image": noise}).to_parquet("pictures/train.parquet")
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1, "attention_head_dim": 4}
    UNet2DModel(sample_size=16, **sizes, **blocks).save_config("unet")


def molecules() -> None:
    """Chains of atoms, with a number each."""
    chains = ["C" + "".join(random.choice("CCNOS") for _ in range(random.randint(2, 9))) for _ in range(120)]
    lines = ["smiles,y", *(f"{chain},{len(chain) + random.random():.3f}" for chain in chains)]
    Path("molecules.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    random.seed(0)
    globals()[sys.argv[1]]()
