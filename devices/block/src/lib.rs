//! virtio-block over a file descriptor, by io_uring with a thread-pool fallback.
