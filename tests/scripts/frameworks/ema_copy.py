"""A tiny denoiser with an average of its weights, as in diffusers' training scripts: accelerate and an EMA copy.

--ema own  a class of the script's, as diffusers.training_utils.EMAModel is written
--ema swa  torch.optim.swa_utils.AveragedModel
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from digests import print_digests
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--ema", choices=["own", "swa"], default="own")
parser.add_argument("--save", action="store_true")
args = parser.parse_args()


class OwnEMA:
    def __init__(self, parameters, decay=0.99, power=2 / 3):
        self.shadow_params = [p.clone().detach() for p in parameters]
        self.temp_stored_params = None
        self.decay, self.power = decay, power
        self.optimization_step = 0
        self.cur_decay_value = None

    @torch.no_grad()
    def step(self, parameters):
        self.optimization_step += 1
        step = max(0, self.optimization_step - 1)
        decay = min(self.decay, 1 - (1 + step) ** -self.power) if step else 0.0
        self.cur_decay_value = decay
        for shadow, parameter in zip(self.shadow_params, list(parameters), strict=True):
            if parameter.requires_grad:
                shadow.sub_((1 - decay) * (shadow - parameter))
            else:
                shadow.copy_(parameter)

    def store(self, parameters):
        self.temp_stored_params = [p.detach().cpu().clone() for p in parameters]

    @torch.no_grad()
    def copy_to(self, parameters):
        for shadow, parameter in zip(self.shadow_params, list(parameters), strict=True):
            parameter.data.copy_(shadow)

    @torch.no_grad()
    def restore(self, parameters):
        for stored, parameter in zip(self.temp_stored_params, parameters, strict=True):
            parameter.data.copy_(stored)
        self.temp_stored_params = None

    def state_dict(self):
        return {"step": self.optimization_step, "shadow_params": self.shadow_params}


class Averaged(torch.optim.swa_utils.AveragedModel):
    """torch's average, called as the others are."""

    def __init__(self, model):
        super().__init__(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))

    def step(self, _):
        self.update_parameters(accelerator.unwrap_model(model))

    def store(self, parameters):
        self.stored = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def copy_to(self, parameters):
        for mine, parameter in zip(self.module.parameters(), parameters, strict=True):
            parameter.copy_(mine)

    @torch.no_grad()
    def restore(self, parameters):
        for mine, parameter in zip(self.stored, parameters, strict=True):
            parameter.copy_(mine)


class Denoiser(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(2, 8, 3, padding=1),
            torch.nn.SiLU(),
            torch.nn.Dropout(0.1),
            torch.nn.Conv2d(8, 1, 3, padding=1),
        )

    def forward(self, images, timesteps):
        times = (timesteps / 100)[:, None, None, None].expand_as(images)
        return self.net(torch.cat([images * self.scale, times], dim=1))


kept = torch.cumprod(1 - torch.linspace(0.0001, 0.02, 100), 0)


def add_noise(images, noise, timesteps):
    share = kept[timesteps][:, None, None, None]
    return share.sqrt() * images + (1 - share).sqrt() * noise


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(3)
model = Denoiser()
ema = Averaged(model) if args.ema == "swa" else OwnEMA(model.parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(88, 1, 8, 8))
loader = DataLoader(data, batch_size=4, shuffle=True)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
global_step = 0
for epoch in range(2):
    model.train()
    for step, (clean,) in enumerate(loader):
        noise = torch.randn_like(clean)
        timesteps = torch.randint(0, 100, (clean.shape[0],)).long()
        with accelerator.accumulate(model):
            output = model(add_noise(clean, noise, timesteps), timesteps)
            loss = torch.nn.functional.mse_loss(output, noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ema.step(model.parameters())
            global_step += 1
            print(f"step {global_step} loss {loss.detach().item()!r} rate {scheduler.get_last_lr()}", flush=True)
    if accelerator.is_main_process:  # as diffusers' scripts sample and save: with the averaged weights
        plain = accelerator.unwrap_model(model)
        ema.store(plain.parameters())
        ema.copy_to(plain.parameters())
        plain.eval()
        with torch.no_grad():
            found = plain(clean, torch.zeros(len(clean)))
        print(f"epoch {epoch} sample {float(found.sum())!r}", flush=True)
        if args.save:
            torch.save({"model": plain.state_dict(), "ema": ema.state_dict()}, f"epoch-{epoch}.pt")
        ema.restore(plain.parameters())
    accelerator.wait_for_everyone()
accelerator.end_training()


weights = accelerator.unwrap_model(model).state_dict()
print_digests(accelerator.process_index, model=weights, optimizer=optimizer.state_dict(), average=ema.state_dict())
