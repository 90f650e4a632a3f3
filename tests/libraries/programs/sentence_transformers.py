"""A sentence encoder trained on pairs with a ranking loss, then used for similarity and semantic search."""

# /// script
# dependencies = ["sentence-transformers==6.2.0", "datasets==5.2.0", "accelerate==1.15.0"]
# ///

import random
from pathlib import Path

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    util,
)
from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.losses import MatryoshkaLoss, MultipleNegativesRankingLoss
from sentence_transformers.models import Normalize, Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast, PrinterCallback, set_seed

set_seed(0)
words = ["cat", "dog", "bird", "runs", "sleeps", "sings", "fast", "long", "loud", "here", "there", "now"]
Path("encoder").mkdir()
Path("vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
BertTokenizerFast("vocab.txt", model_max_length=16).save_pretrained("encoder")
config = BertConfig(
    vocab_size=20, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
)
BertModel(config).save_pretrained("encoder")
model = SentenceTransformer(modules=[Transformer("encoder"), Pooling(48), Normalize()])

draw = random.Random(0)
subjects, verbs, rest = words[:3], words[3:6], words[6:]
anchors, positives = [], []
for _ in range(240):
    subject, verb = draw.choice(subjects), draw.choice(verbs)
    anchors.append(f"{subject} {verb} {draw.choice(rest)}")
    positives.append(f"{draw.choice(rest)} {subject} {verb} {draw.choice(rest)}")

first, second = anchors[:24], positives[:12] + positives[24:36]
evaluator = EmbeddingSimilarityEvaluator(first, second, [1.0] * 12 + [0.0] * 12, write_csv=False)
trainer = SentenceTransformerTrainer(
    model,
    SentenceTransformerTrainingArguments(
        "output",
        max_steps=60,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        warmup_steps=5,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_dict({"anchor": anchors, "positive": positives}),
    loss=MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), [48, 24]),
)
trainer.remove_callback(PrinterCallback)
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print("loss", entry["loss"])

for name, value in evaluator(model).items():
    print(name, float(value))
corpus = model.encode(positives[:40], batch_size=8, convert_to_tensor=True, show_progress_bar=False)
queries = model.encode(["cat runs now", "bird sings loud"], convert_to_tensor=True, show_progress_bar=False)
print("similarity", *model.similarity(queries, corpus[:4]).flatten().tolist())
for hits in util.semantic_search(queries, corpus, top_k=3):
    for hit in hits:
        print("hit", hit["corpus_id"], hit["score"])
print("clusters", *map(len, util.community_detection(corpus, threshold=0.9, min_community_size=2)))
