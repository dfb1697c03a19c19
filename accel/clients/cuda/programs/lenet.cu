// LeNet-5, trained through cuDNN's and cuBLAS' calls with kernels of its own for the loss and the step, beside the same on the CPU in plain
// loops: the loss of each step has to be the CPU's to 1e-4, and training has to lessen it. With the argument `keep` it answers then: for each
// number that is written to ./ask it says in ./answer the loss of that batch and the microseconds that took, and ./ready is there.
#include "check.h"
#include "libraries.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>

#include <sys/stat.h>

static const int BATCH = 8, STEPS = 12, CLASSES = 10;
static const float RATE = 0.1f;

// One side of a layer: channels and a square of so many by so many.
struct Shape {
    int channels, side;
    int size() const { return channels * side * side; }
};

static const Shape INPUT = {1, 28}, CONV1 = {6, 28}, POOL1 = {6, 14}, CONV2 = {16, 10}, POOL2 = {16, 5};
static const int KERNEL = 5, FULL[4] = {400, 120, 84, 10};

struct Weights {
    // Two convolutions and three products, each with its bias.
    std::vector<float> w[5], b[5];
    Weights()
    {
        Numbers numbers(8);
        const int inputs[5] = {25, 150, 400, 120, 84}, outputs[5] = {6, 16, 120, 84, 10};
        for (int layer = 0; layer < 5; layer++) {
            w[layer] = numbers.list(inputs[layer] * outputs[layer], std::sqrt(3.0f / inputs[layer]));
            b[layer] = numbers.list(outputs[layer], 0.05f);
        }
    }
};

// Images of which each class has its own pattern, with noise.
struct Data {
    std::vector<float> images;
    std::vector<int> labels;
    explicit Data(uint64_t seed)
    {
        Numbers numbers(seed);
        images = numbers.list(BATCH * INPUT.size(), 0.3f);
        for (int image = 0; image < BATCH; image++) {
            labels.push_back((int)((seed * 3 + image * 7) % CLASSES));
            for (int i = 0; i < INPUT.size(); i++)
                if ((i / 28 / 3 + i % 28 / 3 * (1 + labels[image])) % 5 == labels[image] % 5)
                    images[image * INPUT.size() + i] += 1;
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------- on the CPU

struct Cpu {
    Weights &own;
    typedef std::vector<float> List;

    static List convolved(const List &x, Shape in, const List &w, const List &b, Shape out, int pad)
    {
        List y(BATCH * out.size());
        for (int image = 0; image < BATCH; image++)
            for (int o = 0; o < out.channels; o++)
                for (int r = 0; r < out.side; r++)
                    for (int c = 0; c < out.side; c++) {
                        double value = b[o];
                        for (int i = 0; i < in.channels; i++)
                            for (int dr = 0; dr < KERNEL; dr++)
                                for (int dc = 0; dc < KERNEL; dc++) {
                                    int row = r + dr - pad, column = c + dc - pad;
                                    if (row >= 0 && row < in.side && column >= 0 && column < in.side)
                                        value += (double)w[((o * in.channels + i) * KERNEL + dr) * KERNEL + dc] *
                                                 x[((image * in.channels + i) * in.side + row) * in.side + column];
                                }
                        y[((image * out.channels + o) * out.side + r) * out.side + c] = (float)value;
                    }
        return y;
    }

    // Gradients of a convolution; of its input if there is a place for it.
    static void convolved_back(const List &x, Shape in, const List &w, const List &dy, Shape out, int pad, List &dw, List &db, List *dx)
    {
        std::vector<double> sums(w.size()), biases(out.channels), inputs(x.size());
        for (int image = 0; image < BATCH; image++)
            for (int o = 0; o < out.channels; o++)
                for (int r = 0; r < out.side; r++)
                    for (int c = 0; c < out.side; c++) {
                        double value = dy[((image * out.channels + o) * out.side + r) * out.side + c];
                        biases[o] += value;
                        for (int i = 0; i < in.channels; i++)
                            for (int dr = 0; dr < KERNEL; dr++)
                                for (int dc = 0; dc < KERNEL; dc++) {
                                    int row = r + dr - pad, column = c + dc - pad;
                                    if (row < 0 || row >= in.side || column < 0 || column >= in.side)
                                        continue;
                                    int at = ((image * in.channels + i) * in.side + row) * in.side + column;
                                    int weight = ((o * in.channels + i) * KERNEL + dr) * KERNEL + dc;
                                    sums[weight] += value * x[at];
                                    inputs[at] += value * w[weight];
                                }
                    }
        dw.assign(sums.begin(), sums.end());
        db.assign(biases.begin(), biases.end());
        if (dx)
            dx->assign(inputs.begin(), inputs.end());
    }

    static List relu(List x)
    {
        for (float &value : x)
            value = std::max(value, 0.0f);
        return x;
    }

    static List relu_back(const List &x, List dy)
    {
        for (size_t i = 0; i < x.size(); i++)
            dy[i] = x[i] > 0 ? dy[i] : 0;
        return dy;
    }

    // The largest of each two by two; with gradients, where they go.
    static List pooled(const List &x, Shape in, const List *dy)
    {
        int side = in.side / 2;
        List y(x.size() / 4), dx(x.size());
        for (int plane = 0; plane < BATCH * in.channels; plane++)
            for (int r = 0; r < side; r++)
                for (int c = 0; c < side; c++) {
                    int best = (plane * in.side + 2 * r) * in.side + 2 * c;
                    for (int other : {best + 1, best + in.side, best + in.side + 1})
                        best = x[other] > x[best] ? other : best;
                    int to = (plane * side + r) * side + c;
                    y[to] = x[best];
                    if (dy)
                        dx[best] += (*dy)[to];
                }
        return dy ? dx : y;
    }

    static List full(const List &x, int in, const List &w, const List &b, int out)
    {
        List y(BATCH * out);
        for (int image = 0; image < BATCH; image++)
            for (int o = 0; o < out; o++) {
                double value = b[o];
                for (int i = 0; i < in; i++)
                    value += (double)w[o * in + i] * x[image * in + i];
                y[image * out + o] = (float)value;
            }
        return y;
    }

    static List full_back(const List &x, int in, const List &w, const List &dy, int out, List &dw, List &db)
    {
        List dx(BATCH * in);
        dw.assign(in * out, 0);
        db.assign(out, 0);
        for (int image = 0; image < BATCH; image++)
            for (int o = 0; o < out; o++) {
                float value = dy[image * out + o];
                db[o] += value;
                for (int i = 0; i < in; i++) {
                    dw[o * in + i] += value * x[image * in + i];
                    dx[image * in + i] += value * w[o * in + i];
                }
            }
        return dx;
    }

    double step(const Data &data)
    {
        List z[5], a[5], p1, p2;
        z[0] = convolved(data.images, INPUT, own.w[0], own.b[0], CONV1, 2);
        a[0] = relu(z[0]);
        p1 = pooled(a[0], CONV1, nullptr);
        z[1] = convolved(p1, POOL1, own.w[1], own.b[1], CONV2, 0);
        a[1] = relu(z[1]);
        p2 = pooled(a[1], CONV2, nullptr);
        const List *x = &p2;
        for (int layer = 2; layer < 5; layer++) {
            z[layer] = full(*x, FULL[layer - 2], own.w[layer], own.b[layer], FULL[layer - 1]);
            a[layer] = relu(z[layer]);
            x = &a[layer];
        }
        double loss = 0;
        List d(BATCH * CLASSES);
        for (int image = 0; image < BATCH; image++) {
            const float *row = &z[4][image * CLASSES];
            double most = *std::max_element(row, row + CLASSES), sum = 0;
            for (int i = 0; i < CLASSES; i++)
                sum += std::exp(row[i] - most);
            for (int i = 0; i < CLASSES; i++) {
                double p = std::exp(row[i] - most) / sum;
                bool is = i == data.labels[image];
                loss -= is ? std::log(p) / BATCH : 0;
                d[image * CLASSES + i] = (float)((p - is) / BATCH);
            }
        }
        List dw[5], db[5];
        for (int layer = 4; layer >= 2; layer--) {
            const List &input = layer == 2 ? p2 : a[layer - 1];
            d = full_back(input, FULL[layer - 2], own.w[layer], d, FULL[layer - 1], dw[layer], db[layer]);
            if (layer > 2)
                d = relu_back(z[layer - 1], d);
        }
        d = relu_back(z[1], pooled(a[1], CONV2, &d));
        List dp1;
        convolved_back(p1, POOL1, own.w[1], d, CONV2, 0, dw[1], db[1], &dp1);
        d = relu_back(z[0], pooled(a[0], CONV1, &dp1));
        convolved_back(data.images, INPUT, own.w[0], d, CONV1, 2, dw[0], db[0], nullptr);
        for (int layer = 0; layer < 5; layer++) {
            for (size_t i = 0; i < dw[layer].size(); i++)
                own.w[layer][i] -= RATE * dw[layer][i];
            for (size_t i = 0; i < db[layer].size(); i++)
                own.b[layer][i] -= RATE * db[layer][i];
        }
        return loss;
    }
};

// ------------------------------------------------------------------------------------------------------------- on the device

__global__ void loss_and_gradient(const float *p, const int *labels, float *d, float *loss)
{
    int image = threadIdx.x;
    if (image >= BATCH)
        return;
    for (int i = 0; i < CLASSES; i++) {
        bool is = i == labels[image];
        if (is)
            atomicAdd(loss, -logf(p[image * CLASSES + i]) / BATCH);
        d[image * CLASSES + i] = (p[image * CLASSES + i] - is) / BATCH;
    }
}

__global__ void descend(float *w, const float *dw, int n, float rate)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        w[i] -= rate * dw[i];
}

static float *room(size_t count)
{
    return on_device(std::vector<float>(count));
}

static cudnnTensorDescriptor_t tensor(int n, int c, int side)
{
    cudnnTensorDescriptor_t made;
    LIBRARY(cudnnCreateTensorDescriptor(&made));
    LIBRARY(cudnnSetTensor4dDescriptor(made, CUDNN_TENSOR_NCHW, CUDNN_DATA_FLOAT, n, c, side, side));
    return made;
}

static const float ONE = 1, ZERO = 0;

struct Convolution {
    Shape in, out;
    cudnnTensorDescriptor_t x, y, b, p;
    cudnnFilterDescriptor_t w;
    cudnnConvolutionDescriptor_t how;
    cudnnPoolingDescriptor_t pooling;
    float *z, *a, *pooled, *da, *dz, *workspace = nullptr;
    size_t bytes = 0;

    Convolution(cudnnHandle_t dnn, Shape from, Shape to, int pad) : in(from), out(to)
    {
        x = tensor(BATCH, in.channels, in.side);
        b = tensor(1, out.channels, 1);
        LIBRARY(cudnnCreateFilterDescriptor(&w));
        LIBRARY(cudnnSetFilter4dDescriptor(w, CUDNN_DATA_FLOAT, CUDNN_TENSOR_NCHW, out.channels, in.channels, KERNEL, KERNEL));
        LIBRARY(cudnnCreateConvolutionDescriptor(&how));
        LIBRARY(cudnnSetConvolution2dDescriptor(how, pad, pad, 1, 1, 1, 1, CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT));
        int n, c, h, width;
        LIBRARY(cudnnGetConvolution2dForwardOutputDim(how, x, w, &n, &c, &h, &width));
        IS(n == BATCH && c == out.channels && h == out.side && width == out.side);
        y = tensor(n, c, h);
        LIBRARY(cudnnCreatePoolingDescriptor(&pooling));
        LIBRARY(cudnnSetPooling2dDescriptor(pooling, CUDNN_POOLING_MAX, CUDNN_NOT_PROPAGATE_NAN, 2, 2, 0, 0, 2, 2));
        LIBRARY(cudnnGetPooling2dForwardOutputDim(pooling, y, &n, &c, &h, &width));
        IS(n == BATCH && c == out.channels && h == out.side / 2 && width == out.side / 2);
        p = tensor(n, c, h);
        LIBRARY(cudnnGetConvolutionForwardWorkspaceSize(dnn, x, w, how, y, CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM, &bytes));
        if (bytes > 0)
            CUDA(cudaMalloc((void **)&workspace, bytes));
        size_t count = (size_t)BATCH * out.size();
        z = room(count);
        a = room(count);
        da = room(count);
        dz = room(count);
        pooled = room(count / 4);
    }
};

struct Device {
    cudnnHandle_t dnn;
    cublasHandle_t blas;
    cudnnActivationDescriptor_t relu;
    cudnnTensorDescriptor_t flat[4], bias[4];
    float *w[5], *b[5], *dw[5], *db[5], *z[5], *a[5], *d[5], *images, *p, *ones, *dp[2], *loss;
    int *labels;
    size_t counts[5], biases[5];
    Convolution *conv[2];

    explicit Device(const Weights &first)
    {
        LIBRARY(cudnnCreate(&dnn));
        LIBRARY(cublasCreate_v2(&blas));
        LIBRARY(cudnnCreateActivationDescriptor(&relu));
        LIBRARY(cudnnSetActivationDescriptor(relu, CUDNN_ACTIVATION_RELU, CUDNN_NOT_PROPAGATE_NAN, 0));
        conv[0] = new Convolution(dnn, INPUT, CONV1, 2);
        conv[1] = new Convolution(dnn, POOL1, CONV2, 0);
        for (int layer = 0; layer < 5; layer++) {
            w[layer] = on_device(first.w[layer]);
            b[layer] = on_device(first.b[layer]);
            counts[layer] = first.w[layer].size();
            biases[layer] = first.b[layer].size();
            dw[layer] = room(counts[layer]);
            db[layer] = room(biases[layer]);
        }
        for (int place = 0; place < 4; place++) {
            flat[place] = tensor(BATCH, FULL[place], 1);
            bias[place] = tensor(1, FULL[place], 1);
            z[place] = room(BATCH * FULL[place]);
            a[place] = room(BATCH * FULL[place]);
            d[place] = room(BATCH * FULL[place]);
        }
        dp[0] = room((size_t)BATCH * POOL1.size());
        dp[1] = room((size_t)BATCH * POOL2.size());
        images = room((size_t)BATCH * INPUT.size());
        p = room(BATCH * CLASSES);
        ones = on_device(std::vector<float>(BATCH, 1));
        loss = room(1);
        labels = on_device(std::vector<int>(BATCH));
    }

    void forward(Convolution &to, int layer, const float *x)
    {
        LIBRARY(cudnnConvolutionForward(dnn, &ONE, to.x, x, to.w, w[layer], to.how, CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM,
                                        to.workspace, to.bytes, &ZERO, to.y, to.z));
        LIBRARY(cudnnAddTensor(dnn, &ONE, to.b, b[layer], &ONE, to.y, to.z));
        LIBRARY(cudnnActivationForward(dnn, relu, &ONE, to.y, to.z, &ZERO, to.y, to.a));
        LIBRARY(cudnnPoolingForward(dnn, to.pooling, &ONE, to.y, to.a, &ZERO, to.p, to.pooled));
    }

    void backward(Convolution &to, int layer, const float *x, const float *dpooled, float *dx)
    {
        LIBRARY(cudnnPoolingBackward(dnn, to.pooling, &ONE, to.p, to.pooled, to.p, dpooled, to.y, to.a, &ZERO, to.y, to.da));
        LIBRARY(cudnnActivationBackward(dnn, relu, &ONE, to.y, to.a, to.y, to.da, to.y, to.z, &ZERO, to.y, to.dz));
        LIBRARY(cudnnConvolutionBackwardBias(dnn, &ONE, to.y, to.dz, &ZERO, to.b, db[layer]));
        LIBRARY(cudnnConvolutionBackwardFilter(dnn, &ONE, to.x, x, to.y, to.dz, to.how, CUDNN_CONVOLUTION_BWD_FILTER_ALGO_0, nullptr, 0,
                                               &ZERO, to.w, dw[layer]));
        if (dx)
            LIBRARY(cudnnConvolutionBackwardData(dnn, &ONE, to.w, w[layer], to.y, to.dz, to.how, CUDNN_CONVOLUTION_BWD_DATA_ALGO_0,
                                                 nullptr, 0, &ZERO, to.x, dx));
    }

    float infer(const Data &data)
    {
        begin(data);
        return from_device(loss, 1)[0];
    }

    // Up to the loss and its gradient.
    void begin(const Data &data)
    {
        CUDA(cudaMemcpy(images, data.images.data(), data.images.size() * sizeof(float), cudaMemcpyHostToDevice));
        CUDA(cudaMemcpy(labels, data.labels.data(), data.labels.size() * sizeof(int), cudaMemcpyHostToDevice));
        forward(*conv[0], 0, images);
        forward(*conv[1], 1, conv[0]->pooled);
        const float *x = conv[1]->pooled;
        for (int layer = 2; layer < 5; layer++) {
            int in = FULL[layer - 2], out = FULL[layer - 1];
            cudnnTensorDescriptor_t shape = flat[layer - 1];
            LIBRARY(cublasSgemm_v2(blas, CUBLAS_OP_T, CUBLAS_OP_N, out, BATCH, in, &ONE, w[layer], in, x, in, &ZERO, z[layer - 1], out));
            LIBRARY(cudnnAddTensor(dnn, &ONE, bias[layer - 1], b[layer], &ONE, shape, z[layer - 1]));
            LIBRARY(cudnnActivationForward(dnn, relu, &ONE, shape, z[layer - 1], &ZERO, shape, a[layer - 1]));
            x = a[layer - 1];
        }
        LIBRARY(cudnnSoftmaxForward(dnn, CUDNN_SOFTMAX_ACCURATE, CUDNN_SOFTMAX_MODE_INSTANCE, &ONE, flat[3], z[3], &ZERO, flat[3], p));
        CUDA(cudaMemsetAsync(loss, 0, sizeof(float), nullptr));
        loss_and_gradient<<<1, 32>>>(p, labels, d[3], loss);
        CUDA(cudaGetLastError());
    }

    float step(const Data &data)
    {
        begin(data);
        for (int layer = 4; layer >= 2; layer--) {
            int in = FULL[layer - 2], out = FULL[layer - 1];
            const float *from = layer == 2 ? conv[1]->pooled : a[layer - 2];
            float *dy = d[layer - 1], *to = layer == 2 ? dp[1] : d[layer - 2];
            LIBRARY(cublasSgemm_v2(blas, CUBLAS_OP_N, CUBLAS_OP_T, in, out, BATCH, &ONE, from, in, dy, out, &ZERO, dw[layer], in));
            LIBRARY(cublasSgemv_v2(blas, CUBLAS_OP_N, out, BATCH, &ONE, dy, out, ones, 1, &ZERO, db[layer], 1));
            LIBRARY(cublasSgemm_v2(blas, CUBLAS_OP_N, CUBLAS_OP_N, in, BATCH, out, &ONE, w[layer], in, dy, out, &ZERO, to, in));
            if (layer > 2) {
                cudnnTensorDescriptor_t shape = flat[layer - 2];
                LIBRARY(cudnnActivationBackward(dnn, relu, &ONE, shape, a[layer - 2], shape, to, shape, z[layer - 2], &ZERO, shape, to));
            }
        }
        backward(*conv[1], 1, conv[0]->pooled, dp[1], dp[0]);
        backward(*conv[0], 0, images, dp[0], nullptr);
        for (int layer = 0; layer < 5; layer++) {
            descend<<<(int)(counts[layer] + 1023) / 1024, 128>>>(w[layer], dw[layer], (int)counts[layer], RATE);
            descend<<<1, 128>>>(b[layer], db[layer], (int)biases[layer], RATE);
        }
        CUDA(cudaGetLastError());
        return from_device(loss, 1)[0];
    }
};

static void answer(Device &device)
{
    if (mkfifo("ask", 0600) != 0 || mkfifo("answer", 0600) != 0 || !std::ofstream("ready"))
        wrong("this directory takes no files: %s", std::strerror(errno));
    for (;;) {
        // Whoever has asked has written a line, and reads one.
        unsigned long seed = 0;
        std::ifstream("ask") >> seed;
        auto begin = std::chrono::steady_clock::now();
        float loss = device.infer(Data(seed));
        auto took = std::chrono::steady_clock::now() - begin;
        std::ofstream("answer") << loss << ' ' << std::chrono::duration_cast<std::chrono::microseconds>(took).count() << std::endl;
    }
}

int main(int count, char **arguments)
{
    Weights weights;
    Device device(weights);
    Cpu cpu = {weights};
    double first = 0, last = 0, apart = 0;
    for (int step = 0; step < STEPS; step++) {
        Data data(step % 2 + 1);
        double expected = cpu.step(data), got = device.step(data);
        apart = std::max(apart, std::fabs(got - expected));
        if (!(std::fabs(got - expected) <= 1e-4))
            wrong("step %d: the loss is %.7f and not %.7f", step, got, expected);
        first = step == 0 ? expected : first;
        last = expected;
    }
    IS(last < 0.7 * first);
    if (count > 1 && std::strcmp(arguments[1], "keep") == 0)
        answer(device);
    LIBRARY(cudnnDestroy(device.dnn));
    LIBRARY(cublasDestroy_v2(device.blas));
    printf("lenet: right, %d steps, loss %.4f to %.4f, at most %.1e from the CPU's\n", STEPS, first, last, apart);
}
