//! virtio-vsock implemented inside the VMM, over unix sockets on the host.
