//! virtio-console: one port over a pair of file descriptors.
