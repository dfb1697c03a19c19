//! What the examples have in common: functions of a loader (`libOpenCL.so.1`) by name, and a queue on the first device.
//!
//! Knows nothing of the library: it finds functions as any program does.

use std::ffi::{CStr, CString, c_void};
use std::ptr;

pub(crate) type Ptr = *const c_void;

pub(crate) struct Loader(*mut c_void);

/// A function of the loader's, by name and type.
macro_rules! cl {
    ($loader:expr, $name:ident($($argument:ty),*) -> $returns:ty) => {{
        let address = $loader.find(stringify!($name));
        // SAFETY: the API's function of this name has this type.
        unsafe { std::mem::transmute::<Ptr, extern "C" fn($($argument),*) -> $returns>(address) }
    }};
}
pub(crate) use cl;

impl Loader {
    pub(crate) fn open() -> Self {
        // SAFETY: the name is a string of C.
        let handle = unsafe { libc::dlopen(c"libOpenCL.so.1".as_ptr(), libc::RTLD_NOW) };
        assert!(
            !handle.is_null(),
            "there is no libOpenCL.so.1; install a loader, such as ocl-icd-libopencl1"
        );
        Self(handle)
    }

    pub(crate) fn find(&self, name: &str) -> Ptr {
        let symbol = CString::new(name).unwrap_or_default();
        // SAFETY: the handle is open, and the name is a string of C.
        let found = unsafe { libc::dlsym(self.0, symbol.as_ptr()) };
        assert!(!found.is_null(), "the loader has no {name}");
        found
    }
}

pub(crate) fn check(what: &str, code: i32) {
    assert_eq!(code, 0, "{what}");
}

/// A context and a queue with these properties on the first platform's first device, whose name is printed.
pub(crate) fn first_queue(cl: &Loader, properties: u64) -> (Ptr, Ptr) {
    let (mut platform, mut device, mut code) = (ptr::null(), ptr::null(), 0);
    let platforms = cl!(cl, clGetPlatformIDs(u32, *mut Ptr, *mut u32) -> i32);
    check("clGetPlatformIDs", platforms(1, &raw mut platform, ptr::null_mut()));
    let devices = cl!(cl, clGetDeviceIDs(Ptr, u64, u32, *mut Ptr, *mut u32) -> i32);
    check(
        "clGetDeviceIDs",
        devices(platform, 0xffff_ffff, 1, &raw mut device, ptr::null_mut()),
    );
    let mut name = [0_u8; 256];
    let info = cl!(cl, clGetDeviceInfo(Ptr, u32, usize, *mut u8, *mut usize) -> i32);
    check(
        "clGetDeviceInfo",
        info(device, 0x102b, name.len(), name.as_mut_ptr(), ptr::null_mut()),
    );
    println!(
        "device: {}",
        CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy()
    );
    let context = cl!(
        cl,
        clCreateContext(*const i64, u32, *const Ptr, Ptr, Ptr, *mut i32) -> Ptr
    );
    let context = context(
        ptr::null(),
        1,
        &raw const device,
        ptr::null(),
        ptr::null(),
        &raw mut code,
    );
    check("clCreateContext", code);
    let queue =
        cl!(cl, clCreateCommandQueue(Ptr, Ptr, u64, *mut i32) -> Ptr)(context, device, properties, &raw mut code);
    check("clCreateCommandQueue", code);
    (context, queue)
}

/// A kernel of a program that is built from source.
#[allow(dead_code, reason = "not every example has one")]
pub(crate) fn build(cl: &Loader, context: Ptr, source: &CStr, name: &CStr) -> Ptr {
    let mut code = 0;
    let source = source.as_ptr();
    let program = cl!(
        cl,
        clCreateProgramWithSource(Ptr, u32, *const *const i8, *const usize, *mut i32) -> Ptr
    );
    let program = program(context, 1, &raw const source, ptr::null(), &raw mut code);
    check("clCreateProgramWithSource", code);
    let build = cl!(cl, clBuildProgram(Ptr, u32, *const Ptr, *const i8, Ptr, Ptr) -> i32);
    check(
        "clBuildProgram",
        build(program, 0, ptr::null(), c"".as_ptr(), ptr::null(), ptr::null()),
    );
    let create = cl!(cl, clCreateKernel(Ptr, *const i8, *mut i32) -> Ptr);
    let kernel = create(program, name.as_ptr(), &raw mut code);
    check("clCreateKernel", code);
    kernel
}
