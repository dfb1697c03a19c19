# Networks for measurements, from the smallest to those that people use: each with the shape of one input, None for words.
#
# Knows neither a device nor what is measured.
import torch
import torch.nn as nn
import torch.nn.functional as functional


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


def gpt():
    return Gpt(), None


class Bottleneck(nn.Module):
    def __init__(self, before, width, stride):
        super().__init__()
        sizes = [(before, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        self.layers = nn.ModuleList([nn.Conv2d(a, b, size, by, size // 2, bias=False) for a, b, size, by in sizes])
        self.norms = nn.ModuleList([nn.BatchNorm2d(b) for _, b, _, _ in sizes])
        self.shortcut = nn.Sequential()
        if stride != 1 or before != 4 * width:
            self.shortcut = nn.Sequential(nn.Conv2d(before, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x):
        y = x
        for index, (layer, norm) in enumerate(zip(self.layers, self.norms)):
            y = norm(layer(y))
            y = functional.relu(y) if index < 2 else y
        return functional.relu(y + self.shortcut(x))


def resnet50():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for width, count, stride in [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]:
        for index in range(count):
            layers.append(Bottleneck(before, width, stride if index == 0 else 1))
            before = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    return nn.Sequential(*layers), (3, 224, 224)
