# Trains and infers with small models by PyTorch on whatever CUDA it finds, and prints for each how many of the library's functions a step
# calls, how many cross, and how long it takes on the host. One line of JSON for each.
#
#   models.py STEPS MODEL...     of lenet, alexnet, resnet18, gpt
#
# Knows no server and judges nothing: xtask/src/torch.rs does. Results of computations are looked at for their forms alone, because the
# back end `null` computes nothing.
import ctypes
import json
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as functional

LIBRARY = ctypes.CDLL("libcudart.so.13")
# The names that programs link by are of one file, loaded once: its state is shared.
assert ctypes.CDLL("libcudnn.so.9")._handle == LIBRARY._handle, "two files, or one file loaded twice"


def counters():
    """Functions called, records that nobody waits for, records that are waited for, calls that are not served."""
    counts = (ctypes.c_uint64 * 4)()
    LIBRARY.basalt_cuda_counters(counts, None, ctypes.c_size_t(0))
    return list(counts)


def lenet():
    layers = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*layers), (1, 28, 28)


def alexnet():
    layers = []
    before = 3
    for width, kernel, stride, padding, pool in [
        (64, 11, 4, 2, True),
        (192, 5, 1, 2, True),
        (384, 3, 1, 1, False),
        (256, 3, 1, 1, False),
        (256, 3, 1, 1, True),
    ]:
        layers += [nn.Conv2d(before, width, kernel, stride, padding), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(3, 2)] if pool else []
        before = width
    layers += [nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Dropout(), nn.Linear(9216, 4096), nn.ReLU(inplace=True)]
    layers += [nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 10)]
    return nn.Sequential(*layers), (3, 64, 64)


class Block(nn.Module):
    def __init__(self, before, width, stride):
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        y = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(y)) + self.shortcut(x))


def resnet18():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for width, stride in [(64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)]:
        layers.append(Block(before, width, stride))
        before = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), (3, 64, 64)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        split = lambda part: part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(split(q), split(k), split(v), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):
    def __init__(self, layers=12, width=256, heads=8, words=1000, length=64):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.Sequential(*[Attention(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, x):
        return self.head(self.norm(self.layers(self.words(x) + self.places))).flatten(0, 1)


def batch(shape, size=8):
    """Inputs and what they are to be told as, in memory of the process."""
    if shape is None:
        words = torch.zeros(size, 64, dtype=torch.long)
        return words, words.flatten()
    return torch.zeros(size, *shape), torch.zeros(size, dtype=torch.long)


def measure(name, steps):
    made = {"lenet": lenet, "alexnet": alexnet, "resnet18": resnet18, "gpt": lambda: (Gpt(), None)}[name]
    model, shape = made()
    model = model.cuda()
    inputs, expected = batch(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs.cuda()), expected.cuda())
        loss.backward()
        optimizer.step()
        return loss.item()

    def infer():
        with torch.no_grad():
            return model(inputs.cuda()).cpu()

    for what, step in [("train", train), ("infer", infer)]:
        model.train(what == "train")
        for _ in range(5):
            step()
        before, times = counters(), []
        for _ in range(steps):
            begin = time.perf_counter()
            step()
            times.append((time.perf_counter() - begin) * 1000)
        calls, sent, asked, not_served = [(after - first) / steps for first, after in zip(before, counters())]
        times.sort()
        print(
            json.dumps(
                {
                    "model": name,
                    "what": what,
                    "calls": calls,
                    "async": sent,
                    "sync": asked,
                    "not_served": not_served,
                    "least_ms": times[0],
                    "median_ms": times[len(times) // 2],
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    # What is measured is one thread's; the machine's other processors are the server's, and other people's.
    torch.set_num_threads(1)
    assert torch.cuda.is_available(), "no accelerator"
    for model in sys.argv[2:]:
        measure(model, int(sys.argv[1]))
