# Trains and infers with ResNet-50 and GPT-2 (124 million parameters), and copies from and to pinned memory, by PyTorch on whatever CUDA it
# finds. One line of JSON for each: milliseconds of a step, or GB/s; and the first losses, which are the same on each side.
#
#   models.py STEPS SMALL       SMALL is 1 for networks of the same layers that a machine without a device has memory for, else 0
#
# Knows no server and judges nothing.
import json
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../torch"))

import torch
import torch.nn.functional as functional

import networks

BLOCKS = 3


def said(**line):
    print(json.dumps(line), flush=True)


def timed(step, steps):
    """The median of blocks of steps, each ended by a synchronization: milliseconds of a step."""
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    blocks = []
    for _ in range(BLOCKS):
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        blocks.append((time.perf_counter() - begin) * 1000 / steps)
    return sorted(blocks)[BLOCKS // 2]


def model(name, steps, small):
    torch.manual_seed(1)
    if name == "resnet50":
        network, shape = networks.resnet50()
        size = 2 if small else 64
        inputs, expected = torch.randn(size, *(3, 64, 64) if small else shape), torch.arange(size) % 1000
    else:
        width, length = (64, 32) if small else (768, 512)
        network = networks.Gpt(12, width, 4 if small else 12, 1000 if small else 50257, length)
        size = 2 if small else 8
        inputs = torch.randint(0, 1000, (size, length))
        expected = inputs.roll(-1, 1).flatten()
    network = network.cuda()
    inputs, expected = inputs.cuda(), expected.cuda()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.9)

    def train():
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(network(inputs), expected)
        loss.backward()
        optimizer.step()
        return loss

    def infer():
        with torch.no_grad():
            return network(inputs)

    losses = [train().item() for _ in range(3)]
    said(model=name, what="losses", losses=losses)
    said(model=name, what="train", ms=timed(train, steps))
    network.eval()
    said(model=name, what="infer", ms=timed(infer, steps))


def copies(small):
    size = (16 if small else 256) << 20
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(size, dtype=torch.uint8, device="cuda")

    def to():
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    def back():
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()

    for what, step in [("to", to), ("from", back)]:
        said(model="pinned", what=what, gb_s=size / 1e6 / timed(step, 5))


if __name__ == "__main__":
    steps, small = int(sys.argv[1]), sys.argv[2] == "1"
    assert torch.cuda.is_available(), "no accelerator"
    for name in ["resnet50", "gpt2"]:
        model(name, steps, small)
    copies(small)
