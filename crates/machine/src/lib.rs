//! The board: vCPU threads, the VM state machine, interrupt routing, power; over boxed devices.
