"""Fine-tune a small DETR: Hungarian matching by scipy, a guard against losses that are not finite."""

import argparse
import math
import sys

import torch
import torch.nn.functional as F
import torchvision
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.ops import box_convert, generalized_box_iou


class DETR(nn.Module):
    def __init__(self, num_classes=20, hidden_dim=256, nheads=8, num_layers=3, num_queries=100):
        super().__init__()
        resnet = torchvision.models.resnet18(norm_layer=torchvision.ops.FrozenBatchNorm2d)
        self.backbone = nn.Sequential(*list(resnet.children())[:-2])
        self.conv = nn.Conv2d(512, hidden_dim, 1)
        self.transformer = nn.Transformer(hidden_dim, nheads, num_layers, num_layers, 1024, batch_first=True)
        self.class_embed = nn.Linear(hidden_dim, num_classes + 1)
        self.bbox_embed = nn.Linear(hidden_dim, 4)
        self.query_pos = nn.Parameter(torch.rand(num_queries, hidden_dim))
        self.row_embed = nn.Parameter(torch.rand(50, hidden_dim // 2))
        self.col_embed = nn.Parameter(torch.rand(50, hidden_dim // 2))

    def forward(self, images):
        h = self.conv(self.backbone(images))
        H, W = h.shape[-2:]
        pos = torch.cat(
            [
                self.col_embed[:W].unsqueeze(0).repeat(H, 1, 1),
                self.row_embed[:H].unsqueeze(1).repeat(1, W, 1),
            ],
            dim=-1,
        ).flatten(0, 1)
        queries = self.query_pos.unsqueeze(0).repeat(h.shape[0], 1, 1)
        h = self.transformer(pos.unsqueeze(0) + h.flatten(2).permute(0, 2, 1), queries)
        return {"pred_logits": self.class_embed(h), "pred_boxes": self.bbox_embed(h).sigmoid()}


@torch.no_grad()
def match(outputs, targets):
    bs, num_queries = outputs["pred_logits"].shape[:2]
    out_prob = outputs["pred_logits"].flatten(0, 1).softmax(-1)
    out_bbox = outputs["pred_boxes"].flatten(0, 1)
    tgt_ids = torch.cat([t["labels"] for t in targets])
    tgt_bbox = torch.cat([t["boxes"] for t in targets])
    cost_bbox = torch.cdist(out_bbox, tgt_bbox, p=1)
    cost = 5 * cost_bbox - out_prob[:, tgt_ids]
    cost = cost.view(bs, num_queries, -1).cpu()
    sizes = [len(t["boxes"]) for t in targets]
    indices = [linear_sum_assignment(c[i]) for i, c in enumerate(cost.split(sizes, -1))]
    return [
        (torch.as_tensor(i, dtype=torch.int64), torch.as_tensor(j, dtype=torch.int64)) for i, j in indices
    ]


def set_criterion(outputs, targets, empty_weight):
    indices = match(outputs, targets)
    batch_idx = torch.cat([torch.full_like(src, i) for i, (src, _) in enumerate(indices)])
    idx = batch_idx, torch.cat([src for (src, _) in indices])
    num_boxes = sum(len(t["labels"]) for t in targets)
    src_logits = outputs["pred_logits"]
    target_classes_o = torch.cat([t["labels"][j] for t, (_, j) in zip(targets, indices, strict=True)])
    no_object = src_logits.shape[-1] - 1
    target_classes = torch.full(src_logits.shape[:2], no_object, dtype=torch.int64, device=src_logits.device)
    target_classes[idx] = target_classes_o
    loss_ce = F.cross_entropy(src_logits.transpose(1, 2), target_classes, empty_weight)
    src_boxes = outputs["pred_boxes"][idx]
    target_boxes = torch.cat([t["boxes"][j] for t, (_, j) in zip(targets, indices, strict=True)])
    loss_bbox = F.l1_loss(src_boxes, target_boxes, reduction="none").sum() / num_boxes
    giou = generalized_box_iou(
        box_convert(src_boxes, "cxcywh", "xyxy"), box_convert(target_boxes, "cxcywh", "xyxy")
    )
    loss_giou = (1 - torch.diag(giou)).sum() / num_boxes
    return {"loss_ce": loss_ce, "loss_bbox": loss_bbox, "loss_giou": loss_giou}


class FineTuning:
    weights = {"loss_ce": 1, "loss_bbox": 5, "loss_giou": 2}

    def __init__(self):
        self.device = torch.device("cuda")
        self.model = DETR().to(self.device)
        self.model.train()
        backbone = [p for n, p in self.model.named_parameters() if "backbone" in n]
        rest = [p for n, p in self.model.named_parameters() if "backbone" not in n]
        self.optimizer = torch.optim.AdamW([{"params": rest}, {"params": backbone, "lr": 1e-5}], lr=1e-4)
        self.empty_weight = torch.ones(21, device=self.device)
        self.empty_weight[-1] = 0.1

    def step(self, batch):
        samples = batch["images"].to(self.device)
        targets = [
            {"labels": labels.to(self.device), "boxes": boxes.to(self.device)}
            for labels, boxes in zip(batch["labels"], batch["boxes"], strict=True)
        ]
        loss_dict = set_criterion(self.model(samples), targets, self.empty_weight)
        losses = sum(loss_dict[k] * self.weights[k] for k in loss_dict)
        loss_value = losses.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            sys.exit(1)
        self.optimizer.zero_grad()
        losses.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        return loss_value


class Boxes(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        boxes = torch.rand(8, 4) * 0.4 + 0.1
        return {"images": torch.rand(3, 256, 256), "labels": torch.randint(20, (8,)), "boxes": boxes}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    tuning = FineTuning()
    for batch in DataLoader(Boxes(args.batch_size * args.steps), batch_size=args.batch_size):
        print(tuning.step(batch))
