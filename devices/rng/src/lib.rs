//! virtio-rng fed by the host's getrandom.
