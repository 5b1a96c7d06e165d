"""PyTorch Geometric: graphs to classify, by `torch_geometric.loader.DataLoader` and DistributedDataParallel on gloo."""

import torch
import torch.distributed as dist
import torch_geometric.nn as layers
from torch.utils.data.distributed import DistributedSampler
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import DataLoader

CLASSES, WIDTH = 3, 16


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = layers.GATv2Conv(8, WIDTH, edge_dim=4)
        self.norm = layers.BatchNorm(WIDTH)
        self.second = layers.GATv2Conv(WIDTH, WIDTH, edge_dim=4, dropout=0.2)
        self.last = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, graphs):
        hidden = self.norm(self.first(graphs.x, graphs.edge_index, graphs.edge_attr)).relu()
        hidden = self.second(hidden, graphs.edge_index, graphs.edge_attr).relu()
        return self.last(layers.global_mean_pool(hidden, graphs.batch))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    graphs = FakeDataset(num_graphs=96, avg_num_nodes=10, num_channels=8, edge_dim=4, num_classes=CLASSES, task="graph")
    sampler = DistributedSampler(graphs[:64], drop_last=True)
    loader, held_out = DataLoader(graphs[:64], batch_size=8, sampler=sampler), DataLoader(graphs[64:], batch_size=16)
    model = torch.nn.parallel.DistributedDataParallel(Network())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch), batch.y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = sum(int((model.module(batch).argmax(-1) == batch.y).sum()) for batch in held_out)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {right} of {len(held_out.dataset)} right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
