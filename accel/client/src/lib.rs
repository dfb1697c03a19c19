//! OpenCL for programs whose accelerator is elsewhere: a library that an ICD loader finds, whose calls a server carries out.
//!
//! ```text
//!   application ─▶ loader ─▶ DISPATCH ─▶ stubs (generated) ─┬─▶ Connection ─▶ ring ─▶ server
//!                                        by hand, by topic ─┘      └─ arena, for data
//! ```
//!
//! What a call is made of (numbers, objects, lists, data) is `accel/spec`'s; `stubs` are made from that, and what no word says is by hand
//! in the modules that are named after what they are about. [`arguments`] has all looks at the application's memory, [`object`] what the
//! application's handles are, [`connection`] the order of calls. The library has no thread of its own until a callback needs one, installs no
//! signal handler, and lets no panic out. Knows no server's back end.

mod answer;
mod arguments;
mod bulk;
mod checks;
mod codes;
mod connection;
mod context;
mod dispatch;
mod event;
mod icd;
mod image;
mod info;
mod kernel;
mod mapping;
mod memory;
mod names;
mod notify;
mod object;
mod pending;
mod platform;
mod process;
mod program;
mod queue;
mod regions;
mod stubs;
mod svm;
mod touched;
mod transfer;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

use arguments::{Out, Ref};
use codes::Code;

/// A lock whose holders leave nothing half done, even by a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The body of a C function: no panic leaves it.
fn guarded<T>(body: impl FnOnce() -> Result<T, Code>) -> Result<T, Code> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(Code::OUT_OF_RESOURCES))
}

/// Of one that returns an error code.
fn status(body: impl FnOnce() -> Result<(), Code>) -> i32 {
    Code::of(guarded(body))
}

/// Of one that returns an object, and its error code elsewhere.
fn returned(errcode_ret: Out<i32>, body: impl FnOnce() -> Result<Ref, Code>) -> Ref {
    errcode_ret.status(guarded(body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_panic_leaves_a_function_of_c() {
        assert_eq!(status(|| panic!("of the test's")), Code::OUT_OF_RESOURCES.0);
        let mut code = [0];
        let object = returned(Out::of(&mut code), || panic!("of the test's"));
        assert_eq!((object.address(), code), (0, [Code::OUT_OF_RESOURCES.0]));
        assert_eq!(status(|| Ok(())), 0);
    }
}
