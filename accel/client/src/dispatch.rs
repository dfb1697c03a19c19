//! The table of functions to which every object begins with a pointer, in the order that loaders know (`accel/spec/opencl/icd-order.txt`), and
//! what is in it where nobody serves the call. Knows no call by itself.
#![allow(
    unsafe_code,
    reason = "a table of addresses is shared by threads; nothing here follows one"
)]

use std::ffi::c_void;

use crate::arguments::{Out, Ref};
use crate::codes::Code;
pub(crate) use crate::stubs::table::{DISPATCH, FUNCTIONS, Table};

/// The address of a function.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct Entry(pub(crate) *const c_void);

// SAFETY: it is the address of a function, which is the same for all threads and never changes.
unsafe impl Sync for Entry {}
// SAFETY: as for Sync.
unsafe impl Send for Entry {}

/// A function by its name, if it is served.
pub(crate) fn address(name: &str) -> Option<*const c_void> {
    let found = FUNCTIONS.iter().find(|(known, _)| *known == name);
    found.map(|(_, entry)| entry.0)
}

/// In the place of a call that returns an error code.
pub(crate) extern "C" fn not_served() -> i32 {
    Code::INVALID_OPERATION.0
}

/// In the place of calls that return an object: none, and the error where the parameter says that it goes.
macro_rules! no_object {
    ($($function:ident($($before:ident),*);)*) => {
        $(
            #[doc = "In the place of a call that returns an object, with as many parameters before its last."]
            pub(crate) extern "C" fn $function($($before: usize,)* errcode_ret: Out<i32>) -> Ref {
                $(let _: usize = $before;)*
                errcode_ret.status(Err(Code::INVALID_OPERATION))
            }
        )*
    };
}

no_object! {
    no_object_3(a, b);
    no_object_4(a, b, c);
    no_object_5(a, b, c, d);
    no_object_6(a, b, c, d, e);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_the_loaders() {
        assert_eq!(DISPATCH.len(), 149);
        let entry = |index: usize| DISPATCH[index].0;
        let named = |name: &str| address(name).unwrap();
        // Places of the published structure.
        assert_eq!(entry(0), named("clGetPlatformIDs"));
        assert_eq!(entry(47), named("clFinish"));
        assert_eq!(entry(48), named("clEnqueueReadBuffer"));
        assert_eq!(entry(148), named("clSetContextDestructorCallback"));
        assert_eq!(entry(65), named("clGetExtensionFunctionAddress"));
        assert_eq!(entry(75), not_served as *const c_void);
        assert_eq!(named("clGetKernelSubGroupInfoKHR"), named("clGetKernelSubGroupInfo"));
        assert!(address("clNoSuchCall").is_none());
        assert!(DISPATCH.iter().all(|entry| !entry.0.is_null()));
    }

    #[test]
    fn what_returns_an_object_tells_its_error_where_it_goes() {
        let mut code = [0];
        assert_eq!(no_object_4(1, 2, 3, Out::of(&mut code)).address(), 0);
        assert_eq!(code, [-59]);
        assert_eq!(no_object_3(1, 2, Out::NULL).address(), 0);
    }
}
