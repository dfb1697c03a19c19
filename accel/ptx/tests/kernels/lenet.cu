// LeNet, forward, backward and gradient descent, a kernel a layer. Images are n x channels x height x width; what a thread computes is
// one number of the result, so that sums have one order and need no atomic access.

extern "C" __global__ void convolution(int total, int channels, int size, int filters, int width, const float *x, const float *w,
                                       const float *bias, float *y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total) return;
    int out = size - width + 1;
    int column = i % out, row = i / out % out, filter = i / (out * out) % filters, image = i / (out * out * filters);
    float sum = bias[filter];
    for (int c = 0; c < channels; c++)
        for (int dy = 0; dy < width; dy++)
            for (int dx = 0; dx < width; dx++)
                sum += x[((image * channels + c) * size + row + dy) * size + column + dx] *
                       w[((filter * channels + c) * width + dy) * width + dx];
    y[i] = sum;
}

extern "C" __global__ void convolution_weights(int total, int images, int channels, int size, int filters, int width,
                                               const float *x, const float *dy, float *dw) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total) return;
    int out = size - width + 1;
    int wx = i % width, wy = i / width % width, c = i / (width * width) % channels, filter = i / (width * width * channels);
    float sum = 0.0f;
    for (int image = 0; image < images; image++)
        for (int row = 0; row < out; row++)
            for (int column = 0; column < out; column++)
                sum += dy[((image * filters + filter) * out + row) * out + column] *
                       x[((image * channels + c) * size + row + wy) * size + column + wx];
    dw[i] = sum;
}

extern "C" __global__ void convolution_bias(int filters, int images, int pixels, const float *dy, float *db) {
    int filter = blockIdx.x * blockDim.x + threadIdx.x;
    if (filter >= filters) return;
    float sum = 0.0f;
    for (int image = 0; image < images; image++)
        for (int i = 0; i < pixels; i++) sum += dy[(image * filters + filter) * pixels + i];
    db[filter] = sum;
}

extern "C" __global__ void convolution_input(int total, int channels, int size, int filters, int width, const float *dy,
                                             const float *w, float *dx) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total) return;
    int out = size - width + 1;
    int column = i % size, row = i / size % size, c = i / (size * size) % channels, image = i / (size * size * channels);
    float sum = 0.0f;
    for (int filter = 0; filter < filters; filter++)
        for (int wy = 0; wy < width; wy++)
            for (int wx = 0; wx < width; wx++) {
                int y = row - wy, x = column - wx;
                if (y >= 0 && y < out && x >= 0 && x < out)
                    sum += dy[((image * filters + filter) * out + y) * out + x] *
                           w[((filter * channels + c) * width + wy) * width + wx];
            }
    dx[i] = sum;
}

extern "C" __global__ void pool(int total, int out, const float *x, float *y, int *chosen) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total) return;
    int column = i % out, row = i / out % out, plane = i / (out * out);
    int first = (plane * 2 * out + 2 * row) * 2 * out + 2 * column, best = first;
    for (int dy = 0; dy < 2; dy++)
        for (int dx = 0; dx < 2; dx++) {
            int at = first + dy * 2 * out + dx;
            if (x[at] > x[best]) best = at;
        }
    y[i] = x[best];
    chosen[i] = best;
}

// Windows do not overlap: each place of dx has one writer at most, and the others were zeroed.
extern "C" __global__ void pool_input(int total, const float *dy, const int *chosen, float *dx) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < total) dx[chosen[i]] = dy[i];
}

extern "C" __global__ void relu(int total, float *x) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < total) x[i] = fmaxf(x[i], 0.0f);
}

extern "C" __global__ void relu_input(int total, const float *y, float *d) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < total && y[i] <= 0.0f) d[i] = 0.0f;
}

extern "C" __global__ void dense(int total, int in, int out, const float *x, const float *w, const float *bias, float *y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total) return;
    float sum = bias[i % out];
    for (int k = 0; k < in; k++) sum += x[i / out * in + k] * w[i % out * in + k];
    y[i] = sum;
}

extern "C" __global__ void dense_weights(int total, int images, int in, int out, const float *x, const float *dy, float *dw) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total) return;
    float sum = 0.0f;
    for (int image = 0; image < images; image++) sum += dy[image * out + i / in] * x[image * in + i % in];
    dw[i] = sum;
}

extern "C" __global__ void dense_input(int total, int in, int out, const float *dy, const float *w, float *dx) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total) return;
    float sum = 0.0f;
    for (int k = 0; k < out; k++) sum += dy[i / in * out + k] * w[k * in + i % in];
    dx[i] = sum;
}

// The loss of each image and its gradient, a warp an image.
extern "C" __global__ void cross_entropy(int classes, float scale, const float *x, const int *labels, float *loss, float *dx) {
    int image = blockIdx.x, lane = threadIdx.x;
    float mine = lane < classes ? x[image * classes + lane] : -1e30f;
    float most = mine;
    for (int by = 16; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, by));
    float e = lane < classes ? __expf(mine - most) : 0.0f;
    float sum = e;
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
    float right = __shfl_sync(0xffffffffu, mine, labels[image]);
    if (lane == 0) loss[image] = __logf(sum) + most - right;
    if (lane < classes) dx[image * classes + lane] = (e / sum - (lane == labels[image] ? 1.0f : 0.0f)) * scale;
}

extern "C" __global__ void descend(int total, float rate, const float *gradient, float *w) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < total) w[i] -= rate * gradient[i];
}
