//! PCI configuration space, BARs, MSI-X and the host bridge.
