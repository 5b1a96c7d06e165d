"""What the programs read: tiny models and data, made from nothing. Run in a program's own environment and folder.

python data.py NAME          NAME: a function of this file
"""

from __future__ import annotations

import json
import random
import shutil
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


def conversations_for_deepspeed() -> None:
    """The same, and DeepSpeed's settings for each stage of ZeRO."""
    conversations()
    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    for stage in (1, 2):
        zero = {"stage": stage, "reduce_bucket_size": 10000}
        settings = {**sizes, "gradient_clipping": "auto", "zero_optimization": zero}
        write_lines(f"zero{stage}.json", [settings | {"zero_allow_untested_optimizer": True}])


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
        turned = (" ".join(reversed(line.split())) for line in of)
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


def encoder() -> None:
    """A BERT of some thousand weights, and its tokenizer, in model/."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    names = [*special, *WORDS]
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(names)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    parts = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=words, mask_token="[MASK]", model_max_length=64, **parts).save_pretrained(
        "model"
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(names), max_position_embeddings=64, **sizes)).save_pretrained("model")


def similar_sentences() -> None:
    """Pairs of sentences and how similar they are, where a hub's data set of that name would be."""
    encoder()
    for name, count in (("train", 96), ("validation", 16), ("test", 16)):
        pairs = [{"sentence1": sentence(), "sentence2": sentence(), "score": random.random()} for _ in range(count)]
        write_lines(f"sentence-transformers/stsb/{name}.jsonl", pairs)


def pairs_of_two_kinds() -> None:
    """The same, and triplets of sentences where another data set would be."""
    similar_sentences()
    for name, count in (("train", 80), ("dev", 16)):
        triplets = [{"anchor": sentence(), "positive": sentence(), "negative": sentence()} for _ in range(count)]
        write_lines(f"sentence-transformers/all-nli/{name}.jsonl", triplets)


def passages() -> None:
    """Questions, each with a passage that answers it and some that do not."""
    encoder()
    passages_of = [{"query": sentence(), "pos": [sentence()], "neg": [sentence() for _ in range(3)]} for _ in range(64)]
    write_lines("passages.jsonl", passages_of)


def digits() -> None:
    """Pictures of noise in the four files of MNIST."""
    write_digits("Datasets/MNIST/raw", 512, 128)


def all_digits() -> None:
    """As many as MNIST has, and a few where Lightning looks whether there are any."""
    write_digits("data/MNIST/raw", 8, 8)
    write_digits("examples/Datasets/MNIST/raw", 60000, 1000)


def write_digits(folder: str, train: int, test: int) -> None:
    """The files, each in the form that torchvision reads."""
    Path(folder).mkdir(parents=True)
    for name, count in (("train", train), ("t10k", test)):
        size = count.to_bytes(4, "big")
        sides = (28).to_bytes(4, "big") * 2
        pictures = (2051).to_bytes(4, "big") + size + sides + random.randbytes(count * 784)
        labels = (2049).to_bytes(4, "big") + size + bytes(random.randrange(10) for _ in range(count))
        Path(folder, f"{name}-images-idx3-ubyte").write_bytes(pictures)
        Path(folder, f"{name}-labels-idx1-ubyte").write_bytes(labels)


def voices() -> None:
    """Sounds of noise by 28 speakers, with the lists that speechbrain's templates read."""
    import wave

    Path("data/noise").mkdir(parents=True)
    names = [f"data/{at}.wav" for at in range(96)]
    for name in (*names, "data/noise/noise.wav"):
        with wave.open(name, "wb") as sound:
            sound.setparams((1, 2, 16000, 0, "NONE", ""))
            sound.writeframes(random.randbytes(16000))
    rows = {name[5:-4]: {"wav": name, "length": 0.5, "spk_id": f"s{at % 28}"} for at, name in enumerate(names)}
    for kind, part in (("train", names[:72]), ("valid", names[72:84]), ("test", names[84:])):
        Path(f"{kind}.json").write_text(json.dumps({key[5:-4]: rows[key[5:-4]] for key in part}), encoding="utf-8")
    Path("noise.csv").write_text(
        "ID,duration,wav,wav_format,wav_opts\nnoise,0.5,data/noise/noise.wav,wav,\n", encoding="utf-8"
    )


def captioned_pictures() -> None:
    """Pictures with a sentence each, and a Stable Diffusion of the smallest parts in model/."""
    import torch
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from PIL import Image
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    names = [f"{at:02}.png" for at in range(48)]
    write_lines("pictures/metadata.jsonl", [{"file_name": name, "text": sentence()} for name in names[1:]])
    for name in names:
        Image.frombytes("RGB", (20, 20), random.randbytes(1200)).save(f"pictures/{name}")
    Path("noise").mkdir()
    Path("pictures", names[0]).rename(f"noise/{names[0]}")
    torch.manual_seed(0)
    letters = [chr(at) for at in range(97, 123)]
    ends = ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: at for at, token in enumerate([*letters, *(f"{letter}</w>" for letter in letters), *ends])}
    Path("model/tokenizer").mkdir(parents=True)
    Path("vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    Path("merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    CLIPTokenizer("vocab.json", "merges.txt", model_max_length=16, pad_token=ends[1]).save_pretrained("model/tokenizer")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    last = len(vocabulary) - 1
    of_tokens = {"vocab_size": len(vocabulary), "bos_token_id": last - 1, "eos_token_id": last, "pad_token_id": last}
    text = CLIPTextModel(CLIPTextConfig(max_position_embeddings=16, **of_tokens, **sizes))
    text.save_pretrained("model/text_encoder")
    AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ).save_pretrained("model/vae")  # fmt: skip
    UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=16, norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    ).save_pretrained("model/unet")  # fmt: skip
    DDPMScheduler().save_pretrained("model/scheduler")
    index = {
        "_class_name": "StableDiffusionPipeline",
        "scheduler": ["diffusers", "DDPMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "safety_checker": [None, None],
        "feature_extractor": [None, None],
    }
    Path("model/model_index.json").write_text(json.dumps(index), encoding="utf-8")


def texts() -> None:
    """Sentences to complete, and a BERT for them."""
    encoder()
    for name, count in (("train", 48), ("validation", 10)):
        write_lines(f"text/{name}.jsonl", [{"text": sentence(16)} for _ in range(count)])


def recipe_of_torchtune() -> None:
    """A recipe with its settings, a Llama 3 of the smallest parts, and a tokenizer of sentencepiece."""
    import sentencepiece
    import torch
    import torchtune
    from torchtune.models.llama3 import llama3

    shutil.copy(f"{torchtune.__path__[0]}/../recipes/full_finetune_distributed.py", "recipe.py")
    lines = [sentence(12) for _ in range(64)]
    write_lines("text/train.jsonl", [{"text": line} for line in lines])
    Path("lines.txt").write_text("\n".join(lines), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input="lines.txt", model_prefix="tokenizer", vocab_size=40, hard_vocab_limit=False, pad_id=3, minloglevel=2
    )
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 16, "max_seq_len": 32}
    Path("model").mkdir()
    torch.save(llama3(**sizes).state_dict(), "model/model.pt")
    files = {"checkpoint_dir": "model", "checkpoint_files": ["model.pt"], "output_dir": "out", "model_type": "LLAMA3"}
    settings = {
        "output_dir": "out",
        "tokenizer": component("models.llama2.llama2_tokenizer", path="tokenizer.model", max_seq_len=24),
        "dataset": component("datasets.text_completion_dataset", source="text", packed=False),
        "model": component("models.llama3.llama3", **sizes),
        "checkpointer": component("training.FullModelTorchTuneCheckpointer", recipe_checkpoint=None, **files),
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
        "loss": component("modules.loss.CEWithChunkedOutputLoss"),
        "metric_logger": component("training.metric_logging.DiskLogger", log_dir="out/logs"),
        "profiler": component("training.setup_torch_profiler", enabled=False),
        "device": "cpu", "dtype": "fp32", "seed": 1, "shuffle": True, "batch_size": 2, "epochs": 2,
        "max_steps_per_epoch": 8, "gradient_accumulation_steps": 2, "clip_grad_norm": 1.0, "log_every_n_steps": 1,
        **dict.fromkeys(("resume_from_checkpoint", "compile", "optimizer_in_bwd", "log_peak_memory_stats"), False),
        **dict.fromkeys(("enable_activation_checkpointing", "enable_activation_offloading"), False),
    }  # fmt: skip
    Path("settings.yaml").write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML, too


def component(name: str, **arguments: Any) -> dict[str, Any]:
    """An entry of torchtune's settings: what is made, and of what."""
    return {"_component_": f"torchtune.{name}", **arguments}


def factory() -> None:
    """Instructions with answers as LLaMA-Factory reads them, and its settings."""
    language_model()
    rows = [{"instruction": sentence(), "input": "", "output": sentence()} for _ in range(72)]
    Path("data").mkdir()
    Path("data/made.json").write_text(json.dumps(rows), encoding="utf-8")
    Path("data/dataset_info.json").write_text(json.dumps({"made": {"file_name": "made.json"}}), encoding="utf-8")
    settings = {
        "model_name_or_path": "model", "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 4,
        "lora_target": "all", "dataset": "made", "dataset_dir": "data", "template": "default", "cutoff_len": 64,
        "output_dir": "out", "logging_steps": 2, "save_steps": 6, "per_device_train_batch_size": 2, "seed": 1,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "max_steps": 16, "use_cpu": True, "report_to": "none",
        "val_size": 0.1, "eval_strategy": "steps", "eval_steps": 5, "lr_scheduler_type": "cosine", "plot_loss": True,
    }  # fmt: skip
    Path("settings.yaml").write_text(json.dumps(settings), encoding="utf-8")


def classes() -> None:
    """Folders of pictures, a class each, to train with and to evaluate."""
    from PIL import Image

    for part, count in (("train", 16), ("val", 4)):
        for name in ("birds", "dogs"):
            folder = Path("pictures", part, name)
            folder.mkdir(parents=True)
            for at in range(count):
                Image.frombytes("RGB", (40, 40), random.randbytes(4800)).save(folder / f"{at}.png")


if __name__ == "__main__":
    random.seed(0)
    globals()[sys.argv[1]]()
