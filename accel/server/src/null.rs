//! A back end that does nothing: calls succeed, what is made has a name, answers are zeroes or plausible constants, no bytes move. For
//! measuring what forwarding costs, and for tests on machines without a driver.
//!
//! The functions are generated; what they write is here.
#![allow(
    unsafe_code,
    reason = "these are functions of a C API, which write where their callers say"
)]

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::api::{Api, P};
use crate::objects::Sort;

/// Something that a function writes; nothing where the place is NULL.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Put {
    /// So many zero bytes.
    Zeroes(P, u64),
    /// So many fresh objects.
    Made(P, u64),
    /// The one platform or the one device, if there is room for it.
    Told(P, u64, Sort),
    /// How many there are.
    Count(P, u32),
    /// The answer to a query.
    Answer { name: u32, size: u64, at: P, size_at: P },
}

/// Functions of C that do nothing but write what stands behind them.
macro_rules! null {
    ($($name:ident($($parameter:ident: $type:ty),*) -> $result:tt { $($put:expr,)* })*) => {
        $(
            #[allow(non_snake_case, unused_variables, reason = "names are C's, and a function that does nothing needs few of them")]
            unsafe extern "C" fn $name($($parameter: $type),*) -> $result {
                // SAFETY: 1. the caller keeps to the API: places are NULL or as large as it says.
                unsafe { crate::null::result!($result, &[$($put),*]) }
            }
        )*

        /// All of them by name.
        pub(crate) const FUNCTIONS: &[(&str, *const ())] = &[$((stringify!($name), $name as *const ())),*];
    };
}

/// What a function returns.
macro_rules! result {
    (i32, $puts:expr) => {
        crate::null::status($puts)
    };
    (P, $puts:expr) => {
        crate::null::made($puts)
    };
    ((), $puts:expr) => {
        _ = crate::null::status($puts)
    };
}

pub(crate) use null;
pub(crate) use result;

/// The table.
pub(crate) fn api() -> Api {
    let find = |name: &CStr| function(name).and_then(|address| NonNull::new(address.cast_mut().cast::<c_void>()));
    // SAFETY: 1. both tables are generated from one list, so that a name has the same types in both.
    unsafe { Api::find(&find) }.0
}

/// One of its functions.
pub(crate) fn function(name: &CStr) -> Option<*const ()> {
    if name == c"clSVMAlloc" {
        return Some(svm_alloc as *const ());
    }
    let functions = crate::generated::null::FUNCTIONS.iter();
    let mut found = functions.filter(|(known, _)| known.as_bytes() == name.to_bytes());
    found.next().map(|(_, address)| *address)
}

/// The code of success.
///
/// # Safety
///
/// Places are NULL or as large as they are said to be.
pub(crate) unsafe fn status(puts: &[Put]) -> i32 {
    for put in puts {
        // SAFETY: 1. the caller's places are as large as it says.
        unsafe { write(put) };
    }
    0
}

/// A fresh object.
///
/// # Safety
///
/// As of [`status`].
pub(crate) unsafe fn made(puts: &[Put]) -> P {
    // SAFETY: 1. the caller's.
    unsafe { status(puts) };
    fresh()
}

/// Addresses of shared virtual memory, which no two allocations have at a time. Nobody looks at what is there.
unsafe extern "C" fn svm_alloc(_context: P, _flags: u64, size: u64, _alignment: u32) -> P {
    /// Where none of this host's processes has anything, and how much there is.
    const BEGIN: usize = 1 << 44;
    const SPACE: usize = 1 << 43;
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    let Some(room) = size.checked_next_multiple_of(64).filter(|room| *room <= SPACE / 4) else {
        return std::ptr::null_mut();
    };
    let begin = NEXT.fetch_add(room, Ordering::Relaxed) % (SPACE / 2);
    std::ptr::without_provenance_mut(BEGIN + begin)
}

/// A name that no other object has. Nobody looks at what is there.
fn fresh() -> P {
    static NEXT: AtomicUsize = AtomicUsize::new(0x1000);
    std::ptr::without_provenance_mut(NEXT.fetch_add(16, Ordering::Relaxed))
}

/// The only one of its sort.
fn only(sort: Sort) -> P {
    std::ptr::without_provenance_mut(0x100 + 16 * (sort as usize))
}

unsafe fn write(put: &Put) {
    match *put {
        // Numbers beside a place that is NULL can be anything.
        Put::Zeroes(at, _) | Put::Made(at, _) if at.is_null() => {}
        Put::Zeroes(at, bytes) => {
            let zeroes = vec![0; usize::try_from(bytes).unwrap_or_default()];
            // SAFETY: 1. the place has so many bytes.
            unsafe { copy(at, &zeroes) };
        }
        Put::Made(at, count) => {
            let made: Vec<u8> = (0..count).flat_map(|_| fresh().addr().to_ne_bytes()).collect();
            // SAFETY: 1. the place has room for so many pointers.
            unsafe { copy(at, &made) };
        }
        Put::Told(at, room, sort) => {
            let told = only(sort).addr().to_ne_bytes();
            // SAFETY: 1. there is room for a pointer, or nothing is written.
            unsafe { copy(at, if room > 0 { &told } else { &[] }) };
        }
        // SAFETY: 1. the place is that of a cl_uint.
        Put::Count(at, count) => unsafe { copy(at, &count.to_ne_bytes()) },
        Put::Answer {
            name,
            size,
            at,
            size_at,
        } => {
            let answer = answer(name);
            let length = u64::try_from(answer.len()).unwrap_or_default();
            let fits = answer.get(..usize::try_from(size.min(length)).unwrap_or_default());
            // SAFETY: 1. no more than the place has.
            unsafe { copy(at, fits.unwrap_or_default()) };
            // SAFETY: 1. the place is that of a size_t.
            unsafe { copy(size_at, &length.to_ne_bytes()) };
        }
    }
}

/// # Safety
///
/// The place is NULL or has room.
unsafe fn copy(at: P, bytes: &[u8]) {
    if !at.is_null() {
        // SAFETY: 1. bytes are there to be read; 2. the caller's place has room; 3. it is the caller's, and no part of them.
        unsafe { at.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}

/// Answers that clients do not go on without (cl.h has the numbers); all others are eight zeroes.
fn answer(name: u32) -> Vec<u8> {
    let text = |text: &CStr| text.to_bytes_with_nul().to_vec();
    match name {
        // CL_PLATFORM_PROFILE, VERSION, NAME, VENDOR, EXTENSIONS
        0x0900 => text(c"FULL_PROFILE"),
        0x0901 => text(c"OpenCL 3.0 Basalt null"),
        0x0902 | 0x102b => text(c"Basalt null"),
        0x0903 | 0x102c => text(c"Basalt"),
        0x0904 | 0x1030 => text(c""),
        // CL_DEVICE_TYPE: an accelerator
        0x1000 => 8_u64.to_le_bytes().to_vec(),
        // CL_DEVICE_MAX_COMPUTE_UNITS, MAX_WORK_ITEM_DIMENSIONS
        0x1002 => 1_u32.to_le_bytes().to_vec(),
        0x1003 => 3_u32.to_le_bytes().to_vec(),
        // CL_DEVICE_MAX_WORK_GROUP_SIZE, CL_KERNEL_WORK_GROUP_SIZE, and sizes in each dimension
        0x1004 | 0x11b0 => 256_u64.to_le_bytes().to_vec(),
        0x1005 => [256_u64; 3].map(u64::to_le_bytes).concat(),
        // CL_DEVICE_MAX_MEM_ALLOC_SIZE, GLOBAL_MEM_SIZE, LOCAL_MEM_SIZE
        0x1010 => (1_u64 << 30).to_le_bytes().to_vec(),
        0x101f => (4_u64 << 30).to_le_bytes().to_vec(),
        0x1023 => (64_u64 << 10).to_le_bytes().to_vec(),
        // CL_DEVICE_AVAILABLE, COMPILER_AVAILABLE, LINKER_AVAILABLE
        0x1027 | 0x1028 | 0x103e => 1_u32.to_le_bytes().to_vec(),
        // CL_DEVICE_PROFILE, CL_DRIVER_VERSION, CL_DEVICE_VERSION, OPENCL_C_VERSION
        0x102e => text(c"FULL_PROFILE"),
        0x102d => text(c"1.0"),
        0x102f => text(c"OpenCL 3.0 Basalt null"),
        0x103d => text(c"OpenCL C 1.2 Basalt null"),
        // CL_DEVICE_PLATFORM
        0x1031 => only(Sort::Platform).addr().to_ne_bytes().to_vec(),
        // CL_CONTEXT_DEVICES, CL_QUEUE_DEVICE, CL_PROGRAM_DEVICES
        0x1081 | 0x1091 | 0x1163 => only(Sort::Device).addr().to_ne_bytes().to_vec(),
        // CL_KERNEL_NUM_ARGS: one, of which it knows nothing else
        0x1191 => 1_u32.to_le_bytes().to_vec(),
        // CL_IMAGE_ELEMENT_SIZE
        0x1111 => 4_u64.to_le_bytes().to_vec(),
        _ => vec![0; 8],
    }
}
