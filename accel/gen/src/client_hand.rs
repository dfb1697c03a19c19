//! Which of the client's C functions are by hand, in which of its modules, and what functions are called.
//!
//! Knows no parameter.

use accel_spec::Api;

use crate::names;

/// Functions by hand, by module: those that annotations call so, those whose parameters are data, and those that keep a state.
pub(crate) const BY_HAND: &[(&str, &[&str])] = &[
    (
        "platform",
        &[
            "clGetPlatformIDs",
            "clGetDeviceIDs",
            "clCreateSubDevices",
            "clRetainDevice",
            "clReleaseDevice",
            "clUnloadCompiler",
            "clUnloadPlatformCompiler",
        ],
    ),
    (
        "icd",
        &[
            "clGetExtensionFunctionAddress",
            "clGetExtensionFunctionAddressForPlatform",
        ],
    ),
    (
        "context",
        &[
            "clCreateContext",
            "clCreateContextFromType",
            "clSetContextDestructorCallback",
        ],
    ),
    ("queue", &["clFinish", "clReleaseCommandQueue"]),
    (
        "memory",
        &[
            "clCreateBuffer",
            "clCreateBufferWithProperties",
            "clCreateSubBuffer",
            "clSetMemObjectDestructorCallback",
        ],
    ),
    (
        "image",
        &[
            "clCreateImage",
            "clCreateImageWithProperties",
            "clCreateImage2D",
            "clCreateImage3D",
            "clGetSupportedImageFormats",
            "clEnqueueReadImage",
            "clEnqueueWriteImage",
        ],
    ),
    (
        "mapping",
        &["clEnqueueMapBuffer", "clEnqueueMapImage", "clEnqueueUnmapMemObject"],
    ),
    (
        "transfer",
        &[
            "clEnqueueReadBuffer",
            "clEnqueueWriteBuffer",
            "clEnqueueReadBufferRect",
            "clEnqueueWriteBufferRect",
        ],
    ),
    (
        "program",
        &[
            "clCreateProgramWithSource",
            "clCreateProgramWithBinary",
            "clCreateProgramWithIL",
            "clBuildProgram",
            "clCompileProgram",
            "clLinkProgram",
            "clSetProgramReleaseCallback",
            "clGetProgramInfo",
            "clGetProgramBuildInfo",
        ],
    ),
    (
        "kernel",
        &[
            "clSetKernelArg",
            "clSetKernelArgSVMPointer",
            "clSetKernelExecInfo",
            "clCloneKernel",
            "clCreateKernelsInProgram",
        ],
    ),
    (
        "event",
        &[
            "clWaitForEvents",
            "clGetEventInfo",
            "clCreateUserEvent",
            "clSetEventCallback",
        ],
    ),
    (
        "svm",
        &[
            "clSVMAlloc",
            "clSVMFree",
            "clEnqueueSVMFree",
            "clEnqueueSVMMemcpy",
            "clEnqueueSVMMemFill",
            "clEnqueueSVMMap",
            "clEnqueueSVMUnmap",
            "clEnqueueSVMMigrateMem",
        ],
    ),
];

/// Commands that only loaders call, whose functions have C's names (`icd`), or which there are none of.
pub(crate) const LOADERS: &[&str] = &[
    "clIcdGetPlatformIDsKHR",
    "clIcdGetFunctionAddressForPlatformKHR",
    "clIcdSetPlatformDispatchDataKHR",
];

/// The module that has a function by hand.
pub(crate) fn module_by_hand(command: &str) -> Option<&'static str> {
    let found = BY_HAND.iter().find(|(_, commands)| commands.contains(&command));
    found.map(|(module, _)| *module)
}

/// `clEnqueueNDRangeKernel` as `enqueue_nd_range_kernel`.
pub(crate) fn function(api: &Api, c_name: &str) -> String {
    let name = names::command(api, c_name).replace("IDs", "Ids");
    let chars: Vec<char> = name.chars().collect();
    let mut snake = String::new();
    for (index, char) in chars.iter().enumerate() {
        let before = index.checked_sub(1).and_then(|index| chars.get(index));
        let after = chars.get(index + 1);
        let begins = char.is_ascii_uppercase()
            && before.is_some_and(|before| {
                before.is_ascii_lowercase()
                    || (before.is_ascii_uppercase() && after.is_some_and(char::is_ascii_lowercase))
            });
        if begins {
            snake.push('_');
        }
        snake.push(char.to_ascii_lowercase());
    }
    snake
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_have_names_of_rust() {
        let api = accel_spec::opencl(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")).unwrap();
        for (c_name, name) in [
            ("clGetPlatformIDs", "get_platform_ids"),
            ("clEnqueueNDRangeKernel", "enqueue_nd_range_kernel"),
            ("clSVMAlloc", "svm_alloc"),
            ("clCreateImage2D", "create_image2d"),
            ("clCreateProgramWithIL", "create_program_with_il"),
        ] {
            assert_eq!(function(&api, c_name), name);
        }
    }

    #[test]
    fn what_is_by_hand_is_a_command() {
        let api = accel_spec::opencl(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")).unwrap();
        let named = BY_HAND.iter().flat_map(|(_, commands)| *commands).chain(LOADERS);
        for name in named {
            assert!(api.commands.iter().any(|command| command.name == **name), "{name}");
        }
    }
}
