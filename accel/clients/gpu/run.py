#!/usr/bin/env python3
# What is to be seen on the day when there is a machine with a GPU: unmodified programs by our library and a server with the back end `cuda`,
# compared with the same programs natively, in turn, in under ten minutes; and a trace of their calls. Prints one JSON object.
#
#   run.py BUILT OUT [--budget SECONDS] [--without-gpu] [--steps NUMBER] [--rounds NUMBER]
#
# BUILT has what was built elsewhere: basalt-accel-server and cuda/libbasalt_cuda.so (docs/accel-cuda-devices.md says by which commands).
# OUT gets result.json, trace.json and the logs. Nothing is built or fetched. --without-gpu tries the script itself: the device is a second
# server with the back end `null`, our own library stands for the real ones, and `native` is our library without a server; small networks.
#
# Knows which programs there may be, and not what their numbers mean.
import argparse
import collections
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, "../../.."))

# Unmodified programs beside PyTorch, as far as they get. Each is a line of Python that prints what it has computed.
PROBES = {
    "torch-sum": "import torch; print(torch.arange(1000, device='cuda').sum().item())",
    "torch-kernel": "import torch; print(((torch.arange(8, device='cuda') * 3 + 1) ** 2).tolist())",
    "torch-matmul": "import torch; a = torch.eye(64, device='cuda') * 2; print((a @ a).sum().item())",
    "torch-random": "import torch; torch.manual_seed(7); print(torch.rand(4, device='cuda').tolist())",
    "cupy": "import cupy; print(int(cupy.arange(1000).sum()))",
    "jax": "import jax, jax.numpy as jnp; print(jax.devices()[0].platform, int(jnp.arange(1000).sum()))",
    "triton": "import torch, triton, triton.language as tl\n"
    "import sys; sys.path.insert(0, %r); import triton_add; triton_add.main()" % HERE,
}


class Run:
    def __init__(self, options):
        self.options = options
        self.begin = time.monotonic()
        self.work = tempfile.mkdtemp(prefix="basalt-gpu-")
        self.out = os.path.abspath(options.out)
        os.makedirs(self.out, exist_ok=True)
        self.server = os.path.abspath(os.path.join(options.built, "basalt-accel-server"))
        self.started = []
        self.result = {"errors": [], "rounds": [], "probes": {}}

    def left(self):
        return self.options.budget - (time.monotonic() - self.begin)

    def libraries(self):
        """Our library by the names that programs look for: links need not have come along."""
        directory = os.path.join(self.work, "cuda")
        os.mkdir(directory)
        library = os.path.join(directory, "libbasalt_cuda.so")
        shutil.copy(os.path.join(self.options.built, "cuda/libbasalt_cuda.so"), library)
        with open(os.path.join(ROOT, "accel/client-cuda/src/generated/files.txt")) as files:
            self.names = files.read().split()
        for name in self.names:
            os.symlink("libbasalt_cuda.so", os.path.join(directory, name))
        return directory

    def start(self, name, arguments, environment=None):
        """A server of ours; its socket."""
        place = os.path.join(self.work, name + ".sock")
        log = open(os.path.join(self.out, name + ".log"), "w")
        server = subprocess.Popen(
            [self.server, "--socket", place, *arguments], stderr=log, stdout=log, env={**os.environ, **(environment or {})}
        )
        self.started.append(server)
        until = time.monotonic() + 60
        while not os.path.exists(place):
            if server.poll() is not None or time.monotonic() > until:
                with open(log.name) as said:
                    raise RuntimeError("the server %s does not listen: %s" % (name, said.read()[-2000:]))
            time.sleep(0.05)
        return place

    def stop(self):
        for server in self.started:
            server.terminate()
            server.wait()
        self.started = []

    def environment(self, socket):
        """Of a program that is forwarded to a server, or runs natively where there is none."""
        environment = dict(os.environ)
        # PyTorch's default way to cuDNN is its graph, which is not served; both sides do without.
        environment["TORCH_CUDNN_V8_API_DISABLED"] = "1"
        if socket is None and not self.options.without_gpu:
            return environment
        # The wheel's libraries have a path to NVIDIA's in them, which comes before LD_LIBRARY_PATH: a library that is loaded already, by the
        # name that they need, comes before both.
        environment["LD_LIBRARY_PATH"] = self.ours
        environment["LD_PRELOAD"] = " ".join(self.names)
        environment["BASALT_ACCEL_DEBUG"] = "1"
        if socket is None:
            environment["BASALT_ACCEL_CUDA"] = "in-process"
        else:
            environment["BASALT_ACCEL_SOCKET"] = socket
        return environment

    def python(self, arguments, socket, limit):
        limit = max(5, min(limit, self.left()))
        command = [sys.executable, "-B", *arguments]
        done = subprocess.run(command, env=self.environment(socket), capture_output=True, text=True, timeout=limit)
        if done.returncode != 0:
            raise RuntimeError("%s ends with %d: %s" % (arguments[:1], done.returncode, done.stderr[-1500:]))
        return done.stdout

    def try_to(self, what, action):
        if self.left() < 20:
            self.result["errors"].append({"what": what, "error": "no time was left"})
            return None
        try:
            return action()
        except Exception as error:
            self.result["errors"].append({"what": what, "error": str(error)[-2000:]})
            return None

    def facts(self):
        def said(command):
            return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()

        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        versions = "import torch; print(torch.__version__, torch.version.cuda, torch.backends.cudnn.version())"
        self.result["device"] = "none" if self.options.without_gpu else said(query)
        self.result["python"] = sys.version.split()[0]
        self.result["torch"] = self.python(["-c", versions], None, 120).strip()

    def real(self):
        """Directories of NVIDIA's libraries: those of Python's packages."""
        if self.options.without_gpu:
            return [self.ours]
        found = "import os, nvidia; print(next(iter(nvidia.__path__)))"
        top = self.python(["-c", found], None, 60).strip()
        directories = []
        for directory, _, files in os.walk(top):
            if any(name.startswith("lib") and ".so" in name for name in files):
                directories.append(directory)
        return sorted(directories)

    def serve(self, name, more=()):
        environment = {}
        if self.options.without_gpu:
            environment["BASALT_ACCEL_SOCKET"] = self.start(name + "-device", ["--backend", "null"])
        arguments = ["--backend", "cuda", "--library", ":".join(self.real()), *more]
        return self.start(name, arguments, environment)

    def models(self, socket, steps):
        small = "1" if self.options.without_gpu else "0"
        text = self.python([os.path.join(HERE, "models.py"), str(steps), small], socket, 150)
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def rounds(self, socket):
        for number in range(self.options.rounds):
            for side, place in [("native", None), ("forwarded", socket)]:
                lines = self.try_to("round %d, %s" % (number, side), lambda: self.models(place, self.options.steps))
                self.result["rounds"].append({"side": side, "lines": lines})

    def summary(self):
        values = collections.defaultdict(lambda: collections.defaultdict(list))
        for entry in self.result["rounds"]:
            for line in entry["lines"] or []:
                key = line["model"] + " " + line["what"]
                values[key][entry["side"]].append(line.get("ms") or line.get("gb_s") or line.get("losses"))
        summary = {}
        for key, sides in values.items():
            if key.endswith("losses"):
                pairs = zip((sides["native"] or [[]])[0], (sides["forwarded"] or [[]])[0])
                summary[key] = {"largest difference": max((abs(a - b) for a, b in pairs), default=None)}
            elif sides["native"] and sides["forwarded"]:
                native, forwarded = statistics.median(sides["native"]), statistics.median(sides["forwarded"])
                # Of times the native one's share, of rates the forwarded one's: 1 is as fast as natively.
                ratio = forwarded / native if key.startswith("pinned") else native / forwarded
                summary[key] = {"native": native, "forwarded": forwarded, "ratio": ratio}
        self.result["summary"] = summary

    def probes(self, socket):
        for name, code in PROBES.items():
            if self.left() < 120:
                self.result["errors"].append({"what": name, "error": "no time was left"})
                continue
            answers = {}
            for side, place in [("native", None), ("forwarded", socket)]:
                # What does not work is the answer, and no error of this script: a machine need not have each of them.
                try:
                    answers[side] = {"says": self.python(["-c", code], place, 60).strip()}
                except Exception as error:
                    answers[side] = {"fails": str(error)[-800:]}
            is_same = "says" in answers["native"] and answers["native"] == answers["forwarded"]
            self.result["probes"][name] = {**answers, "same": is_same}

    def trace(self):
        """Calls of a few steps as the server sees them: names, sizes, times."""
        socket = self.serve("trace", ["--log-level", "trace"])
        self.models(socket, 3)
        names = {}
        with open(os.path.join(ROOT, "accel/spec/ops.lock")) as lock:
            for line in lock:
                if line.startswith("0x"):
                    number, _, name = line.split()
                    names[number] = name
        calls = []
        with open(os.path.join(self.out, "trace.log")) as log:
            for line in log:
                _, found, rest = line.partition(" call ")
                words = rest.split()
                if found and len(words) == 5:
                    number, size, waits, nanoseconds, code = words
                    calls.append([names.get(number, number), int(size), waits == "waits", int(nanoseconds), int(code)])
        with open(os.path.join(self.out, "trace.json"), "w") as out:
            json.dump({"columns": ["call", "bytes", "waits", "ns", "code"], "calls": calls}, out)
        os.remove(os.path.join(self.out, "trace.log"))
        counts = collections.Counter(call[0] for call in calls)
        self.result["trace"] = {
            "calls": len(calls),
            "failed": sum(1 for call in calls if call[4] != 0),
            "ms": sum(call[3] for call in calls) / 1e6,
            "most": counts.most_common(20),
        }

    def run(self):
        self.ours = self.libraries()
        self.try_to("facts", self.facts)
        socket = self.try_to("the server", lambda: self.serve("server", ["--log-level", "info"]))
        if socket is not None:
            self.rounds(socket)
            self.probes(socket)
        self.stop()
        self.try_to("trace", self.trace)
        self.stop()
        self.summary()
        self.result["seconds"] = time.monotonic() - self.begin


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("built")
    parser.add_argument("out")
    parser.add_argument("--budget", type=float, default=540)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--without-gpu", action="store_true")
    run = Run(parser.parse_args())
    try:
        run.run()
    except Exception:
        run.result["errors"].append({"what": "the script", "error": traceback.format_exc()})
    finally:
        run.stop()
        shutil.rmtree(run.work)
    text = json.dumps(run.result, indent=1)
    with open(os.path.join(run.out, "result.json"), "w") as out:
        out.write(text)
    print(text)
    return 1 if run.result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
