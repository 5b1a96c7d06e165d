"""A recipe of torchtune as `tune cp` copies it: recipe.py of the working folder, with settings that `--config` names.

Rank 0 reads how much memory of a GPU is used, and frees it, without asking whether there is one; not here.
"""

import sys

sys.path.insert(0, ".")

import torch
from torchtune import training

training.get_memory_stats = lambda *_, **__: {}
training.log_memory_stats = lambda *_, **__: None
torch.cpu.empty_cache = torch.cpu.reset_peak_memory_stats = lambda *_, **__: None

import recipe

if __name__ == "__main__":
    sys.exit(recipe.recipe_main())
