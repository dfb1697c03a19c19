//! Port and MMIO dispatch.
