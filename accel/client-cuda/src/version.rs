//! Programs that are linked with a version of CUDA's libraries that is not served: they find the files and the functions, all of which are
//! this one. The first that a program calls is the registration of its kernels, before its `main`.
#![allow(unsafe_code, reason = "a function of C, which the linker's words name")]

/// What a program has to be told that cannot go on.
const SAID: &str = "basalt-cuda: this program is linked with an older version of CUDA's libraries than are served (libcudart.so.11.0, \
    libcublas.so.11, libcudnn.so.8 and older); Basalt serves those of CUDA 13 and 12 (libcudart.so.13, libcudart.so.12, libcudnn.so.9): \
    build it with nvcc 13 or 12 and -cudart shared, or take a wheel for one of these (cu130, cu12x)";

/// Says so, and ends the program.
#[unsafe(no_mangle)]
extern "C" fn basalt_another_version() -> ! {
    eprintln!("{SAID}");
    // SAFETY: 1. it does not return, and nothing of the program has begun that would have to be ended.
    unsafe { libc::_exit(1) }
}
