//! What a virtualization engine must offer a machine: traits, typed exits, whole-vCPU state.
