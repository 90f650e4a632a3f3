"""Trains embeddings with miners, reducers and losses for metric learning, and measures retrieval."""

# /// script
# dependencies = ["pytorch-metric-learning==2.9.0"]
# ///

import torch
from pytorch_metric_learning import distances, losses, miners, reducers, samplers
from pytorch_metric_learning.regularizers import LpRegularizer
from pytorch_metric_learning.utils.inference import CustomKNN, MatchFinder
from torch import nn

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
CLASSES, WIDTH = 6, 16
centres = torch.randn(CLASSES, 20)


def examples(count):
    label = torch.randint(0, CLASSES, (count,))
    return centres[label] + torch.randn(count, 20), label


cosine, euclidean = distances.CosineSimilarity(), distances.LpDistance()
cases = {
    "triplet": (
        losses.TripletMarginLoss(0.2, distance=cosine, reducer=reducers.AvgNonZeroReducer()),
        miners.TripletMarginMiner(margin=0.2, distance=cosine, type_of_triplets="semihard"),
    ),
    "contrastive": (
        losses.ContrastiveLoss(0, 1, distance=euclidean),
        miners.BatchHardMiner(distance=euclidean),
    ),
    "multi similarity": (losses.MultiSimilarityLoss(), miners.MultiSimilarityMiner(epsilon=0.1)),
    "ntxent": (losses.NTXentLoss(temperature=0.2), None),
    "supcon": (losses.SupConLoss(), None),
    "circle": (losses.CircleLoss(m=0.4, gamma=32), miners.DistanceWeightedMiner()),
    "arcface": (
        losses.ArcFaceLoss(CLASSES, WIDTH, embedding_regularizer=LpRegularizer(), embedding_reg_weight=0.1),
        None,
    ),
    "proxy": (losses.ProxyAnchorLoss(CLASSES, WIDTH), None),
    "memory": (losses.CrossBatchMemory(losses.ContrastiveLoss(), WIDTH, memory_size=128), None),
}
queries, query_labels = examples(100)
references, reference_labels = examples(200)

for name, (criterion, miner) in cases.items():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters()], lr=1e-2)
    for step in range(20):
        x, label = examples(48)
        embedding = model(x)
        pairs = miner(embedding, label) if miner else None
        loss = criterion(embedding, label, pairs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(name, step, loss.item())
    with torch.no_grad():
        nearest = torch.cdist(model(queries), model(references)).topk(5, largest=False).indices
        print(
            name, "precision at 5", (reference_labels[nearest] == query_labels[:, None]).float().mean().item()
        )

nearest = CustomKNN(distances.CosineSimilarity(), batch_size=32)
with torch.no_grad():
    similarities, indices = nearest(model(queries[:8]), 3, model(references))
print("neighbours", similarities[:, 0].tolist(), reference_labels[indices].tolist())
finder = MatchFinder(distances.CosineSimilarity(), threshold=0.5)
with torch.no_grad():
    print("matches", finder.is_match(model(queries[:4]), model(references[:4])).tolist())
    print("pairs", int(finder.get_matching_pairs(model(queries), model(references)).sum()))
sampler = samplers.MPerClassSampler(reference_labels.cpu(), m=4, batch_size=16, length_before_new_iter=64)
print("sampler", len(list(sampler)))
