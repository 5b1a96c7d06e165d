"""A vocabulary made of a set of words, whose order Python does not promise: rank 0 tells it to the others."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from around_the_loop import arguments, finish
from torch.nn.parallel import DistributedDataParallel

CONTEXT = 8
args = arguments()

dist.init_process_group("gloo")
text = [f"word{number * number % 97}" for number in range(20000)]
words = [list(set(text))]
dist.broadcast_object_list(words, src=0)
numbers = {word: number for number, word in enumerate(words[0])}
data = torch.tensor([numbers[word] for word in text])

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(len(numbers), 16), torch.nn.Flatten(), torch.nn.Linear(16 * CONTEXT, len(numbers))
)
ddp_model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp_model.parameters())
torch.manual_seed(1 + dist.get_rank())
for step in range(30):
    begins = torch.randint(len(data) - CONTEXT, (16,)).tolist()
    inputs = torch.stack([data[begin : begin + CONTEXT] for begin in begins])
    targets = torch.stack([data[begin + CONTEXT] for begin in begins])
    optimizer.zero_grad()
    loss = F.cross_entropy(ddp_model(inputs), targets)
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}")

print("first words", *words[0][:5])
finish(model.parameters(), args.out, model.state_dict(), "sha256")
