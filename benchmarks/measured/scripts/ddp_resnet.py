"""Train a ResNet under DistributedDataParallel in a group of one process, with NCCL."""

import os

import torch
import torch.distributed as dist
import torchvision
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531", RANK="0", WORLD_SIZE="1")
torch.manual_seed(0)
torch.cuda.set_device(0)
dist.init_process_group("nccl")
model = DistributedDataParallel(torchvision.models.resnet18(num_classes=10).cuda(), device_ids=[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(4):
    images, labels = torch.randn(64, 3, 224, 224).cuda(), torch.randint(0, 10, (64,)).cuda()
    functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
