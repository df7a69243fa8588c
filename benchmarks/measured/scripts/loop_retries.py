"""Train a ResNet by hand at changing sizes with half of a GiB to spare, so that the allocator gives its cache back."""

import torch
import torchvision
from torch.nn import functional

torch.manual_seed(0)
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(3500 * 2**20 / total)
model = torchvision.models.resnet50(num_classes=10).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for size in (224, 160, 192, 256, 128, 224, 240, 176):
    images, labels = torch.randn(24, 3, size, size).cuda(), torch.randint(0, 10, (24,)).cuda()
    functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
print(torch.cuda.memory_stats()["num_alloc_retries"], "retries")
try:
    model(torch.randn(512, 3, 256, 256).cuda())
except torch.cuda.OutOfMemoryError as error:
    print(error)
