// Functions, types and values of cuBLAS, cuRAND and cuDNN that these programs use, from the libraries' public documentation: their own
// headers are in wheels of hundreds of megabytes. The recipe makes libraries to link with from the names that are declared here.
#pragma once

#include <cstddef>

#include <cuda_runtime.h>

extern "C" {

typedef struct cublasContext *cublasHandle_t;
enum { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
int cublasCreate_v2(cublasHandle_t *handle);
int cublasDestroy_v2(cublasHandle_t handle);
int cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream);
int cublasGetStream_v2(cublasHandle_t handle, cudaStream_t *stream);
int cublasSgemm_v2(cublasHandle_t handle, int transa, int transb, int m, int n, int k, const float *alpha, const float *A, int lda,
                   const float *B, int ldb, const float *beta, float *C, int ldc);
int cublasSgemv_v2(cublasHandle_t handle, int trans, int m, int n, const float *alpha, const float *A, int lda, const float *x,
                   int incx, const float *beta, float *y, int incy);
int cublasSaxpy_v2(cublasHandle_t handle, int n, const float *alpha, const float *x, int incx, float *y, int incy);
int cublasSdot_v2(cublasHandle_t handle, int n, const float *x, int incx, const float *y, int incy, float *result);
int cublasSetMatrix(int rows, int cols, int elemSize, const void *A, int lda, void *B, int ldb);
int cublasGetMatrix(int rows, int cols, int elemSize, const void *A, int lda, void *B, int ldb);
int cublasSetVector(int n, int elemSize, const void *x, int incx, void *y, int incy);

typedef struct curandGenerator_st *curandGenerator_t;
enum { CURAND_RNG_PSEUDO_XORWOW = 101, CURAND_RNG_PSEUDO_PHILOX4_32_10 = 161, CURAND_STATUS_TYPE_ERROR = 103 };
int curandCreateGenerator(curandGenerator_t *generator, int type);
int curandDestroyGenerator(curandGenerator_t generator);
int curandSetPseudoRandomGeneratorSeed(curandGenerator_t generator, unsigned long long seed);
int curandSetGeneratorOffset(curandGenerator_t generator, unsigned long long offset);
int curandGenerate(curandGenerator_t generator, unsigned int *out, size_t count);
int curandGenerateUniform(curandGenerator_t generator, float *out, size_t count);
int curandGenerateUniformDouble(curandGenerator_t generator, double *out, size_t count);
int curandGenerateNormal(curandGenerator_t generator, float *out, size_t count, float mean, float stddev);
int curandGenerateLogNormal(curandGenerator_t generator, float *out, size_t count, float mean, float stddev);
int curandGeneratePoisson(curandGenerator_t generator, unsigned int *out, size_t count, double lambda);

typedef struct cudnnContext *cudnnHandle_t;
typedef struct cudnnTensorStruct *cudnnTensorDescriptor_t;
typedef struct cudnnFilterStruct *cudnnFilterDescriptor_t;
typedef struct cudnnConvolutionStruct *cudnnConvolutionDescriptor_t;
typedef struct cudnnPoolingStruct *cudnnPoolingDescriptor_t;
typedef struct cudnnActivationStruct *cudnnActivationDescriptor_t;
enum { CUDNN_TENSOR_NCHW = 0, CUDNN_DATA_FLOAT = 0, CUDNN_CROSS_CORRELATION = 1, CUDNN_POOLING_MAX = 0, CUDNN_ACTIVATION_RELU = 1 };
enum { CUDNN_SOFTMAX_ACCURATE = 1, CUDNN_SOFTMAX_MODE_INSTANCE = 0, CUDNN_NOT_PROPAGATE_NAN = 0, CUDNN_STATUS_BAD_PARAM = 2000 };
enum { CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM = 0, CUDNN_CONVOLUTION_BWD_FILTER_ALGO_0 = 0, CUDNN_CONVOLUTION_BWD_DATA_ALGO_0 = 0 };
int cudnnCreate(cudnnHandle_t *handle);
int cudnnDestroy(cudnnHandle_t handle);
int cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t *tensor);
int cudnnCreateFilterDescriptor(cudnnFilterDescriptor_t *filter);
int cudnnCreateConvolutionDescriptor(cudnnConvolutionDescriptor_t *convolution);
int cudnnCreatePoolingDescriptor(cudnnPoolingDescriptor_t *pooling);
int cudnnCreateActivationDescriptor(cudnnActivationDescriptor_t *activation);
int cudnnSetTensor4dDescriptor(cudnnTensorDescriptor_t tensor, int format, int type, int n, int c, int h, int w);
int cudnnSetFilter4dDescriptor(cudnnFilterDescriptor_t filter, int type, int format, int k, int c, int h, int w);
int cudnnSetConvolution2dDescriptor(cudnnConvolutionDescriptor_t convolution, int pad_h, int pad_w, int u, int v, int dilation_h,
                                    int dilation_w, int mode, int type);
int cudnnSetPooling2dDescriptor(cudnnPoolingDescriptor_t pooling, int mode, int nan, int window_h, int window_w, int pad_h, int pad_w,
                                int stride_h, int stride_w);
int cudnnSetActivationDescriptor(cudnnActivationDescriptor_t activation, int mode, int nan, double coef);
int cudnnGetConvolution2dForwardOutputDim(cudnnConvolutionDescriptor_t convolution, cudnnTensorDescriptor_t input,
                                          cudnnFilterDescriptor_t filter, int *n, int *c, int *h, int *w);
int cudnnGetPooling2dForwardOutputDim(cudnnPoolingDescriptor_t pooling, cudnnTensorDescriptor_t input, int *n, int *c, int *h, int *w);
int cudnnGetConvolutionForwardWorkspaceSize(cudnnHandle_t handle, cudnnTensorDescriptor_t x, cudnnFilterDescriptor_t w,
                                            cudnnConvolutionDescriptor_t convolution, cudnnTensorDescriptor_t y, int algo, size_t *size);
int cudnnConvolutionForward(cudnnHandle_t handle, const void *alpha, cudnnTensorDescriptor_t xDesc, const void *x,
                            cudnnFilterDescriptor_t wDesc, const void *w, cudnnConvolutionDescriptor_t convolution, int algo,
                            void *workspace, size_t bytes, const void *beta, cudnnTensorDescriptor_t yDesc, void *y);
int cudnnConvolutionBackwardFilter(cudnnHandle_t handle, const void *alpha, cudnnTensorDescriptor_t xDesc, const void *x,
                                   cudnnTensorDescriptor_t dyDesc, const void *dy, cudnnConvolutionDescriptor_t convolution, int algo,
                                   void *workspace, size_t bytes, const void *beta, cudnnFilterDescriptor_t dwDesc, void *dw);
int cudnnConvolutionBackwardData(cudnnHandle_t handle, const void *alpha, cudnnFilterDescriptor_t wDesc, const void *w,
                                 cudnnTensorDescriptor_t dyDesc, const void *dy, cudnnConvolutionDescriptor_t convolution, int algo,
                                 void *workspace, size_t bytes, const void *beta, cudnnTensorDescriptor_t dxDesc, void *dx);
int cudnnConvolutionBackwardBias(cudnnHandle_t handle, const void *alpha, cudnnTensorDescriptor_t dyDesc, const void *dy,
                                 const void *beta, cudnnTensorDescriptor_t dbDesc, void *db);
int cudnnAddTensor(cudnnHandle_t handle, const void *alpha, cudnnTensorDescriptor_t aDesc, const void *A, const void *beta,
                   cudnnTensorDescriptor_t cDesc, void *C);
int cudnnPoolingForward(cudnnHandle_t handle, cudnnPoolingDescriptor_t pooling, const void *alpha, cudnnTensorDescriptor_t xDesc,
                        const void *x, const void *beta, cudnnTensorDescriptor_t yDesc, void *y);
int cudnnPoolingBackward(cudnnHandle_t handle, cudnnPoolingDescriptor_t pooling, const void *alpha, cudnnTensorDescriptor_t yDesc,
                         const void *y, cudnnTensorDescriptor_t dyDesc, const void *dy, cudnnTensorDescriptor_t xDesc, const void *x,
                         const void *beta, cudnnTensorDescriptor_t dxDesc, void *dx);
int cudnnActivationForward(cudnnHandle_t handle, cudnnActivationDescriptor_t activation, const void *alpha,
                           cudnnTensorDescriptor_t xDesc, const void *x, const void *beta, cudnnTensorDescriptor_t yDesc, void *y);
int cudnnActivationBackward(cudnnHandle_t handle, cudnnActivationDescriptor_t activation, const void *alpha,
                            cudnnTensorDescriptor_t yDesc, const void *y, cudnnTensorDescriptor_t dyDesc, const void *dy,
                            cudnnTensorDescriptor_t xDesc, const void *x, const void *beta, cudnnTensorDescriptor_t dxDesc, void *dx);
int cudnnSoftmaxForward(cudnnHandle_t handle, int algo, int mode, const void *alpha, cudnnTensorDescriptor_t xDesc, const void *x,
                        const void *beta, cudnnTensorDescriptor_t yDesc, void *y);

} // extern "C"
