//! Virtqueues, the virtio-pci transport, the `VirtioDevice` trait and the conformance kit.
