"""A classifier of images in DistributedDataParallel, as examples of PyTorch train it.

torchrun --nproc-per-node 2 ddp_vision.py --arch resnet18 --bucket-cap-mb 10 --static-graph
"""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(nn.Module):
    """A classifier with a head that training does not use."""

    def __init__(self, arch):
        super().__init__()
        self.body = torchvision.models.get_model(arch)
        self.unused = nn.Linear(1000, 1000)

    def forward(self, x):
        return self.body(x)


class Trainer:
    def __init__(
        self,
        arch="resnet18",
        bucket_cap_mb=25,
        static_graph=False,
        find_unused=False,
        bucket_view=False,
        no_buffers=False,
        accumulate=1,
        amp=False,
    ):
        local_rank = int(os.environ["LOCAL_RANK"])
        dist.init_process_group("nccl")
        torch.cuda.set_device(local_rank)
        self.device = torch.device("cuda", local_rank)
        model = TwoHeads(arch) if find_unused else torchvision.models.get_model(arch)
        self.model = DistributedDataParallel(
            model.to(self.device),
            device_ids=[local_rank],
            output_device=local_rank,
            bucket_cap_mb=bucket_cap_mb,
            static_graph=static_graph,
            find_unused_parameters=find_unused,
            gradient_as_bucket_view=bucket_view,
            broadcast_buffers=not no_buffers,
        )
        self.criterion = nn.CrossEntropyLoss().to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
        self.scaler = torch.amp.GradScaler("cuda", enabled=amp)
        self.accumulate, self.amp = accumulate, amp

    def step(self, batch):
        images, target = (one.to(self.device, non_blocking=True) for one in batch)
        for number in range(self.accumulate):
            last = number == self.accumulate - 1
            with nullcontext() if last else self.model.no_sync():
                with torch.autocast("cuda", torch.float16, enabled=self.amp):
                    output = self.model(images)
                    loss = self.criterion(output, target)
                self.scaler.scale(loss / self.accumulate).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--arch", default="resnet18")
    parser.add_argument("--bucket-cap-mb", type=int, default=25)
    parser.add_argument("--accumulate", type=int, default=1)
    for flag in ("static-graph", "find-unused", "bucket-view", "no-buffers", "amp"):
        parser.add_argument(f"--{flag}", action="store_true")
    args = vars(parser.parse_args())
    size, steps = args.pop("batch_size"), args.pop("steps")
    trainer = Trainer(**args)
    batches = [(torch.zeros(size, 3, 128, 128), torch.zeros(size, dtype=torch.int64)) for _ in range(steps)]
    for batch in batches:
        trainer.step(batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
