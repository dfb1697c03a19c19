//! Kernel and initramfs loading, ACPI tables, command line and initial registers, as functions into guest memory.
