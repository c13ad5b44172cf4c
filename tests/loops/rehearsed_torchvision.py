"""torchvision: a ResNet-50, channels last, under autocast."""

# /// script
# dependencies = ["torchvision==0.29.2"]
# ///

import torch
import torchvision
from torch.utils.data import DataLoader, TensorDataset

model = torchvision.models.resnet50(num_classes=10).to("cuda", memory_format=torch.channels_last)
print("parameters", sum(p.nbytes for p in model.parameters()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
data = TensorDataset(torch.rand(32, 3, 128, 128), torch.randint(0, 10, (32,)))
for images, wanted in DataLoader(data, 8, shuffle=True, pin_memory=True):
    images = images.to("cuda", non_blocking=True, memory_format=torch.channels_last)
    wanted = wanted.to("cuda", non_blocking=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(images), wanted, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
