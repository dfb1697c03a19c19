//! The libraries: where their files are found, and what the device is.
//!
//! Each is loaded when the first of its functions is called, as cuDNN and cuBLAS are large; the runtime's is loaded at once. None is ever
//! unloaded: they have threads. Knows no call.
#![allow(unsafe_code, reason = "libraries are loaded by dlopen(3)")]

use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::AtomicI32;

use crate::failure::Failure;
use crate::generated::{DRIVER, RUNTIME, Tables};
use crate::hand::{Driver, Runtime};
use crate::table::Find;

/// Why there is no back end.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// The runtime's library cannot be loaded.
    #[error(
        "cannot load {}: {reason}; name the directories of CUDA's libraries with --library, with colons between them",
        RUNTIME.join(" or ")
    )]
    Load {
        /// What the loader says.
        reason: String,
    },
    /// There is no device.
    #[error(
        "CUDA has no device: cudaGetDeviceCount answers {status} and {count} devices; `nvidia-smi` tells whether the driver has one, and \
         a jail needs --device for each of its files (docs/accel-cuda-devices.md)"
    )]
    NoDevice {
        /// The code.
        status: i32,
        /// How many.
        count: i32,
    },
}

/// CUDA's libraries, and the functions of those that were called.
#[derive(Debug)]
pub struct Libraries {
    directories: Vec<PathBuf>,
    pub(crate) tables: Tables,
    pub(crate) runtime: Runtime,
    driver: OnceLock<Driver>,
    /// The code that all calls answer, once the context has failed.
    pub(crate) lost: AtomicI32,
}

/// How a table is filled.
type Fill<T> = unsafe fn(Find<'_>) -> (T, Vec<&'static str>);

impl Libraries {
    /// Those in these directories, or where the loader finds them; whether there is a device is asked.
    ///
    /// # Errors
    ///
    /// [`LibraryError`].
    pub fn open(directories: &[PathBuf]) -> Result<Self, LibraryError> {
        let handle = load(directories, RUNTIME).map_err(|reason| LibraryError::Load { reason })?;
        let (runtime, missing) = fill(handle, Runtime::find);
        if !missing.is_empty() {
            log::info!(
                "{} has not {}; calls of them are refused",
                RUNTIME.join(" or "),
                missing.join(", ")
            );
        }
        let libraries = Self {
            directories: directories.to_owned(),
            tables: Tables::default(),
            runtime,
            driver: OnceLock::new(),
            lost: AtomicI32::new(0),
        };
        let (status, count) = libraries.runtime.devices();
        if status != 0 || count < 1 {
            return Err(LibraryError::NoDevice { status, count });
        }
        Ok(libraries)
    }

    /// A table of one library's functions.
    pub(crate) fn table<'t, T>(&self, place: &'t OnceLock<T>, files: &[&str], find: Fill<T>) -> Result<&'t T, Failure> {
        Ok(place.get_or_init(|| match load(&self.directories, files) {
            Ok(handle) => {
                let (table, missing) = fill(handle, find);
                if !missing.is_empty() {
                    let missing = missing.join(", ");
                    log::info!("{} has not {missing}; calls of them are refused", files.join(" or "));
                }
                table
            }
            Err(reason) => {
                log::warn!("cannot load {}: {reason}; calls of it are refused", files.join(" or "));
                // SAFETY: 1. nothing is found.
                unsafe { find(&|_| None) }.0
            }
        }))
    }

    /// The driver's functions.
    pub(crate) fn driver(&self) -> Result<&Driver, Failure> {
        self.table(&self.driver, DRIVER, Driver::find)
    }
}

fn fill<T>(handle: NonNull<c_void>, find: Fill<T>) -> (T, Vec<&'static str>) {
    let by_name = |name: &CStr| {
        // SAFETY: 1. the handle is dlopen's and never closed; 2. the name ends with a zero.
        NonNull::new(unsafe { libc::dlsym(handle.as_ptr(), name.as_ptr()) })
    };
    // SAFETY: 1. the library is CUDA's by its name, as whoever started the server answers for; 2. it is never closed.
    unsafe { find(&by_name) }
}

/// The first of the files that is there, in the directories or where the loader looks.
fn load(directories: &[PathBuf], files: &[&str]) -> Result<NonNull<c_void>, String> {
    let mut reasons = Vec::new();
    for file in files {
        let places = directories.iter().map(|directory| directory.join(file));
        for place in places.chain([PathBuf::from(file)]) {
            if place.parent().is_some_and(|parent| parent != Path::new("")) && !place.exists() {
                continue;
            }
            let Ok(name) = CString::new(place.as_os_str().as_bytes()) else {
                continue;
            };
            // SAFETY: 1. the name ends with a zero; 2. what the library does when it is loaded, whoever started the server answers for.
            let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            match NonNull::new(handle) {
                Some(handle) => return Ok(handle),
                None => reasons.push(load_error()),
            }
        }
    }
    Err(reasons.join("; "))
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_said_with_what_to_do() {
        let error = Libraries::open(&["/nowhere".into()]).unwrap_err().to_string();
        assert!(
            error.contains("libcudart.so.13") && error.contains("--library"),
            "{error}"
        );
    }
}
