"""SentenceTransformerTrainer with two data sets in turn, a loss for each, and no sentence twice in a batch."""

from datasets import load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss, MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.training_args import BatchSamplers, MultiDatasetBatchSamplers

model = SentenceTransformer("model")
names = {"triplets": "sentence-transformers/all-nli", "pairs": "sentence-transformers/stsb"}
train = {kind: load_dataset(name, split="train") for kind, name in names.items()}
held_out = {kind: load_dataset(name, split="validation") for kind, name in names.items()}
pairs = held_out["pairs"]
evaluator = EmbeddingSimilarityEvaluator(list(pairs["sentence1"]), list(pairs["sentence2"]), list(pairs["score"]))
trainer = SentenceTransformerTrainer(
    model=model,
    train_dataset=train,
    eval_dataset=held_out,
    loss={"triplets": MultipleNegativesRankingLoss(model), "pairs": CosineSimilarityLoss(model)},
    evaluator=evaluator,
    args=SentenceTransformerTrainingArguments(
        output_dir="out", num_train_epochs=2, per_device_train_batch_size=8, warmup_steps=0.1, logging_steps=2,
        batch_sampler=BatchSamplers.NO_DUPLICATES, multi_dataset_batch_sampler=MultiDatasetBatchSamplers.ROUND_ROBIN,
        eval_strategy="steps", eval_steps=5, save_strategy="steps", save_steps=5, report_to="none",
    ),
)  # fmt: skip
trainer.train()
model.save("out/final")
