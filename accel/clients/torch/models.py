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
import torch.nn.functional as functional

import networks

LIBRARY = ctypes.CDLL("libcudart.so.13")
# The names that programs link by are of one file, loaded once: its state is shared.
assert ctypes.CDLL("libcudnn.so.9")._handle == LIBRARY._handle, "two files, or one file loaded twice"


def counters():
    """Functions called, records that nobody waits for, records that are waited for, calls that are not served."""
    counts = (ctypes.c_uint64 * 4)()
    LIBRARY.basalt_cuda_counters(counts, None, ctypes.c_size_t(0))
    return list(counts)


def batch(shape, size=8):
    """Inputs and what they are to be told as, in memory of the process."""
    if shape is None:
        words = torch.zeros(size, 64, dtype=torch.long)
        return words, words.flatten()
    return torch.zeros(size, *shape), torch.zeros(size, dtype=torch.long)


def measure(name, steps):
    made = {"lenet": networks.lenet, "alexnet": networks.alexnet, "resnet18": networks.resnet18, "gpt": networks.gpt}[name]
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
