"""Graph networks: nodes classified with attention, links predicted, batches of whole graphs classified."""

# /// script
# dependencies = ["torch-geometric==2.8.1"]
# ///

import torch
from torch import nn
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import (
    GATv2Conv,
    GCNConv,
    GINEConv,
    InnerProductDecoder,
    SAGEConv,
    global_add_pool,
    global_mean_pool,
)
from torch_geometric.transforms import NormalizeFeatures, RandomLinkSplit
from torch_geometric.utils import (
    add_self_loops,
    degree,
    dropout_edge,
    negative_sampling,
    stochastic_blockmodel_graph,
)

seed_everything(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# --- nodes -------------------------------------------------------------------------------------

blocks = [40, 40, 40]
probabilities = [[0.2, 0.02, 0.02], [0.02, 0.2, 0.02], [0.02, 0.02, 0.2]]
edges = stochastic_blockmodel_graph(blocks, probabilities)
labels = torch.arange(3).repeat_interleave(40)
graph = NormalizeFeatures()(
    Data(x=torch.rand(120, 16) + nn.functional.one_hot(labels, 16), edge_index=edges, y=labels)
)
graph.train_mask = torch.rand(120) < 0.4
graph = graph.to(device)
print("graph", graph.num_nodes, graph.num_edges, graph.is_undirected(), degree(edges[0]).mean().item())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GATv2Conv(16, 8, heads=4, dropout=0.1)
        self.second = GCNConv(32, 3)

    def forward(self, x, edge_index):
        kept, _ = dropout_edge(edge_index, 0.1, training=self.training)
        return self.second(self.first(x, kept).relu(), edge_index)


model = Attention().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for step in range(50):
    model.train()
    out = model(graph.x, graph.edge_index)
    loss = nn.functional.cross_entropy(out[graph.train_mask], graph.y[graph.train_mask])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print("nodes", loss.item())
model.eval()
with torch.no_grad():
    right = model(graph.x, graph.edge_index).argmax(-1) == graph.y
print("accuracy", right[~graph.train_mask].float().mean().item())

# --- links -------------------------------------------------------------------------------------

split = RandomLinkSplit(num_val=0.1, num_test=0.1, is_undirected=True, add_negative_train_samples=False)
seen, _, unseen = split(graph)
encoder, decoder = SAGEConv(16, 16).to(device), InnerProductDecoder()
optimizer = torch.optim.Adam(encoder.parameters(), lr=0.01)
for step in range(40):
    z = encoder(seen.x, seen.edge_index)
    loops, _ = add_self_loops(seen.edge_index)
    none = negative_sampling(loops, seen.num_nodes, seen.edge_label_index.shape[1])
    scores = decoder(z, torch.cat([seen.edge_label_index, none], dim=1), sigmoid=False)
    wanted = torch.cat([seen.edge_label, torch.zeros(none.shape[1], device=device)])
    loss = nn.functional.binary_cross_entropy_with_logits(scores, wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print("links", loss.item())
with torch.no_grad():
    scores = decoder(encoder(seen.x, seen.edge_index), unseen.edge_label_index)
print(
    "unseen links", scores[unseen.edge_label == 1].mean().item(), scores[unseen.edge_label == 0].mean().item()
)

# --- graphs ------------------------------------------------------------------------------------


def ring(label: int) -> Data:
    """A ring, with chords if the label is 1."""
    size = int(torch.randint(6, 12, ()))
    source = torch.arange(size)
    target = (source + 1) % size
    if label:
        source, target = torch.cat([source, source]), torch.cat([target, (torch.arange(size) + 3) % size])
    edge_index = torch.stack([torch.cat([source, target]), torch.cat([target, source])])
    return Data(
        x=torch.randn(size, 4), edge_index=edge_index, edge_attr=torch.rand(edge_index.shape[1], 2), y=label
    )


class Isomorphism(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.convs = nn.ModuleList(
            GINEConv(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)), edge_dim=2)
            for _ in range(2)
        )
        self.head = nn.Linear(2 * width, 2)

    def forward(self, batch):
        x = self.embed(batch.x)
        for conv in self.convs:
            x = conv(x, batch.edge_index, batch.edge_attr).relu()
        return self.head(
            torch.cat([global_add_pool(x, batch.batch), global_mean_pool(x, batch.batch)], dim=-1)
        )


loader = DataLoader([ring(index % 2) for index in range(64)], batch_size=16, shuffle=True)
model = Isomorphism().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for _ in range(10):
    for batch in loader:
        batch = batch.to(device)
        loss = nn.functional.cross_entropy(model(batch), batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("graphs", loss.item())
