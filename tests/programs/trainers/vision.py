"""Image classification: a dataset of PIL images and a transform in the collator, as in the examples."""

import numpy as np
import torch
from PIL import Image
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

ROWS = [{"image": Image.new("RGB", (48, 40)), "label": number % 3} for number in range(6)]


def transform(image):
    return torch.from_numpy(np.array(image.resize((32, 32)))).permute(2, 0, 1).float() / 255


def collate_fn(examples):
    pixel_values = torch.stack([transform(example["image"]) for example in examples])
    labels = torch.tensor([example["label"] for example in examples])
    return {"pixel_values": pixel_values, "labels": labels}


config = ViTConfig(
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    image_size=32,
    num_labels=3,
)
model = ViTForImageClassification(config)
args = TrainingArguments(
    output_dir="out", remove_unused_columns=False, fp16=True, use_cpu=False, report_to="none"
)
trainer = Trainer(model=model, args=args, data_collator=collate_fn, train_dataset=ROWS)


def make_trainer():
    return trainer


if __name__ == "__main__":
    trainer.train()
