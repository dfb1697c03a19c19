"""The guest's half of the case `accelerator`: a program with OpenCL's loader, as programs use it. The first thing that is not as it should be is the
exception that ends it.

    accelerator.py compute N      N numbers by a kernel, which are right
    accelerator.py call N         N calls that are waited for; prints nanoseconds for each
    accelerator.py busy NS        begins as the others do, and is busy for so long
    accelerator.py keep N         has a kernel and N MiB of numbers, all zero; adds what is written to /tmp/ask, and writes to /tmp/answer the
                                  first number, the last, and the time in us; /tmp/ready has the time that all of it took to be made
    accelerator.py load           tells "ready" when its program is built, and has kernels on the device until there is /tmp/enough
    accelerator.py survive        tells "ready", computes until there is an error, tells how long that took, and calls anew
"""
import ctypes as c
import os
import sys
import time

cl = c.CDLL("/cl/libOpenCL.so.1")
for name in ("clCreateContext", "clCreateCommandQueue", "clCreateBuffer", "clCreateProgramWithSource", "clCreateKernel"):
    getattr(cl, name).restype = c.c_void_p
DEVICE_TYPE_ALL = c.c_ulong(0xFFFFFFFF)
READ_WRITE, COPY_HOST_PTR = 1, 1 << 5
SOURCE = b"""__kernel void saxpy(float a, __global const float *x, __global float *y) {
    size_t i = get_global_id(0);
    y[i] = a * x[i] + y[i];
}"""

LOAD = b"""__kernel void load(__global float *y) {
    size_t i = get_global_id(0);
    float x = y[i];
    for (int n = 0; n < 64; n++)
        x = x * 0.5f + (float)n;
    y[i] = x;
}"""


ADD = b"__kernel void add(__global uint *all, uint what) { all[get_global_id(0)] += what; }"


class Failed(Exception):
    pass


def check(code):
    if code != 0:
        raise Failed(code)


def made(call, *args):
    code = c.c_int(0)
    result = call(*args, c.byref(code))
    check(code.value)
    return c.c_void_p(result)


class Accelerator:
    def __init__(self):
        count, platform, self.device = c.c_uint(0), c.c_void_p(), c.c_void_p()
        check(cl.clGetPlatformIDs(1, c.byref(platform), c.byref(count)))
        assert count.value == 1, f"{count.value} platforms"
        check(cl.clGetDeviceIDs(platform, DEVICE_TYPE_ALL, 1, c.byref(self.device), None))
        self.context = made(cl.clCreateContext, None, 1, c.byref(self.device), None, None)
        self.queue = made(cl.clCreateCommandQueue, self.context, self.device, c.c_ulong(0))

    def compute(self, n):
        """Tells whether all of n numbers are right."""
        numbers = c.c_float * n
        x, y = numbers(*range(n)), numbers(*([1.0] * n))
        size = c.c_size_t(c.sizeof(numbers))
        flags = c.c_ulong(READ_WRITE | COPY_HOST_PTR)
        x_buffer = made(cl.clCreateBuffer, self.context, flags, size, x)
        y_buffer = made(cl.clCreateBuffer, self.context, flags, size, y)
        source = c.c_char_p(SOURCE)
        program = made(cl.clCreateProgramWithSource, self.context, 1, c.byref(source), None)
        check(cl.clBuildProgram(program, 1, c.byref(self.device), b"", None, None))
        kernel = made(cl.clCreateKernel, program, b"saxpy")
        factor = c.c_float(2.0)
        check(cl.clSetKernelArg(kernel, 0, c.c_size_t(4), c.byref(factor)))
        check(cl.clSetKernelArg(kernel, 1, c.c_size_t(8), c.byref(x_buffer)))
        check(cl.clSetKernelArg(kernel, 2, c.c_size_t(8), c.byref(y_buffer)))
        work = c.c_size_t(n)
        check(cl.clEnqueueNDRangeKernel(self.queue, kernel, 1, None, c.byref(work), None, 0, None, None))
        result = numbers()
        check(cl.clEnqueueReadBuffer(self.queue, y_buffer, 1, c.c_size_t(0), size, result, 0, None, None))
        return all(result[i] == 2.0 * i + 1.0 for i in range(n))

    def load(self):
        """Always has some kernels on the device, each of which takes some time."""
        n = 1 << 14
        size = c.c_size_t(4 * n)
        buffer = made(cl.clCreateBuffer, self.context, c.c_ulong(READ_WRITE), size, None)
        source = c.c_char_p(LOAD)
        program = made(cl.clCreateProgramWithSource, self.context, 1, c.byref(source), None)
        check(cl.clBuildProgram(program, 1, c.byref(self.device), b"", None, None))
        kernel = made(cl.clCreateKernel, program, b"load")
        check(cl.clSetKernelArg(kernel, 0, c.c_size_t(8), c.byref(buffer)))
        work = c.c_size_t(n)

        def launch(count):
            """The event of the last of them."""
            event = c.c_void_p()
            for at in range(count):
                last = c.byref(event) if at == count - 1 else None
                check(cl.clEnqueueNDRangeKernel(self.queue, kernel, 1, None, c.byref(work), None, 0, None, last))
            check(cl.clFlush(self.queue))
            return event

        def wait(event):
            check(cl.clWaitForEvents(1, c.byref(event)))
            check(cl.clReleaseEvent(event))

        # Built for this size of work.
        wait(launch(1))
        print("ready", flush=True)
        # There are kernels left to do whenever some are done.
        before = launch(16)
        while not os.path.exists("/tmp/enough"):
            now = launch(16)
            wait(before)
            before = now
        wait(before)

    def is_refused(self, size):
        """Tells whether so much memory is more than the device has left: CL_MEM_OBJECT_ALLOCATION_FAILURE, CL_INVALID_BUFFER_SIZE."""
        try:
            made(cl.clCreateBuffer, self.context, c.c_ulong(READ_WRITE), c.c_size_t(size), None)
        except Failed as failed:
            return failed.args[0] in (-4, -61)
        return False

    def call(self, count):
        finish, queue = cl.clFinish, self.queue
        begun = time.monotonic_ns()
        for _ in range(count):
            if finish(queue) != 0:
                raise Failed("clFinish")
        return (time.monotonic_ns() - begun) // count


def keep(mebibytes):
    begun = time.monotonic()
    accelerator = Accelerator()
    source = c.c_char_p(ADD)
    program = made(cl.clCreateProgramWithSource, accelerator.context, 1, c.byref(source), None)
    check(cl.clBuildProgram(program, 1, c.byref(accelerator.device), b"", None, None))
    kernel = made(cl.clCreateKernel, program, b"add")
    piece = 1 << 20
    count = mebibytes * piece // 4
    flags, size = c.c_ulong(READ_WRITE), c.c_size_t(4 * count)
    buffer = made(cl.clCreateBuffer, accelerator.context, flags, size, None)
    # No zeroes of the kernel's: they are to be written, and saved.
    zeroes = (c.c_uint * (piece // 4))(*([1] * (piece // 4)))
    for at in range(0, 4 * count, piece):
        check(cl.clEnqueueWriteBuffer(accelerator.queue, buffer, 1, c.c_size_t(at), c.c_size_t(piece), zeroes, 0, None, None))
    check(cl.clSetKernelArg(kernel, 0, c.c_size_t(8), c.byref(buffer)))

    def add(number):
        what, work, ends = c.c_uint(number), c.c_size_t(count), (c.c_uint * 2)()
        check(cl.clSetKernelArg(kernel, 1, c.c_size_t(4), c.byref(what)))
        check(cl.clEnqueueNDRangeKernel(accelerator.queue, kernel, 1, None, c.byref(work), None, 0, None, None))
        for place, at in ((0, 0), (1, 4 * (count - 1))):
            to = c.byref(ends, 4 * place)
            check(cl.clEnqueueReadBuffer(accelerator.queue, buffer, 1, c.c_size_t(at), c.c_size_t(4), to, 0, None, None))
        return tuple(ends)

    # The first launch compiles what the second one has.
    assert add(2**32 - 1) == (0, 0), "wrong numbers"
    for name in ("/tmp/ask", "/tmp/answer"):
        os.mkfifo(name)
    with open("/tmp/ready.new", "w") as ready:
        ready.write(f"{(time.monotonic() - begun) * 1e6:.0f}")
    os.rename("/tmp/ready.new", "/tmp/ready")
    while True:
        with open("/tmp/ask") as ask:
            number = int(ask.read())
        begun = time.monotonic()
        ends = add(number)
        with open("/tmp/answer", "w") as answer:
            answer.write(f"{ends[0]} {ends[1]} {(time.monotonic() - begun) * 1e6:.0f}")


def survive():
    accelerator = Accelerator()
    print("ready", flush=True)
    while True:
        begun = time.monotonic()
        try:
            accelerator.call(1)
        except Failed:
            break
    took = time.monotonic() - begun
    end = time.monotonic() + 60
    while True:
        try:
            Accelerator().call(10)
            break
        except Failed:
            # The next server may not have begun.
            assert time.monotonic() < end, "no server came again"
            time.sleep(0.05)
    print(f"an error after {took * 1000:.0f} ms, and calls that succeed later", flush=True)


if sys.argv[1] == "compute":
    accelerator = Accelerator()
    assert accelerator.compute(int(sys.argv[2])), "wrong numbers"
    # The sandbox has 256 MiB.
    assert not accelerator.is_refused(32 << 20) and accelerator.is_refused(512 << 20), "it is no quota"
    print("right")
elif sys.argv[1] == "call":
    print(Accelerator().call(int(sys.argv[2])))
elif sys.argv[1] == "keep":
    keep(int(sys.argv[2]))
elif sys.argv[1] == "load":
    Accelerator().load()
elif sys.argv[1] == "busy":
    Accelerator()
    end = time.monotonic_ns() + int(sys.argv[2])
    while time.monotonic_ns() < end:
        pass
else:
    survive()
