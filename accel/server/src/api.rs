//! What a back end is: the API of the accelerator in C, as a table of functions by their names, out of a library or made here.
//!
//! Knows how functions are found, not what they do.
#![allow(
    unsafe_code,
    reason = "functions of a library are found by name and have the types that the specification gives them"
)]

use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::cuda::Support;
pub(crate) use crate::generated::api::Api;
use crate::objects::Sort;

/// What C has as a pointer: an object, a place for results, or a list.
pub(crate) type P = *mut c_void;

/// An error code of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) i32);

/// Codes that the server itself answers with (OpenCL API, appendix "Error codes").
impl Code {
    pub(crate) const MEM_OBJECT_ALLOCATION_FAILURE: Self = Self(-4);
    pub(crate) const OUT_OF_RESOURCES: Self = Self(-5);
    pub(crate) const OUT_OF_HOST_MEMORY: Self = Self(-6);
    pub(crate) const INVALID_VALUE: Self = Self(-30);
    pub(crate) const INVALID_MEM_OBJECT: Self = Self(-38);
    pub(crate) const INVALID_ARG_INDEX: Self = Self(-49);
    pub(crate) const INVALID_ARG_VALUE: Self = Self(-50);
    pub(crate) const INVALID_ARG_SIZE: Self = Self(-51);
    pub(crate) const INVALID_EVENT_WAIT_LIST: Self = Self(-57);
    pub(crate) const INVALID_OPERATION: Self = Self(-59);
}

/// An error unless it is none; positive numbers are none of the API's.
pub(crate) fn check(status: i32) -> Result<(), Code> {
    if status == 0 { Ok(()) } else { Err(Code(status)) }
}

/// The table of an API's functions: a field for each, missing if the library has none, and a method of the same name that gives it.
macro_rules! functions {
    ($($name:ident($($parameter:ident: $type:ty),*) -> $result:ty;)*) => {
        /// Functions of the back end.
        #[derive(Debug, Clone)]
        #[allow(non_snake_case, reason = "the names are C's")]
        pub(crate) struct Api {
            $($name: Option<unsafe extern "C" fn($($parameter: $type),*) -> $result>,)*
        }

        #[allow(non_snake_case, reason = "the names are C's")]
        impl Api {
            /// All of them, from whoever finds them by name; and the names of those that were not found.
            ///
            /// # Safety
            ///
            /// What is found by a name is the function that the specification calls so, and stays for as long as the table.
            pub(crate) unsafe fn find(
                find: &dyn Fn(&std::ffi::CStr) -> Option<std::ptr::NonNull<std::ffi::c_void>>,
            ) -> (Self, Vec<&'static str>) {
                let mut missing = Vec::new();
                $(
                    let $name = find(const { crate::api::c_name(concat!(stringify!($name), "\0")) }).map(|address| {
                        // SAFETY: 1. both are an address of a function; 2. the caller vouches for it being this one.
                        unsafe {
                            std::mem::transmute::<
                                std::ptr::NonNull<std::ffi::c_void>,
                                unsafe extern "C" fn($($type),*) -> $result,
                            >(address)
                        }
                    });
                    if $name.is_none() {
                        missing.push(stringify!($name));
                    }
                )*
                (Self { $($name),* }, missing)
            }

            $(
                /// The function of that name.
                pub(crate) fn $name(
                    &self,
                ) -> Result<unsafe extern "C" fn($($parameter: $type),*) -> $result, crate::api::Code> {
                    self.$name.ok_or(crate::api::Code::INVALID_OPERATION)
                }
            )*
        }
    };
}

pub(crate) use functions;

/// A name as C has it; its zero is there.
pub(crate) const fn c_name(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => c"",
    }
}

/// Why there is no back end.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The library cannot be loaded.
    #[error("cannot load {}: {reason}; name an OpenCL library with --library, or install ocl-icd-libopencl1 and a driver", path.display())]
    Load {
        /// Which.
        path: PathBuf,
        /// What the loader says.
        reason: String,
    },
    /// It is no OpenCL library.
    #[error(
        "{} has no clGetPlatformIDs and is no OpenCL library; a driver that only a loader can use is found by libOpenCL.so.1 with \
         OCL_ICD_VENDORS set to it",
        path.display()
    )]
    NoFunctions {
        /// Which.
        path: PathBuf,
    },
    /// CUDA's libraries cannot be used.
    #[error(transparent)]
    Cuda(#[from] accel_cuda_library::LibraryError),
}

/// Objects that are there, by their sort.
#[derive(Debug, Default)]
pub(crate) struct Census([AtomicU64; Sort::ALL.len()]);

impl Census {
    /// One more.
    pub(crate) fn made(&self, sort: Sort) {
        self.0[sort as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// One less.
    pub(crate) fn gone(&self, sort: Sort) {
        self.0[sort as usize].fetch_sub(1, Ordering::Relaxed);
    }

    /// How many there are.
    pub(crate) fn count(&self, sort: Sort) -> u64 {
        self.0[sort as usize].load(Ordering::Relaxed)
    }

    /// How many there are of all sorts.
    pub(crate) fn total(&self) -> u64 {
        self.0.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}

/// Who carries calls out.
#[derive(Debug)]
pub struct Backend {
    pub(crate) api: Api,
    /// Whether it looks at arguments of kernels, which can be taken for addresses of objects.
    pub(crate) looks_at_arguments: bool,
    /// Whether it calls functions that were registered with it, and has memory with bytes in it.
    pub(crate) calls_back: bool,
    /// What it does with CUDA's calls.
    pub(crate) cuda: Support,
    /// How many objects it has for the server.
    pub(crate) census: Census,
    name: String,
}

impl Backend {
    /// The loader's or a driver's library, by dlopen(3). It is never unloaded: drivers have threads.
    ///
    /// # Errors
    ///
    /// [`BackendError`].
    pub fn opencl(library: &Path) -> Result<Self, BackendError> {
        let path = library.to_owned();
        let reason = |reason: String| BackendError::Load {
            path: path.clone(),
            reason,
        };
        let name = CString::new(library.as_os_str().as_bytes()).map_err(|error| reason(error.to_string()))?;
        // SAFETY: 1. the name ends with a zero; 2. what the library does when it is loaded, whoever started the server answers for.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let Some(handle) = NonNull::new(handle) else {
            return Err(reason(load_error()));
        };
        let find = |name: &CStr| {
            // SAFETY: 1. the handle is dlopen's and never closed; 2. the name ends with a zero.
            NonNull::new(unsafe { libc::dlsym(handle.as_ptr(), name.as_ptr()) })
        };
        if find(c"clGetPlatformIDs").is_none() {
            return Err(BackendError::NoFunctions { path });
        }
        // SAFETY: 1. the library is an OpenCL library, which exports functions of the specification by their names; it is never closed.
        let (api, missing) = unsafe { Api::find(&find) };
        if !missing.is_empty() {
            log::info!(
                "{} has not {}; calls of them are refused",
                path.display(),
                missing.join(", ")
            );
        }
        first_calls(&api);
        Ok(Self {
            api,
            looks_at_arguments: true,
            calls_back: true,
            cuda: Support::Nothing,
            census: Census::default(),
            name: format!("opencl ({})", path.display()),
        })
    }

    /// CUDA's real libraries in these directories, or where the loader finds them. Calls of OpenCL are refused. They are never unloaded.
    ///
    /// # Errors
    ///
    /// [`BackendError::Cuda`].
    pub fn cuda(directories: &[PathBuf]) -> Result<Self, BackendError> {
        let libraries = accel_cuda_library::Libraries::open(directories)?;
        // SAFETY: 1. nothing is found.
        let (api, _) = unsafe { Api::find(&|_| None) };
        Ok(Self {
            api,
            looks_at_arguments: false,
            calls_back: false,
            cuda: Support::Library(Box::new(libraries)),
            census: Census::default(),
            name: "cuda".into(),
        })
    }

    /// One that does nothing: each call succeeds, what is made has a name, and no bytes move.
    #[must_use]
    pub fn null() -> Self {
        Self {
            api: crate::null::api(),
            looks_at_arguments: false,
            calls_back: false,
            cuda: Support::Null,
            census: Census::default(),
            name: "null".into(),
        }
    }

    /// One that computes CUDA's calls on the CPU, and has nothing of OpenCL.
    #[must_use]
    pub fn reference() -> Self {
        // SAFETY: 1. nothing is found.
        let (api, _) = unsafe { Api::find(&|_| None) };
        Self {
            api,
            cuda: Support::Reference,
            name: "reference".into(),
            ..Self::null()
        }
    }

    /// One whose kernels take as many microseconds as their first global size says, on one device for all back ends of this kind in the
    /// process; in everything else as [`Backend::null`].
    #[must_use]
    pub fn simulated() -> Self {
        Self {
            api: crate::simulated::api(),
            cuda: Support::Nothing,
            name: "simulated".into(),
            ..Self::null()
        }
    }

    /// With which code it has failed for good, and only another process can go on.
    pub(crate) fn lost(&self) -> Option<i32> {
        match &self.cuda {
            Support::Library(libraries) => libraries.lost(),
            Support::Nothing | Support::Null | Support::Reference => None,
        }
    }

    /// What it is called, for logs.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// The most platforms and devices that are looked at.
const MOST: u32 = 64;

/// Loaders and drivers make themselves ready when they are asked for platforms and devices first, and not all of them do it well when two
/// threads ask at a time: ocl-icd tells the second that there are no platforms, PoCL that devices have no memory. So all are asked for here,
/// by one thread at a time.
fn first_calls(api: &Api) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (Ok(platforms_of), Ok(devices_of)) = (api.clGetPlatformIDs(), api.clGetDeviceIDs()) else {
        return;
    };
    let mut platforms: Vec<P> = vec![std::ptr::null_mut(); MOST as usize];
    let mut count = 0_u32;
    // SAFETY: 1. the function has these types; 2. there is room for as many as are said, and for a number.
    let status = unsafe { platforms_of(MOST, platforms.as_mut_ptr().cast(), (&raw mut count).cast()) };
    if status != 0 {
        log::warn!("the library has no platforms: {status}; install a driver, such as pocl-opencl-icd");
        return;
    }
    platforms.truncate(count.min(MOST) as usize);
    for platform in platforms {
        let mut devices: Vec<P> = vec![std::ptr::null_mut(); MOST as usize];
        let mut count = 0_u32;
        let (places, counted) = (devices.as_mut_ptr().cast(), (&raw mut count).cast());
        // SAFETY: 1. the function has these types; 2. the platform is one; 3. there is room for as many as are said, and for a number.
        let status = unsafe { devices_of(platform, ALL_DEVICES, MOST, places, counted) };
        log::info!("a platform with {count} devices, {status}");
    }
}

/// `CL_DEVICE_TYPE_ALL` (cl.h).
const ALL_DEVICES: u64 = 0xffff_ffff;

/// What the loader says of its last failure.
fn load_error() -> String {
    // SAFETY: 1. dlopen(3) of this thread has failed.
    let said = unsafe { libc::dlerror() };
    if said.is_null() {
        return "for no reason that the loader knows".into();
    }
    // SAFETY: 1. not NULL, so that it is a string of the loader's; 2. it is copied before this thread calls the loader again.
    unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned()
}
